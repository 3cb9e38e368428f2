"""Where the target's committed recurrent states lie in a running server: a view that reads and never writes.

SGLang commits a verify step by copying the state behind the last accepted row into the pool
(hybrid_linear_attn_backend.py:1514), on the stream that runs the next draft. So what the pool holds when a block is
drafted is the state after every token before the anchor, the same rule as for the draft's context; prefills write it
there themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sglang_ext.errors import UsageError
from sglang_ext.ready.config import ReadyConfig


@dataclass(frozen=True)
class CommittedStates:
    """The sources' states by request slot. All tensors belong to SGLang and keep their addresses (CUDA graphs)."""

    temporal: Tensor  # [recurrent layers, state slots, HV, V, K], its strides are not always those of a whole tensor
    state_slots: Tensor  # [request slots] int32: where a request's state lies; row 0 is padding's
    layers: tuple[int, ...]  # the sources' rows of ``temporal``

    def gather(self, request_slots: Tensor) -> Tensor:
        """A copy [bs, L, HV, V, K] of the states of the requests in these slots [bs]."""
        slots = self.state_slots[request_slots].to(torch.int64)
        return torch.stack([self.temporal[layer][slots] for layer in self.layers], 1)


def committed_states(pool: Any, config: ReadyConfig, shards: int) -> CommittedStates:
    """View of SGLang's request pool; UsageError when it does not keep the states that the drafter reads.

    Args:
        pool: the target's ``req_to_token_pool``, which the drafter shares.
        config: the drafter's ``ready_config``.
        shards: ranks that the value heads are split over.
    """
    from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool

    if not isinstance(pool, HybridReqToTokenPool):
        raise UsageError("The target keeps no recurrent states, so READY has nothing to read; serve a hybrid target.")
    states = pool.mamba_pool
    if any(getattr(states, name, None) is not None for name in ("replayssm_write_pos", "replayssm_spec_write_pos")):
        raise UsageError("ReplaySSM lets the states lag behind the committed tokens; drop --enable-linear-replayssm*.")
    translated = type(pool).translate_mamba_indices is not HybridReqToTokenPool.translate_mamba_indices
    if translated or pool.mamba_v2p_table is not None:
        raise UsageError(
            "The state pool has virtual slots, which READY is not verified with; drop --enable-unified-memory."
        )
    missing = [layer for layer in config.source_layers if layer not in pool.mamba_map]
    if missing:
        raise UsageError(
            f"Layers {', '.join(map(str, missing))} of ready_config.source_layers keep no state here; those that do: "
            f"{', '.join(map(str, sorted(pool.mamba_map)))}."
        )
    temporal = states.mamba_cache.temporal
    heads = config.value_heads // shards
    if tuple(temporal.shape[2:]) != (heads, config.value_dim, config.key_dim):
        raise UsageError(
            f"The target's states are {list(temporal.shape[2:])} a rank and the reader was made for "
            f"{[heads, config.value_dim, config.key_dim]} [heads, values, keys]; use the drafter of this target and "
            "the same --tp for both."
        )
    return CommittedStates(
        temporal, pool.req_index_to_mamba_index_mapping, tuple(pool.mamba_map[layer] for layer in config.source_layers)
    )
