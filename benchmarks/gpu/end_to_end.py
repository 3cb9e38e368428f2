"""What acceptance brings end to end: speed-up against acceptance, from the recorded sweeps of benchmarks/loadtest.

    python benchmarks/gpu/end_to_end.py benchmarks/loadtest/h200-dense benchmarks/loadtest/h200-hybrid \\
        --out benchmarks/gpu/end-to-end-h200

writes OUT.json and OUT.png. Speed-ups are ratios of tokens per busy second, acceptance gains are ratios of acceptance
lengths, both over the same prompts and repeats of two methods; ``kept`` is their quotient: 1 where all of what is
accepted more arrives as speed, below 1 where the method costs time. ``round_speed`` is the ratio of verify steps per
second between a request's first token and its end: below 1 where a method's round takes longer. The time to the
first token, which no draft shortens, takes the rest. Intervals (95 %) draw the same prompts and repeats for both.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from sglang_ext_loadtest import compare, results
from sglang_ext_loadtest.settings import Sweep

from sglang_ext.errors import refusal_ends_process

LEVELS = (1, 4, 16, 32)
AIM = 0.95  # of the acceptance gain that should arrive as speed
Interval = dict[str, float | None]


def baseline(method: str) -> str | None:
    """The method whose drafter this one goes on from; None for those that others go on from."""
    if method.startswith("READY"):
        return "DSPARK"
    stock = method.removeprefix("CARRYOVER_")
    return None if stock == method else stock


def lengths(rows: compare.Rows) -> list[dict[str, Any]]:
    """Requests in a form whose tokens per second are the acceptance length: committed tokens by verify steps."""
    found = []
    for row in rows:
        steps = sum(row["histogram"])
        accepted = sum(count * drafts for drafts, count in enumerate(row["histogram"]))
        found.append({**row, "tokens": steps + accepted, "busy_s": steps})
    return found


def rounds(rows: compare.Rows) -> list[dict[str, Any]]:
    """Requests in a form whose tokens per second are verify steps per second after the first token."""
    return [
        {**row, "tokens": sum(row["histogram"]), "busy_s": (row["e2e_ms"] - row["ttft_ms"]) / 1000}
        for row in rows
        if row["error"] is None
    ]


def measured(cells: Sequence[Mapping[str, Any]], method: str, level: float) -> dict[int, compare.Rows]:
    """Requests of the valid cells of a method at a level, by repeat."""
    here = [cell for cell in cells if (cell["method"], cell["level"]) == (method, level) and not cell["invalid"]]
    return {cell["repeat"]: cell["rows"] for cell in here}


def pair(ours: dict[int, compare.Rows], theirs: dict[int, compare.Rows], seed: int) -> dict[str, Any] | None:
    """Speed-up, acceptance gain and what is kept of it, over the repeats that both have; None without any.

    The gain is left out where the reference drafts nothing.
    """
    shared = sorted(ours.keys() & theirs.keys())
    left, right = [ours[repeat] for repeat in shared], [theirs[repeat] for repeat in shared]
    speed = compare.ratio(left, right, seed)
    if speed is None:
        return None
    found: dict[str, Any] = {"repeats": len(shared), "speedup": _interval(speed.value, speed.samples)}
    if all(any(row["histogram"] for row in rows) for rows in (*left, *right)):
        gain = compare.ratio([lengths(rows) for rows in left], [lengths(rows) for rows in right], seed)
        if gain is not None:
            found["acceptance_gain"] = _interval(gain.value, gain.samples)
            found["kept"] = _interval(speed.value / gain.value, speed.samples / gain.samples)
        pace = compare.ratio([rounds(rows) for rows in left], [rounds(rows) for rows in right], seed)
        if pace is not None:
            found["round_speed"] = _interval(pace.value, pace.samples)
    return found


def rows(document: Mapping[str, Any], sweep: Sweep, target: str) -> list[dict[str, Any]]:
    """One row per drafting method and concurrency."""
    plain = next((method.name for method in sweep.methods if method.role == "plain"), None)
    notes = {method.name: method.note for method in sweep.methods}
    found = []
    for group in document["summary"]["groups"]:
        method, level = group["method"], group["level"]
        if level not in LEVELS or "acceptance" not in group:
            continue
        row = {"target": target, "method": method, "concurrency": int(level), "note": notes[method]}
        row |= {"tok_s": round(group["matched_tok_s"], 1), "acceptance_length": round(group["acceptance"]["length"], 4)}
        row |= {"ttft_ms_p50": round(group["ttft_ms"]["p50"], 2)}
        ours = measured(document["cells"], method, level)
        taken = rounds([row for repeat in ours.values() for row in repeat])
        row["round_ms"] = round(1000 * sum(each["busy_s"] for each in taken) / sum(each["tokens"] for each in taken), 3)
        calm = float(np.percentile([1000 * each["busy_s"] / each["tokens"] for each in taken if each["tokens"]], 10))
        row["round_ms_p10"] = round(calm, 3)  # of the requests that the host disturbed least
        for name, reference in (("plain", plain), ("baseline", baseline(method))):
            theirs = measured(document["cells"], reference, level) if reference else {}
            if reference and (result := pair(ours, theirs, sweep.load.seed)) is not None:
                row[name] = {"method": reference} | result
        found.append(row)
    return found


def _interval(value: float, samples: np.ndarray) -> Interval:
    low, high = (float(bound) for bound in np.percentile(samples, (2.5, 97.5)))
    return {"value": round(value, 4), "low": round(low, 4), "high": round(high, 4)}


def draw(found: Sequence[Mapping[str, Any]], path: Path, title: str) -> None:
    """Two panels for each target: speed-up over plain decoding, and what is kept of the acceptance gain."""
    targets = list(dict.fromkeys(row["target"] for row in found))
    figure, grid = plt.subplots(len(targets), 2, figsize=(11, 3.6 * len(targets)), squeeze=False, layout="constrained")
    everyone = list(dict.fromkeys(row["method"] for row in found))
    colours = {method: f"C{number}" for number, method in enumerate(everyone)}
    for axes, target in zip(grid, targets, strict=True):
        for axis, name, key in zip(axes, ("plain", "baseline"), ("speedup", "kept"), strict=True):
            mine = [row for row in found if row["target"] == target and key in row.get(name, {})]
            methods = [method for method in everyone if any(row["method"] == method for row in mine)]
            for number, method in enumerate(methods):
                rows = [row for row in mine if row["method"] == method]
                shift = (number - (len(methods) - 1) / 2) * 0.8 / len(methods)
                places = [LEVELS.index(row["concurrency"]) + shift for row in rows]
                values = [row[name][key] for row in rows]
                middle = [each["value"] for each in values]
                below = [max(each["value"] - each["low"], 0) for each in values]
                above = [max(each["high"] - each["value"], 0) for each in values]
                look: dict[str, Any] = {"color": colours[method], "label": method}
                axis.errorbar(places, middle, yerr=(below, above), fmt="o", ms=4, capsize=2, **look)
                if name == "plain":
                    axis.scatter(
                        places, [row["acceptance_length"] for row in rows], marker="_", s=90, **look | {"label": None}
                    )
            axis.set_xticks(range(len(LEVELS)), [f"{level}" for level in LEVELS])
            axis.set_xlim(-0.5, len(LEVELS) - 0.5)
            axis.set_xlabel("concurrency")
            axis.grid(axis="y", color="0.92")
            axis.set_axisbelow(True)
            axis.axhline(1, color="0.6", lw=0.8)
            if name == "plain":
                axis.set_ylim(bottom=0)
                axis.set_ylabel("points: speed-up, bars: acceptance length", fontsize=9)
                axis.set_title(f"{target}: times plain decoding", fontsize=10)
            else:
                axis.set_ylabel("both over the base drafter", fontsize=9)
                axis.axhline(AIM, color="0.4", lw=1, ls="--", label=f"aim: {AIM}")
                axis.set_title(f"{target}: speed-up / acceptance gain", fontsize=10)
            low, high = axis.get_ylim()
            axis.set_ylim(low, high + 0.25 * (high - low))  # room for the legend
            if mine:
                axis.legend(fontsize=8, ncols=3 if max(map(len, methods)) <= 16 else 2, loc="upper left")
    figure.suptitle(title)
    figure.savefig(path, dpi=110)


def main(argv: Sequence[str] | None = None) -> int:
    """Read sweeps, write the record and its plot."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sweeps", nargs="+", type=Path, help="directories of results.json")
    parser.add_argument("--out", type=Path, required=True, help="name of the record, without .json")
    args = parser.parse_args(argv)
    found: list[dict[str, Any]] = []
    sources = []
    for folder in args.sweeps:
        document, sweep = results.read(folder)
        found += rows(document, sweep, document["title"].split(":")[0])
        gpus = sorted({about.get("accelerator", "not stated") for about in document["methods"].values()})
        keys = ("title", "created", "command", "generator")
        sources.append({"record": str(folder), "gpu": gpus, **{key: document[key] for key in keys}, "note": sweep.note})
    words = shlex.join(argv if argv is not None else sys.argv[1:])
    record = {
        "what": " ".join((__doc__ or "").split("\n\n")[-1].split()),
        "command": f"python benchmarks/gpu/end_to_end.py {words}",
        "sources": sources,
        "rows": found,
    }
    args.out.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    hardware = ", ".join(sorted({name for source in sources for name in source["gpu"]}))
    draw(found, args.out.with_suffix(".png"), f"End to end on {hardware}")
    for row in found:
        over = row.get("baseline", {})
        kept = over.get("kept")
        tail = f", {over['speedup']['value']:.3f} of {over['method']}" if over else ""
        tail += f", gain {over['acceptance_gain']['value']:.3f}" if kept else ""
        tail += f", kept {kept['value']:.3f} [{kept['low']:.3f}, {kept['high']:.3f}]" if kept else ""
        against = f"{row['plain']['speedup']['value']:.2f} of plain" if "plain" in row else "plain not measured"
        print(f"{row['target']}, {row['method']} at {row['concurrency']}: {row['tok_s']} tok/s, {against}{tail}")
    return 0


if __name__ == "__main__":
    with refusal_ends_process():
        sys.exit(main())
