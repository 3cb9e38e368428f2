"""Held-out prompts from JSONL files: one object a line, ``{"id", "category", "turns": [...]}``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_ext.errors import UsageError


@dataclass(frozen=True)
class Prompt:
    """One held-out prompt: the user's first turn, and those that follow it where there are more."""

    id: str
    category: str
    text: str
    more: tuple[str, ...] = ()


def read_prompts(paths: Path | Sequence[Path], per_category: int | None = None) -> list[Prompt]:
    """The prompts of one or more files, in their order; at most ``per_category`` of each category, grouped by it.

    Public sets drop in: Spec-Bench's ``question_id`` is read as ``id``; without an id a line's number is taken, and
    without a category the file's name. Of several files an id gets the file's name in front.

    Raises:
        UsageError: a file is missing or empty, or a line (named by its number) is broken or repeats an id.
    """
    paths = [paths] if isinstance(paths, Path) else list(paths)
    prompts: list[Prompt] = []
    for path in paths:
        prompts += _read(path, f"{path.stem}/" if len(paths) > 1 else "")
    if per_category is None:
        return prompts
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.category, []).append(prompt)
    return [prompt for group in groups.values() for prompt in group[:per_category]]


def _read(path: Path, prefix: str) -> list[Prompt]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise UsageError(f"There are no prompts at {path} ({reason}); give a JSONL file of prompts.") from None
    prompts: dict[str, Prompt] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            prompt = _prompt(json.loads(line), number, path.stem, prefix)
        except ValueError as error:
            raise UsageError(f"Line {number} of {path} is no prompt ({error}); mend or remove it.") from None
        if prompt.id in prompts:
            raise UsageError(f"Line {number} of {path} repeats the id {prompt.id!r}; give each prompt its own.")
        prompts[prompt.id] = prompt
    if not prompts:
        raise UsageError(f"{path} holds no prompts; give a JSONL file with one prompt a line.")
    return list(prompts.values())


def _prompt(record: Any, number: int, stem: str, prefix: str) -> Prompt:
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    turns = record.get("turns")
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise ValueError('"turns" must be a list of texts')
    key = record.get("id", record.get("question_id", number))
    return Prompt(f"{prefix}{key}", str(record.get("category", stem)), turns[0], tuple(turns[1:]))
