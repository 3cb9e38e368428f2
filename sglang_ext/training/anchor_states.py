"""Recurrent states of a hybrid target at chosen positions, captured while the target reads the recorded text once.

A Gated DeltaNet layer keeps, per value head, a matrix S that every token decays and corrects (arXiv 2412.06464):
``S <- exp(g) S + beta k (v - S^T k)^T``. What serving holds committed when a token is the anchor of a draft block is S
after all tokens strictly before the anchor, and the last inputs of the layer's short convolution.

Instead of running the recurrence once per anchor, the tokens of a chunk are reduced to corrections (the WY form of the
delta rule), so that a chunk's end follows from its start in two matrix products, and the state at any offset inside the
chunk in one more. Chunks follow one another; everything else is one batched operation. All of it is fp32, whatever
kernels the target itself runs.

Memory, for ``HV`` value heads of ``K x V``: a kept anchor costs ``4 HV K V`` bytes a layer (2.1 MB for Qwen3.5-4B, half
of it in bf16); while a layer is worked on, a row of T tokens needs another ``T / 64`` states and four times its keys
and values in fp32.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from sglang_ext.errors import UsageError

_CHUNK = 64  # tokens; the chunk of the target's own kernels


@dataclass(frozen=True)
class LayerStates:
    """One layer's committed states at the anchors [R, n] of rows.

    ``recurrent`` [R, n, HV, K, V] is laid out as transformers and flash-linear-attention have it; SGLang's pool holds
    [.., HV, V, K], its transpose. ``conv`` [R, n, C, k - 1] are the inputs of the convolution of width k at the
    positions before the anchor, oldest first, zero before the text begins.
    """

    recurrent: Tensor
    conv: Tensor


def recurrent_layers(model: nn.Module) -> list[int]:
    """Numbers of the target's recurrent layers, rising; empty for a target with full attention only."""
    layers: Any = model.model
    return [i for i, layer in enumerate(layers.layers) if hasattr(layer, "linear_attn")]


@contextmanager
def anchor_states(
    model: nn.Module, layers: Sequence[int], anchors: Tensor, dtype: torch.dtype = torch.float32
) -> Iterator[dict[int, LayerStates]]:
    """Capture the states of ``layers`` at ``anchors`` [R, n] while the target reads rows [R, T] inside the context.

    Yields a dictionary that each layer fills (states in ``dtype``) as soon as it has run for the first time; an entry
    that is taken out is free.
    Rows are padded at the end if at all, and are read from their first token on. ``model`` is a transformers causal LM
    of the Qwen3.5-text or Qwen3-Next family.

    Raises:
        UsageError: a layer has no recurrent state.
    """
    found = recurrent_layers(model)
    for layer in layers:
        if layer not in found:
            raise UsageError(
                f"target layer {layer} keeps no recurrent state; take states from its recurrent layers, "
                f"{', '.join(map(str, found)) or 'of which it has none'}."
            )
    states: dict[int, LayerStates] = {}
    decoder: Any = model.model

    def watch(number: int, mixer: Any) -> list[Any]:
        seen: dict[str, Tensor] = {}

        def keep(name: str) -> Callable[..., None]:
            def hook(_module: Any, _inputs: Any, output: Tensor) -> None:
                seen[name] = output

            return hook

        def finish(_module: Any, _inputs: Any, _output: Any) -> None:
            states[number] = _layer_states(mixer, seen, anchors, dtype)
            seen.clear()
            for handle in handles:
                handle.remove()

        projections = [(name, child) for name, child in mixer.named_children() if name.startswith("in_proj")]
        handles = [child.register_forward_hook(keep(name)) for name, child in projections]
        handles.append(mixer.register_forward_hook(finish))
        return handles

    watched = [watch(number, decoder.layers[number].linear_attn) for number in layers]
    try:
        yield states
    finally:
        for handle in itertools.chain.from_iterable(watched):
            handle.remove()


@torch.no_grad()
def _layer_states(mixer: Any, projected: dict[str, Tensor], anchors: Tensor, dtype: torch.dtype) -> LayerStates:
    """States of a layer from the outputs of its input projections, [R, T, ..] each."""
    mixed, write, decay = _delta_inputs(mixer, projected)
    history = mixer.conv_kernel_size - 1
    row = torch.arange(len(anchors), device=anchors.device)[:, None, None]
    before = anchors[:, :, None] + torch.arange(history, device=anchors.device)
    conv = F.pad(mixed, (0, 0, history, 0))[row, before].transpose(2, 3)
    key, value = _convolved(mixer, mixed)
    with torch.autocast(mixed.device.type, enabled=False):
        gate = -mixer.A_log.float().exp() * F.softplus(decay.float() + mixer.dt_bias.float())
        recurrent = delta_rule_states(key.float(), value.float(), gate, write.float().sigmoid(), anchors, dtype)
    return LayerStates(recurrent, conv)


