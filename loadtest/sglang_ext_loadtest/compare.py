"""Methods against each other at the same concurrency; pure arithmetic.

In a closed loop of c users, throughput is c times (tokens / busy time), both summed over requests. The ratio of two
methods' tokens per busy second is therefore their ratio of throughput, and it is a ratio of sums over prompts, which
can be resampled in pairs: a resample draws repeats and prompts, with replacement, the same for both methods and at
every concurrency. Intervals are between the 2.5th and 97.5th percentile of the resampled figures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_ext.evaluation.bootstrap import RESAMPLES, resample

Array = NDArray[np.float64]
Rows = Sequence[Mapping[str, Any]]  # figures.row of one cell's measured requests


@dataclass(frozen=True)
class Ratio:
    """How many times as fast, with its interval; none where there is nothing to judge the spread by."""

    value: float
    low: float | None
    high: float | None
    samples: Array  # [resamples]


def ratio(method: Sequence[Rows], reference: Sequence[Rows], seed: int) -> Ratio | None:
    """Speed of a method over that of a reference at one concurrency.

    Args:
        method, reference: the measured requests of each repeat, paired by position.
        seed: of the resampling; the same seed draws the same prompts.

    Returns:
        None when either has no successful request on a prompt that both answered.
    """
    repeats = min(len(method), len(reference))
    prompts = sorted(_prompts(method[:repeats]) & _prompts(reference[:repeats]))
    if not repeats or not prompts:
        return None
    ours, theirs = _sums(method[:repeats], prompts), _sums(reference[:repeats], prompts)
    value = float(_speed(ours, None, None)[0] / _speed(theirs, None, None)[0])
    if len(prompts) < 2:
        return Ratio(value, None, None, np.full(RESAMPLES, value))
    some_prompts = resample(len(prompts), seed)
    some_repeats = resample(repeats, seed + 1)
    samples = _speed(ours, some_repeats, some_prompts) / _speed(theirs, some_repeats, some_prompts)
    low, high = _interval(samples)
    return Ratio(value, low, high, samples)


@dataclass(frozen=True)
class BreakEven:
    """Where a method stops being faster, as a concurrency; 0 is below the ladder, infinity above it."""

    value: float
    low: float
    high: float


def break_even(ladder: Sequence[int], ratios: Sequence[Ratio]) -> BreakEven | None:
    """The concurrency at which a speed-up first falls to 1, between steps on a line over log2(concurrency).

    Returns:
        None for a ladder of fewer than two steps.
    """
    if len(ladder) < 2:
        return None
    value = crossing(ladder, [entry.value for entry in ratios])
    resampled = np.stack([entry.samples for entry in ratios])  # [steps, resamples]
    crossings = np.array([crossing(ladder, column) for column in resampled.T])
    low, high = _interval(crossings)
    return BreakEven(value, low, high)


def crossing(ladder: Sequence[int], speedups: Sequence[float] | Array) -> float:
    """Concurrency of the first fall to 1; 0 when the first step is already below, infinity when none is."""
    if speedups[0] < 1:
        return 0.0
    for index in range(1, len(ladder)):
        above, below = speedups[index - 1], speedups[index]
        if below < 1:
            left, right = np.log2(ladder[index - 1]), np.log2(ladder[index])
            return float(2 ** (left + (right - left) * (above - 1) / (above - below)))
    return float("inf")


def _interval(samples: Array) -> tuple[float, float]:
    # Order statistics instead of interpolation: samples may be infinite.
    ordered = np.sort(samples)
    last = len(ordered) - 1
    return float(ordered[round(0.025 * last)]), float(ordered[round(0.975 * last)])


def _prompts(repeats: Sequence[Rows]) -> set[str]:
    """Prompts that were answered in every repeat."""
    answered = [{str(row["prompt"]) for row in rows if row["error"] is None} for rows in repeats]
    return set.intersection(*answered) if answered else set()


def _sums(repeats: Sequence[Rows], prompts: Sequence[str]) -> Array:
    """[2, repeats, prompts]: tokens and busy seconds."""
    index = {prompt: position for position, prompt in enumerate(prompts)}
    sums = np.zeros((2, len(repeats), len(prompts)))
    for number, rows in enumerate(repeats):
        for row in rows:
            if row["error"] is None and row["prompt"] in index:
                sums[:, number, index[row["prompt"]]] += (row["tokens"], row["busy_s"])
    return sums


def _speed(sums: Array, repeats: Array | None, prompts: Array | None) -> Array:
    """Tokens per busy second of each resample [resamples]; of everything, [1], without draws."""
    if repeats is None or prompts is None:
        tokens, seconds = sums.sum((1, 2))
        return np.array([tokens / seconds])
    drawn = np.einsum("br,krp,bp->kb", repeats, sums, prompts, optimize=True)
    return np.asarray(drawn[0] / drawn[1], dtype=np.float64)
