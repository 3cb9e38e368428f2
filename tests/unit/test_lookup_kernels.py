"""The Triton kernels of the lookup, interpreted on the CPU, against their plain forms."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import torch
from sglang_ext.carryover import lookup, lookup_kernels as kernels

torch.manual_seed(0)
TABLE = torch.tensor([0.5, 1.0, 2.0, 3.0, 5.0])
raised = followed = twice = 0
for width, drafts, lens in ((1, 3, torch.int64), (5, 4, torch.int32), (8, 8, torch.int64), (16, 15, torch.int32),
                            (64, 20, torch.int64)):
    requests, slots = 7, torch.tensor([9, 2, 0, 5, 11, 3, 7, 1, 1])  # two more than count
    # Two tokens at a narrow round, three at a wide one: long matches and rows that choose the same token.
    inputs, choices = (torch.randint(2 + (width > 8), (requests, width)).to(lens) for _ in range(2))
    committed = torch.randint(1, width + 1, (requests,)).to(lens)
    committed[0], committed[1], committed[2] = 0, width, 1
    rounds = lookup.new_rounds(12, width, "cpu")
    rounds += 77  # what another request left
    kernels.remember(rounds, slots, inputs, choices.flatten(), committed)
    assert rounds.dtype == torch.int32 and rounds.shape == (12, 2 * width + 1)
    assert (rounds[[1, 4, 6, 8, 10]] == 77).all(), "a slot beside the batch's was written"
    kept = rounds[slots[:requests]].long()
    assert torch.equal(kept, torch.cat((inputs, choices, committed[:, None]), 1).long())
    verified = lookup.VerifiedRound(inputs.long(), choices.long(), committed.long())

    for dtype in (torch.float32, torch.bfloat16):
        # Halves, exact in bfloat16: ties with the drafter's own token and between rows occur. Rows of a wider tensor.
        logits = (torch.randint(-6, 1, (requests, drafts, 2 + width)) / 2).to(dtype)[:, :, : 1 + width]
        tokens = torch.randint(100, 103, (requests, drafts)).to(lens)
        anchor = torch.randint(2, (requests, 2)).to(lens)[:, 1]
        expected = lookup.look_up(tokens.long(), logits, anchor.long(), verified, TABLE)
        found = kernels.look_up(tokens, logits, anchor, rounds, slots, TABLE)
        assert found.dtype == lens and torch.equal(found.long(), expected), (width, dtype)
        raised += int((found != tokens).sum())

    for dtype in (torch.float32, torch.bfloat16):
        matched, lengths = torch.full((requests, width), 99, dtype=lens), verified.begin()
        for draft in range(drafts):
            # The whole vocabulary, or a rank's part of it.
            start, size = ((0, 5), (1, 1), (0, 1), (1, 3))[draft % 4]
            plain = torch.randint(-6, 7, (requests, size)).to(dtype)
            token = torch.randint(2, (requests, 3)).to(lens)[:, 1]
            lengths = verified.follow(lengths, token.long())
            bonus = verified.bonus(lengths, draft, TABLE)
            expected = lookup.raise_choices(plain, verified.choices, bonus, start)
            bias = plain.new_full((requests, size + 1), 42.0)
            bias[:, :size] = plain
            kernels.follow_and_raise(bias[:, :size], matched, token, draft, rounds, slots, TABLE, start)
            assert torch.equal(matched.long(), lengths), (width, draft)
            assert torch.equal(bias[:, :size], expected) and (bias[:, size] == 42).all(), (width, draft, start)
            assert torch.equal(bias[:2, :size], plain[:2]), "a request without a rejected row was raised"
            followed += int((lengths > lookup.LONGEST).sum())
            twice += int(((bonus > 0).sum(1) > 5).sum())
assert raised and followed and twice, "nothing was raised, no match was long, no token was chosen twice"
for call in (lambda: lookup.new_rounds(3, 65, "cpu"), lambda: kernels.remember(rounds, slots, inputs, choices[1:],
             committed), lambda: kernels.look_up(tokens, logits[:, :, 1:], anchor, rounds, slots, TABLE),
             lambda: kernels.follow_and_raise(bias, matched[:, 1:], token, 0, rounds, slots, TABLE)):
    try:
        call()
    except ValueError as error:
        assert str(error).endswith(".")
    else:
        raise AssertionError("not refused")
print("equal")
"""


def test_the_kernels_equal_the_plain_forms() -> None:
    """In a process of its own: Triton looks for the interpreter when it is imported."""
    root = str(Path(__file__).parents[2])
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", SCRIPT], env=env, cwd=root, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.split() == ["equal"]


TYPES = {"rounds": "*i32", "slots": "*i64", "table": "*fp32"}
STRIDES = ("stride_request", "stride_draft", "stride_anchor", "draft", "start", "vocabulary", "stride_bias")
TYPES |= dict.fromkeys((*STRIDES, "stride_token"), "i32")
NARROW, WIDE = {"W": 16, "LONGEST": 4}, {"W": 64, "LONGEST": 4}
KERNELS = {
    "remember": ("_remember_kernel", 1, {"W": 16, "BW": 16}),
    "look_up": ("_look_up_kernel", 1, {**NARROW, "P": 15, "BD": 32, "BP": 16}),
    "look_up, wide": ("_look_up_kernel", 1, {**WIDE, "P": 63, "BD": 128, "BP": 64}),
    "raise, first": ("_raise_kernel", 1, {**NARROW, "BW": 16, "FIRST": True}),
    "raise": ("_raise_kernel", 1, {**NARROW, "BW": 16, "FIRST": False}),
    "raise, wide": ("_raise_kernel", 4, {**WIDE, "BW": 64, "FIRST": False}),
}


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize(("tokens", "logits"), [("*i32", "*fp32"), ("*i64", "*bf16")])
@pytest.mark.parametrize("name", KERNELS)
def test_the_kernels_compile_for_hopper_and_blackwell(name: str, tokens: str, logits: str, capability: int) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from sglang_ext.carryover import lookup_kernels

    name, warps, constants = KERNELS[name]
    kernel = getattr(lookup_kernels, name)
    others = ("inputs", "choices", "commit_lens", "tokens", "anchor", "drafts", "matched", "token")
    types = {**TYPES, **dict.fromkeys(others, tokens), "logits": logits, "bias": logits}
    signature = {each: "constexpr" if each in constants else types[each] for each in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
    assert f"sm_{capability}" in made.asm["ptx"] and len(made.asm["cubin"]) > 1000
    if name == "_raise_kernel":  # works in place: whatever thread reads, it does so before any writes
        loading, storing = made.asm["ttgir"].split("barrier")
        assert "tt.load" in loading and "tt.store" not in loading and "tt.load" not in storing
