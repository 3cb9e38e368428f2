"""Confidence intervals by resampling prompts; pure arithmetic.

Verify steps of one prompt are not independent, so whole prompts are drawn: a resample takes as many prompts as there
are, with replacement, and the figure is computed anew from the prompts' pooled counts. The interval is between the
2.5th and the 97.5th percentile of the resampled figures (percentile bootstrap). Where two methods are compared both
see the same resamples, which pairs them: what a prompt does to both cancels.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sglang_ext.evaluation.acceptance import Histogram

Array = NDArray[np.float64]
Interval = tuple[float, float]

RESAMPLES = 5000
LEVEL = 0.95
METHOD = f"{LEVEL:.0%} percentile bootstrap over prompts, {RESAMPLES} resamples, methods paired by prompt"


def resample(prompts: int, seed: int, resamples: int = RESAMPLES) -> Array:
    """How often each resample draws each prompt, [resamples, prompts]; the same for the same arguments."""
    draws = np.random.default_rng(seed).multinomial(prompts, np.full(prompts, 1 / prompts), size=resamples)
    return draws.astype(np.float64)


def interval(values: Array) -> Interval | None:
    """The percentile interval of resampled figures [resamples]; None where any is undefined or there is no spread to
    judge by (a single prompt)."""
    if values.size == 0 or not np.isfinite(values).all():
        return None
    low, high = np.percentile(values, [50 * (1 - LEVEL), 50 * (1 + LEVEL)])
    return float(low), float(high)


class Counts:
    """One method's verify steps, prompt by prompt.

    Args:
        histograms: one per prompt; entry ``a`` counts its verify steps that accepted ``a`` drafts.
        drafts: drafts proposed per verify step.
    """

    def __init__(self, histograms: Sequence[Histogram], drafts: int) -> None:
        table = np.zeros((len(histograms), drafts + 1))
        for row, histogram in zip(table, histograms, strict=True):
            row[: len(histogram)] = histogram
        self.steps: Array = table.sum(1)  # [prompts]
        self.accepted: Array = table @ np.arange(drafts + 1.0)  # [prompts]
        self.survivors: Array = table[:, ::-1].cumsum(1)[:, -2::-1]  # [prompts, drafts]: steps that accepted > k drafts

    def length(self, draws: Array) -> Array:
        """Acceptance length (micro average) of each resample [resamples]; NaN without a verify step."""
        with np.errstate(invalid="ignore"):
            return 1 + draws @ self.accepted / (draws @ self.steps)

    def mean_of_prompts(self, draws: Array) -> Array:
        """Mean of the prompts' own acceptance lengths, of each resample [resamples]."""
        some = self.steps > 0
        lengths = np.divide(self.accepted, self.steps, out=np.zeros_like(self.steps), where=some)
        with np.errstate(invalid="ignore"):
            return 1 + draws @ lengths / (draws @ some.astype(np.float64))

    def survival(self, draws: Array) -> Array:
        """Prefix survival of each resample [resamples, drafts]."""
        with np.errstate(invalid="ignore"):
            return draws @ self.survivors / (draws @ self.steps)[:, None]


def gain(method: Counts, reference: Counts, seed: int) -> tuple[float | None, Interval | None]:
    """By how much a method's acceptance length exceeds a reference's on the same prompts, as a fraction.

    Returns:
        length(method) / length(reference) - 1 and its interval; None where a length is undefined, and no interval for
        fewer than two prompts.
    """
    prompts = len(method.steps)
    if len(reference.steps) != prompts:
        raise ValueError(f"{prompts} prompts cannot be paired with {len(reference.steps)}")
    if not method.steps.sum() or not reference.steps.sum():
        return None, None
    every = np.ones((1, prompts))
    value = float(method.length(every)[0] / reference.length(every)[0] - 1)
    if prompts < 2:
        return value, None
    draws = resample(prompts, seed)
    return value, interval(method.length(draws) / reference.length(draws) - 1)
