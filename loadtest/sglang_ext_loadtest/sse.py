"""One streamed answer of the OpenAI API, line by line, each line with its arrival time.

A server that decodes speculatively sends all tokens of one verify step in one event, so events are no tokens. What an
event brings is read from continuous usage (``stream_options.continuous_usage_stats``): the completion tokens so far.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from sglang_ext_loadtest.records import RequestError


@dataclass(frozen=True)
class Event:
    """One event that brought text or a new token count."""

    at: float  # arrival, monotonic seconds
    text: str  # content, reasoning and tool-call deltas together
    total: int | None  # completion tokens so far by the server's usage, where the event states it


@dataclass
class Answer:
    """What has arrived of one answer."""

    events: list[Event] = field(default_factory=list)
    done: bool = False  # the stream said [DONE]
    end: float = 0.0
    total: int | None = None  # completion tokens by the last usage seen
    continuous: bool = True  # every event with text stated its usage
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    finish: str | None = None
    request: str = ""
    histogram: list[int] = field(default_factory=list)
    content: str = ""  # content deltas only: what a next turn gets as the assistant's message
    _data: list[bytes] = field(default_factory=list)
    _at: float = 0.0

    def line(self, raw: bytes, at: float) -> None:
        """Take one line of the stream, with or without its line end.

        Raises:
            RequestError: ``bad_event`` for an event that is no JSON object of the expected form, ``server_error`` for
                an error object.
        """
        line = raw.rstrip(b"\r\n")
        if line.startswith(b"data:"):
            self._data.append(line[5:].removeprefix(b" "))
            self._at = at
        elif not line and self._data:
            data, self._data = b"\n".join(self._data), []
            self._event(data, self._at)

    def _event(self, data: bytes, at: float) -> None:
        self.end = at
        if data.strip() == b"[DONE]":
            self.done = True
            return
        try:
            chunk = json.loads(data)
        except ValueError:
            raise RequestError("bad_event", f"not JSON: {data[:120]!r}") from None
        if not isinstance(chunk, dict):
            raise RequestError("bad_event", f"not a JSON object: {data[:120]!r}")
        if chunk.get("error"):
            error = chunk["error"]
            raise RequestError("server_error", str(error.get("message", error) if isinstance(error, dict) else error))
        try:
            self._chunk(chunk, at)
        except (AttributeError, TypeError, KeyError, ValueError) as error:
            raise RequestError("bad_event", f"unexpected form ({error}): {data[:120]!r}") from None

    def _chunk(self, chunk: dict[str, Any], at: float) -> None:
        self.request = chunk.get("id") or self.request
        text = ""
        for choice in chunk.get("choices") or []:
            delta = choice.get("delta") or {}
            content = delta.get("content") or choice.get("text") or ""
            self.content += content
            text += (delta.get("reasoning_content") or delta.get("reasoning") or "") + content
            for call in delta.get("tool_calls") or []:
                function = call.get("function") or {}
                text += (function.get("name") or "") + (function.get("arguments") or "")
            self.finish = choice.get("finish_reason") or self.finish
        usage = chunk.get("usage") or {}
        total = int(usage["completion_tokens"]) if usage.get("completion_tokens") is not None else None
        if usage:
            self.prompt_tokens = usage.get("prompt_tokens", self.prompt_tokens)
            details = usage.get("prompt_tokens_details") or {}
            self.cached_tokens = details.get("cached_tokens", self.cached_tokens)
        if text:
            self.continuous &= total is not None
        if text or (total is not None and total > (self.total or 0)):
            self.events.append(Event(at, text, total))
        if total is not None:
            self.total = total
        details = (chunk.get("sglext") or {}).get("spec_tokens_details")
        if isinstance(details, dict):
            self.histogram = [int(steps) for steps in details.get("spec_correct_drafts_histogram") or []]
