"""Conditions on the results that decide the exit code, for continuous integration.

``[METHOD@CONCURRENCY:]FIGURE OPERATOR NUMBER``, for example::

    *:error_rate<=0
    DSPARK@4:ttft_ms.p95<=800
    CARRYOVER_DSPARK@1:speedup.plain>=1.2
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_ext.errors import UsageError

OPERATORS = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}
FORM = re.compile(
    r"^\s*(?:(?P<method>[^@:]+?)(?:@(?P<level>\d+(?:\.\d+)?|\*))?\s*:)?\s*(?P<figure>[\w.]+)\s*"
    r"(?P<operator><=|>=|<|>)\s*(?P<limit>-?\d*\.?\d+(?:e-?\d+)?)\s*$"
)
# The figures of a group of ``summary.groups``; a gate on anything else would only fail once all is measured.
FIGURES = re.compile(
    r"""repeats|invalid_repeats|requests|error_rate|user_tok_s|matched_tok_s|slo_met
    |throughput\.(output_tok_s|low|high|requests_s)
    |(ttft|tpot|e2e|itl|chunk|send_lag)_ms\.(mean|p50|p90|p95|p99)
    |goodput\.(share|requests_s|output_tok_s)
    |acceptance\.(length|mean_of_requests|verify_steps|accepted_drafts|by_category\.\w+)
    |speedup\.(?P<role>plain|stock)(\.(value|low|high))?""",
    re.VERBOSE,
)


@dataclass(frozen=True)
class Gate:
    """One condition; the method ``*`` stands for every method, the level None for every concurrency."""

    text: str
    method: str
    level: float | None
    figure: tuple[str, ...]
    operator: str
    limit: float

    @classmethod
    def parse(cls, text: str) -> Gate:
        """Raises UsageError when the text is no gate."""
        match = FORM.match(text)
        if match is None:
            raise UsageError(f"{text!r} is no gate; write METHOD@CONCURRENCY:FIGURE<=NUMBER, such as *:error_rate<=0.")
        return cls(
            text,
            match["method"] or "*",
            None if match["level"] in (None, "*") else float(match["level"]),
            tuple(match["figure"].split(".")),
            match["operator"],
            float(match["limit"]),
        )

    def fit(self, methods: Sequence[str], levels: Sequence[float], roles: Sequence[str | None]) -> None:
        """Raises UsageError when a sweep of these will have nothing that the gate speaks of.

        Args:
            methods: names of the sweep's methods.
            levels: its ladder.
            roles: what speed-ups are counted against; nothing in an open loop.
        """
        figure = FIGURES.fullmatch(".".join(self.figure))
        if self.method not in ("*", *methods):
            problem = f"the sweep has no method {self.method}; name one of {', '.join(methods)}, or *"
        elif self.level not in (None, *levels):
            problem = f"{self.level:g} is not on the ladder; name one of {', '.join(f'{x:g}' for x in levels)}, or *"
        elif figure is None:
            problem = (
                f"{'.'.join(self.figure)} is no figure; name one of summary.groups in results.json, such as "
                "error_rate, ttft_ms.p95, throughput.output_tok_s, acceptance.length or speedup.plain"
            )
        elif figure["role"] not in (None, *roles):
            problem = f"speed-ups need a closed loop and a method with the role {figure['role']}"
        else:
            return
        raise UsageError(f"The gate {self.text!r} cannot hold: {problem}.")

    def check(self, groups: Sequence[Mapping[str, Any]]) -> list[str]:
        """What speaks against it among groups (``summary.groups``), a sentence each; empty when it holds."""
        matching = [
            group for group in groups if self.method in ("*", group["method"]) and self.level in (None, group["level"])
        ]
        if not matching:
            return [f"{self.text}: nothing was measured that it speaks of."]
        failures = []
        for group in matching:
            value: Any = group
            for key in self.figure:
                value = value.get(key) if isinstance(value, Mapping) else None
            value = value.get("value") if isinstance(value, Mapping) else value
            where = f"{group['method']} at {group['level']:g}"
            if not isinstance(value, int | float):
                failures.append(f"{self.text}: {where} has no figure {'.'.join(self.figure)}.")
            elif not OPERATORS[self.operator](value, self.limit):
                failures.append(f"{self.text}: {where} has {value:.4g}.")
        return failures
