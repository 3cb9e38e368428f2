"""`make observe`: everything comes up, shows something, and is gone after Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil

from dashboards import boards, prom
from sglang_ext import cpu
from sglang_ext.evaluation.servers import free_port

ROOT = Path(__file__).resolve().parents[2]


def test_observe_shows_a_server_and_ends_cleanly() -> None:
    """The recorded figures and the drawn dashboards are there; SIGINT ends every process with code 0."""
    port, scraped, drawn = (free_port() for _ in range(3))
    words = ["--port", str(port), "--prometheus-port", str(scraped), "--preview-port", str(drawn)]
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "dashboards.observe", *words],
        cwd=ROOT,
        env={**os.environ, **cpu.environment(), "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # Whoever runs the tests in a shell's background ignores SIGINT, and a child would inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    try:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "until Ctrl-C" in line:
                break
        else:
            raise AssertionError("".join(lines))
        assert f"http://127.0.0.1:{drawn}" in "".join(lines)
        url, deadline = f"http://127.0.0.1:{scraped}", time.monotonic() + 60
        while not prom.query(url, "sglang_ext:acceptance_length:ratio_rate5m > 1"):
            assert time.monotonic() < deadline
            time.sleep(0.5)
        assert prom.query(url, "sglang_ext_method_as_expected == 1")
        for name in boards.NAMES:
            with urllib.request.urlopen(f"http://127.0.0.1:{drawn}/{name}", timeout=60) as answer:
                assert "<polyline" in answer.read().decode()
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 3  # the server with its scheduler, and Prometheus
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert "nothing is left running" in process.stdout.read()
        _, alive = psutil.wait_procs(children, timeout=10)
        assert alive == []
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)
