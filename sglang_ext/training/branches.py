"""Branch verification: what the frozen target makes of every anchor's proposals, all in one pass.

Draft-verify-draft training (arXiv 2609.14717, section 2.2) needs, for each anchor of a recorded sequence, the target's
hidden states on the recorded prefix followed by the drafter's proposals. The recorded rows' keys and values are kept
from the pass that gave their features; the branches, one packed sequence of short blocks, read those and themselves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from sglang_ext.training.drafter_models import FLEX
from sglang_ext.training.features import TargetFeatures
from sglang_ext.training.masks import anchored_blocks, dense_mask, flex_mask


@torch.no_grad()
def verify_branches(
    target: TargetFeatures, input_ids: Tensor, anchors: Tensor, proposals: Tensor, recorded: DynamicCache
) -> tuple[Tensor, Tensor]:
    """Target features [R, n, W, K*H] and last hidden states [R, n, W, H] of every branch row (row 0 is the anchor).

    ``recorded`` holds the target's keys and values of the rows [R, T]; ``anchors`` [R, n] are positions in them,
    ``proposals`` [R, n, W - 1] tokens. A branch row sees the recorded tokens before its anchor and the rows of its own
    branch up to itself: FlexAttention on a GPU, a dense mask on a CPU. Full attention only: a recurrent layer carries
    state from row to row and would run through the branches.
    """
    rows, length = input_ids.shape
    count, width = anchors.shape[1], proposals.shape[2] + 1
    device = input_ids.device
    branches = torch.cat([input_ids.gather(1, anchors)[:, :, None], proposals], dim=2)
    positions = anchors[:, :, None] + torch.arange(width, device=device)
    row = torch.arange(rows, device=device)
    packed_anchors = (anchors + row[:, None] * length).flatten()
    rule = anchored_blocks(row.repeat_interleave(length), packed_anchors, width, causal=True)
    on_gpu = device.type == "cuda"
    features, last_hidden = target(
        branches.view(1, -1),
        position_ids=positions.view(1, -1),
        attention_mask={"full_attention": flex_mask(rule) if on_gpu else dense_mask(rule, device)},
        past_key_values=_packed(recorded),
        attention=FLEX if on_gpu else "sdpa",
    )
    return features.view(rows, count, width, -1), last_hidden.view(rows, count, width, -1)


def _packed(recorded: DynamicCache) -> DynamicCache:
    """The same keys and values, all rows one behind the other: [R, heads, T, D] to [1, heads, R * T, D]."""
    packed = DynamicCache()
    for number, layer in enumerate(recorded.layers):
        keys, values = (_behind_each_other(states) for states in (layer.keys, layer.values))
        packed.update(keys, values, number)
    return packed


def _behind_each_other(states: Any) -> Tensor:
    rows, heads, length, width = states.shape
    packed: Tensor = states.transpose(0, 1).reshape(1, heads, rows * length, width)
    return packed


def accepted_drafts(proposals: Tensor, continuation: Tensor) -> Tensor:
    """How many leading proposals [..., P] equal the continuation [..., P]: the round commits one row more."""
    return (proposals == continuation).long().cumprod(-1).sum(-1)
