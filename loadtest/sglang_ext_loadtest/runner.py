"""A sweep: cells in an interleaved order, each one Locust run, on endpoints that are up or that it starts itself."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sglang_ext.errors import UsageError
from sglang_ext_loadtest import figures
from sglang_ext_loadtest.collector import RECORDS, RUN
from sglang_ext_loadtest.generator import Generator
from sglang_ext_loadtest.launch import Server, wait
from sglang_ext_loadtest.records import ERRORS, MEASURE, Record, RequestError
from sglang_ext_loadtest.server import Endpoint, Gauges, cross_check
from sglang_ext_loadtest.settings import Method, Plan, Sweep

LOCUSTFILE = Path(__file__).with_name("locustfile.py")
GRACE_SECONDS = 60.0  # for Locust to start and to end, on top of a step's own limit
SILENT_CELLS = 2  # in a row without an answer, after which a server is given up
SETTLE_SECONDS = 2.0  # for the server's counters to take in the last request


@dataclass(frozen=True)
class Slot:
    """One cell to measure."""

    method: Method
    level: float  # users of a closed loop, or requests per second
    repeat: int


def schedule(sweep: Sweep) -> list[Slot]:
    """Every cell, interleaved so that a drift of the machine does not fall on one method.

    Endpoints that are all up, or servers that all stay up side by side, take turns at each level, in a new random order
    each time. Where servers have to be started, one at a time, whole ladders take turns, and the order of the methods
    is reversed from repeat to repeat: the last server of one repeat is the first of the next.
    """
    source = random.Random(sweep.load.seed)
    slots = []
    in_turn = any(method.serve for method in sweep.methods) and not sweep.load.side_by_side
    for repeat in range(sweep.load.repeats):
        methods = list(sweep.methods if repeat % 2 == 0 else reversed(sweep.methods))
        if in_turn:
            for method in methods:
                slots += [Slot(method, level, repeat) for level in _shuffled(sweep.load.levels, source)]
        else:
            for level in _shuffled(sweep.load.levels, source):
                slots += [Slot(method, level, repeat) for method in _shuffled(methods, source)]
    return slots


class Runner:
    """Runs cells of a sweep.

    Args:
        sweep: what to do.
        out: directory; each cell's plan, records and log go to ``cells/`` in it.
        say: called with one line of progress at a time.
    """

    def __init__(self, sweep: Sweep, out: Path, say: Callable[[str], None]) -> None:
        self.sweep, self.out, self.say = sweep, out, say
        self.about: dict[str, dict[str, Any]] = {}  # what each method's server says about itself
        self.servers: dict[str, Server] = {}  # by method: those that were started, up or not
        self._up: dict[str, tuple[Endpoint, str]] = {}  # by method: the current one, side by side all
        self._dead: dict[str, UsageError] = {}  # servers that could not be started, or hang
        self._silent: Counter[str] = Counter()  # by method: cells in a row without one answer
        self._rehearsed: set[str] = set()
        self._generator: Generator | None = None
        self._api_key = os.environ.get(sweep.requests.api_key_env)

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_servers()
        if self._generator is not None:
            self._generator.close()

    def run(self, slots: Sequence[Slot], begin: int = 0, total: int | None = None) -> Iterator[dict[str, Any]]:
        """Measure cells one after the other; a cell that cannot be measured comes out invalid, with the reason.

        Args:
            slots: the cells, in this order.
            begin, total: how many there were before these, and are in all; for what is said.
        """
        for number, slot in enumerate(slots, start=begin + 1):
            where = f"[{number}/{total or len(slots)}] {slot.method.name} at {slot.level:g}, repeat {slot.repeat + 1}"
            try:
                endpoint, model = self._endpoint(slot.method)
            except (RequestError, UsageError) as error:
                cell = self._unmeasured(slot, error)
            else:
                cell = self._cell(slot, endpoint, model)
                self._judge(slot.method, cell)
            self.say(f"{where}: {_line(cell)}")
            yield cell

    def _judge(self, method: Method, cell: dict[str, Any]) -> None:
        """Give up a server of ours that hangs: each further cell would cost its whole time limit."""
        self._silent[method.name] = 0 if cell["requests"]["ok"] else self._silent[method.name] + 1
        if method.serve and self._silent[method.name] == SILENT_CELLS:
            self._dead[method.name] = UsageError(
                f"{SILENT_CELLS} cells in a row brought no answer; its server was asked no more."
            )

    def start(self) -> None:
        """Start the servers that stay up side by side; they load while the caller goes on."""
        ours = [method for method in self.sweep.methods if method.serve]
        if self.sweep.load.side_by_side and ours and not self.servers:
            self._launch(ours)

    def ready(self) -> None:
        """Wait until they answer or have had their time, and rehearse them all at once."""
        if self.sweep.load.side_by_side:
            self._await()
            names = self.servers.keys() - self._dead.keys()
            up = [method for method in self.sweep.methods if method.name in names]
            for method in up:
                with contextlib.suppress(RequestError):  # comes up again when its turn comes, and is reported then
                    self._greet(method)
            self._rehearse([method for method in up if method.name in self._up])

    def _endpoint(self, method: Method) -> tuple[Endpoint, str]:
        if method.name in self._dead:
            raise self._dead[method.name]
        if method.name in self._up:
            return self._up[method.name]
        if not self.sweep.load.side_by_side:
            self._stop_servers()
        if method.serve and not (method.name in self.servers and self.servers[method.name].settled):
            if self.sweep.load.side_by_side:
                self.start()
                self.ready()
            else:
                self._launch([method])
                self._await()
        if method.name in self._dead:
            raise self._dead[method.name]
        endpoint = self._greet(method)
        self._rehearse([method])
        return endpoint

    def _greet(self, method: Method) -> tuple[Endpoint, str]:
        url = method.url or self.servers[method.name].url
        endpoint = Endpoint(url, self._api_key)
        model = endpoint.model(method.model)
        if "model" not in self.about.get(method.name, {}):  # also after a cell in which the endpoint was down
            self.about[method.name] = {"url": method.url, "serve": method.serve, "model": model} | endpoint.about()
        self._up[method.name] = endpoint, model
        return endpoint, model

    def _rehearse(self, methods: Sequence[Method]) -> None:
        """A cell at the highest level that is not kept: what is compiled or tuned on first use happens in it."""
        due = [method for method in methods if method.name not in self._rehearsed] if self.sweep.load.rehearse else []
        self._rehearsed |= {method.name for method in due}
        with contextlib.ExitStack() as stack:
            waiting = []
            for method in due:
                place = self.out / "cells" / f"{_slug(method.name)}-rehearsal"
                plan = self._plan(Slot(method, max(self.sweep.load.levels), 0), *self._up[method.name], place)
                plan = replace(plan, load=replace(plan.load, workers=1))  # two masters would want the same port
                generator = Generator()
                stack.callback(generator.close)
                generator.begin(_prepared(plan, place), place / "locust.log")
                waiting.append((generator, plan))
            for generator, plan in waiting:
                generator.end(_limit(plan))

    def _launch(self, methods: Sequence[Method]) -> None:
        """Start servers together."""
        self.say(f"starting {', '.join(method.name for method in methods)}")
        for method in methods:
            log = self.out / "servers" / f"{_slug(method.name)}.log"
            self.servers[method.name] = Server(method.name, method.serve, log, self.sweep.load.start_seconds, self.say)

    def _await(self) -> None:
        """Wait for servers that were started; one that does not answer in time is dead for the rest of the sweep."""
        wait(list(self.servers.values()))
        self._dead |= {name: server.failure for name, server in self.servers.items() if server.failure is not None}

    def _stop_servers(self) -> None:
        for server in self.servers.values():  # all of them are told before the first is waited for
            server.terminate()
        for server in self.servers.values():
            server.close()
        self.servers, self._up = {}, {}

    def _cell(self, slot: Slot, endpoint: Endpoint, model: str) -> dict[str, Any]:
        name = f"{_slug(slot.method.name)}-{slot.level:g}-{slot.repeat + 1}"
        place = self.out / "cells" / name
        plan = self._plan(slot, endpoint, model, place)
        flushed = endpoint.flush() if self.sweep.load.flush_cache else None
        before = endpoint.metrics()
        started = datetime.now(UTC)
        with Gauges(endpoint) as gauges:
            failure = self._locust(plan, place)
        records, run = _read(place)
        if failure:
            run["halted"] = failure
        cell = figures.cell(records, plan.load, self.sweep.slo, run)
        if flushed is False:
            cell["warnings"].append("The server's prefix cache could not be emptied before the cell.")
        return cell | {
            "method": slot.method.name,
            "level": slot.level,
            "repeat": slot.repeat,
            "started": started.isoformat(timespec="seconds"),
            "cache_flushed": flushed,
            "cross_check": _settled(endpoint, before, figures.totals(records)),
            "server": gauges.summary(),
            "rows": [figures.row(record) for record in records if record.phase == MEASURE],
        }

    def _plan(self, slot: Slot, endpoint: Endpoint, model: str, place: Path) -> Plan:
        load = self.sweep.load
        if load.arrivals is None:
            users = int(slot.level)
            workers = max(min(load.workers, users // load.users_per_worker), 1)
            load = replace(load, concurrency=(users,), workers=workers)
        else:
            load = replace(load, rates=(slot.level,))
        return Plan(endpoint.url, model, self.sweep.workload, self.sweep.requests, load, str(place))

    def _locust(self, plan: Plan, place: Path) -> str | None:
        """Run Locust on a plan; the reason if it did not come to its end."""
        if self._generator is None:
            self._generator = Generator()
        self._generator.begin(_prepared(plan, place), place / "locust.log")
        limit = _limit(plan)
        begun = time.monotonic()
        code = self._generator.end(limit)
        if code is None:
            self._generator = None
            if time.monotonic() - begun < limit:
                return f"the load generator is gone; read {place / 'locust.log'}"
            return f"the load generator did not end within {limit:.0f} s"
        return None if code == 0 else f"the load generator ended with code {code}; read {place / 'locust.log'}"

    def _unmeasured(self, slot: Slot, error: RequestError | UsageError) -> dict[str, Any]:
        kind = error.kind if isinstance(error, RequestError) else "connect"
        problem = error.detail if isinstance(error, RequestError) else str(error)
        run = {"halted": f"{ERRORS[kind]} ({problem.rstrip('.')})", "workers": []}
        cell = figures.cell([], self.sweep.load, self.sweep.slo, run)
        cell["requests"]["errors"] = {kind: {"count": 1, "example": problem}}
        self.about.setdefault(slot.method.name, {"url": slot.method.url, "serve": slot.method.serve})
        return cell | {"method": slot.method.name, "level": slot.level, "repeat": slot.repeat, "rows": []}


def _settled(endpoint: Endpoint, before: dict[str, float], totals: tuple[int, int, int]) -> list[dict[str, Any]]:
    """The cross-check, once the counters agree or have had their time."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        checks = cross_check(before, endpoint.metrics(), *totals)
        if all(check["agrees"] for check in checks) or time.monotonic() > deadline:
            return checks
        time.sleep(0.25)


