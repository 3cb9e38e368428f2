"""What acceptance brings end to end: speed-up against acceptance, from the recorded sweeps of benchmarks/loadtest.

    python benchmarks/gpu/end_to_end.py benchmarks/loadtest/h200-dense benchmarks/loadtest/h200-hybrid \\
        --out benchmarks/gpu/end-to-end-h200

writes OUT.json and OUT.png. Speed-ups are ratios of tokens per busy second, acceptance gains are ratios of acceptance
lengths, both over the same prompts and repeats of two methods; ``kept`` is their quotient: 1 where all of what is
accepted more arrives as speed, below 1 where the method costs time. Intervals (95 %) draw the same prompts and repeats
for both.
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
        ours = measured(document["cells"], method, level)
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
    """A row of two panels for each target: over plain decoding, and over the drafter that a method goes on from."""
    targets = list(dict.fromkeys(row["target"] for row in found))
    figure, grid = plt.subplots(len(targets), 2, figsize=(11, 4.6 * len(targets)), squeeze=False)
    methods = list(dict.fromkeys(row["method"] for row in found))
    colours = {method: f"C{number}" for number, method in enumerate(methods)}
    for axes, target in zip(grid, targets, strict=True):
        for axis, name in zip(axes, ("plain", "baseline"), strict=True):
            mine = [row for row in found if row["target"] == target and name in row]
            for method in methods:
                points = [row for row in mine if row["method"] == method]
                for row in points:
                    over = row[name]
                    x = row["acceptance_length"] if name == "plain" else over["acceptance_gain"]["value"]
                    y = over["speedup"]
                    error = [[max(y["value"] - y["low"], 0)], [max(y["high"] - y["value"], 0)]]
                    label = method if row is points[0] else None
                    axis.errorbar(x, y["value"], yerr=error, fmt="o", color=colours[method], capsize=2, label=label)
                    axis.annotate(f" {row['concurrency']}", (x, y["value"]), fontsize=8)
            low, high = axis.get_xlim()
            line = np.array([min(low, 1.0), max(high, 1.05)])
            axis.plot(line, line, color="0.6", lw=0.8, label="speed-up = acceptance")
            if name == "baseline":
                axis.plot(line, AIM * line, color="0.6", lw=0.8, ls="--", label=f"{AIM:.0%} of it")
            else:
                axis.axhline(1, color="0.6", lw=0.8, ls=":")
            axis.set_xlabel("acceptance length" if name == "plain" else "acceptance length over the base drafter's")
            axis.set_ylabel("speed-up over " + ("plain decoding" if name == "plain" else "the base drafter"))
            axis.set_title(f"{target}; numbers: concurrency", fontsize=10)
            if mine:
                axis.legend(fontsize=8)
    figure.suptitle(title)
    figure.tight_layout()
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
    sys.exit(main())
