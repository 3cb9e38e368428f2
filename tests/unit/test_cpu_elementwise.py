"""The small fused kernels against their formulas."""

from __future__ import annotations

import pytest
import torch

from sglang_ext.cpu.elementwise import sigmoid_mul


@pytest.mark.parametrize("inplace", [False, True])
def test_attention_gate(inplace: bool) -> None:
    attention, gate = torch.randn(5, 12), torch.randn(5, 3, 8)[..., :4]
    before = attention.clone()
    found = sigmoid_mul(attention, gate, inplace=inplace)
    torch.testing.assert_close(found, before / (1 + torch.exp(-gate.reshape(5, 12))))
    assert (found is attention) == inplace
    assert torch.equal(attention, found if inplace else before)
