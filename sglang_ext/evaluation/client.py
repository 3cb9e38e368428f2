"""Prompts through a running server's OpenAI chat API, and what came back."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from sglang_ext.errors import UsageError
from sglang_ext.evaluation.prompts import Prompt


@dataclass(frozen=True)
class Answer:
    """What the server streamed for one turn of one prompt."""

    prompt: Prompt
    text: str
    token_ids: tuple[int, ...]
    histogram: tuple[int, ...]  # verify steps by accepted drafts; empty for plain decoding
    input_ids: tuple[int, ...] = ()  # the turn as the chat template and the tokenizer made it
    request: str = ""  # the server's id of the request


def ask(
    port: int,
    prompts: Sequence[Prompt],
    *,
    max_tokens: int,
    concurrency: int,
    done: Callable[[Answer], None],
    temperature: float = 0.0,
    all_turns: bool = False,
) -> list[Answer]:
    """Stream the answer to every prompt's first turn, or to each of its turns behind the answers before it.

    Args:
        done: called as each answer ends, from the thread that asked.

    Returns:
        The answers in the prompts' order, a prompt's turns behind each other.

    Raises:
        UsageError: the server refused a request or stopped answering.
    """
    from openai import OpenAI, OpenAIError

    client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=600)

    def one(prompt: Prompt) -> list[Answer]:
        messages: list[dict[str, str]] = []
        answers = []
        for turn in (prompt.text, *prompt.more) if all_turns else (prompt.text,):
            messages.append({"role": "user", "content": turn})
            answers.append(_stream(client, model, prompt, messages, temperature, max_tokens))
            messages.append({"role": "assistant", "content": answers[-1].text})
            done(answers[-1])
        return answers

    pool = ThreadPoolExecutor(concurrency)
    try:
        model = client.models.list().data[0].id
        return [answer for answers in pool.map(one, prompts) for answer in answers]
    except OpenAIError as error:
        raise UsageError(f"The server stopped answering ({error}); read its log.") from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # an interrupted run ends its streams by stopping the server


def _stream(
    client: Any, model: str, prompt: Prompt, messages: list[dict[str, str]], temperature: float, max_tokens: int
) -> Answer:
    stream = client.chat.completions.create(
        model=model,
        messages=list(messages),
        temperature=temperature,
        max_tokens=max_tokens,
        stream=True,
        extra_body={
            "return_spec_tokens_details": True,
            "return_output_ids_in_sglext": True,
            "return_input_ids_in_sglext": True,
        },
    )
    text, request, extra = "", "", {}
    for chunk in stream:
        request = chunk.id or request
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        extra.update({k: v for k, v in ((chunk.model_extra or {}).get("sglext") or {}).items() if v is not None})
    details = extra.get("spec_tokens_details") or {}
    return Answer(
        prompt,
        text,
        tuple(extra["output_ids"][0]),
        tuple(details.get("spec_correct_drafts_histogram") or ()),
        tuple(extra["input_ids"]),
        request,
    )


def lead(port: int, input_ids: Sequence[int], first: int, second: int) -> float | None:
    """By how much the server's log probability of ``first`` exceeds that of ``second`` behind ``input_ids``.

    None where ``second`` is not among the server's first 20 choices.
    """
    body = {
        "input_ids": list(input_ids),
        "sampling_params": {"temperature": 0, "max_new_tokens": 1},
        "return_logprob": True,
        "top_logprobs_num": 20,
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/generate",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        meta = json.loads(answer.read())["meta_info"]
    found = {int(token): float(value) for value, token, _ in meta["output_top_logprobs"][0]}
    return found[first] - found[second] if first in found and second in found else None


def tie(port: int) -> float:
    """Lead in log probability up to which rounding may decide between two tokens, by the dtype a server computes in.

    Batches of other shapes sum in another order. Near 16 and above bfloat16 logits lie 0.125 apart: two such steps.
    """
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/server_info", timeout=60) as answer:
        return 1e-3 if json.loads(answer.read()).get("dtype") == "float32" else 0.25
