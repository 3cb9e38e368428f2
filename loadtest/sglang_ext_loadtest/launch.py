"""Servers that a sweep starts: they load side by side, are looked at in turns, and may get a second try."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from sglang_ext.errors import UsageError
from sglang_ext.evaluation.servers import answers, free_port, started, stop, trouble

TURN_SECONDS = 0.5  # between two looks at the same server
DROP_SECONDS = 2.0  # for a server that never answered to end by itself
STARTED = "Application startup complete"  # uvicorn's line right before it listens
REFUSED = 2  # exit code of a server that refuses its arguments
# With one of these the port of the process group is not ours to give: it is given already, or each data-parallel
# rank needs its own (data_parallel_controller.py:434).
GROUP_PORT_FLAGS = ("--nccl-port", "--dp", "--data-parallel-size")


class Server:
    """One ``sglang-ext serve`` of a sweep, started at once.

    Args:
        name: the method it serves.
        words: arguments of ``sglang-ext serve``, without ports.
        log: file for what it prints; a second try writes to one beside it.
        seconds: from now until it must answer, both tries together.
        say: called with a line when it gets its second try.

    Attributes:
        ready: whether it has answered.
        failure: why it never will, None while it may.
    """

    def __init__(self, name: str, words: Sequence[str], log: Path, seconds: float, say: Callable[[str], None]) -> None:
        self.name, self.ready = name, False
        self.failure: UsageError | None = None
        self._words, self._log, self._say = words, log, say
        self._until = time.monotonic() + seconds
        self._tries, self._deaf = 0, False
        self._start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def settled(self) -> bool:
        return self.ready or self.failure is not None

    def look(self) -> None:
        """Ask it once: afterwards it is ready, has failed, was started once more, or still loads.

        Its time can only be over if it was so before it was asked, so that whoever waits may come late.
        """
        over = time.monotonic() >= self._until
        reason = trouble(self._process, self._log) or self._ask()
        if reason is None and over and not self.ready:
            reason = f"The server did not answer in time; read {self._log}."
        if reason is None:
            return
        stop(self._process, DROP_SECONDS)
        self.close()
        refused = self._process.returncode == REFUSED and " in use" not in reason
        if over or refused or self._tries == 2:
            self.failure = UsageError(reason)
        else:
            self._log = self._log.with_name(f"{self._log.stem}-again{self._log.suffix}")
            self._start()
            self._say(f"{self.name} gets a second try, on port {self._port}. {reason}")

    def terminate(self) -> None:
        """Ask it to stop, without waiting."""
        if self._process.poll() is None:
            self._process.terminate()

    def close(self) -> None:
        """Stop it and leave nothing of it running."""
        self._running.close()

    def _ask(self) -> str | None:
        answer = answers(self._port)
        self.ready = bool(answer)
        deaf = answer is None and STARTED in self._log.read_text(encoding="utf-8", errors="replace")
        twice, self._deaf = deaf and self._deaf, deaf  # the line comes a moment before it listens
        return f"The server says that it has started, but does not listen; read {self._log}." if twice else None

    def _start(self) -> None:
        self._tries += 1
        self._deaf = False
        words = list(self._words)
        if not any(word.startswith(GROUP_PORT_FLAGS) for word in words):
            words += ["--nccl-port", str(free_port())]
        self._port = free_port()
        self._running = contextlib.ExitStack()
        self._process: subprocess.Popen[bytes] = self._running.enter_context(
            started(words, port=self._port, log=self._log)
        )


def wait(servers: Sequence[Server]) -> None:
    """Look at all of them in turns until each is ready or has failed; one that hangs takes no time from the others."""
    while waiting := [server for server in servers if not server.settled]:
        for server in waiting:
            server.look()
        if not all(server.settled for server in waiting):
            time.sleep(TURN_SECONDS)
