"""Branch verification on targets with recurrent layers: every branch starts from the state at its anchor.

A full-attention target verifies all branches in one pass under a mask (:mod:`branches`). A recurrent layer knows no
mask: its state would run from branch to branch. Here the target reads the recorded rows once, and each layer, as soon
as it has done so, also reads the branches: a recurrent layer from its state at each anchor, a full-attention layer over
the recorded keys and values before the anchor and the branch's own. States are therefore held for one layer at a time.

Cost of n anchors with W rows: one more pass over the T recorded tokens, ``n W`` tokens through every layer, and while a
recurrent layer is at work ``n (4 HV K V + C (k - 1) b)`` bytes of states (b bytes an activation) beside the working
memory of :mod:`anchor_states`: for the shape of Qwen3.5-4B 2.1 MB an anchor, so 64 anchors a row rather than 512. The
published work has no such case.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from sglang_ext.training.anchor_states import LayerStates, anchor_states, recurrent_layers
from sglang_ext.training.features import TargetFeatures


@torch.no_grad()
def verify_hybrid_branches(
    target: TargetFeatures, input_ids: Tensor, anchors: Tensor, proposals: Tensor
) -> tuple[Tensor, Tensor]:
    """Target features [R, n, W, K*H] and last hidden states of every branch row, as ``branches.verify_branches``.

    Args:
        target: a hybrid target (Qwen3.5-text, Qwen3-Next) with its captured layers.
        input_ids: recorded rows [R, T], padded at the end if at all.
        anchors: positions [R, n] of the branches' first tokens.
        proposals: drafts [R, n, W - 1] that follow the anchors.
    """
    rows, length = input_ids.shape
    count, width = anchors.shape[1], proposals.shape[2] + 1
    model, decoder = target.model, _decoder(target)
    tokens = torch.cat([input_ids.gather(1, anchors)[:, :, None], proposals], dim=2)
    positions = anchors[:, :, None] + torch.arange(width, device=anchors.device)
    hidden = decoder.embed_tokens(tokens.flatten(1))  # [R, n * W, H] between layers
    rotary = decoder.rotary_emb(hidden, positions.flatten(1))
    mask = _branch_rows_mask(anchors, length, width, hidden.dtype)
    recorded = DynamicCache(config=decoder.config)
    features: list[Tensor] = []

    def branches_too(number: int) -> Any:
        def hook(layer: Any, _inputs: Any, _output: Any) -> None:
            nonlocal hidden
            if number in states:
                cache = _cache_at(states.pop(number), number, decoder.config)
                own = hidden.view(rows * count, width, -1)
                # Past the layer's hooks, which are there for the recorded rows.
                hidden = layer.forward(own, position_embeddings=rotary, past_key_values=cache).view_as(hidden)
            else:
                hidden = layer.forward(
                    hidden, position_embeddings=rotary, attention_mask=mask, past_key_values=recorded
                )
            if number in target.layer_ids:
                features.append(hidden)

        return hook

    with anchor_states(model, recurrent_layers(model), anchors) as states:
        handles = [layer.register_forward_hook(branches_too(i)) for i, layer in enumerate(decoder.layers)]
        try:
            target(input_ids, past_key_values=recorded)
        finally:
            for handle in handles:
                handle.remove()
    return torch.cat(features, dim=-1).view(rows, count, width, -1), hidden.view(rows, count, width, -1)


def _decoder(target: TargetFeatures) -> Any:
    return target.model.model


def _branch_rows_mask(anchors: Tensor, length: int, width: int, dtype: torch.dtype) -> Tensor:
    """Additive [R, 1, n * W, length + n * W]: a branch row sees what precedes its anchor, and its own branch so far."""
    rows, count = anchors.shape
    order = torch.arange(count * width, device=anchors.device)
    prefix = torch.arange(length, device=anchors.device) < anchors.repeat_interleave(width, dim=1)[:, :, None]
    own = (order[:, None] // width == order // width) & (order[:, None] >= order)
    seen = torch.cat([prefix, own.expand(rows, -1, -1)], dim=2)[:, None]
    return torch.zeros(seen.shape, dtype=dtype, device=anchors.device).masked_fill_(~seen, torch.finfo(dtype).min)


def _cache_at(states: LayerStates, number: int, config: Any) -> DynamicCache:
    """transformers' cache of layer ``number`` with one sequence per anchor, as if it had just read the prefix."""
    cache = DynamicCache(config=config)
    cache.update_conv_state(states.conv.flatten(0, 1), number)
    cache.update_recurrent_state(states.recurrent.flatten(0, 1), number)
    return cache
