"""The gated delta rule in torch, in the shapes SGLang 0.5.23 calls it with; a recurrent state is [value heads, V, K].

For each token, with decay exp(g) and write strength beta (Gated Delta Networks, arXiv 2412.06464):

    S <- exp(g) S;   S <- S + beta (v - S k) k^T;   o = S q

The whole batch advances one token at a time: exact for every chunking of a prompt, and quick enough for small models.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

#: Tokens between the states that a prefill hands back for the radix cache (kernels/ops/attention/fla/chunk_delta_h.py).
CHUNK_SIZE = 64


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    before_step: Callable[[int, torch.Tensor], None] | None = None,
    after_step: Callable[[int, torch.Tensor], None] | None = None,
) -> torch.Tensor:
    """Run the recurrence in float32.

    Args:
        q, k: [bs, T, HV, K], scaled and normalised already; v: [bs, T, HV, V]; g (log decay), beta: [bs, T, HV].
            A padding token has g = beta = 0 and leaves the state as it is.
        state: [bs, HV, V, K] float32, advanced in place.
        before_step, after_step: called with (t, state) around each token.

    Returns:
        [bs, T, HV, V] float32.
    """
    bs, steps, heads, _ = q.shape
    flat = state.view(bs * heads, *state.shape[2:])

    def by_step(x: torch.Tensor, *shape: int) -> torch.Tensor:
        return x.transpose(0, 1).reshape(steps, bs * heads, *shape)

    keys, values, decays, strengths = by_step(k, 1, -1), by_step(v, -1, 1), by_step(g.exp(), 1, 1), by_step(beta, 1, 1)
    # The state is large, the vectors are small: one pass over it serves key and query, whose product with the updated
    # state follows from that with the old one.
    pairs = torch.stack([by_step(k, -1), by_step(q, -1)], -1)
    overlaps = by_step((k * q).sum(-1), 1, 1)
    out = torch.empty(steps, bs * heads, v.shape[-1])
    for t in range(steps):
        if before_step is not None:
            before_step(t, state)
        read = (flat @ pairs[t]).mul_(decays[t])
        delta = (values[t] - read[..., :1]).mul_(strengths[t])
        torch.add(read[..., 1], (delta * overlaps[t])[..., 0], out=out[t])
        flat.mul_(decays[t]).baddbmm_(delta, keys[t])
        if after_step is not None:
            after_step(t, state)
    return out.view(steps, bs, heads, -1).transpose(0, 1).contiguous()


def gate(A_log: torch.Tensor, a: torch.Tensor, dt_bias: torch.Tensor, beta: float, threshold: float) -> torch.Tensor:
    """Log decay [.., HV] of the delta rule: ``-exp(A_log) softplus(a + dt_bias)``."""
    return -A_log.float().exp() * F.softplus(a.float() + dt_bias.float(), beta, threshold)


def fused_gdn_gating(
    A_log: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    dt_bias: torch.Tensor,
    beta: float = 1.0,
    threshold: float = 20.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log decay and write strength, [1, tokens, HV] float32 (kernels/ops/attention/linear/fused_gdn_gating.py:44).

    a, b: [tokens, HV].
    """
    return gate(A_log, a, dt_bias, beta, threshold)[None], b.float().sigmoid()[None]


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    initial_state_indices: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    head_first: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    inplace_update: bool = True,
) -> tuple[torch.Tensor, None, torch.Tensor]:
    """Prefill (kernels/ops/attention/fla/chunk.py:136).

    Args:
        q, k: [1, tokens, H, K]; v: [1, tokens, HV, V]; g, beta: [1, tokens, HV], requests one after the other.
        initial_state: [slots, HV, V, K]; initial_state_indices: [bs]; cu_seqlens: [bs + 1].

    Returns:
        Outputs [1, tokens, HV, V], None, and the states [1, chunks, HV, V, K] before each chunk of each request.
    """
    assert initial_state is not None and initial_state_indices is not None and cu_seqlens is not None and not head_first
    bounds = [int(n) for n in cu_seqlens.tolist()]
    lengths = [end - start for start, end in itertools.pairwise(bounds)]
    bs, steps = len(lengths), max(lengths, default=0)
    chunks = [-(-length // CHUNK_SIZE) for length in lengths]
    heads = v.shape[2]
    before = initial_state.new_empty((sum(chunks), *initial_state.shape[1:]), dtype=k.dtype)

    # [tokens, ..] -> [bs, steps, ..], padded with zeros.
    mask = torch.arange(steps) < torch.tensor(lengths)[:, None]

    def padded(x: torch.Tensor) -> torch.Tensor:
        rows = x.new_zeros((bs, steps, *x.shape[2:]), dtype=torch.float32)
        rows[mask] = x[0, : bounds[-1]].float()
        return rows

    first_chunk = [sum(chunks[:row]) for row in range(bs)]

    def keep_chunk_start(t: int, state: torch.Tensor) -> None:
        if t % CHUNK_SIZE == 0:
            for row, length in enumerate(lengths):
                if t < length:
                    before[first_chunk[row] + t // CHUNK_SIZE] = state[row].to(before.dtype)

    slots = initial_state_indices[:bs].long()
    state = _gather(initial_state, slots)
    query, key = _prepare(padded(q), padded(k), heads, scale, use_qk_l2norm_in_kernel)
    out = gated_delta_rule(query, key, padded(v), padded(g), padded(beta), state, before_step=keep_chunk_start)
    if inplace_update:
        written = (slots >= 0) & (torch.tensor(lengths) > 0)
        initial_state[slots[written]] = state[written].to(initial_state.dtype)
    tokens = torch.zeros_like(v)
    tokens[0, : bounds[-1]] = out[mask].to(v.dtype)
    return tokens, None, before[None]


def fused_sigmoid_gating_delta_rule_update(
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    softplus_beta: float,
    softplus_threshold: float,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    b: torch.Tensor,
    initial_state_source: torch.Tensor,
    initial_state_indices: torch.Tensor,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    is_kda: bool = False,
    disable_state_update: bool = False,
    intermediate_states_buffer: torch.Tensor | None = None,
    intermediate_state_indices: torch.Tensor | None = None,
    retrieve_parent_token: torch.Tensor | None = None,
    cache_ring: bool = False,
    **_: Any,
) -> torch.Tensor:
    """Decode and verify (kernels/ops/attention/linear/fused_sigmoid_gating_recurrent.py:538).

    Args:
        q, k: [1, tokens, H, K]; v: [1, tokens, HV, V]; a, b: [tokens, HV], every request with as many tokens.
        initial_state_source: [slots, HV, V, K].
        intermediate_states_buffer: [rows, steps, HV, V, K], takes the state after each token.

    Returns:
        [1, tokens, HV, V].
    """
    if is_kda or cache_ring or retrieve_parent_token is not None:
        raise NotImplementedError("the CPU platform's gated delta rule knows neither KDA, ReplaySSM nor tree drafts")
    heads, tokens = v.shape[2], v.shape[1]
    bs = tokens if cu_seqlens is None else cu_seqlens.shape[0] - 1
    steps = tokens // bs
    if cu_seqlens is not None and int(cu_seqlens[-1]) != bs * steps:
        raise NotImplementedError(
            "the CPU platform verifies the same number of tokens for every request (static verify)"
        )
    slots = initial_state_indices[:bs].long()
    state = _gather(initial_state_source, slots)

    def rows(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(bs, steps, *x.shape[2:]).float()

    keep = None
    if intermediate_states_buffer is not None and intermediate_state_indices is not None:
        buffer, kept_rows = intermediate_states_buffer, intermediate_state_indices[:bs].long()
        valid = slice(None) if bool((kept_rows >= 0).all()) else kept_rows >= 0
        kept_rows = kept_rows[valid]

        def keep(t: int, current: torch.Tensor) -> None:
            buffer[kept_rows, t] = current[valid].to(buffer.dtype)

    query, key = _prepare(rows(q), rows(k), heads, scale, use_qk_l2norm_in_kernel)
    decay = gate(A_log, a.reshape(bs, steps, heads), dt_bias, softplus_beta, softplus_threshold)
    write = b.reshape(bs, steps, heads).float().sigmoid()
    out = gated_delta_rule(query, key, rows(v), decay, write, state, after_step=keep)
    if not disable_state_update:
        initial_state_source[slots[slots >= 0]] = state[slots >= 0].to(initial_state_source.dtype)
    return out.to(v.dtype).view_as(v)


def fused_recurrent_gated_delta_rule_packed_decode(
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    scale: float,
    initial_state: torch.Tensor,
    out: torch.Tensor,
    ssm_state_indices: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per request (kernels/ops/attention/fla/fused_recurrent.py:269).

    mixed_qkv: [bs, 2 H K + HV V]; a, b: [bs, HV]; initial_state: [slots, HV, V, K]; out: [bs, 1, HV, V], the result.
    """
    heads, value_dim, key_dim = initial_state.shape[-3:]
    bs = mixed_qkv.shape[0]
    query_width = (mixed_qkv.shape[1] - heads * value_dim) // 2
    q, k, v = mixed_qkv.split([query_width, query_width, heads * value_dim], -1)
    result = fused_sigmoid_gating_delta_rule_update(
        A_log,
        a,
        dt_bias,
        1.0,
        20.0,
        q.reshape(1, bs, -1, key_dim),
        k.reshape(1, bs, -1, key_dim),
        v.reshape(1, bs, heads, value_dim),
        b,
        initial_state,
        ssm_state_indices,
        scale,
        use_qk_l2norm_in_kernel,
    )
    out.copy_(result.view_as(out))
    return out, initial_state


def split_projections(
    mixed_qkvz: torch.Tensor,
    mixed_ba: torch.Tensor,
    num_heads_qk: int,
    num_heads_v: int,
    head_qk: int,
    head_v: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cut the joint projections (kernels/ops/attention/triton_gdn_fused_proj.py:272).

    mixed_qkvz: [tokens, q | k | v | z]; mixed_ba: [tokens, b | a].

    Returns:
        qkv [tokens, 2 H K + HV V], z [tokens, HV, V], b [tokens, HV], a [tokens, HV].
    """
    qkv, z = mixed_qkvz.split([2 * num_heads_qk * head_qk + num_heads_v * head_v, num_heads_v * head_v], -1)
    b, a = mixed_ba.split([num_heads_v, num_heads_v], -1)
    return qkv.contiguous(), z.unflatten(-1, (num_heads_v, head_v)), b.contiguous(), a.contiguous()


def gated_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    z: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
    activation: str = "swish",
    quant_heads: int = 0,
) -> tuple[torch.Tensor, None, None]:
    """Group norm of x [rows, N] times the activated gate z (kernels/ops/attention/fla/layernorm_gated.py:234)."""
    if quant_heads:
        raise NotImplementedError("the CPU platform has no quantised gated norm")
    values = x.float()
    activated = None
    if z is not None:
        gates = z.reshape(x.shape).float()
        activated = gates.sigmoid() if activation == "sigmoid" else F.silu(gates)
    if activated is not None and not norm_before_gate:
        values = values * activated
    groups = values.unflatten(-1, (-1, group_size or x.shape[-1]))
    if not is_rms_norm:
        groups = groups - groups.mean(-1, keepdim=True)
    values = (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)).flatten(-2) * weight.float()
    if bias is not None:
        values = values + bias.float()
    if activated is not None and norm_before_gate:
        values = values * activated
    result = values.to(x.dtype)
    return (result if out is None else out.copy_(result)), None, None


def _prepare(
    q: torch.Tensor, k: torch.Tensor, value_heads: int, scale: float | None, normalise: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise and scale [bs, T, H, K] queries and keys, and give each value head its own copy: [bs, T, HV, K]."""
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    if normalise:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    repeats = value_heads // q.shape[2]
    return (q * scale).repeat_interleave(repeats, 2), k.repeat_interleave(repeats, 2)


def _gather(states: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Float32 copies [bs, HV, V, K] of the slots' states; zeros for a negative slot, which SGLang uses for padding."""
    gathered = states[slots.clamp(min=0)].float()
    gathered[slots < 0] = 0
    return gathered
