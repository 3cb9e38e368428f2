"""``sglang-ext bench throughput``: tokens per second of several drafters with real acceptance, in one engine.

Two servers of the same code differ in speed by more than most methods do. Here all drafters stand on one target in one
engine (``bench.probe.ByRequest``), and blocks of the same requests go to one after the other, there and back again, so
that what a machine does to all of them cancels. A request is greedy and stays with its drafter from its prefill to its
end; so many run at a time. Speed and acceptance are of the same blocks, hence what is kept of a gain is too.

No draft shortens a prefill, nor do a last round's drafts beyond the answer's end count: a method that costs nothing
keeps a little less than all, the more so the shorter the answers are.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO

from sglang_ext.bench import process, throughput_report
from sglang_ext.checkpoints import DraftContract, TargetInfo, check, locate, read_contract, read_target
from sglang_ext.errors import UsageError

PLAIN = "plain"
_COUNTS = ("requests", "cycles", "max_tokens", "limit")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Target, drafters, prompts, how much is measured, and outputs."""
    add = parser.add_argument
    add("target", type=Path, help="target checkpoint directory")
    add(
        "--drafters",
        type=Path,
        nargs="*",
        default=[],
        metavar="D",
        help="drafter directories, all of one kind and width; the first is what the others are held against, and one "
        "given again shows how far two equal ones come apart (default: none, plain decoding)",
    )
    add("--prompts", type=Path, nargs="+", default=[Path("models/prompts.jsonl")], metavar="F", help="JSONL of prompts")
    add("--concurrency", type=int, nargs="+", default=[1, 4, 16, 32], metavar="C", help="requests at a time")
    add("--requests", type=int, default=24, help="of a block, at least four times as many as run at a time")
    add("--cycles", type=int, default=10, help="blocks that each drafter gets at each concurrency")
    add("--max-tokens", type=int, default=160, help="longest answer")
    add("--limit", type=float, default=900, help="seconds after which the engine is ended")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try it, no measurement of a GPU's server")
    add("--engine", type=process.json_object, default={}, metavar="JSON", help="more arguments of the engine")
    add(
        "--out",
        type=Path,
        default=Path("build/bench/throughput.json"),
        help="JSON file, rewritten after each cycle; PNG beside it",
    )


