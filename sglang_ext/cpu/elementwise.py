"""Small fused kernels in torch: the attention output gate, and the drafters' query/key norm with rotary positions."""

from __future__ import annotations

import torch


def sigmoid_mul(
    attn_output: torch.Tensor, gate: torch.Tensor, inplace: bool = False, quant: bool = False
) -> torch.Tensor:
    """``attn_output * sigmoid(gate)`` (kernels/ops/elementwise/elementwise.py:53), [tokens, heads * head_dim]."""
    if quant:
        raise NotImplementedError("the CPU platform has no quantised attention output gate")
    result = (attn_output.float() * gate.reshape(attn_output.shape).float().sigmoid()).to(attn_output.dtype)
    return attn_output.copy_(result) if inplace else result


def table_qk_norm_rope_(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    num_q_heads: int,
    num_k_heads: int,
    head_dim: int,
    eps: float,
) -> None:
    """Norm and rotate queries and keys in place (kernels/ops/attention/table_qk_norm_rope.py:52, for bfloat16).

    qkv: [tokens, (H + 2 KH) * head_dim], queries first, then keys, then values, which stay.
    cos_sin_cache: [positions, head_dim], the cosines first (half-split rotary).
    """
    heads = num_q_heads + num_k_heads
    x = qkv[:, : heads * head_dim].unflatten(-1, (heads, head_dim)).float()
    weight = torch.cat([q_weight.expand(num_q_heads, -1), k_weight.expand(num_k_heads, -1)]).float()
    x = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight).to(qkv.dtype).float()
    cos, sin = cos_sin_cache[positions.long(), None].float().chunk(2, -1)
    first, second = x.chunk(2, -1)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    qkv[:, : heads * head_dim] = rotated.flatten(-2).to(qkv.dtype)
