"""Triton kernels of the lookup: one launch where ``lookup`` issues many small ones. CUDA only, with equal results.

The last verify steps of all request slots are one tensor ``rounds`` [request slots, 2 W + 1] int32: inputs, choices,
committed (0: no round), as in ``lookup.VerifiedRound``. Kernels read it through ``slots`` [>= bs] int64, of which the
first bs count, so that neither is copied and a CUDA graph can hold the launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_ext.carryover.lookup import LONGEST


def _width(rounds: Tensor) -> int:
    return (rounds.shape[1] - 1) // 2


@triton.jit
def _remember_kernel(  # type: ignore[no-untyped-def]
    rounds, slots, inputs, choices, commit_lens, W: tl.constexpr, BW: tl.constexpr
):
    request = tl.program_id(0).to(tl.int64)
    verified = rounds + tl.load(slots + request).to(tl.int64) * (2 * W + 1)
    row = tl.arange(0, BW)
    inside = row < W
    tl.store(verified + row, tl.load(inputs + request * W + row, mask=inside).to(tl.int32), mask=inside)
    tl.store(verified + W + row, tl.load(choices + request * W + row, mask=inside).to(tl.int32), mask=inside)
    tl.store(verified + 2 * W, tl.load(commit_lens + request).to(tl.int32))


def remember(rounds: Tensor, slots: Tensor, inputs: Tensor, choices: Tensor, commit_lens: Tensor) -> None:
    """Keep one verify step of bs requests: ``inputs`` and ``choices`` [bs, W] or [bs * W], ``commit_lens`` [bs]."""
    width, requests = _width(rounds), commit_lens.shape[0]
    if inputs.numel() != requests * width or choices.numel() != requests * width:
        raise ValueError(f"{requests} requests of {width} rows are not {inputs.numel()} and {choices.numel()} tokens.")
    if requests:
        _remember_kernel[(requests,)](
            rounds,
            slots,
            inputs.contiguous(),
            choices.contiguous(),
            commit_lens.contiguous(),
            W=width,
            BW=triton.next_power_of_2(width),
            num_warps=1,
        )


@triton.jit
def _begin(inputs, committed, row, W: tl.constexpr, LONGEST: tl.constexpr):  # type: ignore[no-untyped-def]
    """``VerifiedRound.begin`` of each ``row``: how many tokens ending there are the last committed ones."""
    matched = tl.zeros_like(row)
    same = row < W
    for back in tl.static_range(LONGEST - 1):
        last, at = committed - 1 - back, row - back
        token = tl.load(inputs + last, mask=last >= 0, other=-1)
        inside = (at >= 0) & (at < W) & (last >= 0)
        same = same & inside & (tl.load(inputs + at, mask=inside, other=-1) == token)
        matched += same.to(tl.int32)
    return matched


@triton.jit
def _bonus(table, matched, row, committed, draft, W: tl.constexpr, LONGEST: tl.constexpr):  # type: ignore[no-untyped-def]
    """``VerifiedRound.bonus`` of each ``row``, in fp32."""
    counts = (committed > 0) & (row >= committed) & (row < W) & ((matched > 0) | (row == committed + draft))
    return tl.load(table + tl.minimum(matched, LONGEST), mask=counts, other=0.0).to(tl.float32)


@triton.jit
def _look_up_kernel(  # type: ignore[no-untyped-def]
    tokens,
    logits,
    anchor,
    rounds,
    slots,
    table,
    drafts,
    stride_request,
    stride_draft,
    stride_anchor,
    W: tl.constexpr,
    P: tl.constexpr,
    BD: tl.constexpr,
    BP: tl.constexpr,
    LONGEST: tl.constexpr,
):
    """One request: its drafts, one after the other.

    A match goes on from row k at one position to row k + 1 at the next, so a lane keeps a diagonal, row minus position,
    and no value moves between lanes.
    """
    request = tl.program_id(0).to(tl.int64)
    inputs = rounds + tl.load(slots + request).to(tl.int64) * (2 * W + 1)
    committed = tl.load(inputs + 2 * W)
    diagonal = tl.arange(0, BD) - (P - 1)
    offset = tl.arange(0, BP)
    own = tl.load(tokens + request * P + offset, mask=offset < P, other=0).to(tl.int32)
    matched = _begin(inputs, committed, diagonal - 1, W, LONGEST)
    written = tl.load(anchor + request * stride_anchor).to(tl.int32)
    kept = own
    for draft in tl.range(P):
        row = diagonal + draft
        inside = (row >= 0) & (row < W)
        at = logits + request * stride_request + draft * stride_draft
        ours = tl.load(at).to(tl.float32)
        theirs = tl.load(at + 1 + row, mask=inside, other=float("-inf")).to(tl.float32)
        token = tl.load(inputs + row, mask=inside, other=-1)
        matched = tl.where(inside & (token == written), matched + 1, 0)
        raised = theirs + _bonus(table, matched, row, committed, draft, W, LONGEST)
        best, lane = tl.max(raised, 0, return_indices=True)
        chosen = lane - (P - 1) + draft
        choice = tl.load(inputs + W + chosen, mask=(chosen >= 0) & (chosen < W), other=0)
        mine = tl.sum(tl.where(offset == draft, own, 0), 0)
        written = tl.where(best > ours, choice, mine)
        kept = tl.where(offset == draft, written, kept)
    tl.store(drafts + request * P + offset, kept.to(drafts.dtype.element_ty), mask=offset < P)


def look_up(tokens: Tensor, logits: Tensor, anchor: Tensor, rounds: Tensor, slots: Tensor, table: Tensor) -> Tensor:
    """``lookup.look_up`` in one launch, of equal raised logits the first row's choice.

    Args:
        tokens: [bs, P] the drafter's own.
        logits: [bs, P, 1 + W] of each position's own token and of the rows' choices; compared in fp32.
        anchor: [bs] the last committed token.
        rounds: [request slots, 2 W + 1] int32.
        slots: [>= bs] int64.
        table: [LONGEST + 1] fp32.

    Raises:
        ValueError: the logits are not of these rounds.
    """
    requests, drafts = tokens.shape
    width = _width(rounds)
    if logits.shape != (requests, drafts, 1 + width):
        raise ValueError(f"Logits of shape {tuple(logits.shape)} are not ({requests}, {drafts}, 1 + {width}).")
    logits = logits if logits.stride(2) == 1 else logits.contiguous()
    found = torch.empty_like(tokens, memory_format=torch.contiguous_format)
    if requests:
        _look_up_kernel[(requests,)](
            tokens.contiguous(),
            logits,
            anchor,
            rounds,
            slots,
            table,
            found,
            logits.stride(0),
            logits.stride(1),
            anchor.stride(0),
            W=width,
            P=drafts,
            BD=triton.next_power_of_2(width + drafts - 1),
            BP=triton.next_power_of_2(drafts),
            LONGEST=LONGEST,
            num_warps=1,
        )
    return found


@triton.jit(do_not_specialize=["draft"], do_not_specialize_on_alignment=["token"])  # one kernel for all drafts
def _raise_kernel(  # type: ignore[no-untyped-def]
    bias,
    matched,
    token,
    rounds,
    slots,
    table,
    draft,
    start,
    vocabulary,
    stride_bias,
    stride_token,
    FIRST: tl.constexpr,
    W: tl.constexpr,
    BW: tl.constexpr,
    LONGEST: tl.constexpr,
):
    """One request, one position: its matches go on by ``token``, and its choices are raised."""
    request = tl.program_id(0).to(tl.int64)
    inputs = rounds + tl.load(slots + request).to(tl.int64) * (2 * W + 1)
    committed = tl.load(inputs + 2 * W)
    row = tl.arange(0, BW)
    inside = row < W
    if FIRST:
        before = _begin(inputs, committed, row - 1, W, LONGEST)
    else:
        before = tl.load(matched + request * W + row - 1, mask=inside & (row > 0), other=0).to(tl.int32)
    written = tl.load(token + request * stride_token).to(tl.int32)
    follows = inside & (tl.load(inputs + row, mask=inside, other=-1) == written)
    after = tl.where(follows, before + 1, 0)
    bonus = _bonus(table, after, row, committed, draft, W, LONGEST)
    choice = tl.load(inputs + W + row, mask=inside, other=-1)
    highest = tl.max(tl.where(choice[:, None] == choice[None, :], bonus[None, :], 0.0), 1)  # of each row's choice
    column = choice - start
    raises = inside & (highest > 0) & (column >= 0) & (column < vocabulary)
    at = bias + request * stride_bias + column
    value = tl.load(at, mask=raises, other=0.0)
    # The bonus is rounded to the logits' dtype before, as lookup.raise_choices does.
    value = (value.to(tl.float32) + highest.to(value.dtype).to(tl.float32)).to(value.dtype)
    # Threads read what others write: a row's matched length by the next row's, a logit by all rows that choose it.
    tl.debug_barrier()
    tl.store(matched + request * W + row, after.to(matched.dtype.element_ty), mask=inside)
    tl.store(at, value, mask=raises)


def follow_and_raise(
    bias: Tensor,
    matched: Tensor,
    token: Tensor,
    draft: int,
    rounds: Tensor,
    slots: Tensor,
    table: Tensor,
    start: int = 0,
) -> None:
    """One position of a drafter that writes one token after the other (DSpark), in one launch and in place.

    ``VerifiedRound.follow``, ``bonus`` and ``raise_choices``; for draft 0 ``begin`` too, so that ``matched`` need not
    be set before it.

    Args:
        bias: [bs, V] logits (or what is added to them) of this rank's part of the vocabulary; raised.
        matched: [bs, W] int, contiguous: the matched lengths; they go on by ``token``.
        token: [bs] written last: the anchor for draft 0, else draft ``draft`` - 1.
        draft: the position, from 0.
        rounds: [request slots, 2 W + 1] int32.
        slots: [>= bs] int64.
        table: [LONGEST + 1] fp32.
        start: first token of this rank's part.

    Raises:
        ValueError: tensors that cannot be written in place as above.
    """
    requests, vocabulary = bias.shape
    width = _width(rounds)
    if matched.shape != (requests, width) or not matched.is_contiguous() or bias.stride(1) != 1:
        raise ValueError(f"Matched lengths must be a contiguous ({requests}, {width}) and each logits row contiguous.")
    if requests:
        _raise_kernel[(requests,)](
            bias,
            matched,
            token,
            rounds,
            slots,
            table,
            draft,
            start,
            vocabulary,
            bias.stride(0),
            token.stride(0),
            FIRST=draft == 0,
            W=width,
            BW=triton.next_power_of_2(width),
            LONGEST=LONGEST,
            num_warps=4 if width > 16 else 1,
        )
