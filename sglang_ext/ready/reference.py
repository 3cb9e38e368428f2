"""The reader written a second time, head by head in float64: what the fast forms are compared with."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from sglang_ext.ready.config import ReadyConfig

_EPS = 1e-6


def read_states(
    hidden: Tensor, states: Tensor, weights: Mapping[str, Tensor], config: ReadyConfig, index: int = 0
) -> Tensor:
    """What one block reads from its request's states.

    Args:
        hidden: [B, H] the block's representations in the index-th reading draft layer.
        states: [L, HV, V, K] committed states of the sources.
        weights: the reader's, by their names below ``state_reader.``.
        config: the checkpoint's ``ready_config``.
        index: which of the reading layers asks, counted from 0.

    Returns:
        [B, H] delta in the dtype of ``hidden``; computed in float64.
    """
    norm, query, out = (weights[f"reads.{index}.{part}"].double() for part in ("norm", "query", "out"))
    x = hidden.double()
    x = x / (x.square().mean(-1, keepdim=True) + _EPS).sqrt() * norm
    delta = torch.zeros_like(x)
    for source in range(len(config.source_layers)):
        for head in range(config.value_heads):
            values, keys = weights["value_down"][source, head].double(), weights["key_down"][source, head].double()
            state = states[source, head].double()
            scale = (values @ state @ keys.T).square().mean().add(_EPS).sqrt()
            question = x @ query[source, 0 if config.query == "source" else head].T
            question = question / question.norm(dim=-1, keepdim=True).clamp(min=_EPS)
            # The state is asked in its own key space, and its answer compressed: no reduced matrix is built.
            answer = (question @ keys) @ state.T @ values.T / scale
            delta = delta + answer @ out[:, source, head].T
    return delta.to(hidden.dtype)
