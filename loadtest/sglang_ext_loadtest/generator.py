"""A process that has Locust imported and forks for every run: importing it takes longer than a short cell."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn


class Generator:
    """Runs Locust, one command line at a time."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", __name__]
        # A session of its own: Ctrl-C reaches the sweep alone, which then ends what it started.
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        self._said = b""
        self._child: int | None = None

    def begin(self, arguments: Sequence[str], log: Path) -> None:
        """Start Locust with these arguments; what it prints goes to ``log``."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # of a process that is gone: ``end`` says so
            job = {"arguments": [*arguments], "log": str(log)}
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()

    def end(self, limit: float) -> int | None:
        """Wait until it has ended, at most ``limit`` seconds, and leave nothing of it running.

        Returns:
            Its exit code; None when time was up or the process is gone, and no further run can begin here.
        """
        code = None
        try:
            if (first := self._number(limit)) is not None:
                self._child = first
                code = self._number(limit)
        finally:
            self._sweep_up()
            if code is None:
                self.close()
        return code

    def close(self) -> None:
        """End it, with whatever runs."""
        self._sweep_up()
        if self._process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):  # what was still to be written has no reader any more
                assert pipe is not None
                pipe.close()

    def _number(self, limit: float) -> int | None:
        """The next number that it says; None when it says none within ``limit`` seconds, or is gone."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + limit
        # Unbuffered reads: what waits in a buffer of Python's, select does not see.
        while b"\n" not in self._said:
            ready, _, _ = select.select([self._process.stdout], [], [], max(deadline - time.monotonic(), 0))
            if not ready or not (piece := os.read(self._process.stdout.fileno(), 4096)):
                return None
            self._said += piece
        line, _, self._said = self._said.partition(b"\n")
        return int(line)

    def _sweep_up(self) -> None:
        """Locust's worker processes belong to the group of the run, and go with it."""
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child, signal.SIGKILL)
        self._child = None


def _leave(main: Callable[[], object]) -> NoReturn:
    """Run a program and end this process at once: what Locust does at exit waits 0.2 s for a terminal."""
    code: object = 1
    try:
        code = main()
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))


def serve() -> None:
    """Fork for every line of JSON on the standard input; say the child's id, and its exit code once it has ended."""
    import gevent.monkey
    import locust.main  # patches the standard library for gevent

    from sglang_ext_loadtest import client, collector, session  # noqa: F401 - so that no child has to

    # gevent's own forms would begin its event loop here, and every child would share it.
    fork, waitpid = (gevent.monkey.get_original("os", name) for name in ("fork", "waitpid"))
    for line in sys.stdin:
        job = json.loads(line)
        child = fork()
        if child == 0:
            os.setpgid(0, 0)
            with open(os.devnull, "rb") as nothing, open(job["log"], "wb") as log:
                os.dup2(nothing.fileno(), 0)
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            gevent.reinit()
            sys.argv = ["locust", *job["arguments"]]
            _leave(locust.main.main)
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    serve()
