"""Anchors: the positions of a document at which a draft block is trained.

An anchor is valid when it and the token after it are both supervised (response) tokens; up to N are drawn per document
without replacement, anew for every visit (published DFlash and DSpark recipes). Blocks that reach past the document's
end stay valid anchors: their surplus rows are simply not supervised.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_ext.drafting import DraftBlock


def anchor_candidates(supervised: Tensor) -> Tensor:
    """Boolean [R, T]: positions that may be anchors, given the supervised positions [R, T] of one document per row."""
    follows = torch.zeros_like(supervised)
    follows[:, :-1] = supervised[:, 1:]
    return supervised & follows


def draw_anchors(supervised: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw up to ``count`` anchors per row without replacement.

    Returns ``(anchors [R, count], valid [R, count])``: positions in rising order, unused places last, at position 0 and
    marked invalid. Every set of candidates of a row is equally likely.
    """
    candidates = anchor_candidates(supervised)
    rows, length = candidates.shape
    keys = torch.rand(rows, length, generator=generator).masked_fill_(~candidates, -1.0)
    if length < count:
        keys = torch.cat([keys, keys.new_full((rows, count - length), -1.0)], dim=1)
    best, chosen = keys.topk(count, dim=1)
    valid = best >= 0
    order = chosen.masked_fill(~valid, length).sort(dim=1).values
    valid = order < length
    return order.masked_fill(~valid, 0), valid


def supervised_drafts(supervised: Tensor, anchors: Tensor, valid: Tensor, block: DraftBlock) -> Tensor:
    """Boolean [R, N, drafts]: which drafted tokens of each block carry a loss.

    A draft counts while every earlier draft of its block counts (the longest supervised prefix, DSpark's rule; on one
    response that runs to the document's end it equals DFlash's rule of looking at each token alone).
    """
    rows, length = supervised.shape
    positions = block.drafted(anchors.reshape(-1)).reshape(rows, -1, block.drafts)
    inside = positions < length
    labelled = supervised.gather(1, positions.clamp(max=length - 1).flatten(1)).reshape(positions.shape)
    return (labelled & inside & valid[..., None]).long().cumprod(dim=-1).bool()
