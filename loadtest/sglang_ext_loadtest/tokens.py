"""How many tokens each event of an answer brought."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_ext.errors import UsageError
from sglang_ext_loadtest.sse import Answer, Event

USAGE, TOKENIZER, EVENTS = "usage", "tokenizer", "events"


def load_tokenizer(path: Path) -> Any:
    """A Hugging Face ``tokenizer.json`` (or a directory with one) for servers without continuous usage.

    Raises:
        UsageError: there is none, or the ``tokenizers`` package is missing.
    """
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise UsageError(f"There is no tokenizer at {file}; give the model's tokenizer.json or its directory.")
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise UsageError("Counting by tokenizer needs the package tokenizers; install it.") from None
    return Tokenizer.from_file(str(file))


def count(answer: Answer, tokenizer: Any | None) -> tuple[list[tuple[float, int]], int, str]:
    """Arrivals of tokens in one answer.

    Events before the first one with text are merged into it, and events without new tokens are dropped, so the first
    entry is the first delta and every later one brought at least one token.

    Args:
        answer: a finished or broken stream.
        tokenizer: a ``tokenizers.Tokenizer`` to count with where the server does not state its usage in every event.

    Returns:
        ([time, tokens] per arrival, completion tokens, where the counts come from). With source ``events`` nothing
        better was known than one token per event: figures per token are then wrong for several tokens per event.
    """
    first = next((index for index, event in enumerate(answer.events) if event.text), None)
    if first is None:
        return [], answer.total or 0, USAGE if answer.total is not None else EVENTS
    if answer.continuous:
        totals, source = _by_usage(answer.events), USAGE
    elif tokenizer is not None:
        totals, source = _by_tokenizer(answer.events, tokenizer), TOKENIZER
    else:
        texts = [event.text != "" for event in answer.events]
        totals, source = [sum(texts[: index + 1]) for index in range(len(texts))], EVENTS
    arrivals = [(answer.events[first].at, totals[first])]
    for event, before, total in zip(answer.events[first + 1 :], totals[first:], totals[first + 1 :], strict=False):
        if total > before:
            arrivals.append((event.at, total - before))
    return arrivals, answer.total if answer.total is not None else totals[-1], source


def _by_usage(events: Sequence[Event]) -> list[int]:
    totals: list[int] = []
    for event in events:
        totals.append(max(event.total or 0, totals[-1] if totals else 0))
    return totals


def _by_tokenizer(events: Sequence[Event], tokenizer: Any) -> list[int]:
    """Tokens whose last character has arrived, event by event."""
    encoding = tokenizer.encode("".join(event.text for event in events), add_special_tokens=False)
    ends = sorted(end for _, end in encoding.offsets)
    totals, characters, seen = [], 0, 0
    for event in events:
        characters += len(event.text)
        while seen < len(ends) and ends[seen] <= characters:
            seen += 1
        totals.append(seen)
    return totals
