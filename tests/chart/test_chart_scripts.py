"""The scripts that pods run: probe.py against a server that misbehaves on request, download.sh with stand-in tools."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import chart_render as chart
import pytest

FILES = chart.CHART / "files"
Run = Callable[..., tuple[int, str]]


@dataclass
class Behaviour:
    """What the stand-in answers; the defaults are those of a healthy speculating server."""

    ready: int = 200
    histogram: list[int] | None = field(default_factory=lambda: [8, 8, 8, 8])  # acceptance length 2.5
    tokens: int | None = None  # None: as many as asked for
    models: tuple[str, ...] = ("target",)
    moves: bool = True
    stream_end: str = "data: [DONE]\n\n"
    error: str = ""
    key: str = ""
    delay: float = 0.0
    connections: int = 0
    counters: dict[str, float] = field(default_factory=lambda: {"verify_steps": 3.0, "accepted_tokens": 5.0})


@pytest.fixture
def behaviour() -> Behaviour:
    return Behaviour()


@pytest.fixture
def url(behaviour: Behaviour) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            super().setup()
            behaviour.connections += 1

        def log_message(self, *_: Any) -> None:
            pass

        def answer(self, status: int, body: str, kind: str = "application/json", **headers: str) -> None:
            data = body.encode()
            self.send_response(status)
            for name, value in {"Content-Type": kind, "Content-Length": str(len(data)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            if self.path == "/ready":
                self.answer(behaviour.ready, "")
            elif self.path == "/metrics":
                self.answer(307, "", Location="/metrics/")
            elif self.path == "/metrics/":
                lines = [f'sglang_ext_{k}_total{{tp_rank="0"}} {v}' for k, v in behaviour.counters.items()]
                self.answer(200, "\n".join(["# HELP x", "other 1", *lines]), "text/plain")
            elif behaviour.key and self.headers["Authorization"] != f"Bearer {behaviour.key}":
                self.answer(401, '{"error": "Unauthorized"}')
            else:
                self.answer(200, json.dumps({"data": [{"id": name} for name in behaviour.models]}))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            time.sleep(behaviour.delay)
            if self.path == "/generate":
                tokens = behaviour.tokens or body["sampling_params"]["max_new_tokens"]
                info = {"completion_tokens": tokens, "spec_correct_drafts_histogram": behaviour.histogram}
                self.answer(200, json.dumps({"text": "x", "meta_info": info}))
                return
            tokens = behaviour.tokens or body["max_tokens"]
            events: list[dict[str, Any]] = [{"choices": [{"text": f" {n}"}]} for n in range(4)]
            events.append({"choices": [], "usage": {"completion_tokens": tokens}})
            if behaviour.error:
                events.insert(2, {"error": behaviour.error})
            if behaviour.moves:
                for name in behaviour.counters:
                    behaviour.counters[name] += 4
            text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + behaviour.stream_end
            self.answer(200, text, "text/event-stream")

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def run(url: str, capsys: pytest.CaptureFixture[str]) -> Run:
    """Call probe.py; its exit code and what it printed."""
    spec = importlib.util.spec_from_file_location("probe", FILES / "probe.py")
    assert spec is not None and spec.loader is not None
    probe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(probe)

    def call(check: str, *words: str) -> tuple[int, str]:
        code: int = probe.main([check, url, *words])
        return code, capsys.readouterr().out.strip()

    return call


def test_gate_passes_a_speculating_server(run: Run) -> None:
    assert run("gate", "--above=1") == (0, "64 tokens, acceptance length 2.50")
    assert run("gate") == (0, "64 tokens, plain decoding")


@pytest.mark.parametrize(
    ("change", "words", "sentence"),
    [
        ({"ready": 503}, ["--above=1"], "/ready answered 503."),
        ({"histogram": [64]}, ["--above=1"], "The acceptance length is 1.00 over 64 verify steps and must be above 1;"),
        ({"histogram": None}, ["--above=1"], "without a verify step, so the server does not speculate."),
        ({"histogram": []}, ["--above=1"], "without a verify step"),
        ({}, ["--above=2.5"], "must be above 2.5"),
        ({"tokens": 1}, [], "64 tokens were asked for and 1 came."),
        ({"delay": 1.0}, ["--timeout=0.3"], "did not answer as expected (TimeoutError: timed out)."),
    ],
)
def test_gate_holds_back(
    behaviour: Behaviour, run: Run, change: dict[str, Any], words: list[str], sentence: str
) -> None:
    """Not ready, no acceptance, no speculation, a cut answer, silence: one line that says which."""
    vars(behaviour).update(change)
    code, said = run("gate", *words)
    assert code == 1 and sentence in said and "\n" not in said


def test_a_loading_server_is_only_asked_whether_it_is_ready(behaviour: Behaviour, run: Run) -> None:
    """Nothing is generated before /ready, and nobody listening is one sentence too."""
    vars(behaviour).update(ready=503, delay=30.0)
    started = time.monotonic()
    assert run("gate")[0] == 1 and time.monotonic() - started < 5


def test_helm_test_passes(behaviour: Behaviour, run: Run) -> None:
    """Everything over one connection, so that a Service does not mix the counters of two pods."""
    said = run("test", "--model=target", "--speculative")
    assert said == (0, "64 tokens in 4 events, 4 verify steps, 4 drafts accepted")
    assert behaviour.connections == 1
    assert run("test", "--model=target") == (0, "64 tokens in 4 events")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"models": ("other",)}, "The server has other and not target."),
        ({"moves": False}, "sglang_ext_verify_steps_total and sglang_ext_accepted_tokens_total did not move"),
        ({"counters": {"verify_steps": 1.0}}, "but sglang_ext_accepted_tokens_total did not move"),
        ({"stream_end": ""}, "The stream ended without [DONE]."),
        ({"stream_end": "data: {\n\n"}, "did not answer as expected (JSONDecodeError"),
        ({"tokens": 3}, "64 tokens were asked for; 3 came"),
        ({"error": "out of memory"}, "The stream brought an error: out of memory."),
        ({"key": "secret"}, '/v1/models answered 401 {"error": "Unauthorized"}.'),
    ],
)
def test_helm_test_fails(behaviour: Behaviour, run: Run, change: dict[str, Any], sentence: str) -> None:
    vars(behaviour).update(change)
    code, said = run("test", "--model=target", "--speculative", "--timeout=2")
    assert code == 1 and sentence in said and "\n" not in said


def test_the_key_is_sent(behaviour: Behaviour, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    behaviour.key = "secret"
    monkeypatch.setenv("SGLANG_EXT_API_KEY", "secret")
    assert run("test", "--model=target")[0] == 0


STAND_IN = """#!/bin/sh
echo "$0 $*" >> "$LOG"
for last; do :; done
case "$0" in *hf) last=$6;; *aws) last=$5;; *oras) last=$3;; esac
echo "{}" > "$last/$CONTENT"
exit "$CODE"
"""


@pytest.fixture
def download(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run download.sh with stand-ins for hf, aws and oras that write one file."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("hf", "aws", "oras"):
        (programs / name).write_text(STAND_IN)
        (programs / name).chmod(0o755)

    def call(source: str, to: Path, code: int = 0, content: str = "config.json") -> subprocess.CompletedProcess[str]:
        env = {"PATH": f"{programs}:/usr/bin:/bin", "LOG": str(tmp_path / "log"), "CODE": str(code), "CONTENT": content}
        return subprocess.run(["sh", FILES / "download.sh", source, to], env=env, capture_output=True, text=True)

    return call


@pytest.mark.parametrize(
    ("source", "command"),
    [
        ("hf://org/model@v1", "hf download org/model --revision v1 --local-dir"),
        ("hf://org/model", "hf download org/model --revision main --local-dir"),
        ("s3://bucket/model", "aws s3 sync --only-show-errors s3://bucket/model"),
        ("oci://registry:5000/model:v1", "oras pull --output"),
    ],
)
def test_download(download: Any, tmp_path: Path, source: str, command: str) -> None:
    """The right tool with the right words; a second pod finds it there; nothing else is left behind."""
    to = tmp_path / "models" / "x"
    assert download(source, to).returncode == 0
    assert sorted(os.listdir(to)) == [".sglang-ext-download", "config.json"]
    assert os.listdir(to.parent) == ["x"]
    log = (tmp_path / "log").read_text()
    assert command in log
    assert "is there already" in download(source, to).stdout
    assert (tmp_path / "log").read_text() == log


def test_download_whole_or_not_at_all(download: Any, tmp_path: Path) -> None:
    """A broken download, one that is no model and an unknown source leave nothing; another source's folder stays."""
    to = tmp_path / "models" / "x"
    for source, more, sentence in (
        ("s3://bucket/model", {"code": 1}, ""),
        ("s3://bucket/model", {"content": "README.md"}, "brought no config.json, so it is no model"),
        ("ftp://host/model", {}, "is neither hf://, s3:// nor oci://"),
    ):
        done = download(source, to, **more)
        assert done.returncode != 0 and sentence in done.stderr
        assert os.listdir(to.parent) == []
    assert download("s3://bucket/a", to).returncode == 0
    other = download("s3://bucket/b", to)
    assert other.returncode == 1 and "holds something else than s3://bucket/b" in other.stderr
    assert (to / ".sglang-ext-download").read_text() == "s3://bucket/a\n"
