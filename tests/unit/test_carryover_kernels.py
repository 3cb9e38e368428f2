"""The Triton kernel that writes Carryover's rows, interpreted on the CPU, against its plain form."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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
