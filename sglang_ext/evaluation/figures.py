"""From answers to records: acceptance by category, gains over references, identity of the output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_ext.evaluation.acceptance import acceptance, pool
from sglang_ext.evaluation.bootstrap import Counts, gain, interval, resample
from sglang_ext.evaluation.client import Answer

ALL = "all"  # the category of records over all prompts


@dataclass(frozen=True)
class PromptTrace:
    """One method on one prompt: its turns' histograms together."""

    id: str
    category: str
    tokens: int
    histogram: tuple[int, ...]


def traces(answers: Sequence[Answer]) -> list[PromptTrace]:
    """One trace per prompt, in the order the prompts first appear."""
    groups: dict[str, list[Answer]] = {}
    for answer in answers:
        groups.setdefault(answer.prompt.id, []).append(answer)
    return [
        PromptTrace(
            id,
            group[0].prompt.category,
            sum(len(answer.token_ids) for answer in group),
            tuple(pool(answer.histogram for answer in group)),
        )
        for id, group in groups.items()
    ]


def selections(prompts: Sequence[PromptTrace]) -> dict[str, list[int]]:
    """Indices of the prompts of each category, and of all."""
    groups: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        groups.setdefault(prompt.category, []).append(index)
    return {**groups, ALL: list(range(len(prompts)))}


def records(prompts: Sequence[PromptTrace], drafts: int, seed: int) -> list[dict[str, Any]]:
    """Acceptance length, mean of prompts and prefix survival with their intervals, per category and over all."""
    rows = []
    for category, chosen in selections(prompts).items():
        histograms = [prompts[index].histogram for index in chosen]
        figures, counts = acceptance(histograms, drafts), Counts(histograms, drafts)
        draws = resample(len(chosen), seed) if len(chosen) > 1 and figures.verify_steps else None
        survival = counts.survival(draws) if draws is not None else None
        rows.append(
            {
                "category": category,
                "prompts": len(chosen),
                "verify_steps": figures.verify_steps,
                "acceptance_length": figures.length,
                "interval": None if draws is None else interval(counts.length(draws)),
                "mean_of_prompts": figures.mean_of_requests,
                "mean_of_prompts_interval": None if draws is None else interval(counts.mean_of_prompts(draws)),
                "survival": list(figures.survival),
                "survival_intervals": None if survival is None else [interval(column) for column in survival.T],
            }
        )
    return rows


def comparisons(
    method: Sequence[PromptTrace], reference: Sequence[PromptTrace], drafts: int, reference_drafts: int, seed: int
) -> list[dict[str, Any]]:
    """The gain of a method over a reference on the same prompts, per category and pooled over all.

    Raises:
        ValueError: the prompts are not the same.
    """
    if [prompt.id for prompt in method] != [prompt.id for prompt in reference]:
        raise ValueError("a paired comparison needs the same prompts in the same order")
    rows = []
    for category, chosen in selections(method).items():
        counts = Counts([method[index].histogram for index in chosen], drafts)
        other = Counts([reference[index].histogram for index in chosen], reference_drafts)
        value, span = gain(counts, other, seed)
        rows.append({"category": category, "prompts": len(chosen), "gain": value, "interval": span})
    return rows


def gains(rows: Sequence[dict[str, Any]], roles: Mapping[str, str]) -> list[dict[str, Any]]:
    """The comparisons of :func:`comparisons` with the references that have a role, side by side.

    ``roles`` maps a field's name to a reference. One row per temperature and category; gains are fractions.
    """
    found: dict[tuple[float, str], dict[str, Any]] = {}
    for role, reference in roles.items():
        for row in rows:
            if row["reference"] == reference:
                head = {name: row[name] for name in ("method", "temperature", "category", "prompts")}
                entry = found.setdefault((row["temperature"], row["category"]), head)
                entry |= {role: row["gain"], f"{role}_interval": row["interval"]}
    return list(found.values())


@dataclass(frozen=True)
class Difference:
    """Where an answer first leaves plain decoding's; a token is None where that answer has ended."""

    id: str
    position: int  # index of the generated token
    input_ids: tuple[int, ...]  # what both saw before it
    expected: int | None
    found: int | None


def differences(answers: Sequence[Answer], plain: Sequence[Answer]) -> list[Difference]:
    """First difference of every answer that is not plain decoding's; turns behind a difference are not compared."""
    found = []
    for answer, reference in zip(answers, plain, strict=True):
        ours, theirs = answer.token_ids, reference.token_ids
        if ours == theirs or answer.input_ids != reference.input_ids:
            continue
        same = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
        position = min(len(ours), len(theirs)) if same is None else same
        found.append(
            Difference(
                answer.prompt.id,
                position,
                (*reference.input_ids, *theirs[:position]),
                theirs[position] if position < len(theirs) else None,
                ours[position] if position < len(ours) else None,
            )
        )
    return found
