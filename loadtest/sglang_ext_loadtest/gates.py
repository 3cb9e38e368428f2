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
    r"^\s*(?:(?P<method>[^@:]+?)(?:@(?P<level>[\d.]+|\*))?\s*:)?\s*(?P<figure>[\w.]+)\s*"
    r"(?P<operator><=|>=|<|>)\s*(?P<limit>-?\d*\.?\d+(?:e-?\d+)?)\s*$"
)


@dataclass(frozen=True)
class Gate:
    """One condition; ``*`` stands for every method or every concurrency."""

    text: str
    method: str
    level: str
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
            match["level"] or "*",
            tuple(match["figure"].split(".")),
            match["operator"],
            float(match["limit"]),
        )

    def check(self, groups: Sequence[Mapping[str, Any]]) -> list[str]:
        """What speaks against it among groups (``summary.groups``), a sentence each; empty when it holds."""
        matching = [
            group
            for group in groups
            if self.method in ("*", group["method"]) and self.level in ("*", f"{group['level']:g}")
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
