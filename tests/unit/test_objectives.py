"""The published objectives against slow, direct formulas."""

from __future__ import annotations

import math

import pytest
import torch

from sglang_ext.training.objectives import default_gamma, dflash_objective, dspark_objective, position_weights

A, S, V = 5, 4, 11


@pytest.fixture
def sample() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    weights = position_weights(S, 4.0).double().repeat(A, 1)
    weights[1, 2:] = 0  # a block that reaches past its document's end
    weights[3] = 0  # an unused anchor place
    return {
        "logits": normal(A, S, V).requires_grad_(),
        "target_logits": normal(A, S, V),
        "confidence": normal(A, S).requires_grad_(),
        "labels": torch.randint(V, (A, S), generator=generator),
        "weights": weights,
    }


def test_position_weights_are_both_papers_formulas() -> None:
    dflash = [math.exp(-(k - 1) / 4.0) for k in range(1, 8)]  # block rows 1 .. 7 of 8
    assert position_weights(7, 4.0).tolist() == pytest.approx(dflash)
    dspark = [math.exp(-k / 4.0) for k in range(7)]  # block rows 0 .. 6 of 7
    assert position_weights(7, 4.0).tolist() == pytest.approx(dspark)
    assert [default_gamma(size) for size in (16, 10, 8)] == [7.0, 5.0, 4.0]


def test_dflash_is_the_weighted_cross_entropy_of_recorded_tokens(sample: dict[str, torch.Tensor]) -> None:
    total, metrics = dflash_objective(sample["logits"], sample["labels"], sample["weights"])
    wanted = 0.0
    for a in range(A):
        for s in range(S):
            row = sample["logits"][a, s].tolist()
            log_sum = math.log(sum(math.exp(x) for x in row))
            wanted += float(sample["weights"][a, s]) * (log_sum - row[int(sample["labels"][a, s])])
    assert float(total.detach()) == pytest.approx(wanted, rel=1e-5)
    assert float(metrics["weight_sum"]) == pytest.approx(float(sample["weights"].sum()))
    total.backward()
    assert sample["logits"].grad[3].abs().max() == 0 and sample["logits"].grad[1, 2:].abs().max() == 0


def test_dspark_is_its_three_terms_with_the_full_l1(sample: dict[str, torch.Tensor]) -> None:
    total, metrics = dspark_objective(**sample)
    wanted = expected = 0.0
    for a in range(A):
        survival, length = 1.0, 1.0
        for s in range(S):
            draft = sample["logits"][a, s].detach().float().softmax(-1)
            target = sample["target_logits"][a, s].float().softmax(-1)
            l1 = sum(abs(p - q) for p, q in zip(draft.tolist(), target.tolist(), strict=True))
            overlap = sum(min(p, q) for p, q in zip(draft.tolist(), target.tolist(), strict=True))
            c = 1 / (1 + math.exp(-float(sample["confidence"][a, s].detach())))
            bce = -(overlap * math.log(c) + (1 - overlap) * math.log(1 - c))
            ce = -math.log(float(draft[sample["labels"][a, s]]))
            wanted += float(sample["weights"][a, s]) * (0.1 * ce + 0.9 * l1 + 1.0 * bce)
            survival *= overlap if sample["weights"][a, s] > 0 else 0.0
            length += survival
        expected += length if sample["weights"][a, 0] > 0 else 0.0
    assert float(total.detach()) == pytest.approx(wanted, rel=1e-4)
    assert float(metrics["expected_sum"]) == pytest.approx(expected, rel=1e-4)


def test_the_confidence_target_is_detached(sample: dict[str, torch.Tensor]) -> None:
    """Shifting the confidence logits changes the loss, but not the gradient that the draft logits get."""
    grads = []
    for shift in (0.0, 2.0):
        sample["logits"].grad = None
        inputs = {**sample, "confidence": sample["confidence"].detach() + shift}
        dspark_objective(**inputs)[0].backward()
        grads.append(sample["logits"].grad.clone())
    assert torch.equal(*grads)


def test_acceptance_length_is_the_leading_run_plus_the_bonus_token() -> None:
    labels = torch.tensor([[1, 2, 3], [1, 2, 3], [1, 2, 3]])
    guesses = torch.tensor([[1, 2, 0], [0, 2, 3], [1, 2, 3]])
    logits = torch.nn.functional.one_hot(guesses, 5).float()
    weights = torch.ones(3, 3)
    weights[2] = 0  # an unused place counts for nothing
    _, metrics = dflash_objective(logits, labels, weights)
    assert float(metrics["blocks"]) == 2
    assert float(metrics["accepted_sum"]) == 3 + 1