def _delta_inputs(mixer: Any, projected: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The convolution's input [R, T, C], and write strength and decay before their activations [R, T, HV]."""
    if "in_proj_qkvz" in projected:  # Qwen3-Next stores the projections interleaved by key head
        query, key, value, _, write, decay = mixer.fix_query_key_value_ordering(
            projected["in_proj_qkvz"], projected["in_proj_ba"]
        )
        return torch.cat([x.flatten(2) for x in (query, key, value)], dim=-1), write, decay
    return projected["in_proj_qkv"], projected["in_proj_b"], projected["in_proj_a"]


def _convolved(mixer: Any, mixed: Tensor) -> tuple[Tensor, Tensor]:
    """Keys [R, T, HV, K] and values [R, T, HV, V] after the short convolution, keys repeated for their value heads."""
    width, (rows, length, channels) = mixer.conv_kernel_size, mixed.shape
    weight = mixer.conv1d.weight
    out = F.conv1d(
        mixed.transpose(1, 2).to(weight.dtype), weight, mixer.conv1d.bias, padding=width - 1, groups=channels
    )
    out = ACT2FN[mixer.activation](out[:, :, :length]).to(mixed.dtype).transpose(1, 2)
    _, key, value = out.split([mixer.key_dim, mixer.key_dim, mixer.value_dim], dim=-1)
    key = key.reshape(rows, length, mixer.num_k_heads, mixer.head_k_dim)
    value = value.reshape(rows, length, mixer.num_v_heads, mixer.head_v_dim)
    return key.repeat_interleave(mixer.num_v_heads // mixer.num_k_heads, dim=2), value


def delta_rule_states(
    key: Tensor,
    value: Tensor,
    gate: Tensor,
    beta: Tensor,
    anchors: Tensor,
    dtype: torch.dtype = torch.float32,
    chunk: int = _CHUNK,
) -> Tensor:
    """States [R, n, HV, K, V] in ``dtype`` of the gated delta rule after the tokens before each anchor.

    Args:
        key: [R, T, HV, K] fp32, not yet normalised.
        value: [R, T, HV, V] fp32.
        gate: log decay [R, T, HV] fp32, at most 0.
        beta: write strength [R, T, HV] fp32, in (0, 1).
        anchors: [R, n] positions below T.
        chunk: tokens that are worked on at once.
    """
    key = key * torch.rsqrt(key.square().sum(-1, keepdim=True) + 1e-6)
    tail = -key.shape[1] % chunk

    def chunked(x: Tensor) -> Tensor:
        """[R, T, HV, D] -> [R, N, HV, chunk, D], padded with tokens that change nothing."""
        return F.pad(x, (0, 0, 0, 0, 0, tail)).unflatten(1, (-1, chunk)).transpose(2, 3)

    key, value, gate, beta = chunked(key), chunked(value), chunked(gate[..., None]), chunked(beta[..., None])
    total = gate.squeeze(-1).cumsum(-1)  # [R, N, HV, chunk]: log decay from the chunk's start to each token
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=key.device).triu(1)
    between = (total[..., :, None] - total[..., None, :]).masked_fill(later, -torch.inf).exp()
    system = (key * beta) @ key.transpose(-1, -2) * between
    # Token i writes value[i] - reach[i] @ (state at the chunk's start), the earlier tokens' writes accounted for.
    sides = torch.cat([value * beta, key * beta * total.exp()[..., None]], dim=-1)
    value, reach = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True).split(
        [value.shape[-1], key.shape[-1]], dim=-1
    )
    at_end = key * (total[..., -1:] - total).exp()[..., None]
    over_chunk = total[..., -1].exp()[..., None, None]
    state = key.new_zeros(*key.shape[:1], key.shape[2], key.shape[-1], value.shape[-1])
    starts, written = [], []
    for number in range(key.shape[1]):
        write = value[:, number] - reach[:, number] @ state
        starts.append(state)
        written.append(write)
        state = state * over_chunk[:, number] + at_end[:, number].transpose(-1, -2) @ write

    row = torch.arange(len(anchors), device=anchors.device)[:, None]
    place, offset = anchors // chunk, anchors % chunk
    inside = torch.arange(chunk, device=anchors.device) < offset[..., None]  # [R, n, chunk]
    total = total[row, place]  # [R, n, HV, chunk]
    last = (offset - 1).clamp(min=0)[..., None, None].expand(*total.shape[:-1], 1)
    since_start = total.gather(-1, last).masked_fill(offset[..., None, None] == 0, 0.0)
    weight = (since_start - total).masked_fill(~inside[:, :, None], -torch.inf).exp()
    added = (key[row, place] * weight[..., None]).transpose(-1, -2) @ torch.stack(written, 1)[row, place]
    return (torch.stack(starts, 1)[row, place] * since_start.exp()[..., None] + added).to(dtype)
