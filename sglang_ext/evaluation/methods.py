"""What is evaluated: one drafter, the references it is compared with, and plain decoding."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sglang_ext.checkpoints import DraftContract, TargetInfo, check, locate, read_contract
from sglang_ext.errors import UsageError
from sglang_ext.settings import CARRIED_ROWS_LIMIT, LOOKUP, ORACLE_LOG, READ_STATES, ROUNDS, WRONG_STATES

OFF = "off"  # as a reference: the drafter under evaluation with its carry switched off
NO_LOOKUP = "no-lookup"  # with its lookup switched off


@dataclass(frozen=True)
class Method:
    """A drafter as it is served.

    ``carried_rows`` limits a Carryover drafter (None: all it was made for); ``states`` feeds a reader wrong ones (None:
    right); ``looks_up`` is whether a lookup table is used where there is one.
    """

    name: str
    contract: DraftContract
    carried_rows: int | None = None
    states: str | None = None
    looks_up: bool = True

    @property
    def context_rows(self) -> int | None:
        """Most rejected rows that its drafts read as context; None is all."""
        limits = [n for n in (self.contract.carried_rows_limit, self.carried_rows) if n is not None]
        return min(limits) if limits else None

    @property
    def lookup(self) -> tuple[float, ...] | None:
        """The lookup table in use; carrying switched off is the lookup switched off."""
        return self.contract.lookup if self.looks_up and self.carried_rows != 0 else None

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
            "carried_rows": self.context_rows,
            "states": (self.states or "committed") if self.contract.reads else None,
            "lookup": self.lookup,
            "embedding": _state(self.contract.embedding_is_zero()),
            "reader": _state(self.contract.reader_is_zero()),
        }


def environment(
    carried_rows: int | None = None, states: str | None = None, looks_up: bool = True, **more: str
) -> dict[str, str]:
    """This process's environment with the switches that a server needs, and no other of ours."""
    ours = (CARRIED_ROWS_LIMIT, LOOKUP, ORACLE_LOG, READ_STATES, ROUNDS)
    kept = {k: v for k, v in os.environ.items() if k not in ours}
    limit = {} if carried_rows is None else {CARRIED_ROWS_LIMIT: str(carried_rows)}
    read = {} if states is None else {READ_STATES: states}
    look = {} if looks_up else {LOOKUP: "off"}
    return {**kept, **limit, **read, **look, **more}


def choose(draft: str, compare: Sequence[str], carried_rows: int | None, target: TargetInfo) -> list[Method]:
    """The drafter under evaluation first, then its references.

    Args:
        draft: directory or Hugging Face name.
        compare: the same, or ``off``, ``no-lookup`` or one of ``WRONG_STATES``: the drafter itself without its carry,
            without its lookup, or fed so.
        carried_rows: limit for the drafter under evaluation; other drafters carry all rows.

    Raises:
        UsageError: a drafter is broken or does not fit, a limit or ``off`` without Carryover, ``no-lookup`` without a
            table, wrong states without a reader, a method given twice.
    """
    contract = _checked(draft, target)
    if not contract.carries and (carried_rows is not None or OFF in compare):
        asked = f"--compare {OFF}" if OFF in compare else "--carried-rows"
        raise UsageError(f"{draft} is no Carryover drafter, so it carries no rows; leave {asked} out.")
    if fed := [word for word in compare if word in WRONG_STATES and not contract.reads]:
        raise UsageError(f"{draft} is no ReaDy drafter, so it reads no states; leave --compare {fed[0]} out.")
    if NO_LOOKUP in compare and contract.lookup is None:
        raise UsageError(f"{draft} has no lookup table; leave --compare {NO_LOOKUP} out.")
    chosen = [Method("", contract, carried_rows)]
    for other in compare:
        if other == OFF:
            chosen.append(Method("", contract, 0))
        elif other == NO_LOOKUP:
            chosen.append(Method("", contract, carried_rows, looks_up=False))
        elif other in WRONG_STATES:
            chosen.append(Method("", contract, carried_rows, other))
        else:
            chosen.append(Method("", _checked(other, target)))
    seen = [(m.contract.path.resolve(), m.carried_rows, m.states, m.lookup) for m in chosen]
    twice = next((method[0] for method in seen if seen.count(method) > 1), None)
    if twice is not None:
        raise UsageError(f"{twice} would be measured twice in the same way; name each drafter once.")
    labels = _labels([method.contract.path for method in chosen])
    return [replace(m, name=label + _suffix(m)) for label, m in zip(labels, chosen, strict=True)]


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


def _suffix(method: Method) -> str:
    limit = method.carried_rows
    carried = "" if limit is None else ", carry off" if limit == 0 else f", {limit} carried"
    return carried + (f", {method.states} states" if method.states else "") + ("" if method.looks_up else ", no lookup")
