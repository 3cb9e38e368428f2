"""The Triton kernel that writes Carryover's rows, interpreted on the CPU, against its plain form."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import torch
from sglang_ext.carryover import kernels, rows

for dtype, size in ((torch.float32, 2500), (torch.bfloat16, 96)):
    hidden = torch.randn(14, 2 * size).to(dtype)[:, :size]  # rows of a wider tensor, and two more than are read
    embedding = torch.randn(size)
    for commits in (torch.tensor([1, 4, 0], dtype=torch.int32), torch.tensor([2, 3, 4])):
        expected = rows.write_all_rows(hidden, commits, 4, embedding)
        found = kernels.write_all_rows(hidden, commits, 4, embedding)
        assert (found[0] != hidden[:12]).any(), "no row was marked"
        assert found[0].dtype == dtype and found[1].dtype == commits.dtype and torch.equal(found[1], expected[1])
        kept = ~rows.rejected_mask(commits, 4).flatten()
        assert torch.equal(found[0][kept], hidden[:12][kept])
        # The interpreter cuts bfloat16 off where compiled code rounds: one unit in the last place.
        unit = 2**-7 if dtype == torch.bfloat16 else 0.0
        torch.testing.assert_close(found[0], expected[0], rtol=unit, atol=2 * unit)
print("equal")
"""


def test_the_kernel_equals_the_plain_form() -> None:
    """In a process of its own: Triton looks for the interpreter when it is imported."""
    root = str(Path(__file__).parents[2])
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", SCRIPT], env=env, cwd=root, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.split() == ["equal"]


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("lens", ["*i32", "*i64"])
def test_the_kernel_compiles_for_hopper_and_blackwell(capability: int, lens: str) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from sglang_ext.carryover import kernels

    types = dict.fromkeys(("hidden", "embedding", "marked"), "*bf16")
    types |= {"commit_lens": lens, "write_lens": lens, "width": "i32", "stride_row": "i32"}
    shape = {"D": 25600, "BD": 2048}
    signature = {name: types.get(name, "constexpr") for name in kernels._mark_kernel.arg_names}
    source = ASTSource(fn=kernels._mark_kernel, signature=signature, constexprs=shape)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})
    assert f"sm_{capability}" in made.asm["ptx"] and len(made.asm["cubin"]) > 1000
