"""What ``make test`` says where it cannot run everything."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("target", ["test", "chart"])
@pytest.mark.parametrize("present", [[], ["node"], ["npm"]])
def test_without_nodejs_make_says_so_before_it_installs_anything(
    tmp_path: Path, target: str, present: list[str]
) -> None:
    make = shutil.which("make")
    assert make is not None
    for name in present:
        (tmp_path / name).touch(mode=0o755)
    command = [make, "-C", str(ROOT), "--no-print-directory", target, "PYTHON=false"]
    done = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=60)
    sentence, end = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (2, "") and end.startswith("make: *** [Makefile:")
    assert "node or npm is not on PATH" in sentence and "install Node.js 18" in sentence and sentence.endswith(".")
