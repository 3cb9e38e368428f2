"""How far a bfloat16 server's block may be from the float32 reference: what the oracle's tolerance rests on."""

from __future__ import annotations

import copy
import statistics

import pytest
import torch

from sglang_ext.carryover.oracle import ROUNDINGS
from sglang_ext.carryover.reference import ReferenceDrafter, rms_norm
from tests.ready_models import make_ready
from tests.tiny_models import MASK, tiny_models

LENGTH, QUERY = 40, 7


class RoundsElsewhere(ReferenceDrafter):
    """Another computation in bfloat16: fused norms, and projections summed in two rounded halves."""

    def _key_value(self, x: torch.Tensor, layer: int, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        prefix = f"layers.{layer}.self_attn."
        key = self._linear(x, prefix + "k_proj").view(-1, self.kv_heads, self.head_dim)
        value = self._linear(x, prefix + "v_proj").view(-1, self.kv_heads, self.head_dim)
        return self._rope(rms_norm(key, self.weights[prefix + "k_norm.weight"], self.eps), positions), value

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight = self.weights[f"{name}.weight"]
        half = weight.shape[1] // 2
        return self._stored(self._stored(x[..., :half] @ weight[:, :half].T) + x[..., half:] @ weight[:, half:].T)


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> ReferenceDrafter:
    models = tiny_models()
    folder = make_ready(
        models["dspark-hybrid"], models["hybrid"], tmp_path_factory.mktemp("ready") / "out", source_layers=(0, 2)
    )
    return ReferenceDrafter(folder, models["hybrid"])


def test_the_tolerance_covers_rounding_and_no_wrong_state(drafter: ReferenceDrafter) -> None:
    """Blocks behind random contexts and states: rounding elsewhere stays below it, other states do not."""
    assert drafter.reader is not None
    rounded = drafter.rounding(torch.bfloat16)
    other = copy.copy(rounded)
    other.__class__ = RoundsElsewhere
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    at, before = torch.arange(LENGTH, LENGTH + QUERY), torch.arange(LENGTH)
    roundings, errors = [], []
    for _ in range(40):
        features = draw(LENGTH, drafter.weights["fc.weight"].shape[1]).bfloat16().float()
        states = draw(2, 4, drafter.reader.value_dim, drafter.reader.key_dim)
        ids = torch.tensor([int(draw(1).abs() * 50)] + [MASK] * (QUERY - 1))

        def block(
            by: ReferenceDrafter, read: torch.Tensor, rows: torch.Tensor = features, ids: torch.Tensor = ids
        ) -> torch.Tensor:
            return by.block(by.context(rows, before), ids, at, read)

        expected = block(drafter, states)
        roundings.append(float((expected - block(rounded, states)).abs().max()))
        errors.append(float((expected - block(other, states)).abs().max()))
        assert 0 < errors[-1] <= ROUNDINGS * roundings[-1]
        decayed = 0.5 * states + 0.5 * draw(*states.shape)  # as after a few more tokens
        for wrong in (torch.zeros_like(states), decayed, states.flip(0), states.flip(1)):
            assert (expected - block(drafter, wrong)).abs().max() > 2 * ROUNDINGS * roundings[-1]
    assert statistics.median(errors) < 1.5 * statistics.median(roundings)
