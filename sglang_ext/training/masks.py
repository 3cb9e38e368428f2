"""Which keys the rows of many small blocks may attend to: one rule, as a block-sparse or as a dense mask.

A block belongs to an anchor of a packed sequence and sees the anchor's document before it, its own rows, and in
Carryover training its own carried rows. That holds for draft blocks, and for the branches that the target verifies,
which are causal inside. The rule is the library's (``speculators`` models/dflash/attention.py). The generic
``create_block_mask`` would evaluate it for every pair of a query and a key, billions a step; since it is known where a
block's keys lie, the sparse structure is written down directly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from speculators.models.dflash.attention import create_anchor_block_mask_mod
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask, or_masks

TILE = 128  # rows and columns of a flex attention tile


@dataclass(frozen=True)
class BlockRule:
    """Visibility of ``keys`` keys to ``queries`` rows in blocks of ``block_size``.

    ``spans`` are intervals of keys, (first [A], end [A]) each; what block j may see lies inside the j-th ones.
    """

    visible: Callable[..., Any]  # flex attention's mask_mod: (batch, head, query, key) -> bool
    queries: int
    keys: int
    block_size: int
    spans: tuple[tuple[Tensor, Tensor], ...]


def anchored_blocks(document_ids: Tensor, anchors: Tensor, block_size: int, causal: bool = False) -> BlockRule:
    """Blocks at ``anchors`` [A] of a packed sequence with ``document_ids`` [T] (-1: padding).

    Keys are the T packed rows, then all block rows. Inside a block every row sees every other, or with ``causal``
    those up to itself.
    """
    total, device = document_ids.shape[0], anchors.device
    # A window as wide as the sequence leaves the prefix whole; the library orders rows causally only with a window.
    order = {"sliding_window": total, "sliding_window_non_causal": False} if causal else {}
    visible, queries, keys = create_anchor_block_mask_mod(
        document_ids=document_ids, total_seq_len=total, anchor_positions=anchors, block_size=block_size, **order
    )
    place = torch.arange(total, device=device)
    begins = torch.ones_like(document_ids, dtype=torch.bool)
    begins[1:] = document_ids[1:] != document_ids[:-1]
    first = torch.where(begins, place, 0).cummax(0).values[anchors]
    own = total + torch.arange(anchors.shape[0], device=device) * block_size
    return BlockRule(visible, queries, keys, block_size, ((first, anchors), (own, own + block_size)))


def with_own_rows(rule: BlockRule, first: int, visible: Tensor) -> BlockRule:
    """Let block j also see those of the C keys from ``first + j * C`` on for which ``visible`` [A, C] holds."""
    blocks, each = visible.shape
    flat, size = visible.reshape(-1), rule.block_size

    def own(_batch: Any, _head: Any, query: Tensor, key: Tensor) -> Tensor:
        row = torch.clamp(key - first, 0, blocks * each - 1)
        inside = (key >= first) & (key < first + blocks * each)
        return inside & (row // each == query // size) & flat[row]

    start = first + torch.arange(blocks, device=visible.device) * each
    return replace(rule, visible=or_masks(rule.visible, own), spans=(*rule.spans, (start, start + each)))


def dense_mask(rule: BlockRule, device: Any) -> Tensor:
    """Boolean [1, 1, queries, keys]: the reference, and what a CPU attends with."""
    return create_mask(rule.visible, 1, 1, rule.queries, rule.keys, device=device)


def flex_mask(rule: BlockRule) -> BlockMask:
    """Block-sparse mask: every tile that a span touches, the rule itself decides inside it."""
    device = rule.spans[0][0].device
    edge = torch.arange(-(-rule.keys // TILE), device=device) * TILE
    touched = torch.zeros(len(rule.spans[0][0]), len(edge), dtype=torch.bool, device=device)
    for first, end in rule.spans:
        touched |= (edge < end[:, None]) & (edge + TILE > first[:, None]) & (end > first)[:, None]
    row = torch.arange(touched.shape[0], device=device) * rule.block_size
    tiles = torch.zeros(-(-rule.queries // TILE), len(edge), dtype=torch.int32, device=device)
    # The tiles of a block's first to last row; a block longer than a tile reaches every one between them.
    for offset in [*range(0, rule.block_size, TILE), rule.block_size - 1]:
        tiles.index_add_(0, (row + offset) // TILE, touched.int())
    used = (tiles > 0).int()
    indices = used.argsort(dim=1, descending=True, stable=True).int()
    return BlockMask.from_kv_blocks(
        used.sum(1, dtype=torch.int32)[None, None],
        indices[None, None],
        BLOCK_SIZE=TILE,
        mask_mod=rule.visible,
        seq_lengths=(rule.queries, rule.keys),
    )
