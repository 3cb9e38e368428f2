"""The Locust side: a user, a shape, and the messages between workers and master.

Locust's own table shows rows TTFT, TPOT and E2E per category. Records with every event go to ``--out``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import gevent
from locust import LoadTestShape, User, events, task
from locust.env import Environment
from locust.runners import LocalRunner, MasterRunner, WorkerRunner

from sglang_ext.errors import UsageError
from sglang_ext_loadtest import settings, workload
from sglang_ext_loadtest.client import StreamingClient
from sglang_ext_loadtest.clocks import INTERVAL, same_clock
from sglang_ext_loadtest.collector import Collector
from sglang_ext_loadtest.figures import tpot
from sglang_ext_loadtest.records import Record, RequestError
from sglang_ext_loadtest.session import Session

STATE: dict[str, Any] = {}  # of this process: "session" where users run, "collector" where records are gathered


@events.init_command_line_parser.add_listener
def add_arguments(parser: Any) -> None:
    """The arguments of plain Locust; ``--plan`` stands for all others."""
    group = parser.add_argument_group("sglang-ext load test")
    group.add_argument("--plan", default="", help="JSON file with the whole plan, written by sglang-ext-loadtest")
    group.add_argument("--prompts", default="", help="JSONL file of prompts (default: the held-out prompts)")
    group.add_argument("--model", default="default", help="model name in the requests")
    group.add_argument("--ladder", default="1,2,4,8", help="users, one step each (closed loop)")
    group.add_argument("--step-seconds", type=float, default=30.0, help="measured seconds of a step")
    group.add_argument("--warmup-seconds", type=float, default=5.0, help="seconds before that, not measured")
    group.add_argument("--arrivals", default="", help="open loop: poisson, constant or trace")
    group.add_argument("--rate", type=float, default=1.0, help="open loop: requests per second")
    group.add_argument("--trace", default="", help="open loop: file of arrival times")
    group.add_argument("--max-tokens", type=int, default=256, help="longest answer")
    group.add_argument("--temperature", type=float, default=0.0, help="sampling temperature")
    group.add_argument("--tokenizer", default="", help="tokenizer.json, for servers without continuous usage")
    group.add_argument("--out", default="build/loadtest-locust", help="directory for records.jsonl and run.json")


def read_plan(options: Any, host: str | None, workers: int) -> settings.Plan:
    """The plan that the command line states.

    Raises:
        UsageError: it is contradictory, or the plan file is not one.
    """
    if options.plan:
        try:
            table = json.loads(Path(options.plan).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(f"{options.plan} is no plan ({error}); let sglang-ext-loadtest write it.") from None
        plan: settings.Plan = settings.parse(settings.Plan, table, options.plan)
    else:
        try:
            ladder = tuple(int(step) for step in options.ladder.split(","))
        except ValueError:
            raise UsageError(f"--ladder {options.ladder} is no list of numbers; write it like 1,2,4.") from None
        plan = settings.Plan(
            url=host or "http://127.0.0.1:30000",
            model=options.model,
            workload=settings.Workload(paths=(options.prompts,) if options.prompts else ()),
            requests=settings.Requests(
                max_tokens=options.max_tokens, temperature=options.temperature, tokenizer=options.tokenizer or None
            ),
            load=settings.Load(
                concurrency=ladder,
                seconds=options.step_seconds,
                warmup_seconds=options.warmup_seconds,
                arrivals=options.arrivals or None,
                rates=(options.rate,),
                trace=options.trace or None,
                stop_seconds=len(ladder) * (options.step_seconds + options.warmup_seconds) + 300,
            ),
            out=options.out,
        )
    settings.check_load(plan.load)
    if plan.load.seconds is None and len(plan.load.concurrency) > 1 and not plan.load.arrivals:
        raise UsageError("A ladder in one Locust run needs steps of seconds; set seconds.")
    return replace(plan, load=replace(plan.load, workers=workers))


@events.init.add_listener
def on_init(environment: Environment, runner: Any, **_: Any) -> None:
    """Check the plan before anything starts, and listen for the other side's messages."""
    environment.stop_timeout = 3600.0  # requests in flight end by themselves; sessions see to the limits
    if isinstance(runner, WorkerRunner):
        runner.register_message("loadtest_stop", lambda **_: _stop_session())
        return
    try:
        plan = read_plan(environment.parsed_options, environment.host, 1)
        workload.load(plan.workload, plan.load.seed)
        StreamingClient(plan.url, timeout=1.0)
    except UsageError as error:
        print(f"sglang-ext load test: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    if isinstance(runner, MasterRunner):
        runner.register_message("loadtest", lambda msg, **_: STATE["collector"].receive(msg.data))


@events.test_start.add_listener
def on_test_start(environment: Environment, **_: Any) -> None:
    """Make this process's session (where users run) or collector (where they do not), or both."""
    runner: Any = environment.runner
    options: Any = environment.parsed_options
    if isinstance(runner, MasterRunner | LocalRunner):
        workers = runner.worker_count if isinstance(runner, MasterRunner) else 1
        plan = read_plan(options, environment.host, workers)
        broken = workload.load(plan.workload, plan.load.seed).broken
        stop = (lambda: runner.send_message("loadtest_stop")) if isinstance(runner, MasterRunner) else _stop_session
        STATE["collector"] = Collector(plan, broken, stop)
        STATE["collector"].expected = workers
        gevent.spawn(_quit_when_finished, runner, STATE["collector"])
        # These travel to the workers with the other options.
        vars(options)["loadtest_workers"] = workers
        vars(options)["loadtest_start"] = [same_clock(), time.monotonic()]
    if isinstance(runner, MasterRunner):
        return
    if isinstance(runner, WorkerRunner):
        workers = options.loadtest_workers
        index = runner.worker_index % workers  # indices go on counting when a worker comes back
    else:
        index, workers = 0, 1
    plan = read_plan(options, environment.host, workers)
    clock, start = options.loadtest_start
    epoch = start if clock and clock == same_clock() else None
    api_key = os.environ.get(plan.requests.api_key_env)

    def client(connections: int) -> StreamingClient:
        return StreamingClient(plan.url, timeout=plan.requests.timeout_s, connections=connections, api_key=api_key)

    def report(message: dict[str, Any]) -> None:
        if isinstance(runner, WorkerRunner):
            runner.send_message("loadtest", message)
        else:
            STATE["collector"].receive(message)

    STATE["session"] = session = Session(
        plan, index, workers, client, report, lambda record: _fire(environment, record), epoch
    )
    gevent.spawn(session.watch)


def _alive(runner: Any) -> int:
    return int(runner.worker_count) if isinstance(runner, MasterRunner) else 1


def _quit_when_finished(runner: Any, collector: Collector) -> None:
    """End the test once every process has measured and reported; a shape's tick would notice up to a second later."""
    while not (runner.user_count and collector.finished(_alive(runner))):
        gevent.sleep(INTERVAL)
    if runner.environment.parsed_options.headless:
        runner.quit()
    else:
        runner.stop()


def _stop_session() -> None:
    if "session" in STATE:
        STATE["session"].stopping = True


def _fire(environment: Environment, record: Record) -> None:
    """Rows of Locust's own statistics."""
    error = None if record.ok else RequestError(record.error or "", record.detail)
    start = record.sent if record.intended is None else record.intended
    times = {"E2E": record.end - start}
    if record.ok and record.first is not None:
        times["TTFT"] = record.first - start
        if (per_token := tpot(record)) is not None:
            times["TPOT"] = per_token
    for kind, seconds in times.items():
        environment.events.request.fire(
            request_type=kind,
            name=record.category,
            response_time=1000 * seconds,
            response_length=record.tokens,
            exception=error,
            context={},
        )


class TokenUser(User):
    """One concurrent stream."""

    def on_start(self) -> None:
        session: Session = STATE["session"]
        self.http = session.client(1)

    @task
    def take_turn(self) -> None:
        STATE["session"].take_turn(self.http)

    def on_stop(self) -> None:
        self.http.close()


class Ladder(LoadTestShape):
    """The plan's steps; what ends the test is ``_quit_when_finished``."""

    def tick(self) -> tuple[int, float]:
        assert self.runner is not None
        runner: Any = self.runner
        alive = _alive(runner)
        plan = read_plan(runner.environment.parsed_options, runner.environment.host, alive)
        if plan.load.arrivals:
            return alive, float(alive)
        step = 0
        if plan.load.seconds is not None:
            step = int(self.get_run_time() / (plan.load.seconds + plan.load.warmup_seconds))
        users = plan.load.concurrency[min(step, len(plan.load.concurrency) - 1)]
        return users, float(users)
