"""The reference models through the real server over HTTP: plain decoding, the stock drafter, and each mechanism on it.

On the dense target Carryover, on the hybrid one ReaDy and both together.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from sglang_ext.demo import report
from sglang_ext.demo.measure import figures
from sglang_ext.demo.suites import MECHANISMS, Suite, suite
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
    parser.add_argument("--only", choices=tuple(MECHANISMS), help="one of the two targets")
    parser.add_argument("--target", help="a target in it, instead of dense-target or hybrid-target; with --only")
    parser.add_argument("--draft", help="a stock drafter in it, instead of dspark-dense or dspark-hybrid; with --only")
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
    """Serve each method in turn, print the tables, write the figures."""
    begun = time.monotonic()
    if (args.target or args.draft) and not args.only:
        raise UsageError("--target and --draft stand for one target's models; add --only with its kind.")
    work = args.out.parent / "demo"
    suites = {
        kind: suite(args.models, args.target or f"{kind}-target", args.draft or f"dspark-{kind}", MECHANISMS[kind])
        for kind in ([args.only] if args.only else MECHANISMS)
    }
    prompts = read_prompts(args.prompts or args.models / "prompts.jsonl", args.per_category)
    check_port("127.0.0.1", args.port)
    results: list[dict[str, Any]] = []
    for kind, served in suites.items():
        rows = serve(args, console, served, prompts, work / kind)
        results.append({"target": str(served.target), "methods": rows})
        console.print(report.table(served.target.name, rows))
    settings = {name: getattr(args, name) for name in ("per_category", "max_tokens", "concurrency")}
    settings["seconds"] = round(time.monotonic() - begun, 1)
    record.write(args.out, report.document(results, settings))
    explain(console, suites, args.out)
    keep(console, args, list(suites.values())[-1])
    return 0 if all(row["identical"] for result in results for row in result["methods"]) else 1


def serve(
    args: argparse.Namespace, console: Console, served: Suite, prompts: list[Prompt], work: Path
) -> list[dict[str, Any]]:
    """The rows of one target."""
    console.print(
        f"{served.target}, served {len(served.words)} times: {len(prompts)} prompts, answers of up to "
        f"{args.max_tokens} tokens."
    )
    rows: list[dict[str, Any]] = []
    reference: list[Answer] | None = None
    with progress(console) as bar:
        for method, words in served.words.items():
            task = bar.add_task(f"{method}: starting the server", total=len(prompts))
            with serving([*words, *SERVER_FLAGS], port=args.port, log=work / f"{method.replace(' ', '-')}.log"):
                answers = measure(args, prompts, method, bar, task)
            reference = reference or answers
            rows.append(figures(method, answers, reference))
            bar.update(task, description=method)
    return rows


def measure(args: argparse.Namespace, prompts: list[Prompt], method: str, bar: Progress, task: Any) -> list[Answer]:
    """Ask every prompt, moving the bar."""

    def done(answer: Answer) -> None:
        bar.update(task, advance=1, description=f"{method}: {answer.prompt.id}, {len(answer.token_ids)} tokens")

    return ask(args.port, prompts, max_tokens=args.max_tokens, concurrency=args.concurrency, done=done)


def explain(console: Console, suites: dict[str, Suite], out: Path) -> None:
    """What a reader of the tables must know."""
    console.print(
        "The other drafters were trained for longer than the stock one; what that alone gives: docs/results.md."
    )
    console.print("Plain decoding emits one token per step. Times on a CPU are no speed claim for any method.")
    console.print(f"Figures: {out}", soft_wrap=True)


def keep(console: Console, args: argparse.Namespace, served: Suite) -> None:
    """Say how to have the last server again, and with ``--keep`` serve it until Ctrl-C."""
    method = served.last.algorithm
    words = [str(served.target), "--draft", str(served.last.path), *SERVER_FLAGS]
    at = f"http://127.0.0.1:{args.port}"
    places = f"  chat     {at}/v1/chat/completions\n  metrics  {at}/metrics"
    if not args.keep:
        program = Path(sys.executable).parent / "sglang-ext"  # the demo does not ask for an activated environment
        command = f"  {program} serve {' '.join(words)} --port {args.port}"
        console.print(f"Nothing keeps running. The {method} server again:\n{command}\n{places}", soft_wrap=True)
        return
    console.print(f"Starting the {method} server again, to stay.")
    with serving(words, port=args.port, log=args.out.parent / "demo" / "kept.log"):
        console.print(f"The {method} server stays up until Ctrl-C.\n{places}", soft_wrap=True)
        signal.pause()


if __name__ == "__main__":
    interrupt_on_terminate()
    sys.exit(main())