def run(args: argparse.Namespace) -> int:
    """Start the engine in a process of its own, measure block by block, draw."""
    from sglang_ext.evaluation import record

    levels = list(dict.fromkeys(args.concurrency))
    for option, least in (("concurrency", min(levels)), *((name, getattr(args, name)) for name in _COUNTS)):
        if least < 1:
            raise UsageError(f"--{option.replace('_', '-')} {least:g} leaves nothing to measure; give at least 1.")
    info = read_target(locate(args.target, weights=False))
    drafters = drafters_of(args.drafters, info)
    prompts = prompt_tokens(args.prompts, args.target)
    if args.device == "cuda" and not process.has_gpu():
        raise UsageError("There is no CUDA device here; use a GPU, or --device cpu to try it.")
    document: dict[str, Any] = {
        "command": shlex.join(["sglang-ext", *sys.argv[1:]]),
        "environment": record.environment(),
        "target": str(args.target),
        "drafters": {
            name: {"path": str(contract.path), "algorithm": contract.algorithm} for name, contract in drafters.items()
        },
        "prompts": len(prompts),
        "max_tokens": args.max_tokens,
        "rows": [],
        "blocks": [],
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (blocks := folder / "blocks.jsonl").touch()
        (counts := folder / "counts.jsonl").touch()
        environment = process.environment(args.device)
        if drafters:
            plan = folder / "plan.json"
            workers = [
                {"name": label, "algorithm": contract.algorithm, "drafter": str(contract.path)}
                for label, contract in drafters.items()
            ]
            plan.write_text(json.dumps({"methods": workers, "out": str(counts)}))
            environment |= process.with_plan(plan)
        job = {
            "engine": engine_arguments(args, info, drafters, prompts),
            "methods": list(drafters) or [PLAIN],
            "levels": levels,
            "requests": {level: max(args.requests, 4 * level) for level in levels},
            "cycles": args.cycles,
            "prompts": prompts,
            "sampling": {"temperature": 0.0, "max_new_tokens": args.max_tokens},
            "out": str(blocks),
            "counts": str(counts) if drafters else None,
        }
        document["engine"] = job["engine"]
        job_file = folder / "job.json"
        job_file.write_text(json.dumps(job))
        engine = process.lines_of("sglang_ext.bench.throughput_engine", job_file, environment, args.limit)
        with blocks.open(encoding="utf-8") as measured, engine as lines:
            _follow(lines, measured, document, args.out)
    if not document["rows"]:
        print("No cycle was measured; the engine's output above says why.", file=sys.stderr)
        return 1
    throughput_report.draw(document, args.out.with_suffix(".png"))
    asked = len(job["methods"]) * len(levels) * args.cycles
    if len(document["blocks"]) == asked:
        return 0
    print(
        f"{len(document['blocks'])} of {asked} blocks were measured; give a longer --limit or fewer --cycles, or read "
        "above what the engine said.",
        file=sys.stderr,
    )
    return 1


def drafters_of(paths: Sequence[Path], target: TargetInfo) -> dict[str, DraftContract]:
    """The drafters by name; UsageError for one that does not fit, or that cannot share an engine with the first."""
    found: dict[str, DraftContract] = {}
    for path in paths:
        contract = read_contract(locate(path))
        check(contract, target)
        first = next(iter(found.values()), contract)
        if _shared(contract) != _shared(first):
            raise UsageError(
                f"{path} ({_shared(contract)}) and {first.path} ({_shared(first)}) cannot share an engine; measure "
                "them one after the other."
            )
        label, number = contract.path.name, 2
        while label in found:
            label, number = f"{contract.path.name}#{number}", number + 1
        found[label] = contract
    return found


def _shared(contract: DraftContract) -> str:
    """What drafters of one engine have in common: the target's verify step, and the layers that it captures."""
    layers = ", ".join(map(str, contract.target_layer_ids))
    return f"{contract.kind}, {contract.verify_width} rows, features of layers {layers}"


def prompt_tokens(paths: Sequence[Path], target: Path) -> list[list[int]]:
    """First turns of the prompts as the target's chat template makes them."""
    from transformers import AutoTokenizer

    from sglang_ext.evaluation.prompts import read_prompts

    tokenizer = AutoTokenizer.from_pretrained(str(target))
    found = []
    for prompt in read_prompts(paths):
        text = prompt.text
        if tokenizer.chat_template:
            message = [{"role": "user", "content": text}]
            text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        found.append(tokenizer.encode(text, add_special_tokens=not tokenizer.chat_template))
    return found


def engine_arguments(
    args: argparse.Namespace,
    target: TargetInfo,
    drafters: dict[str, DraftContract],
    prompts: Sequence[Sequence[int]],
) -> dict[str, Any]:
    """Arguments of ``sglang.Engine``: pools for what runs at a time, so that every drafter's own find room."""
    most = max(args.concurrency)
    longest = max(map(len, prompts)) + args.max_tokens
    first = next(iter(drafters.values()), None)
    rows = 2 * first.verify_width if first else 0
    arguments: dict[str, Any] = {
        "model_path": str(args.target),
        "disable_radix_cache": True,  # a prompt comes again with another drafter, whose context it must write
        "context_length": longest + rows + 128,
        "max_running_requests": most,
        "max_total_tokens": most * (longest + rows + 128) + 2048,
        "random_seed": 1,
        "log_level": "warning",
    }
    arguments = process.on_device(args.device, arguments, (1, min(2, most), *range(4, most, 4), most))
    if target.recurrent_layers:
        arguments["max_mamba_cache_size"] = 2 * most + 2
    if first is not None:
        arguments |= {
            "speculative_algorithm": first.algorithm,
            "speculative_draft_model_path": str(first.path),
        }
    return arguments | args.engine


def _follow(lines: Iterable[str], blocks: TextIO, document: dict[str, Any], out: Path) -> None:
    """Take the blocks, a line each, as the engine ends them; a cycle counts once every drafter had its block."""
    from sglang_ext.evaluation import record

    pending: list[dict[str, Any]] = []
    methods = list(document["drafters"]) or [PLAIN]
    said = 0
    for line in lines:
        word, _, rest = line.strip().partition(" ")
        if word == "READY_TO_MEASURE":
            document["start_seconds"] = float(rest)
            print(f"engine with {', '.join(methods)} started in {float(rest):.0f} s", flush=True)
        elif word == "BLOCK_DONE":
            pending.append(json.loads(blocks.readline()))
            if len(pending) < len(methods):
                continue
            document["blocks"] += throughput_report.condense(pending, methods[0])
            pending = []
            document["rows"] = throughput_report.summarize(document["blocks"], methods)
            record.write(out, document)
            level = document["blocks"][-1]["concurrency"]
            if sum(block["concurrency"] == level for block in document["blocks"]) == len(methods):
                said = _say(document["rows"], said, keep=len(methods))
        else:
            print(line, end="", flush=True)
    _say(document["rows"], said, keep=0)


def _say(rows: Sequence[dict[str, Any]], said: int, keep: int) -> int:
    """Print the rows that are final, all but the last ``keep``; returns how many have been printed."""
    final = max(len(rows) - keep, said)
    for row in rows[said:final]:
        print(throughput_report.line_of(row), flush=True)
    return final
