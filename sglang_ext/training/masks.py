"""Which keys the rows of many small blocks may attend to: one rule, as a block-sparse or as a dense mask.

A block belongs to an anchor of a packed sequence and sees the anchor's document before it, its own rows, and in
Carryover training its own carried rows. That holds for draft blocks, and for the branches that the target verifies,
which are causal inside. It is the rule of ``speculators`` models/dflash/attention.py (a test compares the two), written
as intervals: the compiled kernel spends most of its time on the library's form, and the generic construction of sparse
masks evaluates it for every pair of a query and a key, billions a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask

TILE = 128  # rows and columns of a flex attention tile


@dataclass(frozen=True)
class BlockRule:
    """Query row q sees key k when k lies in one of its ``spans``, intervals (first [Q], end [Q])."""

    keys: int
    spans: tuple[tuple[Tensor, Tensor], ...]

    @property
    def queries(self) -> int:
        """Number of query rows Q."""
        return self.spans[0][0].shape[0]

    @property
    def visible(self) -> Callable[[Any, Any, Tensor, Tensor], Tensor]:
        """The rule as flex attention asks it: (batch, head, query, key) -> bool, for broadcastable row numbers."""
        (head, tail), *more = self.spans

        def visible(_batch: Any, _head: Any, query: Tensor, key: Tensor) -> Tensor:
            seen = (key >= head[query]) & (key < tail[query])
            for first, end in more:
                seen = seen | ((key >= first[query]) & (key < end[query]))
            return seen

        return visible


def anchored_blocks(document_ids: Tensor, anchors: Tensor, block_size: int, causal: bool = False) -> BlockRule:
    """Blocks at ``anchors`` [A] of a packed sequence with ``document_ids`` [T], each document in one piece.

    Keys are the T packed rows, then all block rows. Inside a block every row sees every other, or with ``causal``
    those up to itself.
    """
    total, device = document_ids.shape[0], anchors.device
    begins = torch.ones_like(document_ids, dtype=torch.bool)
    begins[1:] = document_ids[1:] != document_ids[:-1]
    begin = torch.where(begins, torch.arange(total, device=device), 0).cummax(0).values[anchors]
    row = torch.arange(anchors.shape[0] * block_size, device=device)
    own = total + row // block_size * block_size
    end = total + row + 1 if causal else own + block_size
    prefix = (begin.repeat_interleave(block_size), anchors.repeat_interleave(block_size))
    return BlockRule(total + row.shape[0], (_span(*prefix), _span(own, end)))


def with_own_rows(rule: BlockRule, first: int, visible: Tensor) -> BlockRule:
    """Let block j also see those of the C keys from ``first + j * C`` on for which ``visible`` [A, C] holds.

    The visible rows of a block are neighbours (``carryover.rows.rejected_mask``).
    """
    blocks, each = visible.shape
    begin = first + torch.arange(blocks, device=visible.device) * each + (~visible).long().cumprod(1).sum(1)
    size = rule.queries // blocks
    span = _span(begin.repeat_interleave(size), (begin + visible.sum(1)).repeat_interleave(size))
    return replace(rule, spans=(*rule.spans, span))


def _span(first: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    return first.int(), end.int()  # the kernel holds them in registers


def dense_mask(rule: BlockRule, device: Any) -> Tensor:
    """Boolean [1, 1, queries, keys]: the reference, and what a CPU attends with."""
    return create_mask(rule.visible, 1, 1, rule.queries, rule.keys, device=device)


def flex_mask(rule: BlockRule) -> BlockMask:
    """Block-sparse mask: tiles that lie in a span of all their rows are full, others that one touches are partial."""
    device = rule.spans[0][0].device
    edge = torch.arange(-(-rule.keys // TILE), device=device, dtype=torch.int32) * TILE
    touched = torch.zeros(-(-rule.queries // TILE) * TILE, len(edge), dtype=torch.bool, device=device)
    covered = torch.zeros_like(touched)
    for first, end in rule.spans:
        first, end = first[:, None], end[:, None]
        touched[: rule.queries] |= (edge < end) & (edge + TILE > first) & (end > first)
        covered[: rule.queries] |= (edge >= first) & (edge + TILE <= end)
    full = covered.view(-1, TILE, len(edge)).all(1)
    partial = touched.view(-1, TILE, len(edge)).any(1) & ~full
    return BlockMask.from_kv_blocks(
        *_listed(partial),
        *_listed(full),
        BLOCK_SIZE=TILE,
        mask_mod=rule.visible,
        seq_lengths=(rule.queries, rule.keys),
    )


def _listed(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Count and column numbers [1, 1, rows, columns] of the tiles of each row, its own first."""
    numbers = tiles.int().argsort(dim=1, descending=True, stable=True).int()
    return tiles.sum(1, dtype=torch.int32)[None, None], numbers[None, None]
