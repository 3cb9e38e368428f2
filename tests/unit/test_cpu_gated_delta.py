"""The gated delta rule and the convolution on the CPU against transformers' reference, with states not square."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from sglang_ext.cpu import gated_delta, mamba_state

H, HV, K, V, SLOTS = 2, 4, 8, 6, 9


def inputs(tokens: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(tokens)
    return {
        "q": torch.randn(1, tokens, H, K),
        "k": torch.randn(1, tokens, H, K),
        "v": torch.randn(1, tokens, HV, V),
        "a": torch.randn(tokens, HV),
        "b": torch.randn(tokens, HV),
    }


A_LOG, DT_BIAS = torch.linspace(-1, 1, HV), torch.linspace(-0.5, 0.5, HV)


def reference(
    x: dict[str, torch.Tensor], rows: slice, state: torch.Tensor, chunked: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """transformers' rule for one request; state [HV, V, K] in SGLang's layout, transposed on the way in and out."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import (
        torch_chunk_gated_delta_rule,
        torch_recurrent_gated_delta_rule,
    )

    rule = torch_chunk_gated_delta_rule if chunked else torch_recurrent_gated_delta_rule
    q, k = (x[name][:, rows].repeat_interleave(HV // H, 2) for name in ("q", "k"))
    g = -A_LOG.exp() * F.softplus(x["a"][rows] + DT_BIAS)
    out, last = rule(
        q,
        k,
        x["v"][:, rows],
        g=g[None],
        beta=x["b"][rows].sigmoid()[None],
        initial_state=state.transpose(-1, -2)[None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return out[0], last[0].transpose(-1, -2)


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("inplace", [True, False])
def test_prefill_equals_transformers(chunked: bool, inplace: bool) -> None:
    lengths = [1, 130, 0, 64, 7]
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    x = inputs(int(bounds[-1]))
    pool = torch.randn(SLOTS, HV, V, K)
    before = pool.clone()
    slots = torch.tensor([3, 8, 1, 5, 0])
    g, beta = gated_delta.fused_gdn_gating(A_LOG, x["a"], x["b"], DT_BIAS)
    out, _, chunks = gated_delta.chunk_gated_delta_rule(
        x["q"],
        x["k"],
        x["v"],
        g,
        beta,
        initial_state=pool,
        initial_state_indices=slots,
        cu_seqlens=bounds,
        use_qk_l2norm_in_kernel=True,
        inplace_update=inplace,
    )
    chunk = 0
    for row, (slot, length) in enumerate(zip(slots.tolist(), lengths, strict=True)):
        rows = slice(int(bounds[row]), int(bounds[row + 1]))
        if length == 0:
            assert torch.equal(pool[slot], before[slot])
            continue
        expected, state = reference(x, rows, before[slot], chunked)
        torch.testing.assert_close(out[0, rows], expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(pool[slot], state if inplace else before[slot], rtol=1e-4, atol=1e-5)
        # The radix cache is handed the state before every 64th token.
        for start in range(0, length, gated_delta.CHUNK_SIZE):
            _, state = reference(x, slice(rows.start, rows.start + start), before[slot]) if start else (0, before[slot])
            torch.testing.assert_close(chunks[0, chunk], state, rtol=1e-4, atol=1e-5)
            chunk += 1
    assert chunk == chunks.shape[1]
    untouched = [slot for slot in range(SLOTS) if slot not in slots]
    assert torch.equal(pool[untouched], before[untouched])


def verify(x: dict[str, torch.Tensor], pool: torch.Tensor, kept: torch.Tensor, update: bool) -> torch.Tensor:
    tokens = x["v"].shape[1]
    return gated_delta.fused_sigmoid_gating_delta_rule_update(
        A_LOG,
        x["a"],
        DT_BIAS,
        1.0,
        20.0,
        x["q"],
        x["k"],
        x["v"],
        x["b"],
        pool,
        torch.tensor([4, 2, 7]),
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=torch.arange(0, tokens + 1, tokens // 3),
        disable_state_update=not update,
        intermediate_states_buffer=kept,
        intermediate_state_indices=torch.tensor([1, 0, 2]),
    )


@pytest.mark.parametrize("update", [False, True])
def test_verify_equals_transformers_and_keeps_the_state_after_each_token(update: bool) -> None:
    steps = 5
    x = inputs(3 * steps)
    pool, kept = torch.randn(SLOTS, HV, V, K), torch.zeros(3, steps, HV, V, K)
    before = pool.clone()
    out = verify(x, pool, kept, update)
    for row, (slot, kept_row) in enumerate(zip((4, 2, 7), (1, 0, 2), strict=True)):
        for step in range(steps):
            rows = slice(row * steps, row * steps + step + 1)
            expected, state = reference(x, rows, before[slot])
            torch.testing.assert_close(out[0, row * steps + step], expected[-1], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(kept[kept_row, step], state, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(pool[slot], state if update else before[slot], rtol=1e-4, atol=1e-5)


def test_a_transposed_square_state_is_noticed() -> None:
    """Negative control: with K = V a transposed state has the right shape, and only the numbers tell."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 3, 1, K) for _ in range(3))
    g, beta = -torch.rand(1, 3, 1), torch.rand(1, 3, 1)
    state = torch.randn(1, 1, K, K)
    right, wrong = state.clone(), state.transpose(-1, -2).clone()
    out = gated_delta.gated_delta_rule(q, k, v, g, beta, right)
    assert (gated_delta.gated_delta_rule(q, k, v, g, beta, wrong) - out).abs().max() > 0.1
    # The same rule in transformers' layout [K, V], written out.
    s = state[0, 0].T
    for t in range(3):
        s = s * g[0, t, 0].exp()
        s = s + torch.outer(k[0, t, 0], (v[0, t, 0] - k[0, t, 0] @ s) * beta[0, t, 0])
        torch.testing.assert_close(out[0, t, 0], q[0, t, 0] @ s)


def test_packed_decode_equals_one_step_of_verify() -> None:
    x = inputs(3)
    pool, out = torch.randn(SLOTS, HV, V, K), torch.empty(3, 1, HV, V)
    other = pool.clone()
    packed = torch.cat([x[name].reshape(3, -1) for name in ("q", "k", "v")], 1)
    gated_delta.fused_recurrent_gated_delta_rule_packed_decode(
        packed, x["a"], x["b"], A_LOG, DT_BIAS, K**-0.5, pool, out, torch.tensor([4, 2, 7]), True
    )
    expected = verify(x, other, torch.zeros(3, 1, HV, V, K), update=True)
    torch.testing.assert_close(out[:, 0], expected[0])
    torch.testing.assert_close(pool, other)


def test_convolution_in_pieces_equals_the_whole() -> None:
    """A prompt in two chunks, then a verify of 4 of which 2 are committed, against one convolution over everything."""
    torch.manual_seed(0)
    dim, width = 10, 4
    weight, bias, x = torch.randn(dim, width), torch.randn(dim), torch.randn(dim, 12)
    whole = F.silu(F.conv1d(F.pad(x, (width - 1, 0))[None], weight[:, None], bias, groups=dim)[0])
    states = torch.randn(3, dim, width - 1)
    slot = torch.tensor([2])
    pieces = []
    for start, end in ((0, 5), (5, 7)):
        bounds, first = torch.tensor([0, end - start]), torch.tensor([start > 0])
        piece = mamba_state.causal_conv1d_fn(x[:, start:end], weight, bias, states, bounds, None, slot, first)
        pieces.append(piece)
    windows = torch.zeros(1, 4, dim, width - 1)
    draft = torch.cat([x[:, 7:9], torch.randn(dim, 2)], 1)[None]
    pieces.append(
        mamba_state.causal_conv1d_update(
            draft,
            states,
            weight,
            bias,
            "silu",
            conv_state_indices=slot,
            intermediate_conv_window=windows,
            intermediate_state_indices=torch.tensor([0]),
        )[0, :, :2]
    )
    mamba_state.commit_states(states[None], windows[None], slot, torch.tensor([1]))
    pieces += [
        mamba_state.causal_conv1d_update(x[None, :, i], states, weight, bias, "silu", conv_state_indices=slot)[
            0, :, None
        ]
        for i in range(9, 12)
    ]
    torch.testing.assert_close(torch.cat(pieces, 1), whole)


def test_commit_takes_the_accepted_step_of_every_layer_and_skips_the_rest() -> None:
    dst, src = torch.zeros(2, 4, 3), torch.randn(2, 3, 5, 3)
    mamba_state.commit_states(dst, src, torch.tensor([3, 1, 2]), torch.tensor([4, -1, 0]))
    torch.testing.assert_close(dst[:, 3], src[:, 0, 4])
    torch.testing.assert_close(dst[:, 2], src[:, 2, 0])
    assert not dst[:, :2].any()
    mamba_state.commit_states(dst, src, torch.tensor([0]), torch.tensor([2]), torch.tensor([1]))
    torch.testing.assert_close(dst[:, 0], src[:, 1, 2])


def test_snapshots_copy_only_marked_requests() -> None:
    conv, ssm = torch.randn(2, 5, 3), torch.randn(2, 5, 4)
    before = conv.clone(), ssm.clone()
    mamba_state.track_states_all_layers(
        conv, ssm, torch.tensor([0, 1]), torch.tensor([True, False]), torch.tensor([3, 4]), 2
    )
    for pool, old in zip((conv, ssm), before, strict=True):
        assert torch.equal(pool[:, 3], old[:, 0])
        assert torch.equal(pool[:, [0, 1, 2, 4]], old[:, [0, 1, 2, 4]])
    mamba_state.track_states(conv[0], ssm[0], torch.tensor([1]), torch.tensor([True]), torch.tensor([4]), 1)
    assert torch.equal(conv[0, 4], before[0][0, 1])
    assert torch.equal(conv[1, 4], before[0][1, 4])


@pytest.mark.parametrize("norm_before_gate", [True, False])
def test_gated_norm_equals_its_formula(norm_before_gate: bool) -> None:
    torch.manual_seed(0)
    x, z, weight = torch.randn(6, 8), torch.randn(3, 2, 8), torch.randn(8)
    gate = F.silu(z.reshape(6, 8))
    found, _, _ = gated_delta.gated_norm(x, weight, None, 1e-6, z, norm_before_gate=norm_before_gate, is_rms_norm=True)
    expected = (
        F.rms_norm(x, (8,), weight, 1e-6) * gate if norm_before_gate else F.rms_norm(x * gate, (8,), weight, 1e-6)
    )
    torch.testing.assert_close(found, expected)
