"""What the demo serves: a reference target with its drafter, plain and with each mechanism."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang_ext.checkpoints import DraftContract, TargetInfo, check, read_contract, read_target
from sglang_ext.commands.convert import convert, convert_ready
from sglang_ext.errors import UsageError
from sglang_ext.ready.config import ReadyConfig

PLAIN = "plain decoding"
MECHANISMS = {"dense": ("carryover",), "hybrid": ("ready", "ready-carryover")}
"""Which forms of its drafter are shown on the reference target of each kind."""


@dataclass(frozen=True)
class Suite:
    """One target, and what is served on it in turn, plain decoding first."""

    target: Path
    words: dict[str, list[str]]  # method -> arguments of ``sglang-ext serve``
    untrained: tuple[str, ...]  # methods whose mechanism has never been trained
    last: DraftContract  # the drafter of the last method


def suite(models: Path, target: str, draft: str, mechanisms: Sequence[str], work: Path) -> Suite:
    """The reference target and drafter in ``models``; a form of it that is not there is made in ``work``, untrained.

    Raises UsageError when one of the two is missing or they do not fit.
    """
    paths = models / target, models / draft
    for path in paths:
        if not (path / "config.json").exists():
            raise UsageError(f"The reference model {path} is missing; run in the repository's root or give --models.")
    base, info = read_contract(paths[1]), read_target(paths[0])
    check(base, info)
    served = str(paths[0])
    words = {PLAIN: [served], base.algorithm: [served, "--draft", str(base.path), "--method", "none"]}
    untrained: list[str] = []
    last = base
    for mechanism in mechanisms:
        last = _form(base, models / f"{mechanism}-{draft}", mechanism, info, work)
        check(last, info)
        words[last.algorithm] = [served, "--draft", str(last.path)]
        if last.embedding_is_zero() or last.reader_is_zero():
            untrained.append(last.algorithm)
    return Suite(paths[0], words, tuple(untrained), last)


def _form(base: DraftContract, trained: Path, mechanism: str, target: TargetInfo, work: Path) -> DraftContract:
    """The drafter with a mechanism: the trained one, else what ``convert`` makes of the stock one."""
    if (trained / "config.json").exists():
        return read_contract(trained)
    carrying, made = work / f"{trained.name}.part", work / trained.name
    for path in (carrying, made):
        shutil.rmtree(path, ignore_errors=True)
    if mechanism == "carryover":
        return convert(base, made)
    if target.recurrent is None:
        raise UsageError(f"{target.path} has no recurrent layers whose states could be read; give the hybrid target.")
    start = convert(base, carrying) if mechanism == "ready-carryover" else base
    return convert_ready(start, made, ReadyConfig.for_target(target.recurrent))
