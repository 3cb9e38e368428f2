"""``sglang-ext serve`` for real: a Carryover server over HTTP, refusals of its process, and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_ext import healthcheck
from sglang_ext.evaluation.client import ask
from sglang_ext.evaluation.prompts import Prompt
from sglang_ext.evaluation.servers import serving

Models = dict[str, Path]
PROMPTS = [Prompt(str(n), "code", text) for n, text in enumerate(["def first(", "The second", "3 + 3 = "])]


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def started(*words: object) -> Iterator[subprocess.Popen[str]]:
    """``sglang-ext serve`` as a user's shell starts it, in its own process group."""
    command = [sys.executable, "-m", "sglang_ext.cli", "serve", *map(str, words)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # A shell's background ignores SIGINT, which a child would inherit; a user's foreground does not.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def left_running(process: subprocess.Popen[str] | subprocess.Popen[bytes], seconds: float = 5) -> bool:
    """Whether any process of the group outlives its leader."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.1)
    return True


def test_a_carryover_server_answers_and_stops_on_sigterm(models: Models, port: int, tmp_path: Path) -> None:
    words = [str(models["dense"]), "--draft", str(models["carryover-dspark-dense"]), "--enable-metrics"]
    log = tmp_path / "log"
    with serving(words, port=port, log=log) as process:
        done: list[str] = []
        answers = ask(port, PROMPTS, max_tokens=24, concurrency=2, done=lambda answer: done.append(answer.prompt.id))
        assert sorted(done) == ["0", "1", "2"]
        for answer in answers:
            assert 1 <= len(answer.token_ids) <= 24
            # Every step emits its accepted drafts and one token more; the prefill emits the first.
            emitted = sum(steps * (accepted + 1) for accepted, steps in enumerate(answer.histogram))
            assert emitted >= len(answer.token_ids) - 1
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
            metrics = response.read().decode()
        assert "sglang:spec_accept_length" in metrics and "sglang:num_requests_total" in metrics
        assert healthcheck.main(Path(f"/proc/{process.pid}/cmdline")) == 0
        process.terminate()
        process.wait(30)
        assert not left_running(process)
    text = log.read_text(errors="replace")
    assert "CARRYOVER_DSPARK on" in text and "Traceback" not in text


def test_a_wrong_drafter_ends_before_the_server_starts(models: Models, port: int, tmp_path: Path) -> None:
    broken = shutil.copytree(models["carryover-dspark-dense"], tmp_path / "broken")
    weights = shutil.copyfile(models["dspark-dense"] / "model.safetensors", broken / "model.safetensors")
    assert weights.exists()
    with started(models["dense"], "--draft", broken, "--port", port) as process:
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 2
        assert output.count("\n") == 1 and "lack carryover_embedding" in output
        assert not left_running(process)


@pytest.mark.parametrize(
    ("draft", "flags", "said"),
    [
        ("carryover-dspark-dense", ["--speculative-draft-window-size", "64"], "CARRYOVER_DSPARK cannot run with"),
        ("dspark-dense", ["--speculative-num-draft-tokens", "3"], "SGLang refuses these flags (DSpark"),
    ],
)
def test_refused_flags_end_the_server_process(
    models: Models, port: int, draft: str, flags: list[str], said: str
) -> None:
    with started(models["dense"], "--draft", models[draft], "--port", port, *flags) as process:
        output, _ = process.communicate(timeout=200)
        assert process.returncode == 2, output
        assert f"sglang-ext: {said}" in output.splitlines()[-1] and "Traceback" not in output
        assert not left_running(process)


def test_an_interrupt_while_starting_leaves_nothing(models: Models, port: int) -> None:
    with started(models["dense"], "--port", port) as process:
        assert process.stdout is not None
        assert "without a drafter of ours" in process.stdout.readline()
        time.sleep(4)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        assert process.returncode != 0
        assert not left_running(process)
