"""What is kept of one request, and the kinds of errors that are counted."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

WARMUP, MEASURE, COOLDOWN = "warmup", "measure", "cooldown"

# Kinds of errors, with what a reader of the report is told.
ERRORS = {
    "connect": "the endpoint could not be reached",
    "timeout": "the endpoint was silent for longer than the time limit",
    "unauthorized": "the endpoint refused the API key (401 or 403)",
    "wrong_model": "the endpoint does not know the model (404)",
    "rate_limited": "the endpoint refused for load (429)",
    "bad_request": "the endpoint refused the request (other 4xx)",
    "http_error": "the endpoint failed (5xx or another status)",
    "server_error": "an error object inside the stream",
    "not_streaming": "the answer is no event stream",
    "broken_stream": "the stream broke off before its end",
    "bad_event": "an event of the stream is not JSON of the expected form",
    "empty": "the stream ended without a single token",
    "invalid_json": "a finished answer to a JSON-schema request is not JSON",
    "not_sent": "not sent: too many requests were in flight (open loop)",
}


class RequestError(Exception):
    """A request that failed, with its kind (a key of ``ERRORS``) and what was seen."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail[:300]


@dataclass
class Record:
    """One request. Times are seconds on the generator's monotonic clock since the start of its test."""

    prompt: str  # id of the prompt
    category: str
    turn: int
    phase: str  # WARMUP, MEASURE or COOLDOWN
    step: int  # index into the ladder
    concurrency: int  # users of this step over all workers; 0 in an open loop
    worker: int
    intended: float | None = None  # open loop: when the request was due
    sent: float = 0.0
    first: float | None = None  # first content, reasoning or tool delta
    end: float = 0.0  # end of the stream, or of the attempt
    # Token-bearing events after and including the first delta: [time, tokens that arrived with it].
    events: list[tuple[float, int]] = field(default_factory=list)
    tokens: int = 0  # completion tokens
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    source: str = ""  # where token counts come from: "usage", "tokenizer" or "events"
    finish: str | None = None
    histogram: list[int] = field(default_factory=list)  # verify steps by accepted drafts
    error: str | None = None  # a key of ERRORS
    detail: str = ""
    request: str = ""  # the server's id of the request

    @property
    def ok(self) -> bool:
        return self.error is None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> Record:
        return cls(**{**value, "events": [(float(at), int(count)) for at, count in value["events"]]})
