"""Triton kernels of the carry: one launch where ``rows`` issues many small ones. CUDA only, with equal results."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_ext.carryover.rows import CarryState

_COLUMNS = 2048  # of one row, a program


@triton.jit
def _mark_kernel(  # type: ignore[no-untyped-def]
    hidden, commit_lens, embedding, marked, write_lens, width, stride_row, D: tl.constexpr, BD: tl.constexpr
):
    """One row and some columns: copied, with the embedding added where the row is rejected."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BD + tl.arange(0, BD)
    request, inside = row // width, column < D
    commit = tl.load(commit_lens + request)
    value = tl.load(hidden + row * stride_row + column, mask=inside)
    if row % width >= commit:
        # Rounded once, as torch adds; an embedding of another dtype is rounded before, as rows.write_all_rows does.
        added = tl.load(embedding + column, mask=inside).to(value.dtype).to(tl.float32)
        value = (value.to(tl.float32) + added).to(value.dtype)
    tl.store(marked + row * D + column, value, mask=inside)
    if (row % width == 0) & (tl.program_id(1) == 0):
        tl.store(write_lens + request, tl.where(commit > 0, width, commit))


def write_all_rows(hidden: Tensor, commit_lens: Tensor, verify_width: int, embedding: Tensor) -> tuple[Tensor, Tensor]:
    """``rows.write_all_rows`` in one launch; ValueError where ``hidden`` [>= bs * W, D] has too few rows."""
    rows, size = commit_lens.shape[0] * verify_width, hidden.shape[1]
    if hidden.shape[0] < rows:
        raise ValueError(f"{commit_lens.shape[0]} requests of {verify_width} rows need more than {hidden.shape[0]}.")
    hidden = hidden if hidden.stride(1) == 1 else hidden.contiguous()
    marked, write_lens = hidden.new_empty(rows, size), commit_lens.new_empty(commit_lens.shape)
    block = min(triton.next_power_of_2(size), _COLUMNS)
    if rows:
        _mark_kernel[(rows, triton.cdiv(size, block))](
            hidden, commit_lens, embedding, marked, write_lens, verify_width, hidden.stride(0), D=size, BD=block
        )
    return marked, write_lens


@triton.jit
def _shift_kernel(  # type: ignore[no-untyped-def]
    slot_rows,
    slots,
    committed,
    stock,
    previous,
    block_slots,
    lengths,
    verify_width,
    columns,
    limit,
    stride_row,
    Q: tl.constexpr,
    BQ: tl.constexpr,
    LAST: tl.constexpr,
):
    """One request: its carried rows, the shifted block's slots and length; its state goes on to this round."""
    request = tl.program_id(0)
    slot = tl.load(slots + request).to(tl.int64)
    length = tl.load(committed + request)
    before = tl.load(previous + slot)
    rejected = before + verify_width - length
    carried = tl.where((before >= 0) & (rejected >= 0) & (rejected < verify_width), rejected, 0)
    carried = tl.minimum(carried, tl.maximum(columns - length - Q, 0))
    carried = tl.minimum(carried, limit)
    tl.store(previous + slot, length.to(tl.int32))
    tl.store(lengths + request, length + carried)
    offset = tl.arange(0, BQ)
    inside = offset < Q
    column = tl.minimum(length + carried + offset, LAST).to(tl.int64)
    shifted = tl.load(slot_rows + slot * stride_row + column, mask=inside & (carried > 0)).to(tl.int64)
    kept = tl.load(stock + request * Q + offset, mask=inside).to(tl.int64)
    tl.store(block_slots + request * Q + offset, tl.where(carried > 0, shifted, kept), mask=inside)


def shift(
    state: CarryState,
    slot_rows: Tensor,
    slots: Tensor,
    committed: Tensor,
    stock: Tensor,
    verify_width: int,
    columns: int,
    limit: int | None,
) -> tuple[Tensor, Tensor]:
    """``rows.shift`` in one launch."""
    requests, width = stock.shape
    block_slots, lengths = stock.new_empty(requests * width, dtype=torch.int64), torch.empty_like(committed)
    _shift_kernel[(requests,)](
        slot_rows,
        slots,
        committed,
        stock.contiguous(),
        state.previous,
        block_slots,
        lengths,
        verify_width,
        columns,
        verify_width if limit is None else limit,
        slot_rows.stride(0),
        Q=width,
        BQ=triton.next_power_of_2(width),
        LAST=slot_rows.shape[1] - 1,
    )
    return block_slots, lengths
