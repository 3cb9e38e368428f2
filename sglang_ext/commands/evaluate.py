"""``sglang-ext evaluate``: how well a drafter drafts for a target, beside others, on the real server."""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from sglang_ext.checkpoints import locate, read_target
from sglang_ext.errors import UsageError

TAKES_REST = True  # what this parser does not know goes to every server


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Target, drafters, prompts and how they are asked."""
    parser.usage = "sglang-ext evaluate TARGET --draft D [--compare D2 ...] [options] [any SGLang flag]"
    parser.epilog = "Every other flag goes to each server as it is. Exit code 1: greedy output is not plain decoding's."
    parser.add_argument("target", metavar="TARGET", help="directory or Hugging Face name of the target")
    parser.add_argument("--draft", metavar="D", required=True, help="the drafter under evaluation")
    parser.add_argument(
        "--compare",
        metavar="D2",
        nargs="+",
        default=[],
        help="drafters that its gain is measured against, on the same prompts; off: itself with the carry switched "
        "off; no-lookup: without its lookup; zero, stale, shuffled: reading such states",
    )
    parser.add_argument(
        "--control", metavar="D3", help="a drafter trained for as many steps without the mechanism, compared like D2"
    )
    parser.add_argument(
        "--prompts",
        metavar="JSONL",
        nargs="+",
        type=Path,
        help='files of {"id", "category", "turns"} lines (default: prompts.jsonl beside the target)',
    )
    parser.add_argument("--per-category", metavar="N", type=_count, help="first N prompts of each category only")
    parser.add_argument("--all-turns", action="store_true", help="ask every turn; default: a prompt's first turn only")
    parser.add_argument(
        "--temperature", metavar="T", nargs="+", type=_temperature, default=[0.0, 1.0], help="of the answers"
    )
    parser.add_argument("--max-tokens", metavar="N", type=_count, default=256, help="longest answer")
    parser.add_argument("--concurrency", metavar="N", type=_count, default=4, help="requests in flight")
    parser.add_argument(
        "--carried-rows", metavar="N", type=_whole, help="D carries at most N rows, 0: none (default: all)"
    )
    parser.add_argument(
        "--recorded-prompts",
        metavar="N",
        type=_whole,
        default=8,
        help="of each category, asked again with their rounds recorded, for the figures of the carry; 0: without them",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the bootstrap and of the servers")
    parser.add_argument(
        "--out", metavar="DIR", type=Path, default=Path("build/evaluation"), help="where figures and pictures go"
    )


def run(args: argparse.Namespace) -> int:
    """Check everything, serve each method in turn, then print tables and write JSON and pictures."""
    import matplotlib  # noqa: F401 - needed at the end, so missed at the beginning
    from rich.console import Console

    from sglang_ext.evaluation import methods, prompts, servers

    target = locate(args.target)
    references = [*args.compare, *filter(None, [args.control])]
    chosen = methods.choose(args.draft, references, args.carried_rows, read_target(target))
    asked = prompts.read_prompts(args.prompts or [target.parent / "prompts.jsonl"], args.per_category)
    from sglang_ext.evaluation import plots, record, report
    from sglang_ext.evaluation.run import Plan, evaluate

    servers.interrupt_on_terminate()
    work = args.out / "work"
    shutil.rmtree(work, ignore_errors=True)
    try:
        work.mkdir(parents=True)
    except OSError as error:
        raise UsageError(f"{args.out} cannot be written ({error.strerror}); give another --out.") from None
    plan = Plan(
        target=args.target,
        target_path=target,
        methods=chosen,
        control=chosen[-1] if args.control else None,
        prompts=asked,
        temperatures=list(dict.fromkeys(args.temperature)),
        max_tokens=args.max_tokens,
        concurrency=args.concurrency,
        all_turns=args.all_turns,
        recorded_prompts=args.recorded_prompts,
        seed=args.seed,
        flags=("--random-seed", str(args.seed), "--log-level", "warning", *args.rest),
        work=work,
    )
    console, begun = Console(highlight=False), time.monotonic()
    turns = "all turns" if args.all_turns else "first turns"
    console.print(f"{args.target}: {len(asked)} prompts ({turns}), answers of up to {args.max_tokens} tokens.")
    with report.progress(console) as bar:
        found = evaluate(plan, bar)
    shutil.rmtree(work / "rounds", ignore_errors=True)  # features are large, and made again by the same command
    document = {
        "command": shlex.join(["sglang-ext", *sys.argv[1:]]),
        "environment": record.environment(),
        "settings": settings(args, plan, round(time.monotonic() - begun, 1)),
        **found,
    }
    record.write(args.out / "evaluation.json", document)
    pictures = plots.draw(document, args.out)
    report.show(console, document)
    report.say(console, document)
    files = ", ".join(path.name for path in pictures)
    console.print(f"Figures: {args.out / 'evaluation.json'}, {files}", soft_wrap=True)
    return 0 if all(row["identical"] or row["ties_only"] for row in document["identity"] or []) else 1


def settings(args: argparse.Namespace, plan: Any, seconds: float) -> dict[str, Any]:
    """What the figures depend on, as JSON."""
    from sglang_ext.evaluation.bootstrap import METHOD

    return {
        "target": args.target,
        "prompts": [str(path) for path in args.prompts or [plan.target_path.parent / "prompts.jsonl"]],
        "number_of_prompts": len(plan.prompts),
        "turns": "all" if plan.all_turns else "first",
        "temperatures": plan.temperatures,
        "max_tokens": plan.max_tokens,
        "concurrency": plan.concurrency,
        "recorded_prompts_per_category": plan.recorded_prompts,
        "server_flags": list(plan.flags),
        "seed": plan.seed,
        "intervals": METHOD,
        "seconds": seconds,
    }


def _whole(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number, 0 or above")
    return int(text)


def _count(text: str) -> int:
    value = _whole(text)
    if not value:
        raise argparse.ArgumentTypeError("0 is too few, give a number above")
    return value


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 10:
        raise argparse.ArgumentTypeError(f"{text!r} is not a temperature")
    return value
