"""What a run is made of, read strictly: an unknown or ill-typed key is an error that names it."""

from __future__ import annotations

import dataclasses
import tomllib
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sglang_ext.errors import UsageError
from sglang_ext_loadtest.gates import Gate

LADDER = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True)
class Workload:
    """Which prompts are sent."""

    kind: str = "prompts"  # prompts, sharegpt, synthetic, shared_prefix
    paths: tuple[str, ...] = ()  # files of prompts and sharegpt; none: the held-out prompts of the reference models
    per_category: int | None = None  # at most this many prompts of each category
    limit: int | None = None  # at most this many prompts in all
    turns: int = 1  # at most this many turns of a conversation
    language: str | None = None  # recorded; a prompt's own "language" counts before it
    system: str | None = None  # system message in front of every conversation
    schema: str | None = None  # file with a JSON schema that every answer must follow
    # synthetic and shared_prefix: lengths in words, drawn evenly from [low, high]
    count: int = 64
    input_words: tuple[int, int] = (128, 128)
    output_tokens: tuple[int, int] | None = None  # exact answer lengths (ignores the end token); None: requests' limit
    prefix_words: int = 512  # shared_prefix: words that all prompts of a group share
    groups: int = 4  # shared_prefix: how many such groups


@dataclass(frozen=True)
class Requests:
    """How they are asked; recorded as it is in every result."""

    api: str = "chat"  # chat or completions
    max_tokens: int = 256
    temperature: float = 0.0
    seed: int = 1  # of sampling: each request adds its own number
    thinking: bool | None = None  # chat template's enable_thinking; None leaves it out
    ignore_eos: bool = False
    timeout_s: float = 120.0
    tokenizer: str | None = None  # counts tokens where the server does not state its usage continuously
    api_key_env: str = "OPENAI_API_KEY"  # the variable that holds the API key
    extra: dict[str, Any] = field(default_factory=dict)  # further fields of the request body


@dataclass(frozen=True)
class Load:
    """How many requests, and when."""

    concurrency: tuple[int, ...] = LADDER  # closed loop: users, one step each
    requests: int | None = None  # measured requests per step; default: each prompt once
    requests_per_user: int | None = None  # and at least so many per user, where requests are counted
    seconds: float | None = None  # or: measured time per step
    warmup_requests: int | None = None  # before a step of requests; default: one per user
    warmup_seconds: float = 5.0  # before a step of seconds, and in an open loop
    arrivals: str | None = None  # open loop: poisson, constant or trace
    rates: tuple[float, ...] = ()  # open loop: requests per second, one step each
    trace: str | None = None  # file of arrival times
    seed: int = 1  # order of prompts, arrivals, interleaving, resampling
    repeats: int = 3
    workers: int = 1  # Locust worker processes; 1 runs in one process
    users_per_worker: int = 1  # no more workers at a step than keep so many users each
    max_in_flight: int = 1024  # open loop: requests beyond are counted as not sent
    max_error_rate: float = 0.01  # a cell with more errors is invalid
    stop_errors: int = 20  # errors in a row that end a step
    stop_seconds: float = 900.0  # a step never takes longer
    max_send_lag_ms: float = (
        500.0  # p99 of send lag (open loop) or of the generator's own timer that invalidates a step
    )
    flush_cache: bool = True  # empty the server's prefix cache before each step
    side_by_side: bool = False  # start all servers at once and keep them up, so that methods take turns at each level
    rehearse: bool = False  # once a server is up: a step at the highest level first, which is not measured
    start_seconds: float = 240.0  # a server that has not answered by then counts as down

    @property
    def levels(self) -> tuple[float, ...]:
        """The ladder: concurrencies, or rates of an open loop (0 stands for a trace's own)."""
        if self.arrivals is None:
            return tuple(float(step) for step in self.concurrency)
        return (0.0,) if self.arrivals == "trace" else self.rates


@dataclass(frozen=True)
class Slo:
    """A request is good when it meets each limit that is set; goodput counts good requests."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    attainment: float = 0.99  # share of good requests that a concurrency must reach

    @property
    def any(self) -> bool:
        return any(limit is not None for limit in (self.ttft_ms, self.tpot_ms, self.e2e_ms))


@dataclass(frozen=True)
class Method:
    """One way to decode: an endpoint that is up, or words for ``sglang-ext serve`` to start it when its turn comes."""

    name: str
    url: str | None = None
    serve: tuple[str, ...] = ()
    model: str | None = None  # default: the first that the endpoint lists
    role: str | None = None  # "plain" or "stock": what others are compared with
    note: str | None = None  # what a reader must know; a method with a note is never recommended


@dataclass(frozen=True)
class Sweep:
    """A whole sweep, as its TOML file says."""

    methods: tuple[Method, ...]
    title: str = "Load test"
    note: str | None = None  # what a reader must know about all of it, said above the answer
    workload: Workload = Workload()
    requests: Requests = Requests()
    load: Load = Load()
    slo: Slo = Slo()
    gates: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """What one Locust run does: the ladder (or the rates) of one endpoint."""

    url: str
    model: str
    workload: Workload
    requests: Requests
    load: Load
    out: str | None = None  # directory for records.jsonl and run.json


def read_sweep(path: Path) -> Sweep:
    """The sweep in a TOML file.

    Raises:
        UsageError: the file is missing, no TOML, or holds an unknown, missing or ill-typed key.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"There is no sweep at {path} ({error.strerror}); give a TOML file.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is no TOML ({error}); mend it.") from None
    return check_sweep(parse(Sweep, table, str(path)))


