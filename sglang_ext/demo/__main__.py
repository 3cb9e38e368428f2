"""Plain decoding, stock DSPARK and CARRYOVER_DSPARK on the reference models, through the real server over HTTP."""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from sglang_ext.checkpoints import DraftContract, check, read_contract, read_target
from sglang_ext.commands.convert import convert
from sglang_ext.demo import report
from sglang_ext.demo.measure import figures
from sglang_ext.errors import UsageError
from sglang_ext.evaluation import record
from sglang_ext.evaluation.client import Answer, ask
from sglang_ext.evaluation.prompts import Prompt, read_prompts
from sglang_ext.evaluation.report import progress
from sglang_ext.evaluation.servers import interrupt_on_terminate, serving
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
    carried = carryover_drafter(base, args.models / f"carryover-{args.draft}", work)
    check(carried, read_target(target))
    methods = {
        "plain decoding": [str(target)],
        base.algorithm: [str(target), "--draft", str(draft), "--method", "none"],
        carried.algorithm: [str(target), "--draft", str(carried.path), "--method", "carryover"],
    }
    console.print(
        f"{target}, served {len(methods)} times: {len(prompts)} prompts, answers of up to {args.max_tokens} tokens."
    )
    rows: list[dict[str, Any]] = []
    reference: list[Answer] | None = None
    with progress(console) as bar:
        for method, words in methods.items():
            task = bar.add_task(f"{method}: starting the server", total=len(prompts))
            with serving([*words, *SERVER_FLAGS], port=args.port, log=work / f"{method.replace(' ', '-')}.log"):
                answers = measure(args, prompts, method, bar, task)
            reference = reference or answers
            rows.append(figures(method, answers, reference))
            bar.update(task, description=method)
    untrained = carried.algorithm if carried.embedding_is_zero() else None
    settings = {name: getattr(args, name) for name in ("per_category", "max_tokens", "concurrency")}
    settings["seconds"] = round(time.monotonic() - begun, 1)
    record.write(args.out, report.document(rows, untrained, settings))
    show(console, rows, untrained, args.out)
    keep(console, args, target, carried)
    return 0 if all(row["identical"] for row in rows) else 1


def carryover_drafter(base: DraftContract, trained: Path, work: Path) -> DraftContract:
    """The reference drafter's Carryover form: the trained one, else one that ``convert`` makes in ``work``."""
    if (trained / "config.json").exists():
        return read_contract(trained)
    made = work / trained.name
    shutil.rmtree(made, ignore_errors=True)
    return convert(base, made)


def measure(args: argparse.Namespace, prompts: list[Prompt], method: str, bar: Progress, task: Any) -> list[Answer]:
    """Ask every prompt, moving the bar."""

    def done(answer: Answer) -> None:
        bar.update(task, advance=1, description=f"{method}: {answer.prompt.id}, {len(answer.token_ids)} tokens")

    return ask(args.port, prompts, max_tokens=args.max_tokens, concurrency=args.concurrency, done=done)


def show(console: Console, rows: list[dict[str, Any]], untrained: str | None, out: Path) -> None:
    """The table, and what its reader must know."""
    console.print(report.table(rows, untrained))
    if untrained:
        console.print(f"The embedding of {untrained} is zero, still untrained: its column is no result for Carryover.")
    else:
        console.print("The Carryover drafter was trained for longer; what that alone gives: docs/results.md.")
    console.print("Plain decoding emits one token per step. Times on a CPU are no speed claim for any method.")
    console.print(f"Figures: {out}", soft_wrap=True)


def keep(console: Console, args: argparse.Namespace, target: Path, carried: DraftContract) -> None:
    """Say how to have the Carryover server, and with ``--keep`` serve it until Ctrl-C."""
    words = [str(target), "--draft", str(carried.path), *SERVER_FLAGS]
    at = f"http://127.0.0.1:{args.port}"
    places = f"  chat     {at}/v1/chat/completions\n  metrics  {at}/metrics"
    if not args.keep:
        command = f"  sglang-ext serve {' '.join(words)} --port {args.port}"
        console.print(f"Nothing keeps running. The Carryover server again:\n{command}\n{places}", soft_wrap=True)
        return
    console.print("Starting the Carryover server again, to stay.")
    with serving(words, port=args.port, log=args.out.parent / "demo" / "kept.log"):
        console.print(f"The Carryover server stays up until Ctrl-C.\n{places}", soft_wrap=True)
        signal.pause()


if __name__ == "__main__":
    interrupt_on_terminate()
    sys.exit(main())
