"""From cells to answers: repeats pooled, speed-ups, break-even points, which method at which concurrency."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from sglang_ext_loadtest import answer, compare
from sglang_ext_loadtest.figures import accepted, spread
from sglang_ext_loadtest.gates import Gate
from sglang_ext_loadtest.settings import Method, Slo, Sweep

Cell = dict[str, Any]
MARGIN = 0.01  # a lead whose interval reaches below this share is none


def summarize(sweep: Sweep, cells: Sequence[Cell]) -> dict[str, Any]:
    """Everything a reader wants first.

    Args:
        sweep: what was asked for.
        cells: what was measured, in any order; invalid ones count for nothing but their mention.
    """
    table = groups(sweep, cells)
    pairs = speedups(sweep, cells)
    for group in table:
        group["speedup"] = {
            role: _ratio(found)
            for role, reference in _references(sweep.methods).items()
            if (found := pairs.get((group["method"], reference, group["level"]))) and group["method"] != reference
        }
    invalid = Counter(f"{cell['method']}: {reason}" for cell in cells for reason in cell["invalid"])
    failures = [failure for text in sweep.gates for failure in Gate.parse(text).check(table)]
    choices = choose(sweep, table, pairs)
    return {
        "groups": table,
        "acceptance": acceptances(sweep, cells),
        "break_even": break_evens(sweep, cells, pairs),
        "choices": choices,
        "answer": answer.sentences(sweep, table, choices),
        "invalid": [f"{reason} ({count} cells)" if count > 1 else reason for reason, count in invalid.items()],
        "gates": {text: not any(failure.startswith(f"{text}: ") for failure in failures) for text in sweep.gates},
        "gate_failures": failures,
        "passed": not invalid and not failures and bool(table),
    }


def groups(sweep: Sweep, cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """One entry per method and level, over its valid repeats, in the sweep's order."""
    found = []
    levels = sorted({cell["level"] for cell in cells})
    for method in sweep.methods:
        for level in levels:
            mine = [cell for cell in cells if cell["method"] == method.name and cell["level"] == level]
            valid = [cell for cell in mine if not cell["invalid"]]
            if valid:
                found.append(_group(method, level, mine, valid, sweep.slo))
    return found


def acceptances(sweep: Sweep, cells: Sequence[Cell]) -> dict[str, dict[str, Any]]:
    """Each drafting method's acceptance over all its valid cells: what is accepted does not hang on the load."""
    found = {}
    for method in sweep.methods:
        mine = [cell for cell in cells if cell["method"] == method.name and not cell["invalid"]]
        figures = _acceptance([row for cell in mine for row in cell["rows"] if row["error"] is None])
        if figures is not None:
            found[method.name] = figures
    return found


def speedups(sweep: Sweep, cells: Sequence[Cell]) -> dict[tuple[str, str, float], compare.Ratio]:
    """Ratio by (method, reference, level) for every ordered pair of methods; closed loops only."""
    if sweep.load.arrivals:
        return {}
    rows: dict[tuple[str, float], dict[int, compare.Rows]] = {}
    for cell in cells:
        if not cell["invalid"]:
            rows.setdefault((cell["method"], cell["level"]), {})[cell["repeat"]] = cell["rows"]
    found = {}
    for method, level in rows:
        for reference in sweep.methods:
            ours, theirs = rows[method, level], rows.get((reference.name, level), {})
            shared = sorted(ours.keys() & theirs.keys())
            pair = compare.ratio([ours[r] for r in shared], [theirs[r] for r in shared], sweep.load.seed)
            if pair is not None and method != reference.name:
                found[method, reference.name, level] = pair
    return found


def break_evens(
    sweep: Sweep, cells: Sequence[Cell], pairs: dict[tuple[str, str, float], compare.Ratio]
) -> list[dict[str, Any]]:
    """Up to which concurrency each method is faster than plain decoding and than the stock drafter."""
    found: list[dict[str, Any]] = []
    levels = sorted({cell["level"] for cell in cells})
    for role, reference in _references(sweep.methods).items():
        for method in sweep.methods:
            if method.role == "plain":
                continue
            ladder = [level for level in levels if (method.name, reference, level) in pairs]
            point = compare.break_even(ladder, [pairs[method.name, reference, level] for level in ladder])
            if point is not None:
                entry = {
                    "method": method.name,
                    "role": role,
                    "reference": reference,
                    "text": _point(point, reference, ladder),
                }
                found.append(entry | {key: _finite(value) for key, value in asdict(point).items()})
    return found


