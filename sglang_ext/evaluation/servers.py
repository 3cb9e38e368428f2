"""One ``sglang-ext serve`` process with its children, from start to its last trace."""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from sglang_ext.errors import UsageError

START_SECONDS = 240.0
STOP_SECONDS = 20.0
ASK_SECONDS = 5.0  # for /health to answer
SERVE = (sys.executable, "-m", "sglang_ext.cli", "serve")
PORTS = range(10_000, 17_000)  # above: those of the GPU tests' engines, and what SGLang draws (network.py:205)
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


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
    command = [*SERVE, *words, "--port", str(port)]
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
    """A port that nothing is bound to now and that this process was not given before.

    A server binds its port half a minute after it was chosen, so it lies where the system takes none for connections
    and for sockets that ask for any port.
    """
    for port in _ports:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise UsageError(f"No port from {PORTS.start} to {PORTS.stop - 1} is free; stop what listens there.")


def _outside_ephemeral() -> list[int]:
    try:
        low, high = map(int, EPHEMERAL.read_text(encoding="ascii").split())
    except (OSError, ValueError):
        low, high = 32_768, 60_999  # Linux's own
    return [port for port in PORTS if not low <= port <= high] or list(PORTS)


def _shuffled(ports: list[int]) -> Iterator[int]:
    return iter(random.Random().sample(ports, len(ports)))  # two processes seldom try the same ones


_ports = _shuffled(_outside_ephemeral())


def stop(process: subprocess.Popen[bytes], seconds: float = STOP_SECONDS) -> None:
    """Ask the server to stop, wait, and end what is left of its process group; Ctrl-C and SIGTERM change nothing."""
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        if process.poll() is None:
            process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def wait_until_healthy(process: subprocess.Popen[bytes], port: int, log: Path, deadline: float) -> None:
    """Return once /health of a started server answers; ``deadline`` is on the monotonic clock.

    Raises:
        UsageError: the server ended or lost its port, or the deadline passed.
    """
    while time.monotonic() < deadline:
        if reason := trouble(process, log):
            raise UsageError(reason)
        if answers(port):
            return
        time.sleep(0.5)
    raise UsageError(f"The server did not answer in time; read {log}.")


def trouble(process: subprocess.Popen[bytes], log: Path) -> str | None:
    """Why a started server will never answer, in a sentence; None while it may.

    SGLang lives on for minutes without its port: its shutdown waits for the thread that warms the server up through
    that port (http_server.py:468).
    """
    if process.poll() is not None:
        return f"The server ended with code {process.returncode} before it answered: {_last_line(log)}"
    lost = [line for line in _lines(log) if "address already in use" in line.lower()]
    return f"The server lost its port to another process: {lost[0].rstrip('.')} ({log})." if lost else None


def answers(port: int) -> bool | None:
    """Whether /health answers on 127.0.0.1; None where nothing listens."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=ASK_SECONDS) as answer:
            return bool(answer.status == 200)
    except (OSError, http.client.HTTPException) as error:
        refused = isinstance(getattr(error, "reason", error), ConnectionRefusedError)
        return None if refused else False


def _lines(log: Path) -> list[str]:
    text = log.read_text(encoding="utf-8", errors="replace")
    return [line.strip() for line in text.splitlines() if line.strip()]


def _last_line(log: Path) -> str:
    lines = _lines(log)
    return f"{lines[-1].rstrip('.') if lines else 'it printed nothing'} ({log})."


def interrupt_on_terminate() -> None:
    """Let SIGTERM end this process as Ctrl-C does, so that a server it started is stopped on the way."""
    signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
