"""Lines of a stream to tokens with times: no server, no clock."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sglang_ext_loadtest import tokens
from sglang_ext_loadtest.clocks import INTERVAL, Watch
from sglang_ext_loadtest.records import RequestError
from sglang_ext_loadtest.sse import Answer

from sglang_ext.errors import UsageError

TOKENIZER = Path(__file__).parents[2] / "models/dense-target"


def feed(*events: tuple[float, Any], end: bool = True) -> Answer:
    answer = Answer()
    for at, event in events:
        answer.line(f"data: {json.dumps(event)}\n".encode(), at)
        answer.line(b"\n", at)
    if end:
        answer.line(b"data: [DONE]\n", events[-1][0])
        answer.line(b"\n", events[-1][0])
    return answer


def delta(text: str, total: int | None = None, field: str = "content") -> dict[str, Any]:
    usage = {} if total is None else {"usage": {"completion_tokens": total, "prompt_tokens": 5}}
    return {"id": "r", "choices": [{"delta": {field: text}}], **usage}


def test_tokens_follow_the_usage_not_the_events() -> None:
    answer = feed((1.0, delta("")), (2.0, delta("a", 1)), (3.0, delta("b c d", 4)), (4.5, delta("e", 5)))
    assert tokens.count(answer, None) == ([(2.0, 1), (3.0, 3), (4.5, 1)], 5, tokens.USAGE)
    assert answer.done and answer.prompt_tokens == 5 and answer.content == "ab c de"


def test_the_first_delta_is_reasoning_or_content_or_a_tool_call() -> None:
    tool = {"choices": [{"delta": {"tool_calls": [{"function": {"name": "f", "arguments": ""}}]}}]}
    call = tool | {"usage": {"completion_tokens": 2}}
    for first in (delta("hm", 2, "reasoning_content"), delta("hm", 2, "reasoning"), call):
        answer = feed((1.0, delta("", 0)), (2.0, first), (3.0, delta("yes", 3)))
        assert tokens.count(answer, None)[0] == [(2.0, 2), (3.0, 1)]
    assert answer.content == "yes"


def test_two_events_of_one_step_count_once_and_a_silent_end_token_counts_at_its_time() -> None:
    answer = feed(
        (1.0, delta("a", 1)),
        (2.0, delta("think", 3, "reasoning_content")),
        (2.1, delta("say", 3)),
        (3.0, {"choices": [], "usage": {"completion_tokens": 4, "prompt_tokens": 5}}),
    )
    assert tokens.count(answer, None) == ([(1.0, 1), (2.0, 2), (3.0, 1)], 4, tokens.USAGE)


def test_without_continuous_usage_the_tokenizer_counts_and_without_that_events_do() -> None:
    whole = "Continue this code: def f(values):\n    return sum(values)"
    parts = [whole[:20], whole[20:21], whole[21:40], whole[40:]]
    answer = feed(*((float(index), delta(part)) for index, part in enumerate(parts)))
    tokenizer = tokens.load_tokenizer(TOKENIZER)
    arrivals, total, source = tokens.count(answer, tokenizer)
    assert source == tokens.TOKENIZER
    assert total == sum(count for _, count in arrivals) == len(tokenizer.encode(whole, add_special_tokens=False).ids)
    assert tokens.count(answer, None) == ([(0.0, 1), (1.0, 1), (2.0, 1), (3.0, 1)], 4, tokens.EVENTS)
    final = feed(*((float(index), delta(part)) for index, part in enumerate(parts)), (4.0, delta("", 30)))
    assert tokens.count(final, tokenizer)[1:] == (30, tokens.TOKENIZER)


def test_a_tokenizer_that_is_not_there_is_said() -> None:
    with pytest.raises(UsageError, match=r"no tokenizer at nowhere"):
        tokens.load_tokenizer(Path("nowhere"))


def test_acceptance_details_and_finish_reason_are_kept() -> None:
    details = {"choices": [], "sglext": {"spec_tokens_details": {"spec_correct_drafts_histogram": [1, 0, 2]}}}
    finish = {"choices": [{"delta": {}, "finish_reason": "length"}]}
    answer = feed((1.0, delta("a", 1)), (2.0, finish), (2.0, details))
    assert (answer.histogram, answer.finish, answer.request) == ([1, 0, 2], "length", "r")


@pytest.mark.parametrize("line", [b"data: {no\n", b"data: [1]\n", b'data: {"choices": 3}\n', b'data: {"usage": [1]}\n'])
def test_an_event_of_another_form_is_named(line: bytes) -> None:
    answer = Answer()
    answer.line(line, 1.0)
    with pytest.raises(RequestError) as caught:
        answer.line(b"\n", 1.0)
    assert caught.value.kind == "bad_event"


def test_an_error_object_is_the_servers_error_and_comments_are_nothing() -> None:
    answer = Answer()
    for line in (b": ping\n", b"\n", b"event: x\n", b'data: {"error": {"message": "out of memory"}}\r\n'):
        answer.line(line, 1.0)
    with pytest.raises(RequestError, match="server_error: out of memory"):
        answer.line(b"\r\n", 1.0)


class Clocks:
    """Two clocks to be set by hand."""

    def __init__(self) -> None:
        self.now, self.offset = 100.0, 1_000.0

    def pass_time(self, seconds: float) -> None:
        self.now += seconds


def test_a_jump_of_the_wall_clock_is_counted_once_and_a_pause_is_a_stall() -> None:
    clocks = Clocks()
    watch = Watch(lambda: clocks.now, lambda: clocks.now + clocks.offset)
    clocks.pass_time(INTERVAL)
    watch.look()
    assert (watch.jumps, watch.stalls) == ([], 0)
    clocks.offset -= 3600.0
    for _ in range(3):
        clocks.pass_time(INTERVAL + 0.01)
        watch.look()
    assert watch.jumps == [pytest.approx(-3600.0)]
    clocks.pass_time(INTERVAL + 2.0)
    watch.look()
    assert (len(watch.jumps), watch.stalls) == (1, 1)
    assert max(watch.lags) == pytest.approx(2.0)
