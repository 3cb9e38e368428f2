"""Triton kernels of the reader: gather and reduce, query and read, or all of it in one launch. CUDA only.

The plain forms are ``StateReader.reduce`` behind ``CommittedStates.gather``, and ``reader.read_reduced``. Here no copy
of the states is made: a program follows a request's slot to the pool (1.57 M values for the paper's two sources), so
the kernels can live in a CUDA graph, where only the slots in a fixed buffer change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import triton
import triton.language as tl
from torch import Tensor

from sglang_ext.ready.reader import EPS
from sglang_ext.ready.states import CommittedStates

_DOT = 16  # smallest side of tl.dot
_READ_TILE = 4096  # values of M^ that one program of the second kernel holds


@triton.jit
def _reduced(  # type: ignore[no-untyped-def]
    temporal, state_slots, request_slots, layers, value_down, key_down, request, source, head,
    stride_layer, stride_slot, stride_head, stride_value, stride_key, eps,
    HEADS: tl.constexpr, V: tl.constexpr, K: tl.constexpr, RV: tl.constexpr, RK: tl.constexpr,
    BV: tl.constexpr, BK: tl.constexpr, BRV: tl.constexpr, BRK: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, EVICTION: tl.constexpr,
):  # fmt: skip
    """M^ [BRV, BRK] of one request, source and head: M = P S U^T, tile by tile along V, then M / rms(M)."""
    slot = tl.load(state_slots + tl.load(request_slots + request)).to(tl.int64)
    slot = tl.maximum(slot, 0)  # a padding row's result is used by nobody, but must be readable
    layer = tl.load(layers + source).to(tl.int64)
    state = temporal + layer * stride_layer + slot * stride_slot + head * stride_head
    at = source * HEADS + head
    v, k = tl.arange(0, BV), tl.arange(0, BK)
    rv, rk = tl.arange(0, BRV), tl.arange(0, BRK)
    down = tl.zeros([BRV, BK], dtype=tl.float32)
    for start in tl.range(0, V, BV, num_stages=STAGES):
        row = start + v
        places = state + row[:, None] * stride_value + k[None, :] * stride_key
        if V % BV == 0 and K == BK:  # wide copies, without a mask
            tile = tl.load(places, eviction_policy=EVICTION).to(tl.float32)
        else:
            inside = (row[:, None] < V) & (k[None, :] < K)
            tile = tl.load(places, mask=inside, other=0.0, eviction_policy=EVICTION).to(tl.float32)
        if PRECISION == "sums":  # no change of layout between load and product; a sum for each of a few ranks
            for r in tl.static_range(RV):
                p = tl.load(value_down + (at * RV + r) * V + row, mask=row < V, other=0.0)
                down += tl.where(rv[:, None] == r, tl.sum(tile * p[:, None], axis=0)[None, :], 0.0)
        else:
            p = tl.load(
                value_down + (at * RV + rv[:, None]) * V + row[None, :],
                mask=(rv[:, None] < RV) & (row[None, :] < V), other=0.0,
            )  # fmt: skip
            down += tl.dot(p, tile, input_precision=PRECISION)
    if PRECISION == "sums":
        reduced = tl.zeros([BRV, BRK], dtype=tl.float32)
        for r in tl.static_range(RK):
            u = tl.load(key_down + (at * RK + r) * K + k, mask=k < K, other=0.0)
            reduced += tl.where(rk[None, :] == r, tl.sum(down * u[None, :], axis=1)[:, None], 0.0)
    else:
        u = tl.load(
            key_down + (at * RK + rk[None, :]) * K + k[:, None], mask=(rk[None, :] < RK) & (k[:, None] < K), other=0.0
        )
        reduced = tl.dot(down, u, input_precision=PRECISION)
    mean = tl.sum(tl.sum(reduced * reduced, axis=1), axis=0) / (RV * RK)
    return reduced * tl.rsqrt(mean + eps)


@triton.jit
def _reduce_kernel(  # type: ignore[no-untyped-def]
    temporal, state_slots, request_slots, layers, value_down, key_down, out,
    stride_layer, stride_slot, stride_head, stride_value, stride_key, eps,
    HEADS: tl.constexpr, V: tl.constexpr, K: tl.constexpr, RV: tl.constexpr, RK: tl.constexpr,
    BV: tl.constexpr, BK: tl.constexpr, BRV: tl.constexpr, BRK: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, EVICTION: tl.constexpr,
):  # fmt: skip
    """M^ of one request, source and head, stored: where several draft layers read it."""
    request, source, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    reduced = _reduced(
        temporal, state_slots, request_slots, layers, value_down, key_down, request, source, head,
        stride_layer, stride_slot, stride_head, stride_value, stride_key, eps,
        HEADS, V, K, RV, RK, BV, BK, BRV, BRK, STAGES, PRECISION, EVICTION,
    )  # fmt: skip
    rv, rk = tl.arange(0, BRV), tl.arange(0, BRK)
    place = (request * tl.num_programs(1) + source) * HEADS + head
    place = out + place * RV * RK + rv[:, None] * RK + rk[None, :]
    tl.store(place, reduced, mask=(rv[:, None] < RV) & (rk[None, :] < RK))


@triton.jit
def _read_states_kernel(  # type: ignore[no-untyped-def]
    temporal, state_slots, request_slots, layers, value_down, key_down, queries, out,
    stride_layer, stride_slot, stride_head, stride_value, stride_key, eps, rows,
    HEADS: tl.constexpr, QUERY_HEADS: tl.constexpr, V: tl.constexpr, K: tl.constexpr,
    RV: tl.constexpr, RK: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr, BRV: tl.constexpr, BRK: tl.constexpr,
    BROWS: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr, EVICTION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """M^ of one request, source and head, and what all rows of the request's block read from it."""
    request, source, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    reduced = _reduced(
        temporal, state_slots, request_slots, layers, value_down, key_down, request, source, head,
        stride_layer, stride_slot, stride_head, stride_value, stride_key, eps,
        HEADS, V, K, RV, RK, BV, BK, BRV, BRK, STAGES, PRECISION, EVICTION,
    )  # fmt: skip
    if EARLY:  # launched before the kernel in front has ended, whose result the queries are; the states are older
        tl.extra.cuda.gdc_wait()
    sources = tl.num_programs(1)
    row, rv, rk = tl.arange(0, BROWS), tl.arange(0, BRV), tl.arange(0, BRK)
    asked = head if QUERY_HEADS == HEADS else 0  # a query of its own, or one for all heads of a source
    q = tl.load(
        queries + (((request * rows + row[:, None]) * sources + source) * QUERY_HEADS + asked) * RK + rk[None, :],
        mask=(row[:, None] < rows) & (rk[None, :] < RK), other=0.0,
    ).to(tl.float32)  # fmt: skip
    q = q / tl.maximum(tl.sqrt(tl.sum(q * q, axis=1)), eps)[:, None]
    if PRECISION == "sums":
        read = tl.sum(q[:, None, :] * reduced[None, :, :], axis=2)
    else:
        read = tl.dot(q, tl.trans(reduced), input_precision=PRECISION)
    place = out + (((request * rows + row[:, None]) * sources + source) * HEADS + head) * RV + rv[None, :]
    tl.store(place, read.to(out.dtype.element_ty), mask=(row[:, None] < rows) & (rv[None, :] < RV))


