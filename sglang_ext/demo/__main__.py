"""Plain decoding, stock DSPARK and CARRYOVER_DSPARK on the reference models, through the real server over HTTP."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from sglang_ext import __version__
from sglang_ext.checkpoints import DraftContract, check, read_contract, read_target
from sglang_ext.commands.convert import convert
from sglang_ext.demo.measure import Answer, Prompt, ask, figures, read_prompts
from sglang_ext.demo.servers import serving
from sglang_ext.errors import UsageError
from sglang_ext.server import check_port

SERVER_FLAGS = ("--enable-metrics", "--log-level", "warning")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; 0 when every output is plain decoding's, 1 when one is not, 2 when something is missing."""
    parser = argparse.ArgumentParser(prog="python -m sglang_ext.demo", description=__doc__, allow_abbrev=False)
    parser.add_argument("--models", type=Path, default=Path("models"), help="directory of the reference models")
    parser.add_argument("--target", default="dense-target", help="the target in it")
    parser.add_argument("--draft", default="dspark-dense", help="the stock drafter in it")
    parser.add_argument("--prompts", type=Path, help="held-out prompts (default: prompts.jsonl beside the models)")
    parser.add_argument("--out", type=Path, default=Path("build/demo.json"), help="where the figures go")
    parser.add_argument("--port", type=int, default=30000, help="where the servers listen on 127.0.0.1")
    parser.add_argument("--per-category", type=int, default=3, help="prompts of each category")
    parser.add_argument("--max-tokens", type=int, default=96, help="longest answer")
    parser.add_argument("--concurrency", type=int, default=4, help="requests in flight")
    parser.add_argument("--keep", action="store_true", help="keep the last server running until Ctrl-C")
    signal.signal(signal.SIGTERM, _interrupt)
    console = Console(highlight=False)
    try:
        return run(parser.parse_args(argv), console)
    except UsageError as error:
        print(f"sglang-ext demo: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        console.print("Stopped; no server is left running.")
        return 130


def run(args: argparse.Namespace, console: Console) -> int:
    """Serve each method in turn, print the table, write the figures."""
    begun = time.monotonic()
    target, draft = args.models / args.target, args.models / args.draft
    for path in (target, draft):
        if not (path / "config.json").exists():
            raise UsageError(f"The reference model {path} is missing; run in the repository's root or give --models.")
    base = read_contract(draft)
    check(base, read_target(target))
    prompts = read_prompts(args.prompts or args.models / "prompts.jsonl", args.per_category)
    check_port("127.0.0.1", args.port)
    work = args.out.parent / "demo"
    carried = carryover_drafter(base, work / f"carryover-{args.draft}")
    methods = {
        "plain decoding": [str(target)],
        base.algorithm: [str(target), "--draft", str(draft), "--method", "none"],
        carried.algorithm: [str(target), "--draft", str(carried.path), "--method", "carryover"],
    }
    rows: list[dict[str, Any]] = []
    reference: list[Answer] | None = None
    with progress(console) as bar:
        for number, (method, words) in enumerate(methods.items()):
            task = bar.add_task(f"{method}: starting the server", total=len(prompts))
            log = work / f"{method.replace(' ', '-')}.log"
            with serving([*words, *SERVER_FLAGS], port=args.port, log=log):
                answers = measure(args, prompts, method, bar, task)
                reference = reference or answers
                rows.append(figures(method, answers, reference))
                bar.update(task, description=method)
                if number == len(methods) - 1:
                    bar.stop()
                    report(console, rows, carried, args)
                    write(args.out, rows, carried, args, time.monotonic() - begun)
                    keep(console, args)
    return 0 if all(row["identical"] for row in rows) else 1


def carryover_drafter(base: DraftContract, path: Path) -> DraftContract:
    """The Carryover form of the reference drafter, made anew by ``convert``."""
    shutil.rmtree(path, ignore_errors=True)
    return convert(base, path)


def measure(args: argparse.Namespace, prompts: list[Prompt], method: str, bar: Progress, task: Any) -> list[Answer]:
    """Ask every prompt, moving the bar."""

    def done(answer: Answer) -> None:
        bar.update(task, advance=1, description=f"{method}: {answer.prompt.id}, {len(answer.token_ids)} tokens")

    return ask(args.port, prompts, max_tokens=args.max_tokens, concurrency=args.concurrency, done=done)


def report(console: Console, rows: list[dict[str, Any]], carried: DraftContract, args: argparse.Namespace) -> None:
    """The table, and what its reader must know."""
    table = Table(title="Acceptance length: tokens per step of the target, on held-out prompts", title_justify="left")
    table.add_column("method", no_wrap=True)
    categories = list(rows[0]["by_category"])
    for name in [*categories, "overall", "verify steps"]:
        table.add_column(name, justify="right")
    table.add_column("output as plain decoding", justify="center")
    for row in rows:
        lengths = [f"{row['by_category'][category]:.2f}" for category in categories]
        same = "yes" if row["identical"] else f"no: {', '.join(row['different'])}"
        table.add_row(row["method"], *lengths, f"{row['acceptance_length']:.2f}", str(row["verify_steps"]), same)
    console.print(table)
    prompts, tokens = rows[0]["prompts"], rows[0]["tokens"]
    console.print(
        f"{prompts} prompts, {tokens} tokens each method, temperature 0. A step of plain decoding emits one token."
    )
    if carried.embedding_is_zero():
        console.print(
            f"{carried.algorithm}: the Carryover embedding is zero, still untrained, so its row is no result."
        )
    console.print("Times on a CPU are no speed claim for any method.")
    console.print(f"Figures: {args.out}")


def keep(console: Console, args: argparse.Namespace) -> None:
    """Say where the server is, and with ``--keep`` leave it there until Ctrl-C."""
    at = f"http://127.0.0.1:{args.port}"
    places = f"Chat: {at}/v1/chat/completions   Metrics: {at}/metrics"
    if not args.keep:
        words = f"{args.models / args.target} --draft {args.out.parent / 'demo' / f'carryover-{args.draft}'}"
        console.print(f"Nothing keeps running. Start the server yourself:\n  sglang-ext serve {words} --enable-metrics")
        console.print(f"Then {places}", soft_wrap=True)
        return
    console.print(f"The Carryover server stays up until Ctrl-C. {places}", soft_wrap=True)
    while True:
        signal.pause()


def write(
    out: Path, rows: list[dict[str, Any]], carried: DraftContract, args: argparse.Namespace, seconds: float
) -> None:
    """The same figures with the environment they were measured in."""
    document = {
        "methods": rows,
        "carryover_embedding_untrained": carried.embedding_is_zero(),
        "settings": {"max_tokens": args.max_tokens, "concurrency": args.concurrency, "temperature": 0},
        "environment": {
            "sglang_ext": __version__,
            **{name: version(name) for name in ("sglang", "torch", "transformers")},
            "python": platform.python_version(),
            "machine": platform.machine(),
            "cpus": os.cpu_count(),
        },
        "seconds": round(seconds, 1),
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def progress(console: Console) -> Progress:
    """A bar per method."""
    columns = (SpinnerColumn(), TextColumn("{task.description:<48}"), BarColumn(20), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), console=console)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
