"""What ``bench throughput`` says of its blocks: speed, acceptance, what is kept of a gain; as rows, text and plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sglang_ext.evaluation.bootstrap import interval, resample

AIM = 0.95
"""Of the acceptance gain that should arrive as speed."""
FEWEST = 6  # cycles that an interval is made of
COUNTS = ("prefills", "rounds")
"""Of a block, by the scheduler's count; without drafters there is none."""


def condense(blocks: Sequence[dict[str, Any]], reference: str) -> list[dict[str, Any]]:
    """One cycle's blocks as the record keeps them: sums, and how many answers equal the reference's."""
    from sglang_ext.evaluation.acceptance import pool

    expected = next(block["outputs"] for block in blocks if block["method"] == reference)
    found = []
    for block in blocks:
        histogram = pool(block["histograms"])
        found.append(
            {name: block[name] for name in ("method", "concurrency", "cycle", "seconds")}
            | {name: block[name] for name in COUNTS if name in block}
            | {
                "requests": len(block["outputs"]),
                "tokens": sum(map(len, block["outputs"])),
                "steps": sum(histogram),
                "accepted": sum(count * drafts for drafts, count in enumerate(histogram)),
                "same": sum(ours == theirs for ours, theirs in zip(block["outputs"], expected, strict=True)),
            }
        )
    return found


