"""Which method decodes fastest at which concurrency, measured through the front door."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from sglang_ext import __version__
from sglang_ext.command_line import Parser
from sglang_ext.errors import UsageError, needs, refusal_ends_process

with refusal_ends_process(), needs("loadtest"):
    from sglang_ext.evaluation.servers import interrupt_on_terminate
    from sglang_ext_loadtest import report, results, settings, summary, tokens, workload
    from sglang_ext_loadtest.arrivals import read_trace
    from sglang_ext_loadtest.launch import wait
    from sglang_ext_loadtest.runner import Runner, schedule, search

BEGUN = time.monotonic()


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0, or 1 for a failed gate or an invalid cell, 2 for wrong use, 130 when interrupted."""
    args = parser().parse_args(argv)
    interrupt_on_terminate()
    try:
        with needs("loadtest"):
            return int(args.run(args))
    except UsageError as error:
        print(f"sglang-ext-loadtest: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = Parser(prog="sglang-ext-loadtest", description=__doc__, allow_abbrev=False)
    top.add_argument("--version", action="version", version=f"sglang-ext-loadtest {__version__}")
    commands = top.add_subparsers(metavar="COMMAND", required=True)

    command = commands.add_parser("run", help="one endpoint up a ladder of concurrencies, without a file")
    command.add_argument("url", help="http://HOST:PORT of the endpoint")
    command.add_argument("--prompts", nargs="+", default=[], help="JSONL files (default: held-out prompts)")
    command.add_argument("--per-category", type=int, help="prompts of each category")
    command.add_argument("--concurrency", type=int, nargs="+", default=list(settings.LADDER), help="the ladder")
    command.add_argument("--repeats", type=int, default=3, help="of the ladder")
    command.add_argument("--max-tokens", type=int, default=256, help="longest answer")
    command.add_argument("--temperature", type=float, default=0.0, help="of the answers")
    command.add_argument("--workers", type=int, default=1, help="Locust worker processes")
    command.add_argument(
        "--keep-cache", action="store_true", help="do not empty the server's prefix cache before cells"
    )
    command.add_argument("--model", help="default: the first that the endpoint lists")
    command.add_argument("--tokenizer", help="tokenizer.json, for servers without continuous usage")
    command.add_argument(
        "--gate", action="append", default=[], help="condition for exit code 0, such as *:error_rate<=0"
    )
    _out(command)
    command.set_defaults(run=_run)

    command = commands.add_parser("sweep", help="methods x concurrencies x repeats, as a TOML file says")
    command.add_argument(
        "files",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="the sweep; several take turns repeat by repeat, each with a directory of its name in --out",
    )
    _out(command)
    command.set_defaults(run=_sweep)

    command = commands.add_parser("search", help="the highest concurrency at which each method meets the SLO")
    command.add_argument("file", type=Path, help="the sweep; its ladder is not used")
    command.add_argument("--most", type=int, default=256, help="no more users than this")
    _out(command)
    command.set_defaults(run=_search)

    command = commands.add_parser("report", help="write index.html anew, also from what a killed sweep left")
    command.add_argument("results", type=Path, help="results.json, or its directory")
    command.set_defaults(run=_report)

    command = commands.add_parser("compare", help="two runs, cell by cell")
    command.add_argument("before", type=Path, help="results.json, or its directory")
    command.add_argument("after", type=Path, help="the other run, likewise")
    command.add_argument("--out", type=Path, default=Path("build/loadtest/compare.html"), help="the page")
    command.set_defaults(run=_compare)
    return top


def measure(sweep: settings.Sweep, out: Path) -> int:
    """Run a whole sweep and write everything; what was measured is written also when it is interrupted."""
    return measure_in_turns([(sweep, out)])


def measure_in_turns(sweeps: Sequence[tuple[settings.Sweep, Path]]) -> int:
    """Run sweeps, each with its own directory, in turns: first repeats of all, then the second ones, and so on.

    Servers that stay up side by side load at the same time, those of all sweeps. Returns the highest exit code.
    """
    for sweep, out in sweeps:
        _check(sweep, out)
    journals = [results.Journal(out, sweep) for sweep, out in sweeps]
    plans = [schedule(sweep) for sweep, _ in sweeps]
    cells: list[list[dict[str, Any]]] = [[] for _ in sweeps]
    code = 0
    runners = [Runner(sweep, out, _say) for sweep, out in sweeps]
    with ExitStack() as stack:
        try:
            for runner in runners:
                stack.enter_context(runner).start()
            wait([server for runner in runners for server in runner.servers.values()])
            for runner in runners:
                runner.ready()
            for repeat in range(max(sweep.load.repeats for sweep, _ in sweeps)):
                for runner, plan, journal, done in zip(runners, plans, journals, cells, strict=True):
                    turn = [slot for slot in plan if slot.repeat == repeat]
                    for cell in runner.run(turn, len(done), len(plan)):
                        done.append(cell)
                        journal.add(cell, runner.about)
        except KeyboardInterrupt:
            made, planned = sum(map(len, cells)), sum(map(len, plans))
            _say(f"Interrupted after {made} of {planned} cells; the report holds what was measured.")
            code = 130
    finished = [
        _finish(sweep, done, runner.about, out)
        for (sweep, out), runner, done in zip(sweeps, runners, cells, strict=True)
    ]
    return max([code, *finished])


def _sweep(args: argparse.Namespace) -> int:
    sweeps = [settings.read_sweep(file) for file in args.files]
    if len(sweeps) == 1:
        return measure(sweeps[0], args.out)
    names = [file.stem for file in args.files]
    if len(set(names)) < len(names):
        raise UsageError("Two sweeps have the same file name, and each gets a directory of its name; rename one.")
    return measure_in_turns([(sweep, args.out / name) for sweep, name in zip(sweeps, names, strict=True)])


def _run(args: argparse.Namespace) -> int:
    sweep = settings.Sweep(
        methods=(settings.Method("endpoint", url=args.url, model=args.model),),
        title=f"Load test of {args.url}",
        workload=settings.Workload(paths=tuple(args.prompts), per_category=args.per_category),
        requests=settings.Requests(max_tokens=args.max_tokens, temperature=args.temperature, tokenizer=args.tokenizer),
        load=settings.Load(
            concurrency=tuple(args.concurrency),
            repeats=args.repeats,
            workers=args.workers,
            flush_cache=not args.keep_cache,
        ),
        gates=tuple(args.gate),
    )
    return measure(sweep, args.out)


def _search(args: argparse.Namespace) -> int:
    sweep = settings.read_sweep(args.file)
    if not sweep.slo.any or sweep.load.arrivals:
        raise UsageError(
            "A search needs a closed loop and limits to search under; set ttft_ms, tpot_ms or e2e_ms in [slo]."
        )
    if args.most < 1:
        raise UsageError(f"--most is {args.most}; give the highest number of users to try, 1 or more.")
    _check(sweep, args.out)
    cells: list[dict[str, Any]] = []
    found: dict[str, Any] = {}
    code = 0
    with Runner(sweep, args.out, _say) as runner:
        try:
            found = search(runner, args.most, cells)
        except KeyboardInterrupt:
            _say(f"Interrupted after {len(cells)} cells; the report holds what was measured.")
            code = 130
    for name, entry in found.items():
        limit = "the most tried" if entry["failed"] is None else f"{entry['failed']} missed the SLO"
        _say(f"{name}: {entry['highest']} concurrent requests meet the SLO ({limit}).")
    finished = _finish(sweep, cells, runner.about, args.out, found)
    return code or finished


def _finish(
    sweep: settings.Sweep,
    cells: list[dict[str, Any]],
    about: dict[str, Any],
    out: Path,
    found: dict[str, Any] | None = None,
) -> int:
    document = results.document(sweep, cells, about, found)
    results.write(out, document)
    report.write(out / "index.html", document, sweep)
    for sentence in document["summary"]["answer"]:
        _say(sentence)
    for failure in document["summary"]["gate_failures"]:
        _say(f"gate failed: {failure}")
    _say(f"{out / 'index.html'}, {out / results.RESULTS}")
    return 0 if document["summary"]["passed"] else 1


def _report(args: argparse.Namespace) -> int:
    folder = args.results if args.results.is_dir() else args.results.parent
    if (folder / results.JOURNAL).exists() and not (folder / results.RESULTS).exists():
        document, sweep = results.recover(folder)
        results.write(folder, document)
        _say(f"{len(document['cells'])} cells from the journal of a sweep that did not end")
    else:
        document, sweep = results.read(args.results)
        document["summary"] = summary.summarize(sweep, document["cells"])
    report.write(folder / "index.html", document, sweep)
    _say(f"{folder / 'index.html'}")
    return 0


def _compare(args: argparse.Namespace) -> int:
    (before, sweep), (after, _) = results.read(args.before), results.read(args.after)
    for line in report.write_comparison(args.out, before, after, sweep):
        _say(line)
    _say(f"{args.out}")
    return 0


def _check(sweep: settings.Sweep, out: Path) -> None:
    """What can be known before the first request."""
    settings.check_sweep(sweep)
    if sweep.requests.tokenizer:
        tokens.load_tokenizer(Path(sweep.requests.tokenizer))
    if sweep.load.arrivals == "trace":
        read_trace(Path(sweep.load.trace or ""))
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{out} cannot be a directory of results ({error.strerror}); give another --out.") from None
    found = workload.load(sweep.workload, sweep.load.seed)
    for sentence in found.broken:
        _say(f"left out: {sentence}")
    if sweep.load.seconds is None and sweep.load.arrivals is None and sweep.load.requests is None:
        _say(f"{len(found.prompts)} prompts, each once per cell")


def _out(command: argparse.ArgumentParser) -> None:
    command.add_argument("--out", type=Path, default=Path("build/loadtest"), help="directory of report and results")


def _say(line: str) -> None:
    """A line of progress, with the seconds since the start."""
    print(f"{time.monotonic() - BEGUN:5.0f} s  {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