def check_sweep(sweep: Sweep) -> Sweep:
    """The same sweep, when its parts fit together.

    Raises:
        UsageError: they do not; says which and what to do.
    """
    if not sweep.methods:
        raise UsageError("The sweep has no methods; add a [[methods]] table with a name and a url.")
    names = [method.name for method in sweep.methods]
    roles = [method.role for method in sweep.methods]
    for method in sweep.methods:
        if names.count(method.name) > 1:
            raise UsageError(f"Two methods are called {method.name!r}; give each its own name.")
        if bool(method.url) == bool(method.serve):
            raise UsageError(f"Method {method.name!r} needs either a url or words to serve; give one of the two.")
        if method.role not in (None, "plain", "stock"):
            raise UsageError(f"Method {method.name!r} has the role {method.role!r}; use plain, stock or none.")
        if method.role and roles.count(method.role) > 1:
            raise UsageError(
                f"Two methods have the role {method.role}, but speed-ups are counted against one; choose it."
            )
        if method.url:
            check_url(method.url)
    check_load(sweep.load)
    work, requests = sweep.workload, sweep.requests
    _positive("requests", max_tokens=requests.max_tokens, timeout_s=requests.timeout_s)
    _positive("workload", per_category=work.per_category, limit=work.limit, turns=work.turns)
    _positive("workload", count=work.count, prefix_words=work.prefix_words, groups=work.groups)
    for name, span in (("input_words", work.input_words), ("output_tokens", work.output_tokens)):
        if span is not None and not 0 < span[0] <= span[1]:
            raise UsageError(f"workload: {name} is {list(span)}; give [low, high] with 0 < low <= high.")
    if requests.temperature < 0:
        raise UsageError(f"requests: temperature is {requests.temperature:g}; give 0 (greedy) or more.")
    if requests.api not in ("chat", "completions"):
        raise UsageError(f"api is {requests.api!r}; use chat or completions.")
    _positive("slo", ttft_ms=sweep.slo.ttft_ms, tpot_ms=sweep.slo.tpot_ms, e2e_ms=sweep.slo.e2e_ms)
    if not 0 < sweep.slo.attainment <= 1:
        raise UsageError(f"slo: attainment is {sweep.slo.attainment:g}; give a share above 0, at most 1.")
    for text in sweep.gates:
        Gate.parse(text).fit(names, sweep.load.levels, () if sweep.load.arrivals else roles)
    return sweep


def check_load(load: Load) -> None:
    """Refuse a load that contradicts itself (UsageError)."""
    if load.requests is not None and load.seconds is not None:
        raise UsageError("The load has both requests and seconds; give the length of a step in one of them.")
    if load.arrivals is None:
        if not load.concurrency or min(load.concurrency) < 1:
            raise UsageError("The ladder of concurrencies is empty or has a step below 1; give numbers of users.")
    elif load.arrivals not in ("poisson", "constant", "trace"):
        raise UsageError(f"arrivals is {load.arrivals!r}; use poisson, constant or trace.")
    elif load.arrivals == "trace" and not load.trace:
        raise UsageError("Arrivals from a trace need its file; set trace.")
    elif load.arrivals != "trace" and (not load.rates or min(load.rates) <= 0):
        raise UsageError(f"{load.arrivals} arrivals need rates above 0; set rates, in requests per second.")
    if load.repeats < 1 or load.workers < 1 or load.users_per_worker < 1:
        raise UsageError("repeats, workers and users_per_worker must be 1 or more.")
    if load.requests_per_user is not None and load.seconds is not None:
        raise UsageError("requests_per_user needs steps of requests; leave seconds out.")
    _positive("load", requests=load.requests, seconds=load.seconds, requests_per_user=load.requests_per_user)
    _positive("load", start_seconds=load.start_seconds)
    _positive("load", stop_errors=load.stop_errors, stop_seconds=load.stop_seconds, max_in_flight=load.max_in_flight)


def check_url(url: str) -> None:
    """Refuse what is no address of an endpoint (UsageError)."""
    try:
        parts = urlsplit(url)
        fine = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        fine = False
    if not fine:
        raise UsageError(f"{url!r} is no endpoint; give http://HOST:PORT.")


def _positive(table: str, **values: float | None) -> None:
    for name, value in values.items():
        if value is not None and not value > 0:
            raise UsageError(f"{table}: {name} is {value:g}; give a number above 0.")


def parse(cls: Any, table: Any, where: str) -> Any:
    """A dataclass from a table of TOML or JSON.

    Raises:
        UsageError: names the key and what it should be.
    """
    if not isinstance(table, dict):
        raise UsageError(f"{where} must be a table, not {table!r}.")
    known = {entry.name: entry for entry in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    for key in table:
        if key not in known:
            raise UsageError(f"{where} has the unknown key {key!r}; it knows {', '.join(known)}.")
    for name, entry in known.items():
        if entry.default is dataclasses.MISSING and entry.default_factory is dataclasses.MISSING and name not in table:
            raise UsageError(f"{where} lacks the key {name!r}; add it.")
    return cls(**{key: _value(hints[key], value, f"{where}: {key}") for key, value in table.items()})


def _value(kind: Any, value: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        if value is None:
            return None
        return _value(next(argument for argument in arguments if argument is not type(None)), value, where)
    if dataclasses.is_dataclass(kind):
        return parse(kind, value, where)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise UsageError(f"{where} must be a list, not {value!r}.")
        if arguments[-1] is not Ellipsis and len(value) != len(arguments):
            raise UsageError(f"{where} must have {len(arguments)} entries, not {value!r}.")
        return tuple(_value(arguments[0], entry, where) for entry in value)
    if origin is dict:
        kind = dict
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise UsageError(f"{where} must be {kind.__name__}, not {value!r}.")
    return value
