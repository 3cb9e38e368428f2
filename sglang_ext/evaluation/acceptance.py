"""Acceptance figures from SGLang's ``spec_correct_drafts_histogram`` (schedule_batch.py:1566); pure arithmetic.

A histogram is a list whose entry ``a`` counts the verify steps of one request that accepted ``a`` drafts. The server's
own ``spec_accept_length`` divides completion tokens by verify steps, so it counts the token of the prefill and cuts the
last step; the acceptance length here does neither.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Histogram = Sequence[int]


@dataclass(frozen=True)
class Acceptance:
    """Figures over a set of requests; lengths are tokens per verify step, the target's own (bonus) token included."""

    requests: int
    verify_steps: int
    accepted_drafts: int
    length: float | None  # micro average: 1 + accepted drafts / verify steps; None without a verify step
    mean_of_requests: float | None  # mean of the requests' own lengths; those without a verify step are left out
    survival: tuple[float, ...]  # entry k: share of verify steps that accepted at least k + 1 drafts


def pool(histograms: Iterable[Histogram]) -> list[int]:
    """Sum of histograms of any lengths."""
    total: list[int] = []
    for histogram in histograms:
        total += [0] * (len(histogram) - len(total))
        for accepted, steps in enumerate(histogram):
            if steps < 0:
                raise ValueError(f"a histogram counts verify steps, but this one holds {steps}: {list(histogram)}")
            total[accepted] += steps
    return total


def acceptance(histograms: Sequence[Histogram], drafts: int | None = None) -> Acceptance:
    """Figures over requests, one histogram each.

    Args:
        histograms: one per request; empty for a request that ended in its prefill.
        drafts: drafts proposed per verify step, the length of ``survival``; default is the most that was accepted.

    Raises:
        ValueError: a negative count, or more accepted drafts than ``drafts``.
    """
    pooled = pool(histograms)
    while pooled and pooled[-1] == 0:
        pooled.pop()
    if drafts is None:
        drafts = max(len(pooled) - 1, 0)
    if len(pooled) > drafts + 1:
        raise ValueError(f"a verify step accepted {len(pooled) - 1} drafts, more than the {drafts} proposed")
    steps, accepted = sum(pooled), _accepted(pooled)
    lengths = [1 + _accepted(histogram) / sum(histogram) for histogram in histograms if sum(histogram)]
    return Acceptance(
        requests=len(histograms),
        verify_steps=steps,
        accepted_drafts=accepted,
        length=1 + accepted / steps if steps else None,
        mean_of_requests=sum(lengths) / len(lengths) if lengths else None,
        survival=tuple(sum(pooled[k + 1 :]) / steps for k in range(drafts)) if steps else (),
    )


def by_category(requests: Iterable[tuple[str, Histogram]], drafts: int | None = None) -> dict[str, Acceptance]:
    """Figures per category, in the order the categories first appear."""
    groups: dict[str, list[Histogram]] = {}
    for category, histogram in requests:
        groups.setdefault(category, []).append(histogram)
    return {category: acceptance(histograms, drafts) for category, histograms in groups.items()}


def _accepted(histogram: Histogram) -> int:
    return sum(accepted * steps for accepted, steps in enumerate(histogram))
