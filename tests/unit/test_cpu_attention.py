"""The CPU attention backend against attention written out densely, and its slots at the end of a row."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_ext.cpu.slots import PADDING_SLOT, assign_extend_cache_locs, assign_req_to_token_pool

HEADS, KV_HEADS, DIM, VALUE_DIM, SLOTS, COLUMNS = 4, 2, 8, 6, 64, 20


class Pool:
    """A key/value pool of one layer."""

    def __init__(self) -> None:
        self.k = torch.randn(SLOTS, KV_HEADS, DIM)
        self.v = torch.randn(SLOTS, KV_HEADS, VALUE_DIM)

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.k

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self.v

    def set_kv_buffer(self, layer: Any, loc: Any, k: torch.Tensor, v: torch.Tensor) -> None:
        slots = loc.loc if hasattr(loc, "loc") else loc[0]
        self.k[slots], self.v[slots] = k.view(-1, KV_HEADS, DIM), v.view(-1, KV_HEADS, VALUE_DIM)


def make_backend() -> tuple[Any, Pool, torch.Tensor]:
    from sglang_ext.cpu.attention import TorchAttentionBackend

    torch.manual_seed(0)
    table = torch.zeros(4, COLUMNS, dtype=torch.int32)
    table[1:] = (torch.randperm(SLOTS - 1)[: 3 * COLUMNS] + 1).view(3, COLUMNS)
    pool = Pool()
    runner = SimpleNamespace(req_to_token_pool=SimpleNamespace(req_to_token=table), token_to_kv_pool=pool)
    return TorchAttentionBackend(runner), pool, table


def make_layer(causal: bool = True, window: int = -1) -> Any:
    from sglang.srt.layers.radix_attention import AttentionType

    return SimpleNamespace(
        layer_id=0,
        tp_q_head_num=HEADS,
        tp_k_head_num=KV_HEADS,
        qk_head_dim=DIM,
        v_head_dim=VALUE_DIM,
        scaling=0.3,
        sliding_window_size=window,
        is_cross_attention=False,
        attn_type=AttentionType.DECODER if causal else AttentionType.ENCODER_ONLY,
    )


def make_batch(mode: str, rows: list[int], seq_lens: list[int], query_lens: list[int]) -> Any:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    extend = mode == "EXTEND"
    return SimpleNamespace(
        forward_mode=ForwardMode[mode],
        seq_lens=torch.tensor(seq_lens),
        req_pool_indices=torch.tensor(rows),
        positions=torch.zeros(sum(query_lens), dtype=torch.int64),
        extend_seq_lens=torch.tensor(query_lens) if extend else None,
        spec_info=SimpleNamespace(ragged_verify_layout=None),
        out_cache_loc=None,
    )


def dense(q: torch.Tensor, pool: Pool, slots: torch.Tensor, causal: bool, window: int) -> torch.Tensor:
    """One request, a query and a head at a time: [query_len, HEADS, DIM] -> [query_len, HEADS, VALUE_DIM]."""
    out = torch.empty(len(q), HEADS, VALUE_DIM)
    for i in range(len(q)):
        place = len(slots) - len(q) + i
        seen = slots[: place + 1] if causal else slots
        if window >= 0:
            seen = seen[max(place - window, 0) :]
        for head in range(HEADS):
            shared = head * KV_HEADS // HEADS
            weights = torch.softmax(pool.k[seen, shared] @ q[i, head] * 0.3, 0)
            out[i, head] = weights @ pool.v[seen, shared]
    return out


@pytest.mark.parametrize("window", [-1, 3])
@pytest.mark.parametrize(
    ("mode", "causal", "seq_lens", "query_lens"),
    [
        ("EXTEND", True, [7, 12, 5], [7, 4, 0]),  # a whole prompt, one with a cached prefix, nothing
        ("DECODE", True, [7, 1, 20], [1, 1, 1]),
        ("TARGET_VERIFY", True, [7, 0, 12], [5, 5, 5]),
        ("TARGET_VERIFY", False, [7, 1, 12], [4, 4, 4]),  # a drafter's block
    ],
)
def test_equals_dense_attention(
    mode: str, causal: bool, seq_lens: list[int], query_lens: list[int], window: int
) -> None:
    backend, pool, table = make_backend()
    rows = [2, 1, 3]
    batch = make_batch(mode, rows, seq_lens, query_lens)
    layer = make_layer(causal, window if causal else -1)
    q = torch.randn(sum(query_lens), HEADS * DIM)
    backend.init_forward_metadata(batch)
    forward = backend.forward_decode if mode == "DECODE" else backend.forward_extend
    found = forward(q, None, None, layer, batch).view(-1, HEADS, VALUE_DIM)
    start = 0
    for row, seq_len, query_len in zip(rows, seq_lens, query_lens, strict=True):
        kv_len = seq_len + query_len if mode == "TARGET_VERIFY" else seq_len
        queries = q[start : start + query_len].view(-1, HEADS, DIM)
        expected = dense(queries, pool, table[row, :kv_len].long(), causal, layer.sliding_window_size)
        torch.testing.assert_close(found[start : start + query_len], expected)
        start += query_len


def test_writes_new_keys_before_reading_them() -> None:
    backend, pool, table = make_backend()
    batch = make_batch("EXTEND", [1], [5], [2])
    batch.out_cache_loc = table[1, 3:5].long()
    q, k, v = (torch.randn(2, n) for n in (HEADS * DIM, KV_HEADS * DIM, KV_HEADS * VALUE_DIM))
    backend.init_forward_metadata(batch)
    found = backend.forward_extend(q, k, v, make_layer(), batch).view(-1, HEADS, VALUE_DIM)
    torch.testing.assert_close(pool.k[table[1, 3:5].long()].flatten(1), k)
    torch.testing.assert_close(found, dense(q.view(2, HEADS, DIM), pool, table[1, :5].long(), True, -1))


def test_a_verify_past_the_row_end_leaves_earlier_queries_right_and_other_rows_alone() -> None:
    backend, pool, table = make_backend()
    batch = make_batch("TARGET_VERIFY", [1], [COLUMNS - 2], [5])
    q = torch.randn(5, HEADS * DIM)
    backend.init_forward_metadata(batch)
    assert backend.segments[0].slots[COLUMNS:].tolist() == [PADDING_SLOT] * 3
    found = backend.forward_extend(q, None, None, make_layer(), batch).view(-1, HEADS, VALUE_DIM)
    expected = dense(q[:2].view(2, HEADS, DIM), pool, table[1].long(), True, -1)
    torch.testing.assert_close(found[:2], expected)


def test_slots_past_the_row_end_are_padding_and_are_not_written() -> None:
    table = torch.arange(1, 31, dtype=torch.int32).view(3, 10)
    read = assign_extend_cache_locs(
        req_pool_indices=torch.tensor([0, 2]),
        req_to_token=table,
        start_offset=torch.tensor([4, 8]),
        end_offset=torch.tensor([8, 12]),
        batch_size=2,
        draft_token_num=4,
        device="cpu",
    )
    assert read.tolist() == [5, 6, 7, 8, 29, 30, PADDING_SLOT, PADDING_SLOT]
    assign_req_to_token_pool(
        torch.tensor([1, 0]), table, torch.tensor([8, 0]), torch.tensor([13, 2]), torch.arange(100, 107), 2
    )
    assert table[1].tolist() == [11, 12, 13, 14, 15, 16, 17, 18, 100, 101]
    assert table[0, :3].tolist() == [105, 106, 3]
    assert table[2].tolist() == list(range(21, 31))


def test_ragged_ranges_are_packed() -> None:
    table = torch.arange(1, 21, dtype=torch.int32).view(2, 10)
    read = assign_extend_cache_locs(
        req_pool_indices=torch.tensor([0, 1]),
        req_to_token=table,
        start_offset=torch.tensor([0, 5]),
        end_offset=torch.tensor([1, 8]),
        batch_size=2,
        draft_token_num=3,
        device="cpu",
    )
    assert read.tolist() == [1, 16, 17, 18, PADDING_SLOT, PADDING_SLOT]
