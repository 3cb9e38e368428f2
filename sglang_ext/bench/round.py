"""``sglang-ext bench round``: what a decode round takes with each method, beside the stock one, and its parts.

Weights are random and the acceptance length is forced, so all methods commit the same number of tokens a round and only
their time differs. Stock and ours run in one engine on one target, in turns of some rounds (``bench.probe``).
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import statistics
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sglang_ext.bench import process
from sglang_ext.bench.shapes import LOOKUPS, SHAPES, algorithm_of
from sglang_ext.errors import UsageError

DSPARK = ("DSPARK", "CARRYOVER_DSPARK", "READY", "READY_CARRYOVER")
DFLASH = ("DFLASH", "CARRYOVER_DFLASH")
KINDS = tuple(
    (*names, *(name + ending for name in names if "CARRYOVER" in name for ending in LOOKUPS))
    for names in (DSPARK, DFLASH)
)
"""What can share an engine beside its stock method: a Carryover drafter's lookup is a method of its own here."""
PARTS = ("draft", "verify", "inject", "glue", "round")
SETTLING = 3
"""Rounds behind each change of method that are not counted: the clocks' queue is filled by the method before."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Shape, methods, cells and outputs."""
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3.8-27b", help="target and its drafters")
    parser.add_argument(
        "--methods",
        nargs="+",
        metavar="M",
        help=f"the stock one first, all of its kind; {' or '.join(LOOKUPS)} behind a Carryover method: its drafter has "
        "a lookup table, and carries rows as well or none; AR alone (default: DSPARK and all of ours on it)",
    )
    parser.add_argument(
        "--cells", nargs="+", default=["1x1024", "32x1024"], metavar="BxC", help="batch x context, measured in order"
    )
    parser.add_argument("--turns", type=int, default=6, help="turns that each method gets in a cell, even")
    parser.add_argument("--turn", type=int, default=16, help="rounds of a turn")
    parser.add_argument("--acceptance", type=float, default=4.0, help="forced tokens a round")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try it, no measurement")
    parser.add_argument("--limit", type=float, default=900, help="seconds after which the engine is ended")
    parser.add_argument(
        "--engine", type=process.json_object, default={}, metavar="JSON", help="more arguments of the engine"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("build/bench/round.json"),
        help="JSON file, rewritten after each cell; PNG beside it",
    )


def cells_of(words: Iterable[str]) -> list[tuple[int, int]]:
    """(batch, context) of words such as 32x1024; UsageError for another form."""
    found = []
    for word in words:
        batch, _, context = word.partition("x")
        if not (batch.isdigit() and context.isdigit() and int(batch) and int(context)):
            raise UsageError(f"--cells {word} is no batch and context; write for example 32x1024.")
        found.append((int(batch), int(context)))
    return found


def methods_of(args: argparse.Namespace) -> tuple[str, ...]:
    """The methods to measure, stock first; UsageError for a set that cannot share one engine."""
    given = tuple(name.upper() for name in args.methods or [])
    shape = SHAPES[args.shape]
    methods = given or (DSPARK if shape.ready else DSPARK[:2])
    kind = next((kind for kind in (*KINDS, ("AR",)) if set(methods) <= set(kind)), None)
    if kind is None:
        raise UsageError(
            f"--methods {' '.join(methods)} cannot share an engine; name some of {', '.join(DSPARK)}, or of "
            f"{', '.join(DFLASH)}, the Carryover ones also with {' or '.join(LOOKUPS)} behind, or AR alone."
        )
    if methods[0] != kind[0]:
        raise UsageError(f"--methods must begin with the stock method {kind[0]}, which the others are held against.")
    if shape.ready is None and any(name.startswith("READY") for name in methods):
        raise UsageError(f"The target {args.shape} has no recurrent states for READY to read; leave it out.")
    return methods


