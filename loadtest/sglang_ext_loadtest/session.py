"""One generator process at work: which request is next, in which phase, and what came of it.

Closed loop: every user sends its next request when the last one has ended. A step is a number of requests or of
seconds. Its phases are ``warmup``, ``measure`` and ``cooldown``; users go on sending in the cool-down until the last
measured request has ended, so that every measured request ran among the full number of others.

Open loop: requests are sent when they are due, whatever the server does, and latency counts from that moment.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gevent

from sglang_ext_loadtest import tokens, workload
from sglang_ext_loadtest.arrivals import arrivals
from sglang_ext_loadtest.client import StreamingClient
from sglang_ext_loadtest.clocks import INTERVAL, Watch
from sglang_ext_loadtest.records import COOLDOWN, MEASURE, WARMUP, Record, RequestError
from sglang_ext_loadtest.settings import Plan
from sglang_ext_loadtest.sse import Answer

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
FLUSH_SECONDS = 0.5


@dataclass(frozen=True)
class Job:
    """One conversation to hold."""

    prompt: workload.Prompt
    number: int  # the same for the same prompt in every run: seeds follow it
    phase: str
    step: int
    concurrency: int
    intended: float | None = None


class Session:
    """The state of one process between the start and the end of a test.

    Args:
        plan: what to do.
        worker: index of this process among ``workers``.
        workers: how many processes share the plan.
        client: makes a client for a number of connections.
        report: called with ``{"kind": "records" | "measured" | "done", "worker", ...}``.
        fire: called with every finished record, for Locust's own statistics.
        epoch: the start on the monotonic clock, where processes that share it have agreed on one; default now.
    """

    def __init__(
        self,
        plan: Plan,
        worker: int,
        workers: int,
        client: Callable[[int], StreamingClient],
        report: Callable[[dict[str, Any]], None],
        fire: Callable[[Record], None],
        epoch: float | None = None,
    ) -> None:
        self.plan, self.worker, self.workers = plan, worker, workers
        self.client, self._report, self._fire = client, report, fire
        self._prompts = workload.load(plan.workload, plan.load.seed).prompts
        path = plan.requests.tokenizer
        self._tokenizer = tokens.load_tokenizer(Path(path)) if path else None
        self._epoch = time.monotonic() if epoch is None else epoch
        self._watch = Watch()
        if plan.load.arrivals:
            self._source = self._open()
        else:
            self._source = self._counted() if plan.load.seconds is None else self._timed(plan.load.seconds)
        self._buffer: list[Record] = []
        self._flushed = 0.0
        self._in_flight = self._measured_in_flight = 0
        self._errors_in_a_row = 0
        self._measuring = True  # measured requests remain to be issued
        self._announced = self.stopping = self.done = self._dispatching = False
        self.halted: str | None = None  # why the step was cut short

    def now(self) -> float:
        """Seconds since the start, on the monotonic clock."""
        return time.monotonic() - self._epoch

    def take_turn(self, client: StreamingClient) -> None:
        """What a user does, over and over: hold the next conversation, or in an open loop send all of them."""
        if self.plan.load.arrivals:
            self._dispatch()
            gevent.sleep(0.2)
            return
        job = None if self.stopping else next(self._source)
        if job is None:
            gevent.sleep(0.2)
        else:
            self._begin(job)
            if not self._converse(job, client):
                gevent.sleep(0.05)  # an endpoint that fails at once is not to be asked ten thousand times a second

    def watch(self) -> None:
        """Look at the clocks, report, and notice the ends of things, until the session is done."""
        while not self.done:
            gevent.sleep(INTERVAL)
            self._watch.look()
            now = self.now()
            if now > self.plan.load.stop_seconds:
                self.halt(f"the step took longer than {self.plan.load.stop_seconds:.0f} s")
            if now - self._flushed > FLUSH_SECONDS:
                self._flush()
            if not self._announced and not self._measured_left():
                self._announced = True
                self._report({"kind": "measured", "worker": self.worker, "halted": self.halted})
            if self.stopping and self._in_flight == 0:
                self.done = True
                self._flush()
                self._report({"kind": "done", "worker": self.worker, "notes": self._notes()})

    def halt(self, reason: str) -> None:
        """Cut the step short."""
        self.halted = self.halted or reason
        self.stopping = True
        self._measuring = False

    def _notes(self) -> dict[str, Any]:
        lags = sorted(self._watch.lags) or [0.0]
        return {
            "halted": self.halted,
            "lag_p99_ms": 1000 * lags[math.ceil(0.99 * len(lags)) - 1],
            "lag_max_ms": 1000 * lags[-1],
            "stalls": self._watch.stalls,
            "clock_jumps_s": self._watch.jumps,
            "seconds": self.now(),
        }

    def _measured_left(self) -> bool:
        if self.halted:
            return False
        seconds = self.plan.load.seconds
        if seconds is not None and not self.plan.load.arrivals:
            self._measuring = self.now() < len(self.plan.load.concurrency) * (self.plan.load.warmup_seconds + seconds)
        return self._measuring or self._measured_in_flight > 0

    def _counted(self) -> Iterator[Job]:
        """Closed loop, a step of requests."""
        load, prompts = self.plan.load, self._prompts
        concurrency = load.concurrency[0]
        warmups = math.ceil((concurrency if load.warmup_requests is None else load.warmup_requests) / self.workers)
        for number in range(warmups):
            index = (-1 - number * self.workers - self.worker) % len(prompts)
            yield Job(prompts[index], index, WARMUP, 0, concurrency)
        total = max(load.requests or len(prompts), concurrency * (load.requests_per_user or 0))
        for number in range(self.worker, total, self.workers):
            # Said before the last one is yielded: whoever takes it begins it before anyone else can look.
            self._measuring = number + self.workers < total
            yield Job(prompts[number % len(prompts)], number, MEASURE, 0, concurrency)
        self._measuring = False
        for number in itertools.count(self.worker, self.workers):
            yield Job(prompts[number % len(prompts)], number, COOLDOWN, 0, concurrency)

    def _timed(self, seconds: float) -> Iterator[Job]:
        """Closed loop, steps of seconds."""
        load, prompts = self.plan.load, self._prompts
        length = load.warmup_seconds + seconds
        for number in itertools.count(self.worker, self.workers):
            now = self.now()
            step = int(now / length)
            phase = WARMUP if now - step * length < load.warmup_seconds else MEASURE
            if step >= len(load.concurrency):
                step, phase = len(load.concurrency) - 1, COOLDOWN
            index = number % len(prompts)
            yield Job(prompts[index], index, phase, step, load.concurrency[step])

    def _open(self) -> Iterator[Job]:
        load, prompts = self.plan.load, self._prompts
        measured = 0
        total = load.requests or (None if load.seconds or load.arrivals == "trace" else len(prompts))
        share = math.ceil(total / self.workers) if total else None
        for number, due in enumerate(arrivals(load, load.rates[0] if load.rates else 0.0, self.worker)):
            phase = MEASURE if due >= load.warmup_seconds else WARMUP
            over = due >= load.warmup_seconds + load.seconds if load.seconds else False
            if phase == MEASURE and (over or (share is not None and measured >= share)):
                phase, self._measuring = COOLDOWN, False
            measured += phase == MEASURE
            index = (number * self.workers + self.worker) % len(prompts)
            yield Job(prompts[index], index, phase, 0, 0, due)
        self._measuring = False

    def _dispatch(self) -> None:
        """Open loop: send every request when it is due, whatever became of those before."""
        if self._dispatching:
            return
        self._dispatching = True
        cap = max(self.plan.load.max_in_flight // self.workers, 1)
        client = self.client(cap)
        for job in self._source:
            assert job.intended is not None
            while not self.stopping and (wait := job.intended - self.now()) > 0:
                gevent.sleep(min(wait, 0.2))
            if self.stopping:
                return
            if self._in_flight >= cap:
                self._refuse(job, cap)
                continue
            self._begin(job)
            gevent.spawn(self._converse, job, client)

    def _refuse(self, job: Job, cap: int) -> None:
        record = self._record(job, 0)
        record.sent = record.end = self.now()
        record.error, record.detail = "not_sent", f"{cap} requests were in flight"
        self._buffer.append(record)
        self._fire(record)

    def _begin(self, job: Job) -> None:
        self._in_flight += 1
        self._measured_in_flight += job.phase == MEASURE

    def _converse(self, job: Job, client: StreamingClient) -> bool:
        """Hold one conversation; False when it failed."""
        answers: list[str] = []
        record = None
        try:
            for turn in range(len(job.prompt.turns)):
                record = self._ask(job, turn, answers, client)
                if not record.ok:
                    break
        finally:
            self._in_flight -= 1
            self._measured_in_flight -= job.phase == MEASURE
        return record is not None and record.ok

    def _ask(self, job: Job, turn: int, answers: list[str], client: StreamingClient) -> Record:
        settings = self.plan.requests
        record, answer = self._record(job, turn), Answer()
        request = workload.body(job.prompt, answers, settings, self.plan.model, job.number)
        payload = json.dumps(request).encode()
        record.sent = self.now()
        try:
            client.stream(PATHS[settings.api], payload, answer, self.now)
            if job.prompt.schema is not None and answer.finish == "stop":
                _check_json(answer.content)
        except RequestError as error:
            record.error, record.detail = error.kind, error.detail
        record.events, record.tokens, record.source = tokens.count(answer, self._tokenizer)
        record.first = record.events[0][0] if record.events else None
        record.end, record.finish, record.request = answer.end, answer.finish, answer.request
        record.prompt_tokens, record.cached_tokens = answer.prompt_tokens, answer.cached_tokens
        record.histogram = answer.histogram
        answers.append(answer.content)
        self._buffer.append(record)
        self._fire(record)
        self._errors_in_a_row = 0 if record.ok else self._errors_in_a_row + 1
        if self._errors_in_a_row >= self.plan.load.stop_errors:
            self.halt(f"{self._errors_in_a_row} requests in a row failed, the last one with {record.error}")
        return record

    def _record(self, job: Job, turn: int) -> Record:
        intended = job.intended if turn == 0 else None
        prompt = job.prompt
        return Record(
            prompt.id, prompt.category, turn, job.phase, job.step, job.concurrency, self.worker, intended=intended
        )

    def _flush(self) -> None:
        records, self._buffer = self._buffer, []
        self._flushed = self.now()
        if records:
            values = [record.as_dict() for record in records]
            self._report({"kind": "records", "worker": self.worker, "records": values})


def _check_json(content: str) -> None:
    try:
        json.loads(content)
    except ValueError as error:
        raise RequestError("invalid_json", f"{error}: {content[:120]!r}") from None
