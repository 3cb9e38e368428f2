"""``sglang-ext train regenerate``: the target answers the prompts of the corpus; a drafter learns from its answers.

Written in the format of ``sglang-ext train encode``, with two more arrays: ``temperatures.npy`` (fp32 [documents]) and
``seeds.npy`` (int64 [documents]). A share of the documents is greedy (temperature 0), the rest is sampled, each from a
seed of its own: a document's answer depends on the model, the prompt and these two, not on the batch it was made in.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sglang_ext.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from sglang_ext.training.encode import TokenDataset

_WINDOW = 16  # batches whose prompts are sorted by length together


@dataclass(frozen=True)
class Request:
    """One answer to make: the prompt of ``document`` at a temperature (0 is greedy) from a seed."""

    document: int
    temperature: float
    seed: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--target", type=Path, required=True, help="folder of the target")
    add("--tokens", type=Path, default=Path("build/tokens"), help="the prompts, from `encode`")
    add("--out", type=Path, required=True, help="folder for the answers, train and held-out")
    add("--copies", type=int, default=1, help="answers to each training prompt")
    add("--limit", type=int, help="at most so many training prompts")
    add("--held-out-limit", type=int, default=512, help="at most so many held-out prompts")
    add("--max-prompt", type=int, default=192, help="tokens; longer prompts are left out")
    add("--max-new-tokens", type=int, default=160, help="longest answer")
    add("--greedy", type=float, default=0.5, help="share of greedy answers to training prompts")
    add("--held-out-greedy", type=float, default=1.0, help="the same of held-out prompts")
    add("--temperature", type=float, default=0.7, help="of the others")
    add("--seed", type=int, default=0, help="of the choice and of the sampling")
    add("--batch-size", type=int, default=1024, help="answers at a time")
    add("--cache", choices=("dynamic", "static"), default="dynamic", help="static: compiled with CUDA graphs")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: a GPU where there is one")
    add("--precision", choices=("auto", "bfloat16", "float32"), default="auto", help="default: bfloat16 on a GPU")


def run(args: argparse.Namespace) -> int:
    from sglang_ext.training.encode import TokenDataset
    from sglang_ext.training.provenance import command, file_digest
    from sglang_ext.training.targets import check_vocabulary, resolve_device
    from sglang_ext.training.targets_model import load_target

    _check(args)
    device = resolve_device(args.device)
    automatic = "bfloat16" if device == "cuda" else "float32"
    model = load_target(args.target, device, automatic if args.precision == "auto" else args.precision)
    record = {
        "command": command(),
        "target_sha256": file_digest(args.target / "model.safetensors"),
        "max_new_tokens": args.max_new_tokens,
        "temperature": args.temperature,
        "seed": args.seed,
    }
    for side, copies, limit in (("train", args.copies, args.limit), ("heldout", 1, args.held_out_limit)):
        prompts = TokenDataset(args.tokens / side)
        check_vocabulary(prompts, int(model.config.vocab_size), args.target)
        share, seed = (args.greedy, args.seed) if side == "train" else (args.held_out_greedy, args.seed + 1)
        requests = plan(prompts, copies, limit, args.max_prompt, share, args.temperature, seed)
        if not requests:
            raise UsageError(f"{prompts.path} has no prompt of at most {args.max_prompt} tokens; raise --max-prompt")
        answers = regenerate(
            model, prompts, requests, max_new_tokens=args.max_new_tokens, batch_size=args.batch_size, cache=args.cache
        )
        write_answers(args.out / side, prompts, answers, record)
    return 0


def _check(args: argparse.Namespace) -> None:
    for option, value in (("--copies", args.copies), ("--batch-size", args.batch_size)):
        if value < 1:
            raise UsageError(f"{option} {value} makes no answer; give at least 1")
    if args.max_new_tokens < 2:
        raise UsageError(f"--max-new-tokens {args.max_new_tokens} leaves nothing to learn from; give at least 2")
    for option, value in (("--greedy", args.greedy), ("--held-out-greedy", args.held_out_greedy)):
        if not 0 <= value <= 1:
            raise UsageError(f"{option} {value} is no share; give a number between 0 and 1")
    if args.temperature <= 0:
        raise UsageError(f"--temperature {args.temperature} does not sample; give more than 0, or --greedy 1")
    if (args.out / "train" / "index.json").exists():
        raise UsageError(f"{args.out} already holds answers; delete it or choose another --out")


def plan(
    prompts: TokenDataset, copies: int, limit: int | None, max_prompt: int, greedy: float, temperature: float, seed: int
) -> list[Request]:
    """Which prompts are answered how: a random choice of ``limit``, each answered ``copies`` times.

    Greedy answers to one prompt would be equal, so at most one of its copies is greedy: copy 0 with the probability
    that makes the share of greedy answers ``greedy`` over all copies (at most ``1 / copies`` of them).
    """
    chosen = [int(i) for i in prompts.order(seed) if prompts.response_starts[i] <= max_prompt][:limit]
    draws = np.random.default_rng(seed)
    first_greedy = draws.random(len(chosen)) < greedy * copies
    seeds = draws.integers(0, 1 << 62, size=(copies, len(chosen)))
    return [
        Request(document, 0.0 if copy == 0 and first_greedy[n] else temperature, int(seeds[copy, n]))
        for copy in range(copies)
        for n, document in enumerate(chosen)
    ]


def regenerate(
    model: PreTrainedModel,
    prompts: TokenDataset,
    requests: list[Request],
    *,
    max_new_tokens: int,
    batch_size: int,
    cache: str = "dynamic",
) -> Iterator[tuple[Request, np.ndarray, int]]:
    """Yield (request, prompt and answer ids, start of the answer); the answer ends with its end token, unless cut.

    ``cache`` "static" lets transformers compile the decoding step for one shape: prompts are then padded to the longest
    of all. The order is by windows of similar length, not that of ``requests``.
    """
    from tqdm.auto import tqdm

    width = max(int(prompts.response_starts[request.document]) for request in requests) if cache == "static" else None
    with tqdm(total=len(requests), desc="regenerate", unit="answer", mininterval=2.0) as bar:
        tokens = 0
        for window_start in range(0, len(requests), _WINDOW * batch_size):
            window = requests[window_start : window_start + _WINDOW * batch_size]
            window.sort(key=lambda request: int(prompts.response_starts[request.document]))
            for start in range(0, len(window), batch_size):
                batch = window[start : start + batch_size]
                beginnings = [prompts.document(r.document)[0][: prompts.response_starts[r.document]] for r in batch]
                for request, beginning, answer in zip(
                    batch, beginnings, _answer(model, beginnings, batch, max_new_tokens, cache, width), strict=True
                ):
                    tokens += len(answer)
                    yield request, np.concatenate([beginning, answer]), len(beginning)
                bar.update(len(batch))
                elapsed = bar.format_dict["elapsed"]
                bar.set_postfix({"tok/s": f"{tokens / elapsed:,.0f}"} if elapsed else {}, refresh=False)


def _answer(
    model: PreTrainedModel,
    beginnings: list[np.ndarray],
    requests: list[Request],
    max_new_tokens: int,
    cache: str,
    width: int | None,
) -> list[np.ndarray]:
    """The answers of one batch, prompts padded on the left to ``width`` or the longest of them."""
    import torch
    from transformers import LogitsProcessorList

    from sglang_ext.training.sampling import SeededTemperature

    device = next(model.parameters()).device
    width = width or max(map(len, beginnings))
    ids = np.full((len(beginnings), width), model.config.pad_token_id, np.int64)
    mask = np.zeros_like(ids)
    for row, beginning in enumerate(beginnings):
        ids[row, width - len(beginning) :] = beginning
        mask[row, width - len(beginning) :] = 1
    noise = SeededTemperature(
        torch.tensor([request.seed for request in requests], device=device),
        torch.tensor([request.temperature for request in requests], device=device),
        width,
    )
    output = model.generate(
        input_ids=torch.from_numpy(ids).to(device),
        attention_mask=torch.from_numpy(mask).to(device),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        logits_processor=LogitsProcessorList([noise]),
        cache_implementation=None if cache == "dynamic" else cache,
    )
    answers = output[:, width:].cpu().numpy()
    is_end = np.isin(answers, model.generation_config.eos_token_id)
    lengths = np.where(is_end.any(1), is_end.argmax(1) + 1, answers.shape[1])
    return [answer[:length] for answer, length in zip(answers, lengths, strict=True)]


def write_answers(
    out: Path, prompts: TokenDataset, answers: Iterator[tuple[Request, np.ndarray, int]], record: dict[str, Any]
) -> None:
    """Write the answers as a token folder; they keep the categories, and the ids of their prompts.

    ``record`` says how they were made; it is kept in index.json under "answers", with the share of greedy ones.
    """
    made = list(answers)
    out.mkdir(parents=True, exist_ok=True)
    requests = [request for request, _, _ in made]
    documents = np.array([request.document for request in requests])
    categories = prompts.category_ids[documents]
    lengths = [len(ids) for _, ids, _ in made]
    np.save(out / "tokens.npy", np.concatenate([ids for _, ids, _ in made]).astype(np.uint16))
    np.save(out / "offsets.npy", np.cumsum([0, *lengths], dtype=np.int64))
    np.save(out / "response_starts.npy", np.array([start for _, _, start in made], np.int32))
    np.save(out / "categories.npy", categories)
    np.save(out / "temperatures.npy", np.array([request.temperature for request in requests], np.float32))
    np.save(out / "seeds.npy", np.array([request.seed for request in requests], np.int64))
    greedy = sum(request.temperature == 0 for request in requests) / len(requests)
    answer_tokens = sum(lengths) - sum(start for _, _, start in made)
    index = prompts.index | {
        "documents": {name: int((categories == number).sum()) for number, name in enumerate(prompts.categories)},
        "tokens": sum(lengths),
        "answers": record | {"tokens": answer_tokens, "greedy_share": round(greedy, 3)},
        "ids": [prompts.document_id(int(i)) for i in documents],
    }
    (out / "index.json").write_text(json.dumps(index) + "\n", encoding="utf-8")
    print(f"{out}: {len(made):,} answers, {answer_tokens / 1e6:.2f} M tokens, {greedy:.0%} greedy", flush=True)
