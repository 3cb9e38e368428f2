"""The figures of one method's answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_ext.evaluation.acceptance import acceptance, by_category
from sglang_ext.evaluation.client import Answer


def figures(method: str, answers: Sequence[Answer], reference: Sequence[Answer]) -> dict[str, Any]:
    """One method's row: acceptance lengths (micro average), target steps after the prefill, identity of the output."""
    row: dict[str, Any] = {"method": method, "prompts": len(answers)}
    row["tokens"] = sum(len(answer.token_ids) for answer in answers)
    row["identical"] = [a.token_ids for a in answers] == [r.token_ids for r in reference]
    row["different"] = [a.prompt.id for a, r in zip(answers, reference, strict=True) if a.token_ids != r.token_ids]
    if not any(answer.histogram for answer in answers):
        # A step of plain decoding is one row of the target and emits one token; the prefill emits the first.
        categories = dict.fromkeys(answer.prompt.category for answer in answers)
        steps = row["tokens"] - len(answers)
        return row | {"acceptance_length": 1.0, "verify_steps": steps, "by_category": dict.fromkeys(categories, 1.0)}
    total = acceptance([answer.histogram for answer in answers])
    groups = by_category((answer.prompt.category, answer.histogram) for answer in answers)
    return row | {
        "acceptance_length": total.length,
        "mean_of_prompts": total.mean_of_requests,
        "verify_steps": total.verify_steps,
        "survival": list(total.survival),
        "by_category": {category: group.length for category, group in groups.items()},
    }
