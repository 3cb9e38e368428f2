"""Key/value slots: torch versions of the kernels that read and write ``req_to_token`` (request row -> token slots).

SGLang's kernels run past the end of a row when a request is about to reach the context length: the verify window and
the reservation are wider than the row's headroom (srt/mem_cache/allocation_sizing.py:96). Here a column past the row
reads slot 0, which the pools reserve for padding, and is never written.
"""

from __future__ import annotations

from typing import Any

import torch

PADDING_SLOT = 0


def gather_slots(req_to_token: torch.Tensor, rows: torch.Tensor, start: torch.Tensor, width: int) -> torch.Tensor:
    """Slots of ``width`` columns from ``start`` on, for each request row.

    Args:
        req_to_token: [request rows, columns] int.
        rows: [bs] int; start: [bs] int; width: columns to read.

    Returns:
        [bs, width] int64; ``PADDING_SLOT`` past the end of a row.
    """
    columns = start.long()[:, None] + torch.arange(width)
    inside = columns < req_to_token.shape[1]
    slots = req_to_token[rows.long()[:, None], columns.clamp(max=req_to_token.shape[1] - 1)]
    return torch.where(inside, slots.long(), PADDING_SLOT)


def assign_extend_cache_locs(
    *,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
    device: Any,
) -> torch.Tensor:
    """Slots of columns [start, end) of each request, one after the other (kernels/ops/speculative/cache_locs.py:679).

    Returns:
        [bs * draft_token_num] int64; where ranges are shorter than draft_token_num, padding follows the last one.
    """
    slots = gather_slots(req_to_token, req_pool_indices, start_offset, draft_token_num)
    wanted = torch.arange(draft_token_num) < (end_offset - start_offset)[:, None]
    if bool(wanted.all()):
        return slots.flatten()
    out = torch.full((batch_size * draft_token_num,), PADDING_SLOT, dtype=torch.int64)
    packed = slots[wanted]
    out[: packed.numel()] = packed
    return out


def assign_req_to_token_pool(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,
) -> None:
    """Write newly allocated slots into columns [start, end) of each request (srt/mem_cache/allocation.py:737)."""
    width = req_to_token.shape[1]
    taken = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        inside = max(min(end, width) - start, 0)
        req_to_token[row, start : start + inside] = out_cache_loc[taken : taken + inside].to(req_to_token.dtype)
        taken += end - start
