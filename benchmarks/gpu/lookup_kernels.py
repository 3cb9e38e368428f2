"""The lookup's kernels, compiled, against their plain forms on random rounds, and their time in a CUDA graph.

    python benchmarks/gpu/lookup_kernels.py --out benchmarks/gpu/lookup-kernels-h200.json

``look_up`` chooses a whole DFlash block of every request in one launch. ``follow_and_raise`` prepares one draft of a
DSpark block, in place in the Markov head's bias over the vocabulary: a block takes one for each draft. ``argmax`` over
a verify step's logits in float32, of one request and of all, is what a DSpark round takes besides.
"""

from __future__ import annotations

import argparse
import functools
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sglang_ext.carryover import lookup, lookup_kernels
from sglang_ext.evaluation import record

REQUESTS, WIDTH, DRAFTS, VOCABULARY, SLOTS = 64, 16, 15, 151_936, 300
TRIALS = 30
Block = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def inputs(slots: torch.Tensor, rounds: torch.Tensor) -> tuple[lookup.VerifiedRound, Block]:
    """A verify step of every request, kept in ``rounds``, and a block's own drafts, logits [bs, P, 1 + W] and anchor.

    Four tokens, so that long matches occur.
    """
    tokens, choices = torch.randint(4, (REQUESTS, WIDTH)), torch.randint(4, (REQUESTS, WIDTH))
    committed = torch.randint(0, WIDTH + 1, (REQUESTS,), dtype=torch.int32)
    lookup_kernels.remember(rounds, slots, tokens, choices, committed)
    logits = (torch.randn(REQUESTS, DRAFTS, 1 + WIDTH) * 3).bfloat16()
    block = torch.randint(4, (REQUESTS, DRAFTS)), logits, torch.randint(4, (REQUESTS,))
    return lookup.VerifiedRound(tokens, choices, committed.long()), block


def compare(slots: torch.Tensor, rounds: torch.Tensor, table: torch.Tensor) -> int:
    """Raise AssertionError where a kernel is not its plain form; how many drafts the lookup changed."""
    changed = 0
    for _ in range(TRIALS):
        verified, block = inputs(slots, rounds)
        chosen = lookup_kernels.look_up(*block, rounds, slots, table)
        assert torch.equal(chosen, lookup.look_up(*block, verified, table))
        changed += int((chosen != block[0]).sum())
        matched, lengths = torch.empty(REQUESTS, WIDTH, dtype=torch.int32), verified.begin()
        for draft in range(DRAFTS):
            token, bias = torch.randint(4, (REQUESTS,)), torch.randn(REQUESTS, VOCABULARY, dtype=torch.bfloat16)
            lengths = verified.follow(lengths, token)
            expected = lookup.raise_choices(bias, verified.choices, verified.bonus(lengths, draft, table), 0)
            lookup_kernels.follow_and_raise(bias, matched, token, draft, rounds, slots, table)
            assert torch.equal(matched.long(), lengths) and torch.equal(bias, expected), draft
    assert changed > 0
    return changed


def time_kernels(slots: torch.Tensor, rounds: torch.Tensor, table: torch.Tensor) -> dict[str, float]:
    """Microseconds of each kernel in a CUDA graph; AssertionError where a captured one does not read new rounds."""
    import triton

    _, block = inputs(slots, rounds)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chosen = lookup_kernels.look_up(*block, rounds, slots, table)
    verified, _ = inputs(slots, rounds)
    graph.replay()
    assert torch.equal(chosen, lookup.look_up(*block, verified, table))
    bias, matched = torch.randn(REQUESTS, VOCABULARY, dtype=torch.bfloat16), verified.begin().to(torch.int32)
    forms: dict[str, Callable[[], Any]] = {
        "look_up": lambda: lookup_kernels.look_up(*block, rounds, slots, table),
        "follow_and_raise": lambda: lookup_kernels.follow_and_raise(bias, matched, block[2], 3, rounds, slots, table),
    }
    for requests in (1, REQUESTS):
        logits = torch.randn(requests * WIDTH, VOCABULARY)
        forms[f"argmax_{requests}"] = functools.partial(torch.argmax, logits, -1)
    return {name: round(1e3 * triton.testing.do_bench_cudagraph(form), 2) for name, form in forms.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/bench/lookup-kernels.json"), help="JSON file")
    args = parser.parse_args()
    torch.set_default_device(DEVICE)
    table = torch.tensor([0.31, 0.77, 1.9, 2.6, 4.4])
    slots, rounds = torch.randperm(SLOTS)[:REQUESTS], lookup.new_rounds(SLOTS, WIDTH, DEVICE)
    document: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        "environment": record.environment(),
        "shape": {"requests": REQUESTS, "verify_width": WIDTH, "drafts": DRAFTS, "vocabulary": VOCABULARY},
        "equal": {"trials": TRIALS, "changed_drafts": compare(slots, rounds, table)},
    }
    if DEVICE == "cuda":
        document["microseconds"] = time_kernels(slots, rounds, table)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
