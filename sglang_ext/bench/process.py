"""The process of a bench that holds an engine: started, read line by line, ended whatever happens."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from sglang_ext.settings import BENCH_PLAN


def json_object(text: str) -> dict[str, Any]:
    """An option's value, engine arguments as JSON; argparse says what is wrong with another one."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'{text} is no JSON object; write for example {{"page_size": 16}}')
    return value


def has_gpu() -> bool:
    """Whether this process sees a CUDA device."""
    import torch

    return bool(torch.cuda.is_available())


def on_device(device: str, arguments: dict[str, Any], batch_sizes: Iterable[int]) -> dict[str, Any]:
    """Arguments of ``sglang.Engine`` with what each device needs; decode graphs are of these batch sizes alone."""
    if device == "cpu":
        from sglang_ext import cpu

        return {**cpu.SERVER_DEFAULTS, **arguments}
    return arguments | {
        "attention_backend": "triton",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "skip_server_warmup": True,
        "cuda_graph_bs_decode": sorted(set(batch_sizes)),  # each takes every drafter's worker time
        "disable_prefill_cuda_graph": True,
        "mem_fraction_static": 0.85,
    }


def environment(device: str, **more: str) -> dict[str, str]:
    """This process's environment for an engine in which more workers than SGLang's are built."""
    found = {
        **os.environ,
        "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING": "0",
    }  # later workers' pools need their memory at once
    if device == "cpu":
        from sglang_ext import cpu

        found |= cpu.environment()
    return found | more


def with_plan(path: Path) -> dict[str, str]:
    """What tells the scheduler's process to build the workers that ``path`` names (``bench.probe``)."""
    return {BENCH_PLAN: str(path)}


@contextlib.contextmanager
def lines_of(module: str, job: Path, environment: dict[str, str], limit: float) -> Iterator[Iterable[str]]:
    """Run ``python -m module job`` and give its output's lines; it ends with the block, or after ``limit`` seconds."""
    from sglang_ext.evaluation.servers import interrupt_on_terminate

    interrupt_on_terminate()
    command = [sys.executable, "-m", module, str(job)]
    process = subprocess.Popen(command, env=environment, start_new_session=True, stdout=subprocess.PIPE, text=True)
    timer = threading.Timer(limit, _end, [process])
    timer.daemon = True
    timer.start()
    try:
        assert process.stdout is not None
        yield process.stdout
    finally:
        timer.cancel()
        _end(process)


def _end(process: subprocess.Popen[Any]) -> None:
    """End the whole process group; it has nothing to save."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
