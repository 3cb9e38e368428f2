"""Loading the embedding: SGLang's loader passes over what is missing, so the model itself must not."""

from __future__ import annotations

import types
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

from sglang_ext.carryover.draft_model import _CarryoverEmbedding


class Base(nn.Module):
    """The part of SGLang's draft models that is built upon."""

    num_context_features = 2

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        own = dict(self.named_parameters())
        for name, tensor in weights:
            if name.removeprefix("model.") in own:
                own[name.removeprefix("model.")].data.copy_(tensor)


class Model(_CarryoverEmbedding, Base):
    """A drafter with nothing but the embedding."""


def model() -> Model:
    return Model(types.SimpleNamespace(hidden_size=3))


@pytest.mark.parametrize("name", ["carryover_embedding", "model.carryover_embedding"])
def test_the_embedding_is_loaded(name: str) -> None:
    loaded = model()
    loaded.load_weights([("fc.weight", torch.zeros(1)), (name, torch.arange(6.0))])
    assert loaded.carryover_embedding.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_a_checkpoint_without_it_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no carryover_embedding; make one with `sglang-ext convert`"):
        model().load_weights([("fc.weight", torch.zeros(1))])


def test_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(5,\), but this drafter's features need \(6,\)"):
        model().load_weights([("carryover_embedding", torch.zeros(5))])


def test_a_later_update_may_bring_other_weights_only() -> None:
    loaded = model()
    loaded.load_weights([("carryover_embedding", torch.ones(6))])
    loaded.load_weights([("fc.weight", torch.zeros(1))])
    assert loaded.carryover_embedding.sum() == 6