def choose(
    sweep: Sweep, table: Sequence[dict[str, Any]], pairs: dict[tuple[str, str, float], compare.Ratio]
) -> list[dict[str, Any]]:
    """The fastest method at each level among those that meet the SLO and carry no note."""
    noted = {method.name for method in sweep.methods if method.note}
    choices = []
    for level in sorted({group["level"] for group in table}):
        here = [group for group in table if group["level"] == level]
        able = [group for group in here if group["slo_met"] and group["method"] not in noted]
        able.sort(key=lambda group: -_merit(group, sweep))
        if not able:
            reason = (
                "no method meets the SLO"
                if any(not group["slo_met"] for group in here)
                else "no method without a caveat"
            )
            choices.append({"level": level, "method": None, "reason": reason, "ties": []})
            continue
        best = able[0]
        ties = []
        for other in able[1:]:
            pair = pairs.get((best["method"], other["method"], level))
            if pair is not None and (pair.low is None or pair.low <= 1 + MARGIN):
                ties.append(other["method"])
        choices.append({"level": level, "method": best["method"], "ties": ties, "speedup": best.get("speedup", {})})
    return choices


def _group(method: Method, level: float, mine: Sequence[Cell], valid: Sequence[Cell], slo: Slo) -> dict[str, Any]:
    rows = [row for cell in valid for row in cell["rows"]]
    fine = [row for row in rows if row["error"] is None]
    rates = [cell["throughput"]["output_tok_s"] for cell in valid]
    share = sum(cell["goodput"]["share"] for cell in valid) / len(valid)
    user = sum(row["tokens"] for row in fine) / max(sum(row["busy_s"] for row in fine), 1e-9)
    group: dict[str, Any] = {
        "method": method.name,
        "level": level,
        "repeats": len(valid),
        "invalid_repeats": len(mine) - len(valid),
        "note": method.note,
        "requests": len(rows),
        "error_rate": 1 - len(fine) / len(rows),
        "throughput": {
            "output_tok_s": sum(rates) / len(rates),
            "low": min(rates),
            "high": max(rates),
            "requests_s": sum(cell["throughput"]["requests_s"] for cell in valid) / len(valid),
        },
        "user_tok_s": user,
        # The same prompts for every method, unlike the throughput, which what ran in the cool-down is a part of.
        "matched_tok_s": level * user,
        "ttft_ms": _spread(fine, "ttft_ms"),
        "tpot_ms": _spread(fine, "tpot_ms"),
        "e2e_ms": _spread(fine, "e2e_ms"),
        "itl_ms": _mean([cell["itl_ms"] for cell in valid]),
        "chunk_ms": _mean([cell["chunk_ms"] for cell in valid]),
        "send_lag_ms": _mean([cell["send_lag_ms"] for cell in valid]),
        "goodput": {
            "share": share,
            "requests_s": sum(cell["goodput"]["requests_s"] for cell in valid) / len(valid),
            "output_tok_s": sum(cell["goodput"]["output_tok_s"] for cell in valid) / len(valid),
        },
        "server": _gauges(valid),
        "slo_met": not slo.any or share >= slo.attainment,
    }
    if (figures := _acceptance(fine)) is not None:
        group["acceptance"] = figures
    return group


def _acceptance(fine: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    return accepted([(row["category"], row["histogram"]) for row in fine])


def _gauges(valid: Sequence[Cell]) -> dict[str, dict[str, float]]:
    """Mean and maximum of the server's gauges over the repeats that have them."""
    found: dict[str, list[dict[str, float]]] = {}
    for cell in valid:
        for name, values in cell.get("server", {}).items():
            found.setdefault(name, []).append(values)
    return {
        name: {
            "mean": sum(values["mean"] for values in entries) / len(entries),
            "max": max(values["max"] for values in entries),
        }
        for name, entries in found.items()
    }


def _merit(group: dict[str, Any], sweep: Sweep) -> float:
    """What is better: speed on the same prompts; at given arrivals the shorter mean time to the end."""
    return float(-group["e2e_ms"]["mean"] if sweep.load.arrivals else group["matched_tok_s"])


def _references(methods: Sequence[Method]) -> dict[str, str]:
    return {method.role: method.name for method in methods if method.role}


def _ratio(pair: compare.Ratio) -> dict[str, float | None]:
    return {"value": pair.value, "low": pair.low, "high": pair.high}


def _spread(rows: Sequence[dict[str, Any]], key: str) -> dict[str, float] | None:
    return spread(row[key] / 1000 for row in rows if row[key] is not None)


def _mean(spreads: Sequence[dict[str, float] | None]) -> dict[str, float] | None:
    """Mean of each percentile over repeats (the events of all repeats are not kept in memory)."""
    known = [entry for entry in spreads if entry]
    return {key: sum(entry[key] for entry in known) / len(known) for key in known[0]} if known else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _point(point: compare.BreakEven, reference: str, ladder: Sequence[float]) -> str:
    """A break-even point in words that follow the method's name."""

    def words(value: float) -> str:
        if value == 0:
            return f"below {ladder[0]:g}"
        return f"above {ladder[-1]:g}" if math.isinf(value) else f"{value:.1f}"

    if point.value == 0:
        text = f"is not faster than {reference} at {ladder[0]:g}, where the ladder begins"
    elif math.isinf(point.value):
        text = f"is faster than {reference} at every measured concurrency, up to {ladder[-1]:g}"
    else:
        text = f"is faster than {reference} up to a concurrency of {words(point.value)}"
    low, high = words(point.low), words(point.high)
    return f"{text} [break-even {low}]" if low == high else f"{text} [break-even {low} to {high}]"