def summarize(blocks: Sequence[dict[str, Any]], methods: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each concurrency and method; figures over the first method's pair the blocks of each cycle.

    ``speed_up`` is a ratio of tokens per second, ``acceptance_gain`` one of acceptance lengths, ``kept`` the one over
    the other. Rows also have ``round_ms``, ``prefill_ms`` and, over the first method's, ``round_ratio``, where they
    can be told apart (:func:`_add_rounds`). Intervals are 95 % percentile bootstraps over cycles, the same draws for
    all of a row's figures; None for fewer than ``FEWEST`` cycles.
    """
    rows = []
    for level in dict.fromkeys(block["concurrency"] for block in blocks):
        here = [block for block in blocks if block["concurrency"] == level]
        cycles = sorted({block["cycle"] for block in here})
        draws = np.vstack([np.ones((1, len(cycles))), resample(len(cycles), seed=0)])
        figures: dict[str, dict[str, Any]] = {}
        for name in methods:
            mine = {block["cycle"]: block for block in here if block["method"] == name}
            sums = {
                key: draws @ np.array([float(mine[cycle][key]) for cycle in cycles])
                for key in ("tokens", "seconds", "steps", "accepted", "requests", "same")
            }
            speed = sums["tokens"] / sums["seconds"]
            drafts = sums["steps"][0] > 0
            length = 1 + sums["accepted"] / sums["steps"] if drafts else np.ones_like(speed)
            figures[name] = {"speed": speed, "length": length}
            row = {
                "method": name,
                "concurrency": level,
                "cycles": len(cycles),
                "requests": int(sums["requests"][0]),
                "tokens": int(sums["tokens"][0]),
                "steps": int(sums["steps"][0]),
                "tokens_per_second": float(speed[0]),
                "acceptance_length": float(length[0]),
                "same_answers": float(sums["same"][0] / sums["requests"][0]),
            }
            if name != methods[0]:
                first = figures[methods[0]]
                up, gain = speed / first["speed"], length / first["length"]
                for key, values in (("speed_up", up), ("acceptance_gain", gain), ("kept", up / gain)):
                    bounds = interval(values[1:]) if len(cycles) >= FEWEST else None
                    row[key] = {"value": float(values[0]), "interval": bounds}
                row["aim"] = verdict(row["kept"]["interval"])
            rows.append(row)
            row |= {key: sum(block[key] for block in mine.values()) for key in COUNTS if all(key in b for b in here)}
        _add_rounds(rows[-len(methods) :], here, draws)
    return rows


def _add_rounds(rows: Sequence[dict[str, Any]], blocks: Sequence[dict[str, Any]], draws: np.ndarray) -> None:
    """Add what a prefill and a round take.

    A block's seconds are its prefills, of which no draft spares any, and its rounds: least squares over all blocks give
    one time of a prefill, with its requests' way through the engine, and one of each method's round. Both are means
    over what the batches were. The fewer blocks differ in their numbers, the less they are known, as their intervals
    say. Records without counts have them for one request at a time, where each has its prefill and its steps.
    """
    names = [row["method"] for row in rows]
    cycles = sorted({block["cycle"] for block in blocks})
    if not (all(name in block for block in blocks for name in COUNTS) or rows[0]["concurrency"] == 1):
        return
    normal, right = np.zeros((len(cycles), len(names) + 1, len(names) + 1)), np.zeros((len(cycles), len(names) + 1))
    for block in blocks:
        parts = np.zeros(len(names) + 1)
        parts[-1] = block.get("prefills", block["requests"])
        parts[names.index(block["method"])] = block.get("rounds", block["steps"])
        normal[cycles.index(block["cycle"])] += np.outer(parts, parts)
        right[cycles.index(block["cycle"])] += parts * block["seconds"]
    if np.linalg.matrix_rank(normal.sum(0)) <= len(names):  # not even rounding tells them apart
        return
    # A draw of one cycle alone may not either, and gets the least solution.
    solved = np.linalg.pinv(np.tensordot(draws, normal, 1), hermitian=True) @ (draws @ right)[..., None]
    times = 1000 * solved[..., 0].T
    known = len(cycles) >= FEWEST

    def figure(values: np.ndarray) -> dict[str, Any]:
        return {"value": float(values[0]), "interval": interval(values[1:]) if known else None}

    for row, of_method in zip(rows, times, strict=False):
        row |= {"round_ms": figure(of_method), "prefill_ms": figure(times[-1])}
        if row is not rows[0]:
            row["round_ratio"] = figure(of_method / times[0])


def verdict(bounds: Sequence[float] | None) -> str:
    """Whether at least ``AIM`` of a gain is kept: met or missed where the whole interval says so, else open."""
    if bounds is None:
        return "open"
    low, high = bounds
    return "met" if low >= AIM else "missed" if high < AIM else "open"


def line_of(row: dict[str, Any]) -> str:
    """A row as text."""
    text = (
        "{method} at {concurrency}: {tokens_per_second:,.0f} tokens/s, acceptance length {acceptance_length:.2f}, "
        "cycles {cycles}"
    ).format(**row)
    if "kept" in row:
        text += f"; speed {_times(row['speed_up'])}, acceptance {_times(row['acceptance_gain'])}, "
        text += f"kept {_times(row['kept'])}: {row['aim']}; {row['same_answers']:.0%} of the answers are the same"
    if "round_ms" in row:
        text += f"; a round {_times(row['round_ms'], 2)} ms"
        text += f", {_times(row['round_ratio'])} of the first's" if "round_ratio" in row else ""
        text += f", a prefill {_times(row['prefill_ms'], 1)} ms"
    if "rounds" in row:
        text += f"; {row['prefills']} prefills, {row['rounds']} rounds"
    return text


def _times(figure: dict[str, Any], digits: int = 3) -> str:
    bounds = figure["interval"]
    return f"{figure['value']:.{digits}f}" + (f" [{bounds[0]:.{digits}f}, {bounds[1]:.{digits}f}]" if bounds else "")


def draw(document: dict[str, Any], path: Path) -> None:
    """Tokens per second by concurrency, and beside it what is kept of each acceptance gain."""
    from matplotlib.figure import Figure

    rows = document["rows"]
    levels = list(dict.fromkeys(row["concurrency"] for row in rows))
    methods = list(dict.fromkeys(row["method"] for row in rows))
    compared = [method for method in methods if any("kept" in row for row in rows if row["method"] == method)]
    figure = Figure(figsize=(10 if compared else 5, 3.8), layout="constrained")
    panels = figure.subplots(1, 2 if compared else 1, squeeze=False)[0]
    for number, method in enumerate(methods):
        mine = [row for row in rows if row["method"] == method]
        places = [levels.index(row["concurrency"]) for row in mine]
        panels[0].plot(places, [row["tokens_per_second"] for row in mine], "o-", ms=4, label=method, color=f"C{number}")
        if method not in compared:
            continue
        shift = (compared.index(method) - (len(compared) - 1) / 2) * 0.7 / len(compared)
        for place, row in zip(places, mine, strict=True):
            value, bounds = row["kept"]["value"], row["kept"]["interval"]
            errors = [[max(value - bounds[0], 0)], [max(bounds[1] - value, 0)]] if bounds else None
            look = {"color": f"C{number}", "mfc": f"C{number}" if bounds else "white"}
            panels[1].errorbar(place + shift, value, errors, fmt="o", ms=4, capsize=3, **look)
    panels[0].set(ylabel="tokens per second", ylim=(0, None))
    for axes in panels:
        axes.set_xticks(range(len(levels)), [str(level) for level in levels])
        axes.set(xlabel="requests at a time", xlim=(-0.5, len(levels) - 0.5))
        axes.grid(axis="y", color="0.92")
        axes.set_axisbelow(True)
    if compared:
        panels[1].axhline(1, color="0.6", linewidth=0.8)
        panels[1].axhline(AIM, color="0.4", linewidth=1, linestyle="--")
        panels[1].set_ylabel(f"speed-up / acceptance gain over\n{methods[0]}", fontsize=9)
        panels[1].set_title(f"kept (dashed: the aim, {AIM}; hollow: too few cycles for an interval)", fontsize=9)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=3, fontsize=8)
    figure.supxlabel(f"{Path(document['target']).name} on {document['environment']['device']}", fontsize=8)
    figure.savefig(path, dpi=120)
