"""What the demo serves: a reference target with its drafter, plain and with each mechanism."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang_ext.checkpoints import DraftContract, check, read_contract, read_target
from sglang_ext.errors import UsageError

PLAIN = "plain decoding"
MECHANISMS = {"dense": ("carryover",), "hybrid": ("ready", "ready-carryover")}
"""Which forms of its drafter are shown on the reference target of each kind."""


@dataclass(frozen=True)
class Suite:
    """One target, and what is served on it in turn, plain decoding first."""

    target: Path
    words: dict[str, list[str]]  # method -> arguments of ``sglang-ext serve``
    last: DraftContract  # the drafter of the last method


def suite(models: Path, target: str, draft: str, mechanisms: Sequence[str]) -> Suite:
    """The reference target, its drafter and that drafter's trained forms ``MECHANISM-DRAFT`` in ``models``.

    Raises UsageError when one of them is missing, does not fit the target or is untrained.
    """
    drafters = [models / name for name in (draft, *(f"{mechanism}-{draft}" for mechanism in mechanisms))]
    for path in (models / target, *drafters):
        if not (path / "config.json").exists():
            raise UsageError(f"The reference model {path} is missing; run in the repository's root or give --models.")
    info = read_target(models / target)
    base, *forms = map(read_contract, drafters)
    check(base, info)
    served = str(info.path)
    words = {PLAIN: [served], base.algorithm: [served, "--draft", str(base.path), "--method", "none"]}
    for form in forms:
        check(form, info)
        if form.embedding_is_zero() or form.reader_is_zero():
            raise UsageError(f"{form.path} is still untrained, so its figures would be no result; train it first.")
        words[form.algorithm] = [served, "--draft", str(form.path)]
    return Suite(info.path, words, (base, *forms)[-1])