def _prepared(plan: Plan, place: Path) -> list[str]:
    """Locust's arguments for a plan, which is written to an empty place."""
    place.mkdir(parents=True, exist_ok=True)
    for name in (RECORDS, RUN):
        (place / name).unlink(missing_ok=True)
    (place / "plan.json").write_text(json.dumps(asdict(plan), indent=1) + "\n", encoding="utf-8")
    arguments = ["-f", str(LOCUSTFILE), "--headless", "--only-summary", "--loglevel", "WARNING"]
    arguments += ["--exit-code-on-error", "0", "--plan", str(place / "plan.json")]
    return arguments + (["--processes", str(plan.load.workers)] if plan.load.workers > 1 else [])


def _limit(plan: Plan) -> float:
    """Seconds after which a run of Locust is ended."""
    return plan.load.stop_seconds + plan.requests.timeout_s + GRACE_SECONDS


def _read(place: Path) -> tuple[list[Record], dict[str, Any]]:
    records = []
    with contextlib.suppress(OSError):
        for line in (place / RECORDS).read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):  # the last line of a generator that was killed
                records.append(Record.from_dict(json.loads(line)))
    try:
        return records, json.loads((place / RUN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return records, {"halted": "the load generator left no result", "workers": []}


def _line(cell: dict[str, Any]) -> str:
    """A cell in one line."""
    if cell["invalid"]:
        return f"INVALID. {' '.join(cell['invalid'])}"
    parts = [f"{cell['requests']['ok']} requests", f"{cell['throughput']['output_tok_s']:.1f} tok/s"]
    parts.append(f"TTFT p50 {cell['ttft_ms']['p50']:.0f} ms")
    if cell["tpot_ms"]:
        parts.append(f"TPOT p50 {cell['tpot_ms']['p50']:.1f} ms")
    if cell["acceptance"]:
        parts.append(f"acceptance length {cell['acceptance']['length']:.2f}")
    return ", ".join(parts)


def _shuffled(values: Sequence[Any], source: random.Random) -> list[Any]:
    return source.sample(list(values), len(values))


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-").lower() or "method"


def search(runner: Runner, most: int, cells: list[dict[str, Any]]) -> dict[str, Any]:
    """The highest concurrency at which each method meets the SLO, by doubling and then halving the gap.

    Args:
        cells: takes every cell as it is measured, so that an interrupted search has them too.

    Returns:
        By method: ``highest`` (0 when even one user is too many) and ``failed`` (the lowest that was tried and missed
        it, None when ``most`` met it).
    """
    return {method.name: _search(runner, method, most, cells) for method in runner.sweep.methods}


def _search(runner: Runner, method: Method, most: int, cells: list[dict[str, Any]]) -> dict[str, Any]:
    def meets(level: int) -> bool:
        (cell,) = runner.run([Slot(method, float(level), 0)])
        cells.append(cell)
        return not cell["invalid"] and cell["goodput"]["share"] >= runner.sweep.slo.attainment

    good, bad, level = 0, None, 1
    while bad is None and good < most:
        if meets(level):
            good, level = level, min(2 * level, most)
        else:
            bad = level
    while bad is not None and bad - good > max(1, math.floor(0.05 * good)):
        middle = (good + bad) // 2
        if meets(middle):
            good = middle
        else:
            bad = middle
    return {"highest": good, "failed": bad}
