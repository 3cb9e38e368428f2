"""Captured states equal transformers' own cache on the truncated prefix; hybrid branches equal one-by-one ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from drafter_fixtures import VOCABULARY
from hybrid_fixtures import LAYERS, hybrid_model
from transformers import DynamicCache

from sglang_ext.errors import UsageError
from sglang_ext.training.anchor_states import anchor_states, delta_rule_states, recurrent_layers
from sglang_ext.training.features import TargetFeatures
from sglang_ext.training.hybrid_branches import verify_hybrid_branches

FAMILIES = ("qwen3_5_text", "qwen3_next")
LENGTHS = (150, 131, 40)  # of the rows, padded to the longest
# Nothing before the anchor, fewer tokens than the convolution sees, both sides of the edges of chunks, the last token.
ANCHORS = ([0, 2, 63, 64, 65, 127, 128, 149], [1, 5, 17, 64, 70, 100, 128, 130], [0, 3, 4, 7, 13, 20, 38, 39])


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> Any:
    return hybrid_model(request.param)


def rows() -> torch.Tensor:
    ids = torch.randint(0, VOCABULARY, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(7))
    return ids.masked_fill(torch.arange(max(LENGTHS)) >= torch.tensor(LENGTHS)[:, None], 0)


def test_states_equal_the_cache_after_the_tokens_before_the_anchor(model: Any) -> None:
    ids, anchors = rows(), torch.tensor(ANCHORS)
    layers = recurrent_layers(model)
    assert layers == [0, 1, 3]
    with TargetFeatures(model, LAYERS) as target, anchor_states(model, layers, anchors) as states:
        target(ids)
    assert states[0].recurrent.shape == (3, 8, 4, 8, 12) and states[0].conv.shape == (3, 8, 80, 3)
    for row, places in enumerate(ANCHORS):
        for column, anchor in enumerate(places):
            if anchor == 0:
                assert all(not states[i].recurrent[row, column].any() for i in layers)
                continue
            cache, longer = DynamicCache(config=model.config), DynamicCache(config=model.config)
            model.model(input_ids=ids[row : row + 1, :anchor], past_key_values=cache, use_cache=True)
            model.model(input_ids=ids[row : row + 1, : anchor + 1], past_key_values=longer, use_cache=True)
            for i in layers:
                found, wanted = states[i].recurrent[row, column], cache.layers[i].recurrent_states[0][0]
                assert (found - wanted).abs().max() < 1e-5 * max(1.0, float(wanted.abs().max()))
                assert (found - longer.layers[i].recurrent_states[0][0]).abs().max() > 1e-3  # the anchor is not in it
                inputs = torch.nn.functional.pad(cache.layers[i].conv_states[0][0], (3, 0))[:, -3:]
                assert (states[i].conv[row, column] - inputs).abs().max() < 1e-5


def test_states_may_be_kept_in_bfloat16_and_hooks_come_off(model: Any) -> None:
    ids, anchors = rows(), torch.tensor(ANCHORS)
    hooks = len(model.model.layers[0].linear_attn._forward_hooks)
    with anchor_states(model, [3], anchors) as exact:
        model.model(input_ids=ids, use_cache=False)
    with anchor_states(model, [3], anchors, torch.bfloat16) as rounded:
        model.model(input_ids=ids, use_cache=False)
        model.model(input_ids=ids[:, :8], use_cache=False)  # later passes leave the captured states alone
    assert list(rounded) == [3] and torch.equal(rounded[3].recurrent, exact[3].recurrent.bfloat16())
    assert len(model.model.layers[0].linear_attn._forward_hooks) == hooks


def test_the_rule_agrees_with_a_step_by_step_recurrence_in_double_precision() -> None:
    """Strong writes and decays from nearly none to nearly all, at every offset of small chunks."""
    torch.manual_seed(5)
    length, heads, keys, values = 21, 3, 4, 6
    key, value = torch.randn(1, length, heads, keys), torch.randn(1, length, heads, values)
    gate, beta = -torch.rand(1, length, heads).pow(4) * 30, torch.rand(1, length, heads)
    found = delta_rule_states(key, value, gate, beta, torch.arange(length)[None], chunk=8)
    state = torch.zeros(heads, keys, values, dtype=torch.float64)
    for step in range(length):
        assert (found[0, step] - state).abs().max() < 1e-5
        k = torch.nn.functional.normalize(key[0, step].double(), dim=-1)
        state = state * gate[0, step].double().exp()[:, None, None]
        write = beta[0, step, :, None].double() * (value[0, step].double() - torch.einsum("hkv,hk->hv", state, k))
        state = state + k[:, :, None] * write[:, None, :]


def test_layers_without_a_state_are_refused(model: Any) -> None:
    with pytest.raises(
        UsageError, match="layer 2 keeps no recurrent state; take states from its recurrent layers, 0, 1, 3"
    ):
        anchor_states(model, [0, 2], torch.zeros(1, 1, dtype=torch.long)).__enter__()


def test_hybrid_branches_equal_one_by_one_verification(model: Any) -> None:
    ids, anchors = rows(), torch.tensor(ANCHORS)
    proposals = torch.randint(0, VOCABULARY, (3, 8, 3), generator=torch.Generator().manual_seed(5))
    with TargetFeatures(model, LAYERS) as target:
        verified, last_hidden = verify_hybrid_branches(target, ids, anchors, proposals)
        assert verified.shape == (3, 8, 4, 3 * 32) and last_hidden.shape == (3, 8, 4, 32)
        for row, places in enumerate(ANCHORS):
            for column, anchor in enumerate(places):
                alone = torch.cat([ids[row, : anchor + 1], proposals[row, column]])[None]
                for found, whole in zip((verified, last_hidden), target(alone), strict=True):
                    wanted = whole[0, anchor:]
                    assert (found[row, column] - wanted).abs().max() < 1e-5 * max(1.0, float(wanted.abs().max()))
                assert (verified[row, column] - verified[row, column - 1]).abs().max() > 1e-2


def test_branches_under_bfloat16_autocast_stay_close(model: Any) -> None:
    """The precision of a GPU run: nothing mixes dtypes, and the states are computed in fp32 all the same."""
    ids, anchors = rows(), torch.tensor(ANCHORS)
    proposals = torch.randint(0, VOCABULARY, (3, 8, 3), generator=torch.Generator().manual_seed(5))
    with TargetFeatures(model, LAYERS) as target:
        exact, _ = verify_hybrid_branches(target, ids, anchors, proposals)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rounded, _ = verify_hybrid_branches(target, ids, anchors, proposals)
            with anchor_states(model, [3], anchors) as states:
                target(ids)
    assert states[3].recurrent.dtype == torch.float32
    assert 0 < (rounded - exact).abs().mean() < 0.05 * exact.abs().mean()
