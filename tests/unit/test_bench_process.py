"""A bench's engine process never outlives the bench."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ENGINE = "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(60)\n"
BENCH = """
import os, pathlib, sys
from sglang_ext.bench import process
with process.lines_of("engine", pathlib.Path("job"), dict(os.environ), float(sys.argv[1])) as lines:
    for line in lines:
        print(line, end="", flush=True)
print("over", flush=True)
"""


def gone(pid: int) -> bool:
    """Whether the process has ended within a few seconds."""
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT, None])
def test_the_engine_ends_with_its_bench(tmp_path: Path, end: signal.Signals | None) -> None:
    (tmp_path / "engine.py").write_text(ENGINE)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", BENCH, "60" if end else "2"]
    bench = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert bench.stdout is not None
    try:
        engine = int(bench.stdout.readline())
        if end:
            os.kill(engine, 0)  # it runs
            bench.send_signal(end)
        code = bench.wait(30)
    finally:
        bench.kill()
    assert gone(engine)
    assert (code == 0 and "over" in bench.stdout.read()) if end is None else code != 0
