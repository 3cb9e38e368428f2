"""SGLang's engine on the CPU platform: greedy output is the target's, sampled output has the target's distribution.

The judge is transformers, which shares no code with the engine: it reads prompt and output and gives the logits that
each output token was to be taken from.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import kstest

from tests.engine.harness import run_job

Models = dict[str, Path]
# Tokens whose logits differ by less than this count as equal: float32 sums differ by the shape of the batch.
TIE = 1e-3
# A correct engine fails one statistical test with this probability.
ALPHA = 1e-4


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 256, (n,), generator=generator).tolist() for n in (1, 3, 8, 17, 40, 90)]


@functools.cache
def reference(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def output_logits(folder: Path, prompt: list[int], outputs: list[list[int]]) -> torch.Tensor:
    """[outputs, tokens, vocab]: what each token of outputs of one length was to be chosen by."""
    ids = torch.tensor([prompt + output for output in outputs])
    logits = [reference(folder)(part).logits[:, len(prompt) - 1 : -1] for part in ids.split(64)]
    return torch.cat(logits)


def assert_greedy(folder: Path, prompt: list[int], output: list[int]) -> None:
    logits = output_logits(folder, prompt, [output])[0]
    chosen = logits.gather(-1, torch.tensor(output)[:, None])[:, 0]
    wrong = (logits.max(-1).values - chosen > TIE).nonzero()[:, 0].tolist()
    assert not wrong, f"token {wrong[0]} of {len(output)} is not the target's"


@functools.cache
def greedy_continuations(folder: Path) -> list[list[int]]:
    texts = []
    for prompt in prompts():
        ids = torch.tensor([prompt])
        text = reference(folder).generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=40,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        texts.append(text[0].tolist())
    return texts


def drafting(models: Models, method: str | None, target: str) -> dict[str, Any]:
    if method is None:
        return {}
    drafter = str(models[f"{method}-{target}"])
    return {"speculative_algorithm": method.upper(), "speculative_draft_model_path": drafter}


PAGED, STEPWISE, NO_RADIX = {"page_size": 16}, {"disable_overlap_schedule": True}, {"disable_radix_cache": True}
# Recurrent states are cached every 64 tokens, so a hybrid's chunks are no smaller.
CHUNKED = {"dense": {"chunked_prefill_size": 32}, "hybrid": {"chunked_prefill_size": 64}}
MIXED = {target: flags | {"enable_mixed_chunk": True} for target, flags in CHUNKED.items()}
MATRIX: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "dense-plain": ("dense", None, PAGED | STEPWISE | CHUNKED["dense"]),
    "dense-dflash": ("dense", "dflash", {}),
    "dense-dflash-paged-stepwise-chunked": ("dense", "dflash", PAGED | STEPWISE | CHUNKED["dense"]),
    "dense-dspark-stepwise": ("dense", "dspark", STEPWISE),
    "dense-dspark-paged-mixed": ("dense", "dspark", PAGED | MIXED["dense"]),
    "dense-dspark-no-radix": ("dense", "dspark", NO_RADIX),
    "hybrid-plain": ("hybrid", None, {}),
    "hybrid-dflash-mixed": ("hybrid", "dflash", MIXED["hybrid"]),
    "hybrid-dflash-paged-stepwise": ("hybrid", "dflash", PAGED | STEPWISE),
    "hybrid-dspark": ("hybrid", "dspark", {}),
    "hybrid-dspark-paged-chunked": ("hybrid", "dspark", PAGED | CHUNKED["hybrid"]),
}


@pytest.mark.parametrize("case", MATRIX)
def test_greedy_output_is_the_targets(models: Models, case: str) -> None:
    target, method, flags = MATRIX[case]
    folder = models[target]
    sampling = {"temperature": 0.0, "max_new_tokens": 40, "ignore_eos": True}
    # The same again, then turns that go on from what decoding put into the cache.
    longer = [[*text, 7, 8, 9] for text in greedy_continuations(folder)]
    turns = [prompts(), prompts(), longer]
    result = run_job(
        "generate",
        fresh=case == "dense-dflash",
        engine={"model_path": str(folder), "mamba_track_interval": 64, **drafting(models, method, target), **flags},
        steps=[{"generate": turn, "sampling": sampling, "stagger": 0.02} for turn in turns],
    )
    histogram = [0] * 8
    for turn, answers in zip(turns, result["steps"], strict=True):
        for prompt, answer in zip(turn, answers, strict=True):
            assert len(answer["output_ids"]) == 40
            assert_greedy(folder, prompt, answer["output_ids"])
            for length, count in enumerate(answer["meta"]["spec_correct_drafts_histogram"] or []):
                histogram[length] += count
    # The longest last turn is 133 tokens, of which the first 90 were a prompt: the cache has some that were decoded.
    cached = max(answer["meta"]["cached_tokens"] for answer in result["steps"][-1])
    assert cached == 0 if flags is NO_RADIX else cached >= (112 if target == "dense" else 128), cached
    if method is not None:
        # Blocks are rejected whole, in part and not at all.
        assert histogram[0] > 0 and sum(histogram[1:7]) > 0 and histogram[7] > 0, histogram


@pytest.mark.parametrize(("target", "method"), [("dense", "dflash"), ("hybrid", "dspark")])
def test_requests_may_run_to_the_context_end(models: Models, target: str, method: str) -> None:
    """The last verify windows are wider than what is left of a request's row."""
    context = 64
    fitting = [prompt for prompt in prompts() if len(prompt) < context]
    sampling = [{"temperature": 0.0, "max_new_tokens": context - len(prompt), "ignore_eos": True} for prompt in fitting]
    folder = models[target]
    result = run_job(
        "generate",
        engine={"model_path": str(folder), "context_length": context, **drafting(models, method, target)},
        steps=[{"generate": fitting, "sampling": sampling}] * 2,
    )
    for answers in result["steps"]:
        for prompt, answer in zip(fitting, answers, strict=True):
            # SGLang keeps the last two places of a context free.
            assert len(prompt) + len(answer["output_ids"]) == context - 2
            assert_greedy(folder, prompt, answer["output_ids"])


