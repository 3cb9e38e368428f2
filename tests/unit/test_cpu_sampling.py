"""The sampling verify keeps the target's distribution, whatever the drafter proposes."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import chisquare

from sglang_ext.cpu.sampling import chain_speculative_sampling, tree_speculative_sampling_target_only, verify_chain

VOCAB, DRAFTS, TRIALS = 6, 3, 60_000
# Chance that a correct verify fails one of these tests, for fixed seeds decided once and for all.
ALPHA = 1e-3


def distributions(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The target's and a drafter's distributions, which depend on the position and the last token."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.softmax(2 * torch.randn(DRAFTS + 1, VOCAB, VOCAB, generator=generator), -1)
    draft = torch.softmax(2 * torch.randn(DRAFTS + 1, VOCAB, VOCAB, generator=generator), -1)
    return target, draft  # [position, last token, next token]


def run_blocks(seed: int, one_hot: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """TRIALS blocks from anchor 0; their accepted lengths and the tokens they emit, -1 past the end."""
    torch.manual_seed(seed)
    target, draft = distributions(seed)
    candidates = torch.zeros(TRIALS, DRAFTS + 1, dtype=torch.int64)
    draft_probs = torch.zeros(TRIALS, DRAFTS, VOCAB)
    for position in range(DRAFTS):
        q = draft[position, candidates[:, position]]
        if one_hot:
            q = torch.nn.functional.one_hot(q.argmax(-1), VOCAB).float()
        candidates[:, position + 1] = torch.multinomial(q, 1)[:, 0]
        draft_probs[:, position] = q
    target_probs = torch.stack([target[p, candidates[:, p]] for p in range(DRAFTS + 1)], 1)
    length, token = verify_chain(candidates, target_probs, draft_probs, torch.rand(TRIALS, DRAFTS), torch.rand(TRIALS))
    emitted = torch.where(torch.arange(DRAFTS)[None] < length[:, None], candidates[:, 1:], -1)
    emitted = torch.cat([emitted, torch.full((TRIALS, 1), -1)], 1)
    emitted[torch.arange(TRIALS), length] = token
    return length, emitted


@pytest.mark.parametrize("one_hot", [False, True], ids=["sampled-draft", "argmax-draft"])
def test_emitted_tokens_follow_the_target(one_hot: bool) -> None:
    length, emitted = run_blocks(1, one_hot)
    assert set(length.tolist()) == set(range(DRAFTS + 1))
    target, _ = distributions(1)
    tests = [(0, torch.ones(TRIALS, dtype=torch.bool), 0)]
    # Given a first token that was emitted and a block that went on, the second follows the target too.
    tests += [(1, (emitted[:, 0] == first) & (length >= 1), first) for first in range(VOCAB)]
    checked = 0
    for position, selected, last in tests:
        observed = torch.bincount(emitted[selected, position], minlength=VOCAB).double()
        if observed.sum() < 500:
            continue
        expected = target[position, last].double()
        expected *= observed.sum() / expected.sum()
        assert chisquare(observed, expected).pvalue > ALPHA / len(tests), (position, last)
        checked += 1
    assert checked >= 2


def test_acceptance_is_what_the_distributions_allow() -> None:
    length, _ = run_blocks(2, one_hot=False)
    target, draft = distributions(2)
    expected = torch.minimum(target[0, 0], draft[0, 0]).sum().item()
    deviation = 4 * (expected * (1 - expected) / TRIALS) ** 0.5
    assert abs((length >= 1).double().mean().item() - expected) < deviation


def test_a_greedy_verify_would_be_noticed() -> None:
    """Negative control: the test above rejects a verify that takes the target's argmax."""
    target, _ = distributions(1)
    observed = torch.zeros(VOCAB)
    observed[target[0, 0].argmax()] = TRIALS
    assert chisquare(observed, target[0, 0].double() * TRIALS, sum_check=False).pvalue < ALPHA


def buffers(bs: int) -> dict[str, torch.Tensor]:
    """What SGLang passes for a chain (srt/speculative/dflash_utils.py:289)."""
    width = DRAFTS + 1
    following = torch.arange(1, width + 1)
    following[-1] = -1
    return {
        "predicts": torch.full((bs * width,), -7, dtype=torch.int32),
        "accept_index": torch.full((bs, width), -7, dtype=torch.int32),
        "accept_token_num": torch.full((bs,), -7, dtype=torch.int32),
        "retrive_index": torch.arange(bs * width).view(bs, width),
        "retrive_next_token": following.expand(bs, width).clone(),
        "retrive_next_sibling": torch.full((bs, width), -1),
    }


@pytest.mark.parametrize("accepted", range(DRAFTS + 1))
def test_outputs_are_where_sglang_reads_them(accepted: int) -> None:
    """Drafts 1, 2, 3 of which the target accepts some for certain and rejects the next for certain."""
    candidates = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 3]])
    certain = [1, 2, 3, 5][:accepted] + [4] * (DRAFTS + 1 - accepted)
    target = torch.nn.functional.one_hot(torch.tensor(certain), VOCAB).float().expand(2, -1, -1)
    draft = torch.nn.functional.one_hot(candidates[:, 1:], VOCAB).float()
    for verify, probs in ((chain_speculative_sampling, draft), (tree_speculative_sampling_target_only, target * 0)):
        out = buffers(2)
        verify(
            candidates=candidates,
            uniform_samples=torch.full((2, DRAFTS + 1), 0.5),
            uniform_samples_for_final_sampling=torch.tensor([0.0, 1.0]),
            target_probs=target.clone(),
            draft_probs=probs,
            threshold_single=1.0,
            threshold_acc=1.0,
            deterministic=True,
            **out,
        )
        assert out["accept_token_num"].tolist() == [accepted, accepted]
        for row in range(2):
            places = out["accept_index"][row, : accepted + 1]
            assert places.tolist() == list(range(row * 4, row * 4 + accepted + 1))
            assert out["predicts"][places].tolist() == [*[1, 2, 3][:accepted], 4]


def test_a_draft_equal_to_the_target_is_always_accepted() -> None:
    target, _ = distributions(3)
    probs = target[0, :1].expand(50, DRAFTS + 1, VOCAB)
    candidates = torch.randint(0, VOCAB, (50, DRAFTS + 1), generator=torch.Generator().manual_seed(0))
    length, token = verify_chain(candidates, probs, probs, torch.rand(50, DRAFTS) * 0.999, torch.rand(50))
    assert length.tolist() == [DRAFTS] * 50
    assert set(token.tolist()) <= set(range(VOCAB))
