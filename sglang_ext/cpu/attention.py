"""Attention over the paged key/value pool in plain torch: prefill, decode, verify and the drafters' non-causal block.

It takes the name ``torch_native``, whose stock implementation (srt/layers/attention/torch_native_backend.py:101 of
SGLang 0.5.23) knows neither target verify nor encoder-only layers. It reads keys and values through ``req_to_token``
exactly as the GPU backends do: a request's context is its first ``kv_len`` columns, whatever the tokens' positions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from sglang_ext.cpu.slots import gather_slots


class Segment(NamedTuple):
    """One request of a forward pass."""

    start: int  # its first row in the packed queries
    query_len: int
    slots: torch.Tensor  # [kv_len] int64; the queries are the last query_len of them


class TorchAttentionBackend(AttentionBackend):
    """One request at a time, so that a request's numbers do not depend on what else is in the batch."""

    needs_cpu_seq_lens = True

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.segments: list[Segment] = []
        if isinstance(self.token_to_kv_pool, SWAKVPool):
            raise NotImplementedError(
                "the CPU platform has no sliding-window key/value pool; serve a full-attention model"
            )

    def support_triton(self) -> bool:
        return False

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.segments = self._plan(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        self.init_forward_metadata(forward_batch)

    def _plan(self, forward_batch: Any) -> list[Segment]:
        mode = forward_batch.forward_mode
        if mode.is_idle():
            return []
        seq_lens = [int(n) for n in forward_batch.seq_lens.tolist()]
        query_lens = _query_lens(forward_batch, len(seq_lens))
        # A verify (and a draft block, which runs in the same mode) counts its own rows on top of the committed length.
        extra = mode.is_target_verify()
        kv_lens = [s + q if extra else s for s, q in zip(seq_lens, query_lens, strict=True)]
        table = gather_slots(
            self.req_to_token_pool.req_to_token,
            forward_batch.req_pool_indices,
            torch.zeros(len(seq_lens), dtype=torch.int64),
            max(kv_lens),
        )
        segments, start = [], 0
        for row, (query_len, kv_len) in enumerate(zip(query_lens, kv_lens, strict=True)):
            segments.append(Segment(start, query_len, table[row, :kv_len]))
            start += query_len
        return segments

    def forward_extend(
        self,
        q: torch.Tensor,  # [tokens, heads * head_dim]
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:  # [tokens, heads * value_dim]
        if kwargs.get("sinks") is not None:
            raise NotImplementedError("the CPU platform has no attention sinks")
        if save_kv_cache and k is not None and v is not None:
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
        heads, kv_heads = layer.tp_q_head_num, layer.tp_k_head_num
        queries = q.view(-1, heads, layer.qk_head_dim)
        out = queries.new_zeros((queries.shape[0], heads, layer.v_head_dim))
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        for segment in self.segments:
            if segment.query_len == 0:
                continue
            rows = slice(segment.start, segment.start + segment.query_len)
            out[rows] = F.scaled_dot_product_attention(
                queries[rows].transpose(0, 1),
                keys[segment.slots].to(q.dtype).transpose(0, 1),
                values[segment.slots].to(q.dtype).transpose(0, 1),
                attn_mask=_mask(segment, layer),
                scale=layer.scaling,
                enable_gqa=heads != kv_heads,
            ).transpose(0, 1)
        return out.view(-1, heads * layer.v_head_dim)

    forward_decode = forward_extend


def _query_lens(forward_batch: Any, bs: int) -> list[int]:
    mode = forward_batch.forward_mode
    if mode.is_decode():
        return [1] * bs
    if mode.is_target_verify():
        if getattr(forward_batch.spec_info, "ragged_verify_layout", None) is not None:
            raise NotImplementedError("the CPU platform verifies as many tokens for every request (static verify)")
    elif forward_batch.extend_seq_lens is not None:
        return [int(n) for n in forward_batch.extend_seq_lens.tolist()]
    return [forward_batch.positions.numel() // bs] * bs


def _mask(segment: Segment, layer: Any) -> torch.Tensor | None:
    """[query_len, kv_len] bool, True where a query may look; None where every query sees everything.

    Drafts are chains, so causal is all the mask a verify needs (SGLang hands a custom mask that says the same).
    """
    kv_len = segment.slots.shape[0]
    causal = not (layer.is_cross_attention or layer.attn_type == AttentionType.ENCODER_ONLY)
    window = layer.sliding_window_size
    window = None if window is None or window < 0 else window
    if window is None and (not causal or segment.query_len == 1):
        return None
    key = torch.arange(kv_len)[None, :]
    query = torch.arange(kv_len - segment.query_len, kv_len)[:, None]
    mask = key <= query if causal else torch.ones(segment.query_len, kv_len, dtype=torch.bool)
    return mask if window is None else mask & (key >= query - window)
