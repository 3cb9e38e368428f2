"""One ``sglang-ext serve`` process with its children, from start to its last trace."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from sglang_ext.errors import UsageError

START_SECONDS = 240.0
STOP_SECONDS = 20.0


@contextlib.contextmanager
def serving(
    words: Sequence[str], *, port: int, log: Path, env: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run ``sglang-ext serve`` with these words until the block ends, whichever way it ends.

    Args:
        words: arguments of ``sglang-ext serve``, without the port.
        port: where it listens on 127.0.0.1.
        log: file for everything it prints.
        env: its environment; this process's by default.

    Yields:
        The process, once /health answers. It leads its own process group, which is gone when the block is left.

    Raises:
        UsageError: the server ended or stayed silent instead of answering; says what it printed last.
    """
    with started(words, port=port, log=log, env=env) as process:
        wait_until_healthy(process, port, log, time.monotonic() + START_SECONDS)
        yield process


@contextlib.contextmanager
def started(
    words: Sequence[str], *, port: int, log: Path, env: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """What ``serving`` does, without waiting until the server answers: several can load at the same time."""
    command = [sys.executable, "-m", "sglang_ext.cli", "serve", *words, "--port", str(port)]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=None if env is None else dict(env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        stop(process)


def free_port() -> int:
    """A port of 127.0.0.1 that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ask the server to stop, wait, and end what is left of its process group; Ctrl-C and SIGTERM change nothing."""
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        if process.poll() is None:
            process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def wait_until_healthy(process: subprocess.Popen[bytes], port: int, log: Path, deadline: float) -> None:
    """Return once /health of a started server answers; ``deadline`` is on the monotonic clock.

    Raises:
        UsageError: the server ended, or the deadline passed.
    """
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise UsageError(f"The server ended with code {process.returncode} before it answered: {_last_line(log)}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.5)
    raise UsageError(f"The server did not answer in time; read {log}.")


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return f"{lines[-1].rstrip('.') if lines else 'it printed nothing'} ({log})."


def interrupt_on_terminate() -> None:
    """Let SIGTERM end this process as Ctrl-C does, so that a server it started is stopped on the way."""
    signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
