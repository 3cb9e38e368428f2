"""Figures of one cell (a method at one concurrency or rate, once) from its records; pure arithmetic.

Definitions, with n completion tokens, of which the first event brought f:

- TTFT: from the sending (in an open loop from the intended time) to the first content, reasoning or tool delta.
- inter-chunk latency: between two events that brought tokens, raw.
- ITL: the same gaps divided by the tokens that came at their end, each counted once per token.
- TPOT: (last token - first token) / (n - f). With f = 1, the usual case, the denominator is n - 1.
- E2E: from the sending (or intended time) to the end of the stream.
- output throughput: tokens that arrived while measured requests ran, of requests of all phases, per second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from sglang_ext.evaluation.acceptance import Histogram, acceptance, by_category
from sglang_ext_loadtest.records import MEASURE, Record
from sglang_ext_loadtest.settings import Load, Slo
from sglang_ext_loadtest.tokens import USAGE

PERCENTILES = (50, 90, 95, 99)
BUSY_LAG_MS = 50.0  # lateness of the generator's own timer (p99) from which a reader is warned


def ttft(record: Record) -> float | None:
    """Seconds to the first delta; None without one."""
    return None if record.first is None else record.first - _start(record)


def e2e(record: Record) -> float:
    """Seconds to the end of the stream."""
    return record.end - _start(record)


def tpot(record: Record) -> float | None:
    """Seconds per token after the first event; None where no token came after it."""
    later = sum(count for _, count in record.events[1:])
    return (record.events[-1][0] - record.events[0][0]) / later if later else None


def gaps(record: Record) -> list[tuple[float, int]]:
    """(seconds since the event before, tokens that came) of every event but the first."""
    pairs = zip(record.events, record.events[1:], strict=False)
    return [(after - before, count) for (before, _), (after, count) in pairs]


def good(record: Record, slo: Slo) -> bool:
    """Whether a request met every limit that is set; a failed one met none."""
    if not record.ok:
        return False
    limits = ((ttft(record), slo.ttft_ms), (tpot(record), slo.tpot_ms), (e2e(record), slo.e2e_ms))
    return all(limit is None or value is None or 1000 * value <= limit for value, limit in limits)


def spread(values: Iterable[float], weights: Sequence[int] | None = None) -> dict[str, float] | None:
    """Mean and percentiles in milliseconds of values in seconds, each counted ``weights`` times; None for none."""
    array = np.asarray(list(values), dtype=np.float64)
    if weights is not None:
        array = np.repeat(array, weights)
    if array.size == 0:
        return None
    quantiles = np.percentile(array, PERCENTILES)
    result = {"mean": float(array.mean())} | {
        f"p{rank}": float(value) for rank, value in zip(PERCENTILES, quantiles, strict=True)
    }
    return {name: round(1000 * value, 3) for name, value in result.items()}


def errors(records: Iterable[Record]) -> dict[str, dict[str, Any]]:
    """Count and first example by kind of error."""
    found: dict[str, dict[str, Any]] = {}
    for record in records:
        if record.error is not None:
            entry = found.setdefault(record.error, {"count": 0, "example": record.detail})
            entry["count"] += 1
    return found


def throughput(records: Sequence[Record], start: float, end: float) -> dict[str, float]:
    """What arrived in [start, end] of the requests that succeeded."""
    seconds = max(end - start, 1e-9)
    fine = [record for record in records if record.ok]
    tokens = sum(count for record in fine for at, count in record.events if start <= at <= end)
    ended = sum(start <= record.end <= end for record in fine)
    return {
        "seconds": round(seconds, 3),
        "output_tok_s": round(tokens / seconds, 3),
        "requests_s": round(ended / seconds, 4),
    }


def cell(records: Sequence[Record], load: Load, slo: Slo, run: dict[str, Any]) -> dict[str, Any]:
    """All figures of one cell.

    Args:
        records: everything of the step, warm-up and cool-down included.
        load: the step's load; its limits decide validity.
        slo: limits of a good request.
        run: ``run.json`` of the Locust run.
    """
    measured = [record for record in records if record.phase == MEASURE]
    fine = [record for record in measured if record.ok]
    result: dict[str, Any] = {
        "requests": {"measured": len(measured), "ok": len(fine), "errors": errors(measured)},
        "all_requests": {"sent": len(records), "errors": errors(records)},
        "token_source": dict(Counter(record.source for record in fine)),
        "generator": run.get("workers", []),
    }
    if fine:
        start = min(record.sent for record in measured)
        # On a ladder in one run the next step adds users while the last requests of this one still run.
        cut = len(load.concurrency) > 1 and load.seconds is not None and not load.arrivals
        end = max((record.sent if cut else record.end) for record in measured)
        result["throughput"] = throughput(records, start, end)
        steps = [gap for record in fine for gap in gaps(record)]
        result |= {
            "ttft_ms": spread(value for record in fine if (value := ttft(record)) is not None),
            "tpot_ms": spread(value for record in fine if (value := tpot(record)) is not None),
            "itl_ms": spread((gap / count for gap, count in steps), [count for _, count in steps]),
            "chunk_ms": spread(gap for gap, _ in steps),
            "e2e_ms": spread(e2e(record) for record in fine),
            "tokens": sum(record.tokens for record in fine),
            "prompt_tokens": sum(record.prompt_tokens or 0 for record in fine),
            "cached_tokens": sum(record.cached_tokens or 0 for record in fine),
            "tokens_per_event": round(sum(count for _, count in steps) / len(steps), 4) if steps else None,
            "acceptance": accepted([(record.category, record.histogram) for record in fine]),
        }
        result["goodput"] = goodput(measured, slo, result["throughput"]["seconds"])
    lags = [record.sent - record.intended for record in records if record.intended is not None]
    result["send_lag_ms"] = spread(lags) if lags else None
    result["invalid"], result["warnings"] = verdict(result, load, run)
    return result


def goodput(measured: Sequence[Record], slo: Slo, seconds: float) -> dict[str, float]:
    """Share of good requests, and what they make per second."""
    kept = [record for record in measured if good(record, slo)]
    return {
        "share": len(kept) / len(measured),
        "requests_s": round(len(kept) / seconds, 4),
        "output_tok_s": round(sum(record.tokens for record in kept) / seconds, 3),
    }


def accepted(requests: Sequence[tuple[str, Histogram]]) -> dict[str, Any] | None:
    """Acceptance figures from (category, histogram) of requests; None where none drafted (plain decoding)."""
    if not any(histogram for _, histogram in requests):
        return None
    total = acceptance([histogram for _, histogram in requests])
    return {
        "length": total.length,
        "mean_of_requests": total.mean_of_requests,
        "verify_steps": total.verify_steps,
        "accepted_drafts": total.accepted_drafts,
        "survival": list(total.survival),
        "by_category": {category: group.length for category, group in sorted(by_category(requests).items())},
    }


def verdict(result: dict[str, Any], load: Load, run: dict[str, Any]) -> tuple[list[str], list[str]]:
    """(reasons why the cell is invalid, warnings), each a sentence."""
    invalid, warnings = [], []
    requests = result["requests"]
    failed = requests["measured"] - requests["ok"]
    if run.get("halted"):
        invalid.append(f"Cut short: {run['halted']}.")
    elif not requests["ok"]:
        invalid.append("No measured request succeeded.")
    if requests["ok"] and failed > load.max_error_rate * requests["measured"]:
        kinds = ", ".join(f"{entry['count']} {kind}" for kind, entry in requests["errors"].items())
        invalid.append(f"{failed} of {requests['measured']} measured requests failed ({kinds}).")
    lag = result["send_lag_ms"]
    if lag and lag["p99"] > load.max_send_lag_ms:
        invalid.append(f"Send lag p99 is {lag['p99']:.0f} ms, above {load.max_send_lag_ms:.0f} ms.")
    users = load.concurrency[0] if load.arrivals is None else 0
    if 0 < requests["measured"] < users:
        warnings.append(f"Only {requests['measured']} measured requests for {users} users: raise requests.")
    notes = run.get("workers", [])
    busy = max((note["lag_p99_ms"] for note in notes), default=0.0)
    if busy > load.max_send_lag_ms:
        invalid.append(f"The generator could not keep up: its own timer was {busy:.0f} ms late (p99).")
    elif busy > BUSY_LAG_MS:
        warnings.append(f"The generator was busy: its own timer was {busy:.0f} ms late (p99).")
    if stalls := sum(note["stalls"] for note in notes):
        longest = max(note["lag_max_ms"] for note in notes)
        warnings.append(f"The generator stood still {stalls} times, {longest:.0f} ms at most.")
    if jumps := [jump for note in notes for jump in note["clock_jumps_s"]]:
        warnings.append(
            f"The wall clock jumped {len(jumps)} times (by {jumps[0]:+.1f} s first); times are monotonic, not affected."
        )
    if others := {source: count for source, count in result["token_source"].items() if source != USAGE}:
        named = ", ".join(f"{count} by {source}" for source, count in others.items())
        warnings.append(f"Tokens were not counted from the server's continuous usage: {named}.")
    if broken := run.get("broken_prompts"):
        warnings.append(f"{len(broken)} prompts could not be read and were left out (first: {broken[0]}).")
    return invalid, warnings


def row(record: Record) -> dict[str, Any]:
    """One measured request in ``results.json`` and ``requests.csv``."""
    first, per_token = ttft(record), tpot(record)
    return {
        "prompt": record.prompt,
        "category": record.category,
        "turn": record.turn,
        "tokens": record.tokens,
        "prompt_tokens": record.prompt_tokens,
        "busy_s": round(record.end - record.sent, 6),
        "ttft_ms": None if first is None else round(1000 * first, 3),
        "tpot_ms": None if per_token is None else round(1000 * per_token, 4),
        "e2e_ms": round(1000 * e2e(record), 3),
        "histogram": record.histogram,
        "finish": record.finish,
        "error": record.error,
    }


def totals(records: Sequence[Record]) -> tuple[int, int, int]:
    """(completion tokens, verify steps, accepted drafts) of all successful requests, as the server counts them too."""
    fine = [record for record in records if record.ok]
    pooled = acceptance([record.histogram for record in fine])
    return sum(record.tokens for record in fine), pooled.verify_steps, pooled.accepted_drafts


def _start(record: Record) -> float:
    return record.sent if record.intended is None else record.intended
