"""A process that has SGLang imported and forks a job on request: importing takes longer than most jobs.

Reads one JSON object a line (job, request, answer, log, env) and writes two lines for it: ``pid`` and the job's process
id, then ``exit`` and its code when it has ended. Ends with its input.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import traceback
from typing import Any


def main() -> None:
    import sglang.srt.entrypoints.engine  # noqa: F401

    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os._exit(_run(**order))
        print("pid", pid, flush=True)
        print("exit", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def _run(job: str, request: str, answer: str, log: str, env: dict[str, str]) -> int:
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(env)
    sys.path[:0] = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    # SGLang asks for new interpreters, which would import everything again.
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = _keep_start_method
    from tests.engine import jobs

    try:
        jobs.run(job, request, answer)
        return 0
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _keep_start_method(*args: Any, **kwargs: Any) -> None:
    pass


if __name__ == "__main__":
    main()
