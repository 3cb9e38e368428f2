"""Small fused kernels in torch."""

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
