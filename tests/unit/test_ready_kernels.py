"""The reader's Triton kernels, interpreted on the CPU, against their plain forms."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kernel_cases import CASES


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    """Every case's differences, from a process of its own: Triton looks for the interpreter when it is imported."""
    script = Path(__file__).with_name("kernel_cases.py")
    root = str(script.parents[2])
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, script, "cpu"], env=env, cwd=root, capture_output=True, text=True, timeout=200
    )
    assert run.returncode == 0, run.stderr[-3000:]
    rows = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    return {row.pop("case"): row for row in rows}


@pytest.mark.parametrize("case", CASES)
def test_a_kernel_equals_its_plain_form(found: dict[str, dict[str, Any]], case: str) -> None:
    differences = found[case]
    assert differences["reduce"] < 1e-5 and differences["delta"] < 1e-4
    # Rounding to bfloat16 may go either way: one unit in the last place of values up to 8.
    assert differences["read"] < (0.04 if case == "bf16-queries" else 1e-5)
    assert "odd" in case or "shared" in case or differences["transposed"] > 1  # what a wrong layout would show
