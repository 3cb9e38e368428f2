"""The image's health check, against a server that answers as SGLang does."""

from __future__ import annotations

import http.server
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_ext import healthcheck


class Health(http.server.BaseHTTPRequestHandler):
    status, delay = 200, 0.0

    def do_GET(self) -> None:
        time.sleep(self.delay)
        self.send_response(self.status if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *words: object) -> None:
        """Nothing."""


@pytest.fixture
def port() -> Iterator[int]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Health)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    thread.join()
    server.server_close()


def first_process(folder: Path, *words: object) -> Path:
    """A command line as /proc shows it."""
    path = folder / "cmdline"
    path.write_bytes(b"".join(str(word).encode() + b"\0" for word in words))
    return path


def test_it_asks_where_the_first_process_listens(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("http_proxy", "http://192.0.2.1:9")  # a proxy is for others
    command = first_process(tmp_path, "python3", "-m", "sglang_ext.server", "--host", "0.0.0.0", "--port", port)
    assert healthcheck.main(command) == 0
    monkeypatch.setattr(Health, "status", 503)  # starting, stopping, or a request that did not come through
    assert healthcheck.main(command) == 1
    assert healthcheck.main(first_process(tmp_path, "serve", "--port", "http")) == 1
    assert healthcheck.main(tmp_path / "none") == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "healthy" and said[1].endswith("answers 503") and "is no port" in said[2] and len(said) == 4


def test_a_second_is_not_too_long_and_silence_is(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Health, "delay", 1.1)  # SGLang's answer never takes less than one
    url = healthcheck.health_url(["--port", str(port)])
    assert healthcheck.check(url) is None
    assert "does not answer" in (healthcheck.check(url, timeout=0.2) or "")
    assert healthcheck.TIMEOUT > 20


@pytest.mark.parametrize(
    ("words", "url"),
    [
        ([], "http://127.0.0.1:30000/health"),
        (["--port=81", "--host", "::"], "http://[::1]:81/health"),
        (["--host", "10.1.2.3", "--ssl-certfile", "c.pem"], "https://10.1.2.3:30000/health"),
    ],
)
def test_addresses(words: list[str], url: str) -> None:
    assert healthcheck.health_url(words) == url


def test_flags_of_the_image_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_EXT_SERVE_FLAGS", "--port 8000 --host 0.0.0.0")
    assert healthcheck.health_url(["serve", "model"]) == "http://127.0.0.1:8000/health"