@triton.jit
def _read_kernel(  # type: ignore[no-untyped-def]
    queries, reduced, out, rows_per_request, eps,
    HEADS: tl.constexpr, QUERY_HEADS: tl.constexpr, PAIRS: tl.constexpr, RV: tl.constexpr, RK: tl.constexpr,
    BP: tl.constexpr, BRV: tl.constexpr, BRK: tl.constexpr,
):  # fmt: skip
    """One block row and some (source, head) pairs: o = M^ q / |q|, laid side by side for the output projection."""
    row = tl.program_id(0)
    request = row // rows_per_request
    pair = tl.program_id(1) * BP + tl.arange(0, BP)
    rv, rk = tl.arange(0, BRV), tl.arange(0, BRK)
    # A query of its own for each pair, or one for all heads of a source.
    asked = (pair // HEADS) * QUERY_HEADS + (pair % HEADS if QUERY_HEADS == HEADS else 0)
    query_rows = PAIRS // HEADS * QUERY_HEADS
    q = tl.load(
        queries + (row * query_rows + asked[:, None]) * RK + rk[None, :],
        mask=(pair[:, None] < PAIRS) & (rk[None, :] < RK), other=0.0,
    ).to(tl.float32)  # fmt: skip
    q = q / tl.maximum(tl.sqrt(tl.sum(q * q, axis=1)), eps)[:, None]
    inside = (pair[:, None, None] < PAIRS) & (rv[None, :, None] < RV) & (rk[None, None, :] < RK)
    m = tl.load(
        reduced + ((request * PAIRS + pair[:, None, None]) * RV + rv[None, :, None]) * RK + rk[None, None, :],
        mask=inside, other=0.0,
    )  # fmt: skip
    read = tl.sum(m * q[:, None, :], axis=2)
    place = out + (row * PAIRS + pair[:, None]) * RV + rv[None, :]
    tl.store(place, read.to(out.dtype.element_ty), mask=(pair[:, None] < PAIRS) & (rv[None, :] < RV))


@dataclass(frozen=True)
class Tuning:
    """How the states are loaded and multiplied: measured with ``sglang-ext bench kernels`` (docs/performance.md).

    ``tf32x3`` is three products on tensor cores that keep float32's precision; ``sums`` takes every product as a sum
    for each rank, in plain float32, where the values lie: for few ranks.
    """

    rows: int = 64  # of a state, a tile
    stages: int = 1  # tiles under way
    warps: int = 4
    precision: Literal["tf32x3", "sums"] = "tf32x3"
    eviction: Literal["", "evict_first"] = "evict_first"  # what the cache does with states, read once a round
    early: bool = False  # programmatic dependent launch: load the states while the kernel in front still runs

    def sides(self, value_down: Tensor, key_down: Tensor) -> dict[str, Any]:
        """Compile-time sizes of both kernels that load states, and their launch options."""
        _, heads, rank_v, value_dim = value_down.shape
        rank_k, key_dim = key_down.shape[2:]
        least = 1 if self.precision == "sums" else _DOT
        return {
            "HEADS": heads, "V": value_dim, "K": key_dim, "RV": rank_v, "RK": rank_k,
            "BV": min(_side(value_dim), self.rows), "BK": _side(key_dim),
            "BRV": _side(rank_v, least), "BRK": _side(rank_k, least),
            "STAGES": self.stages, "PRECISION": self.precision, "EVICTION": self.eviction, "num_warps": self.warps,
        }  # fmt: skip


FEW = Tuning()
"""Each program as quick as can be: there are too few of them to fill the device."""
MANY = Tuning(rows=16, stages=3, warps=1, precision="sums")
"""A program is one warp, without sums across warps, and small enough that a dozen share a multiprocessor."""
_MANY_FROM = 768  # programs, requests x sources x heads: measured with states of 128 x 128


def served(requests: int, sources: int, heads: int, rank: int) -> Tuning:
    """The quicker way for so many states of one batch; the products' cost of MANY grows with the rank."""
    return MANY if requests * sources * heads >= _MANY_FROM and rank <= 8 else FEW


def reduce_states(
    states: CommittedStates,
    layers: Tensor,
    request_slots: Tensor,
    value_down: Tensor,
    key_down: Tensor,
    tuning: Tuning | None = None,
) -> Tensor:
    """Reduced states M^ [bs, L, HV, r_v, r_k] (float32) straight from the pool.

    Args:
        states: the view of the pool; its strides may be any.
        layers: [L] int64 on the device, ``states.layers``.
        request_slots: [bs] request slots.
        value_down, key_down: the reader's, [L, HV, r_v, V] and [L, HV, r_k, K], float32.
        tuning: changes the speed only; by default what :func:`served` says.
    """
    sources, heads, rank_v, _ = value_down.shape
    tuning = tuning or served(request_slots.shape[0], sources, heads, max(rank_v, key_down.shape[2]))
    out = value_down.new_empty(request_slots.shape[0], sources, heads, rank_v, key_down.shape[2])
    _reduce_kernel[(request_slots.shape[0], sources, heads)](
        states.temporal, states.state_slots, request_slots, layers, value_down, key_down, out,
        *states.temporal.stride(), EPS, **tuning.sides(value_down, key_down),
    )  # fmt: skip
    return out


def read_states(
    states: CommittedStates,
    layers: Tensor,
    request_slots: Tensor,
    value_down: Tensor,
    key_down: Tensor,
    queries: Tensor,
    tuning: Tuning | None = None,
) -> Tensor:
    """``reduce_states`` and ``read_reduced`` in one launch, for a drafter of which one layer reads.

    Args:
        queries: [bs, B, L, HV or 1, r_k], not yet of unit length.

    Returns:
        Reads [bs, B, L, HV, r_v] in the dtype of the queries.
    """
    sources, heads, rank_v, _ = value_down.shape
    anchors, rows, _, query_heads, _ = queries.shape
    tuning = tuning or served(anchors, sources, heads, max(rank_v, key_down.shape[2]))
    out = queries.new_empty(anchors, rows, sources, heads, rank_v)
    launch: dict[str, Any] = {"launch_pdl": True} if tuning.early else {}
    _read_states_kernel[(anchors, sources, heads)](
        states.temporal, states.state_slots, request_slots, layers, value_down, key_down, queries.contiguous(), out,
        *states.temporal.stride(), EPS, rows,
        QUERY_HEADS=query_heads, BROWS=_side(rows, 1 if tuning.precision == "sums" else _DOT), EARLY=tuning.early,
        **tuning.sides(value_down, key_down), **launch,
    )  # fmt: skip
    return out


def read_reduced(queries: Tensor, reduced: Tensor) -> Tensor:
    """``reader.read_reduced`` in one kernel: [N, B, L, HV, r_v] in the dtype of the queries."""
    anchors, rows, sources, query_heads, rank_k = queries.shape
    heads, rank_v = reduced.shape[2:4]
    pairs = sources * heads
    side_v, side_k = triton.next_power_of_2(rank_v), triton.next_power_of_2(rank_k)
    tile = max(1, min(triton.next_power_of_2(pairs), _READ_TILE // (side_v * side_k)))
    out = queries.new_empty(anchors, rows, sources, heads, rank_v)
    _read_kernel[(anchors * rows, triton.cdiv(pairs, tile))](
        queries.contiguous(), reduced.contiguous(), out, rows, EPS,
        HEADS=heads, QUERY_HEADS=query_heads, PAIRS=pairs, RV=rank_v, RK=rank_k,
        BP=tile, BRV=side_v, BRK=side_k,
    )  # fmt: skip
    return out


def _side(size: int, least: int = _DOT) -> int:
    return max(least, triton.next_power_of_2(size))
