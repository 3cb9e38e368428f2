"""Captured features are the layers' outputs, in SGLang's numbering."""

from __future__ import annotations

import pytest
import torch
from target_fixtures import VOCABULARY, random_target

from sglang_ext.errors import UsageError
from sglang_ext.training.features import TargetFeatures, check_layer_ids, default_layer_ids


@pytest.mark.parametrize("preset", ["dense-tiny", "hybrid-tiny"])
def test_features_are_the_outputs_of_the_layers(preset: str) -> None:
    model = random_target(preset)
    ids = torch.randint(0, VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(0))
    layer_ids = default_layer_ids(model.config.num_hidden_layers)
    with TargetFeatures(model, layer_ids) as features:
        captured, last_hidden = features(ids)
        logits = features.logits(last_hidden)
    with torch.no_grad():
        plain = model(input_ids=ids, output_hidden_states=True)
    assert captured.shape == (2, 11, 3 * model.config.hidden_size)
    # transformers counts the embedding as 0, so the output of layer i is entry i + 1.
    assert torch.equal(captured, torch.cat([plain.hidden_states[i + 1] for i in layer_ids], -1))
    assert torch.equal(logits, plain.logits)
    # Negative control: the numbering that is off by one gives other values everywhere.
    wrong = torch.cat([plain.hidden_states[i] for i in layer_ids], -1)
    assert (captured - wrong).abs().amax(-1).min() > 1e-2
    # The state before the final norm is not the last entry of hidden_states, which is normed already.
    assert (last_hidden - plain.hidden_states[-1]).abs().max() > 1e-2


def test_closing_takes_the_hooks_off() -> None:
    model = random_target("dense-tiny")
    with TargetFeatures(model, [0, 2]) as features:
        assert features.feature_size == 2 * model.config.hidden_size
    assert not any(layer._forward_hooks for layer in model.model.layers)
    assert not model.model.norm._forward_pre_hooks


@pytest.mark.parametrize("layers, expected", [(36, [1, 17, 33]), (8, [1, 3, 5]), (5, [0, 2, 3]), (4, [0, 1, 2])])
def test_default_layers(layers: int, expected: list[int]) -> None:
    assert default_layer_ids(layers) == expected
    check_layer_ids(expected, layers)


@pytest.mark.parametrize("ids", [[], [3, 1], [1, 1], [-1, 2], [1, 4]])
def test_layer_ids_the_server_cannot_capture(ids: list[int]) -> None:
    with pytest.raises(UsageError, match="between 0 and 3"):
        check_layer_ids(ids, 5)
