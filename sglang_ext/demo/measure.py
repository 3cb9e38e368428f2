"""Held-out prompts through the OpenAI chat API, and the figures of what came back."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_ext.errors import UsageError
from sglang_ext.evaluation.acceptance import acceptance, by_category


@dataclass(frozen=True)
class Prompt:
    """One held-out prompt; only its first turn is asked."""

    id: str
    category: str
    text: str


@dataclass(frozen=True)
class Answer:
    """What the server streamed for one prompt."""

    prompt: Prompt
    text: str
    token_ids: tuple[int, ...]
    histogram: tuple[int, ...]  # verify steps by accepted drafts; empty for plain decoding


def read_prompts(path: Path, per_category: int) -> list[Prompt]:
    """The first ``per_category`` prompts of every category, in the file's order."""
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        prompts = [Prompt(str(line["id"]), str(line["category"]), str(line["turns"][0])) for line in lines]
    except FileNotFoundError:
        raise UsageError(f"There are no prompts at {path}; give the directory of the reference models.") from None
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise UsageError(f"{path} is not a file of prompts ({error!r}); restore it.") from None
    taken: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        group = taken.setdefault(prompt.category, [])
        if len(group) < per_category:
            group.append(prompt)
    return [prompt for group in taken.values() for prompt in group]


def ask(
    port: int, prompts: Sequence[Prompt], *, max_tokens: int, concurrency: int, done: Callable[[Answer], None]
) -> list[Answer]:
    """Stream every prompt's greedy answer; ``done`` is called as each one ends."""
    from openai import OpenAI, OpenAIError

    client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=300)
    model = client.models.list().data[0].id

    def one(prompt: Prompt) -> Answer:
        stream = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": prompt.text}],
            temperature=0,
            max_tokens=max_tokens,
            stream=True,
            extra_body={"return_spec_tokens_details": True, "return_output_ids_in_sglext": True},
        )
        text, extra = "", {}
        for chunk in stream:
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
            extra.update({k: v for k, v in ((chunk.model_extra or {}).get("sglext") or {}).items() if v is not None})
        details = extra.get("spec_tokens_details") or {}
        answer = Answer(
            prompt,
            text,
            tuple(extra["output_ids"][0]),
            tuple(details.get("spec_correct_drafts_histogram") or ()),
        )
        done(answer)
        return answer

    pool = ThreadPoolExecutor(concurrency)
    try:
        return list(pool.map(one, prompts))
    except OpenAIError as error:
        raise UsageError(f"The server stopped answering ({error}); read its log.") from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # an interrupted run ends its streams by stopping the server


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
