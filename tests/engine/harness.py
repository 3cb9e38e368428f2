"""Run one job of ``jobs.py`` in a subprocess of its own: a scheduler that crashes kills its whole process tree."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from sglang_ext import cpu

ROOT = Path(__file__).resolve().parents[2]


def run_job(job: str, timeout: float = 240, env: dict[str, str] | None = None, **payload: Any) -> Any:
    """Call ``jobs.<job>(**payload)`` in a new process and return its result (JSON both ways).

    Args:
        timeout: seconds after which the job's process group is killed.
        env: variables on top of this process's and the CPU platform's.

    Raises:
        AssertionError: the job failed or ran out of time; the message ends with its last output.
    """
    with tempfile.TemporaryDirectory() as folder:
        request, answer, log = (Path(folder) / name for name in ("request.json", "answer.json", "log"))
        request.write_text(json.dumps(payload))
        with log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.engine.jobs", job, str(request), str(answer)],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", **cpu.environment(), **(env or {})},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code: int | str = process.wait(timeout)
            except subprocess.TimeoutExpired:
                code = f"nothing within {timeout:.0f} s"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if code != 0 or not answer.exists():
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-40:])
            raise AssertionError(f"job {job} ended with {code}:\n{tail}")
        return json.loads(answer.read_text())