def run(args: argparse.Namespace) -> int:
    """Start the engine in a process of its own, measure cell by cell, draw."""
    from sglang_ext.evaluation import record

    cells, methods = cells_of(args.cells), methods_of(args)
    if args.device == "cuda" and not process.has_gpu():
        raise UsageError("There is no CUDA device here, and a CPU's rounds say nothing about a GPU's; use a GPU.")
    document: dict[str, Any] = {
        "command": shlex.join(["sglang-ext", *sys.argv[1:]]),
        "environment": record.environment(),
        "shape": args.shape,
        "methods": list(methods),
        "acceptance": args.acceptance,
        "turns": args.turns,
        "turn": args.turn,
        "memory": {},
        "rows": [],
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = SHAPES[args.shape].write(folder, tuple(m for m in methods if m != "AR"))
        rounds = folder / "rounds.jsonl"
        workers = [
            {"name": name, "algorithm": algorithm_of(name), "drafter": str(paths.get(name, ""))} for name in methods
        ]
        plan = {"methods": workers, "turn": args.turn, "out": str(rounds)}
        (folder / "plan.json").write_text(json.dumps(plan))
        job = {
            "engine": engine_arguments(args, methods, cells, paths),
            "cells": cells,
            "new_tokens": new_tokens(args, methods),
            "vocabulary": SHAPES[args.shape].common["vocab_size"] - 64,
        }
        (folder / "job.json").write_text(json.dumps(job))
        forced = str(args.acceptance) if methods[0] != "AR" else "-1"
        environment = process.environment(args.device, SGLANG_SIMULATE_ACC_LEN=forced)
        environment |= process.with_plan(folder / "plan.json")
        job_file = folder / "job.json"
        with process.lines_of("sglang_ext.bench.engine", job_file, environment, args.limit) as lines:
            _follow(lines, document, args.out, rounds, folder / "memory.json", cells, methods)
    if not document["rows"]:
        print("No cell was measured; the engine's output above says why.", file=sys.stderr)
        return 1
    _draw(document, args.out.with_suffix(".png"))
    return 0 if len({(row["batch"], row["context"]) for row in document["rows"]}) == len(cells) else 1


def new_tokens(args: argparse.Namespace, methods: Sequence[str]) -> int:
    """Output tokens of each request: enough rounds for every method's turns."""
    rounds = len(methods) * args.turns * args.turn + 2
    return int(rounds * (1 if methods[0] == "AR" else args.acceptance))


def engine_arguments(
    args: argparse.Namespace, methods: Sequence[str], cells: Sequence[tuple[int, int]], paths: dict[str, Path]
) -> dict[str, Any]:
    """Arguments of ``sglang.Engine``: pools just large enough, graphs of the measured batch sizes."""
    more = new_tokens(args, methods) + 128
    batch = max(batch for batch, _ in cells)
    arguments: dict[str, Any] = {
        "model_path": str(paths["target"]),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "disable_radix_cache": True,
        "context_length": max(context for _, context in cells) + more,
        "max_total_tokens": max(batch * (context + more) for batch, context in cells) + 1024,
        "max_running_requests": batch,
        "random_seed": 1,
        "log_level": "info",
    }
    arguments = process.on_device(args.device, arguments, (batch for batch, _ in cells))
    if "linear_num_value_heads" in SHAPES[args.shape].target:
        arguments["max_mamba_cache_size"] = 4 * batch if args.device == "cpu" else batch + 1
    if methods[0] != "AR":
        arguments |= {"speculative_algorithm": methods[0], "speculative_draft_model_path": str(paths[methods[0]])}
    return arguments | args.engine


def _follow(
    lines: Iterable[str],
    document: dict[str, Any],
    out: Path,
    rounds: Path,
    memory: Path,
    cells: Sequence[tuple[int, int]],
    methods: Sequence[str],
) -> None:
    """Take the cells as the engine's process ends them; its first word on each line says what the line is."""
    from sglang_ext.evaluation import record

    done = 0
    for line in lines:
        word, _, rest = line.strip().partition(" ")
        if word == "READY_TO_MEASURE":
            document["start_seconds"] = float(rest)
            document["memory"] = json.loads(memory.read_text())
            print(f"engine started in {float(rest):.0f} s; memory {json.dumps(document['memory'])}", flush=True)
        elif word == "CELL_DONE":
            batch, context = cells[done]
            done += 1
            rows = summarize(take_rounds(rounds), batch, context, methods[0])
            document["rows"] += rows
            for row in rows:
                print(line_of(row), flush=True)
            record.write(out, document)
        else:
            print(line, end="", flush=True)


def take_rounds(path: Path) -> list[dict[str, Any]]:
    """The rounds written so far, in order; the file begins anew for the next cell."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    path.unlink(missing_ok=True)
    return [row for row in rows if "method" in row]


def summarize(rounds: Sequence[dict[str, Any]], batch: int, context: int, stock: str) -> list[dict[str, Any]]:
    """One row a method: medians in microseconds over its settled rounds of the full batch, overhead against stock.

    Turns go there and back again (:func:`bench.probe.whose_turn`); a cycle is both. The overhead is the median over
    cycles of (this method's time - stock's) / stock's, where a time is the mean of its two turns' medians: a context
    that grows through the cycle cancels out. Its spread are the quartiles over cycles.
    """
    by_turn: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for one in rounds:
        if one["batch"] == batch:
            by_turn.setdefault((one["method"], one["turn"]), []).append(one)
    methods = list(dict.fromkeys(name for name, _ in by_turn))
    halves: dict[str, dict[int, list[float]]] = {name: {} for name in methods}
    kept: dict[str, list[dict[str, Any]]] = {name: [] for name in methods}
    for (name, turn), members in by_turn.items():
        settled = [row for row in members[SETTLING:] if "round" in row]
        if settled:
            kept[name] += settled
            median = statistics.median(row["round"] for row in settled)
            halves[name].setdefault(turn // (2 * len(methods)), []).append(median)
    cycles = {
        name: {cycle: statistics.mean(pair) for cycle, pair in turns.items() if len(pair) == 2}
        for name, turns in halves.items()
    }
    found = []
    for name in methods:
        if not kept[name]:
            continue
        row: dict[str, Any] = {"method": name, "batch": batch, "context": context, "rounds": len(kept[name])}
        for part in PARTS:
            values = [_part(one, part) for one in kept[name]]
            row[f"{part}_us"] = statistics.median(values)
        low, high = _quartiles([one["round"] for one in kept[name]])
        row |= {"round_low_us": low, "round_high_us": high}
        shared = sorted(set(cycles[name]) & set(cycles.get(stock, {})))
        ratios = [cycles[name][cycle] / cycles[stock][cycle] - 1 for cycle in shared]
        if ratios:
            low, high = _quartiles(ratios)
            row |= {"overhead": statistics.median(ratios), "overhead_low": low, "overhead_high": high}
            row["cycles"] = len(ratios)
        found.append(row)
    return found


def _part(row: dict[str, Any], part: str) -> float:
    if part == "glue":
        return float(row["round"] - row["draft"] - row["verify"] - row["inject"])
    return float(row[part])


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def line_of(row: dict[str, Any]) -> str:
    """A row as text."""
    text = (
        "{method:28} batch {batch:3} context {context:6}: round {round_us:9.1f} us ({round_low_us:.1f}-"
        "{round_high_us:.1f}) = draft {draft_us:.1f} + verify {verify_us:.1f} + inject {inject_us:.1f} + glue "
        "{glue_us:.1f}; {rounds} rounds"
    ).format(**row)
    if "overhead" in row:
        text += "; overhead {:+.2%} ({:+.2%} to {:+.2%})".format(
            row["overhead"], row["overhead_low"], row["overhead_high"]
        )
    return text


def _draw(document: dict[str, Any], path: Path) -> None:
    """A column a cell: each method's parts, stacked, and below them its overhead with the quartiles over cycles."""
    from matplotlib.figure import Figure

    rows = document["rows"]
    cells = list(dict.fromkeys((row["batch"], row["context"]) for row in rows))
    compared = [row for row in rows if row["method"] != document["methods"][0] and "overhead" in row]
    # A disturbed cycle may lie far off; what is compared are the medians.
    highest = 150 * max((row["overhead"] for row in compared), default=0.0)
    figure = Figure(figsize=(1.2 + 1.9 * len(cells), 5.4 if compared else 3.2), layout="constrained")
    panels = figure.subplots(1 + bool(compared), len(cells), squeeze=False)
    for column, (batch, context) in enumerate(cells):
        chosen = [row for row in rows if (row["batch"], row["context"]) == (batch, context)]
        names = [re.sub("[_+]", "\n", row["method"]) for row in chosen]
        bottom = [0.0] * len(chosen)
        for part in PARTS[:-1]:
            values = [row[f"{part}_us"] / 1000 for row in chosen]
            panels[0][column].bar(names, values, bottom=bottom, label=part)
            bottom = [low + value for low, value in zip(bottom, values, strict=True)]
        panels[0][column].set_title(f"{batch} x {context:,}", fontsize=10)
        for place, row in enumerate(chosen):
            if row in compared:
                low, middle, high = (100 * row[name] for name in ("overhead_low", "overhead", "overhead_high"))
                panels[1][column].errorbar(place, middle, [[middle - low], [high - middle]], fmt="ko", capsize=3)
                where: dict[str, Any] = {"textcoords": "offset points", "ha": "right", "va": "center"}
                panels[1][column].annotate(f"{middle:.2f}", (place, middle), (-6, 0), fontsize=8, **where)
        if compared:
            panels[1][column].axhline(0, color="grey", linewidth=0.8)
            panels[1][column].set(xlim=panels[0][column].get_xlim(), ylim=(-0.2 * highest or -1, highest or 1))
            panels[1][column].set_xticks(range(len(names)), names)
        for axes in panels[:, column]:
            axes.tick_params(axis="x", labelsize=5)
    panels[0][0].set_ylabel("milliseconds a round")
    if compared:
        panels[1][0].set_ylabel(f"percent more than {document['methods'][0]}")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=4, fontsize=8)
    figure.supxlabel(f"{document['shape']}, requests x context", fontsize=9)
    figure.savefig(path, dpi=120)
