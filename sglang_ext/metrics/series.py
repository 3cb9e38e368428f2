"""The Prometheus objects. Import this only in a process that may create metrics.

prometheus_client chooses its storage when it is imported; SGLang's processes share files in PROMETHEUS_MULTIPROC_DIR,
which SGLang sets before it starts them (utils/common.py:2825), and /metrics adds the files up.
"""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter, Gauge, Histogram

from sglang_ext.metrics.rounds import REASONS, Tally

PREFIX = "sglang_ext_"


class SpeculationSeries:
    """Counters of verify steps; every series exists from the start, so that ``rate`` sees the first increase."""

    def __init__(self, labels: dict[str, str], verify_width: int) -> None:
        def counter(name: str, text: str) -> Any:
            return Counter(PREFIX + name, text, list(labels)).labels(**labels)

        def counters(name: str, text: str, label: str, values: list[str]) -> list[Any]:
            family = Counter(PREFIX + name, text, [*labels, label])
            return [family.labels(**labels, **{label: value}) for value in values]

        self.verify_steps = counter(
            "verify_steps_total", "Verify steps, one per request and round; without those of requests already ended."
        )
        self.drafted = counter("drafted_tokens_total", "Draft tokens that the target verified.")
        self.accepted = counter("accepted_tokens_total", "Draft tokens that the target accepted.")
        self.emitted = counter(
            "emitted_tokens_total", "Accepted drafts and the target's own token of each step, before stop trimming."
        )
        self.overshoot = counter(
            "overshoot_steps_total", "Steps of requests that had ended in the round before (overlap scheduling)."
        )
        self.by_position = counters(
            "accepted_by_position_total",
            "Verify steps that accepted the draft at this position (1 is the first behind the anchor).",
            "position",
            [str(position) for position in range(1, verify_width)],
        )
        self.carried_steps = counter("carried_steps_total", "Verify steps whose draft read carried rows.")
        self.carried_rows = counter("carried_rows_total", "Rejected rows that drafts read.")
        self.uncarried = counters(
            "uncarried_steps_total", "Verify steps whose draft read no carried rows.", "reason", list(REASONS)
        )
        self.state_reads = counter(
            "state_reads_total", "Committed recurrent states that drafts read, one per step and source layer."
        )
        self.length: Any = Histogram(
            PREFIX + "acceptance_length",
            "Tokens per verify step: accepted drafts and the target's own token.",
            list(labels),
            buckets=[float(length) for length in range(1, verify_width + 1)],
        ).labels(**labels)

    def add(self, tally: Tally) -> None:
        """Add the sums; an increase of a shared counter costs about a microsecond, so not at every round."""
        steps = tally.verify_steps
        amounts = [
            (self.verify_steps, steps),
            (self.drafted, tally.drafted),
            (self.accepted, tally.accepted),
            (self.emitted, tally.emitted),
            (self.overshoot, tally.overshoot),
            (self.carried_steps, tally.carried_steps),
            (self.carried_rows, tally.carried_rows),
            (self.state_reads, steps * tally.state_layers),
            *zip(self.by_position, tally.accepted_by_position(), strict=True),
            *zip(self.uncarried, tally.uncarried, strict=True),
            # As SGLang does for its inter-token latency (metrics_collector.py:2165): many observations at once.
            *zip(self.length._buckets, tally.steps, strict=False),
            (self.length._sum, tally.emitted),
        ]
        for series, amount in amounts:
            if amount:
                series.inc(amount)


def publish_method(labels: dict[str, str], contract: dict[str, str], accelerators: int, expected: str | None) -> None:
    """Set the gauges that say what this server runs.

    Args:
        labels: of every series, ``method`` included.
        contract: more labels of ``method_info``.
        accelerators: devices behind this scheduler.
        expected: the method the operator asked for, None where nothing was asked.
    """

    def gauge(name: str, text: str, labels: dict[str, str], value: float) -> None:
        Gauge(PREFIX + name, text, list(labels), multiprocess_mode="mostrecent").labels(**labels).set(value)

    gauge("method_info", "What this server runs: the effective contract, in labels.", {**labels, **contract}, 1)
    gauge("accelerators", "Accelerators (ranks) behind this scheduler.", labels, accelerators)
    if expected is not None:
        gauge(
            "method_as_expected",
            "1 where the method is the one in SGLANG_EXT_EXPECTED_METHOD, else 0.",
            {**labels, "expected": expected},
            float(expected == labels["method"]),
        )
