"""Run one job of ``jobs.py`` in a process of its own: a scheduler that crashes kills its whole process tree."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang_ext import cpu

ROOT = Path(__file__).resolve().parents[2]


def run_job(
    job: str,
    timeout: float = 240,
    env: dict[str, str] | None = None,
    fresh: bool | None = None,
    log: Path | None = None,
    device: str = "cpu",
    **payload: Any,
) -> Any:
    """Call ``jobs.<job>(**payload)`` in a new process and return its result (JSON both ways).

    Args:
        timeout: seconds after which the job's process group is killed.
        env: variables on top of this process's and the CPU platform's.
        fresh: True starts a new interpreter, as a user would; False forks one that has SGLang imported already (quick).
            By default that is only where ``env`` has a variable of SGLang's own, which it may read on import, or on
            another device than the CPU, since CUDA does not survive a fork.
        log: keep the job's output here instead of in a temporary file.
        device: where its engine runs; on another device than the CPU nothing of the CPU platform's is set.

    Raises:
        AssertionError: the job failed or ran out of time; the message ends with its last output.
    """
    env = env or {}
    if fresh is None:
        read_on_import = [name for name in env if name.startswith("SGLANG_") and not name.startswith("SGLANG_EXT_")]
        fresh = device != "cpu" or bool(read_on_import)
    with tempfile.TemporaryDirectory() as folder:
        request, answer = Path(folder) / "request.json", Path(folder) / "answer.json"
        log = log or Path(folder) / "log"
        request.write_text(json.dumps(payload))
        start = functools.partial(_start_fresh, device) if fresh else _warm().start
        pid, wait = start([job, str(request), str(answer)], log, env)
        _live.add(pid)
        try:
            code: int | str = wait(timeout)
        except TimeoutError:
            code = f"nothing within {timeout:.0f} s"
        finally:
            _kill(pid)
        if code != 0 or not answer.exists():
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-40:])
            raise AssertionError(f"job {job} ended with {code}:\n{tail}")
        return json.loads(answer.read_text())


Wait = Callable[[float], int]
_live: set[int] = set()


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    _live.discard(pid)


@atexit.register
def _kill_all() -> None:
    """End what an interrupted run has left in its threads."""
    for pid in list(_live):
        _kill(pid)


def _environment(env: dict[str, str], device: str = "cpu") -> dict[str, str]:
    platform = cpu.environment() if device == "cpu" else {}
    # Models are local; a hub that cannot be reached would only cost time.
    merged = {**os.environ, **platform, "HF_HUB_OFFLINE": "1", **env}
    paths = [env.get("PYTHONPATH"), os.environ.get("PYTHONPATH")]  # SGLang itself may lie on the path
    return {**merged, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _start_fresh(device: str, words: list[str], log: Path, env: dict[str, str]) -> tuple[int, Wait]:
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.engine.jobs", *words],
            cwd=ROOT,
            env=_environment(env, device),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait(timeout: float) -> int:
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise TimeoutError from None

    return process.pid, wait


class _Warm:
    """The process of ``warm.py``, which ends with this one."""

    def __init__(self) -> None:
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.engine.warm"],
            cwd=ROOT,
            env=_environment({}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            start_new_session=True,
        )
        self.lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put("")

    def _number(self, word: str, timeout: float) -> int:
        # A test that was interrupted leaves the exit of its job unread.
        kind = value = ""
        while kind != word:
            try:
                kind, _, value = self.lines.get(timeout=timeout).partition(" ")
            except queue.Empty:
                raise TimeoutError from None
            if not kind:
                self.errors.seek(0)
                raise AssertionError(f"the process that forks jobs has ended:\n{self.errors.read()[-4000:]}")
        return int(value)

    def start(self, words: list[str], log: Path, env: dict[str, str]) -> tuple[int, Wait]:
        order = dict(zip(("job", "request", "answer"), words, strict=True), log=str(log), env=env)
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        pid = self._number("pid", 180)

        def wait(timeout: float) -> int:
            try:
                return self._number("exit", timeout)
            except TimeoutError:
                os.killpg(pid, signal.SIGKILL)
                self._number("exit", 60)
                raise

        return pid, wait


@functools.cache
def _warm() -> _Warm:
    return _Warm()
