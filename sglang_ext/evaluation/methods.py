"""What is evaluated: one drafter, the references it is compared with, and plain decoding."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_ext.checkpoints import DraftContract, TargetInfo, check, locate, read_contract
from sglang_ext.errors import UsageError
from sglang_ext.settings import CARRIED_ROWS_LIMIT, ORACLE_LOG, ROUNDS

OFF = "off"  # as a reference: the drafter under evaluation with its carry switched off


@dataclass(frozen=True)
class Method:
    """A drafter as it is served; ``carried_rows`` limits a Carryover drafter (None: all rows)."""

    name: str
    contract: DraftContract
    carried_rows: int | None = None

    def words(self, target: str, flags: Sequence[str]) -> list[str]:
        """Arguments of ``sglang-ext serve``."""
        return [target, "--draft", str(self.contract.path), *flags]

    def describe(self) -> dict[str, Any]:
        """The method's entry in the results."""
        return {
            "name": self.name,
            "drafter": str(self.contract.path),
            "algorithm": self.contract.algorithm,
            "drafts": self.contract.drafts,
            "carried_rows": self.carried_rows,
            "embedding": _state(self.contract.embedding_is_zero()),
            "reader": _state(self.contract.reader_is_zero()),
        }


def environment(carried_rows: int | None = None, **more: str) -> dict[str, str]:
    """This process's environment with the switches that a server needs, and no other of ours."""
    kept = {k: v for k, v in os.environ.items() if k not in (CARRIED_ROWS_LIMIT, ORACLE_LOG, ROUNDS)}
    limit = {} if carried_rows is None else {CARRIED_ROWS_LIMIT: str(carried_rows)}
    return {**kept, **limit, **more}


def choose(draft: str, compare: Sequence[str], carried_rows: int | None, target: TargetInfo) -> list[Method]:
    """The drafter under evaluation first, then its references.

    Args:
        draft: directory or Hugging Face name.
        compare: the same, or ``off``.
        carried_rows: limit for the drafter under evaluation; references carry all rows.

    Raises:
        UsageError: a drafter is broken or does not fit, a limit or ``off`` without Carryover, a method given twice.
    """
    contract = _checked(draft, target)
    if not contract.carries and (carried_rows is not None or OFF in compare):
        asked = f"--compare {OFF}" if OFF in compare else "--carried-rows"
        raise UsageError(f"{draft} is no Carryover drafter, so it carries no rows; leave {asked} out.")
    chosen = [(contract, carried_rows)]
    chosen += [(contract, 0) if other == OFF else (_checked(other, target), None) for other in compare]
    seen = [(contract.path.resolve(), limit) for contract, limit in chosen]
    twice = next((path for path, limit in seen if seen.count((path, limit)) > 1), None)
    if twice is not None:
        raise UsageError(f"{twice} would be measured twice in the same way; name each drafter once.")
    labels = _labels([path for path, _ in seen])
    return [
        Method(label + _suffix(limit), contract, limit) for label, (contract, limit) in zip(labels, chosen, strict=True)
    ]


def baseline(methods: Sequence[Method]) -> Method | None:
    """The first reference that is a stock drafter of the first method's kind, reading the same target features."""
    first = methods[0].contract
    for method in methods[1:]:
        other = method.contract
        same = (other.kind, other.target_layer_ids, other.drafts) == (first.kind, first.target_layer_ids, first.drafts)
        if other.method == "none" and same:
            return method
    return None


def _checked(draft: str, target: TargetInfo) -> DraftContract:
    contract = read_contract(locate(draft))
    check(contract, target)
    return contract


def _labels(paths: Sequence[Path]) -> list[str]:
    """Directory names; whole paths where two differ only in those."""
    return [str(path) if any(p.name == path.name and p != path for p in paths) else path.name for path in paths]


def _state(zero: bool | None) -> str | None:
    return None if zero is None else "zero, untrained" if zero else "trained"


def _suffix(limit: int | None) -> str:
    if limit is None:
        return ""
    return ", carry off" if limit == 0 else f", {limit} carried"
