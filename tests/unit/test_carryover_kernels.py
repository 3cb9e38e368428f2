"""The Triton kernels of the carry, interpreted on the CPU, against their plain forms."""

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

W, Q, COLUMNS = 8, 7, 40
for lens in (torch.int32, torch.int64):
    for limit in (None, 2, 0):
        slot_rows = torch.randperm(9 * 48).view(9, 48).to(torch.int32)
        plain, ours = rows.CarryState(9, "cpu"), rows.CarryState(9, "cpu")
        committed = torch.tensor([12, 3, 30, 20], dtype=lens)
        for steps in (0, torch.tensor([1, 8, 1, 3], dtype=lens), torch.tensor([5, 9, 2, 8], dtype=lens), 1):
            committed = committed + steps
            slots, stock = torch.tensor([3, 1, 8, 5]), torch.randint(9 * 48, (4, Q))
            given = (slot_rows, slots, committed, stock, W, COLUMNS, limit)
            expected, found = rows.shift(plain, *given), kernels.shift(ours, *given)
            assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(expected, found, strict=True))
            assert torch.equal(plain.previous, ours.previous)
            moved = found[1] - committed
            assert isinstance(steps, int) and not steps or limit == 0 or moved.any(), "nothing was carried"
print("equal")
"""


def test_the_kernels_equal_the_plain_forms() -> None:
    """In a process of its own: Triton looks for the interpreter when it is imported."""
    root = str(Path(__file__).parents[2])
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", SCRIPT], env=env, cwd=root, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.split() == ["equal"]


MARK = {**dict.fromkeys(("hidden", "embedding", "marked"), "*bf16"), "width": "i32", "stride_row": "i32"}
SHIFT = {**dict.fromkeys(("slots", "stock", "block_slots"), "*i64"), "slot_rows": "*i32", "previous": "*i32"}
SHIFT |= dict.fromkeys(("verify_width", "columns", "limit", "stride_row"), "i32")
KERNELS = {
    "_mark_kernel": (MARK, ("commit_lens", "write_lens"), {"D": 25600, "BD": 2048}),
    "_shift_kernel": (SHIFT, ("committed", "lengths"), {"Q": 15, "BQ": 16, "LAST": 40959}),
}


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("lens", ["*i32", "*i64"])
@pytest.mark.parametrize("name", KERNELS)
def test_the_kernels_compile_for_hopper_and_blackwell(name: str, capability: int, lens: str) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from sglang_ext.carryover import kernels

    kernel = getattr(kernels, name)
    types, lengths, constants = KERNELS[name]
    types = {**types, **dict.fromkeys(lengths, lens)}
    signature = {each: types.get(each, "constexpr") for each in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})
    assert f"sm_{capability}" in made.asm["ptx"] and len(made.asm["cubin"]) > 1000