def uniform_ranks(logits: torch.Tensor, outputs: list[list[int]], temperature: float, top_k: int) -> Any:
    """A number per output token that is uniform on [0, 1] if the token was drawn from the target's distribution.

    It is the mass of the likelier tokens plus a random part of the token's own, given the tokens before it.
    """
    ordered, order = torch.softmax(logits / temperature, -1).sort(-1, descending=True)
    ordered[..., top_k:] = 0
    ordered /= ordered.sum(-1, keepdim=True)
    rank = (order == torch.tensor(outputs)[..., None]).float().argmax(-1)[..., None]
    own = ordered.gather(-1, rank)[..., 0]
    assert bool((own > 0).all()), "a token outside the top k"
    before = ordered.cumsum(-1).gather(-1, rank)[..., 0] - own
    part = torch.rand(own.shape, generator=torch.Generator().manual_seed(0))
    return (before + part * own).flatten().numpy()


ALL = 320
SAMPLING = [(1.0, ALL), (2.0, 8)]
SAMPLES, TOKENS = 200, 8


@pytest.mark.parametrize(
    ("target", "method"), [("dense", None), ("dense", "dflash"), ("dense", "dspark"), ("hybrid", "dspark")]
)
def test_sampled_tokens_follow_the_target(models: Models, target: str, method: str | None) -> None:
    """Each setting's tokens pass a Kolmogorov-Smirnov test at ALPHA; greedy requests beside them stay greedy."""
    folder = models[target]
    prompt = prompts()[2]
    common = {"max_new_tokens": TOKENS, "ignore_eos": True}
    sampled = [
        {"temperature": temperature, "top_k": -1 if top_k == ALL else top_k, **common}
        for temperature, top_k in SAMPLING
    ]
    greedy = {"temperature": 0.0, **common}
    result = run_job(
        "generate",
        engine={"model_path": str(folder), "max_running_requests": 16, **drafting(models, method, target)},
        steps=[{"generate": [prompt] * (SAMPLES + 4), "sampling": [each] * SAMPLES + [greedy] * 4} for each in sampled],
    )
    for (temperature, top_k), answers in zip(SAMPLING, result["steps"], strict=True):
        outputs = [answer["output_ids"] for answer in answers]
        for output in outputs[SAMPLES:]:
            assert_greedy(folder, prompt, output)
        del outputs[SAMPLES:]
        logits = output_logits(folder, prompt, outputs)
        assert kstest(uniform_ranks(logits, outputs, temperature, top_k), "uniform").pvalue > ALPHA, temperature
        # Negative control: the same tokens do not pass for draws at another temperature.
        colder = uniform_ranks(logits, outputs, 0.6 * temperature, top_k)
        assert kstest(colder, "uniform").pvalue < ALPHA, temperature
    if method is not None:
        histograms = [answer["meta"]["spec_correct_drafts_histogram"] for answer in result["steps"][0]]
        accepted = sum(length * count for histogram in histograms for length, count in enumerate(histogram))
        assert accepted > SAMPLES
