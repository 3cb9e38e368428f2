"""The token-aware streaming client: one request of the OpenAI API, timed on the monotonic clock.

It stands on geventhttpclient, which Locust's FastHttpUser uses too. Lines are read with ``readline``: iterating over a
response waits for full blocks, which makes the time to the first token that of the last.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from geventhttpclient import HTTPClient
from geventhttpclient.response import HTTPConnectionClosed, HTTPParseError

from sglang_ext_loadtest.records import RequestError
from sglang_ext_loadtest.settings import check_url
from sglang_ext_loadtest.sse import Answer

STATUS = {401: "unauthorized", 403: "unauthorized", 404: "wrong_model", 429: "rate_limited"}


class StreamingClient:
    """Keep-alive connections to one endpoint.

    Args:
        url: ``http(s)://host[:port][/prefix]`` without ``/v1``.
        timeout: longest silence in seconds before a request counts as ``timeout``.
        connections: at most this many at once.
        api_key: sent as a bearer token where given.
    """

    def __init__(self, url: str, *, timeout: float, connections: int = 1, api_key: str | None = None) -> None:
        check_url(url)
        parts = urlsplit(url)
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        self._http = HTTPClient.from_url(
            f"{parts.scheme}://{parts.netloc}",
            headers=headers,
            network_timeout=timeout,
            connection_timeout=min(timeout, 30.0),
            concurrency=connections,
        )

    def stream(self, path: str, payload: bytes, answer: Answer, clock: Callable[[], float] = time.monotonic) -> None:
        """POST a JSON body and fill ``answer`` as its lines arrive.

        A keep-alive connection that the server had closed meanwhile is replaced once.

        Raises:
            RequestError: whatever went wrong, by kind; ``answer`` keeps what had arrived.
        """
        response = None
        try:
            response = self._post(path, payload)
            self._check(response)
            while line := response.readline(b"\n"):
                answer.line(line, clock())
            if not answer.done:
                raise RequestError("broken_stream", "the stream ended without [DONE]")
            if not any(event.text for event in answer.events):
                raise RequestError("empty", f"finish reason {answer.finish}")
        except TimeoutError:
            raise RequestError("timeout", "no byte within the time limit") from None
        except (OSError, HTTPParseError) as error:
            kind = "connect" if response is None else "broken_stream"
            raise RequestError(kind, f"{type(error).__name__}: {error}") from error
        finally:
            if not answer.done:
                answer.end = clock()
            if response is not None:
                response.release()

    def close(self) -> None:
        self._http.close()

    def _post(self, path: str, payload: bytes) -> Any:
        try:
            return self._http.request("POST", self._prefix + path, body=payload)
        except HTTPConnectionClosed:
            return self._http.request("POST", self._prefix + path, body=payload)

    @staticmethod
    def _check(response: Any) -> None:
        status = response.status_code
        if status != 200:
            kind = STATUS.get(status, "bad_request" if 400 <= status < 500 else "http_error")
            raise RequestError(kind, f"HTTP {status}: {response.read()[:200].decode(errors='replace')}")
        kind = str(response.get("content-type", "none"))
        if not kind.startswith("text/event-stream"):
            raise RequestError("not_streaming", f"content type {kind}")
