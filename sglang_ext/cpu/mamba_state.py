"""State of recurrent layers in torch: the short convolution, the commit after a verify, the radix cache's snapshots."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

PAD_SLOT = -1


def causal_conv1d_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_states: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens_cpu: Any,
    cache_indices: torch.Tensor | None = None,
    has_initial_state: torch.Tensor | None = None,
    activation: str | None = "silu",
    pad_slot_id: int = PAD_SLOT,
    **_: Any,
) -> torch.Tensor:
    """Depthwise causal convolution of a prefill (kernels/ops/mamba/causal_conv1d_triton.py:408).

    Args:
        x: [dim, tokens], requests one after the other; weight: [dim, width].
        conv_states: [slots, dim, width - 1], the last inputs of each request, advanced in place.

    Returns:
        [dim, tokens].
    """
    assert cache_indices is not None
    out = torch.zeros_like(x)
    bounds = query_start_loc.tolist()
    for row, slot in enumerate(cache_indices[: len(bounds) - 1].tolist()):
        start, end = bounds[row], bounds[row + 1]
        if slot == pad_slot_id or start == end:
            continue
        history = conv_states[slot]
        if has_initial_state is not None and not bool(has_initial_state[row]):
            history = torch.zeros_like(history)
        window = torch.cat([history.to(x.dtype), x[:, start:end]], 1)
        out[:, start:end] = _convolve(window[None], weight, bias, activation)[0]
        conv_states[slot] = window[:, -history.shape[-1] :].to(conv_states.dtype)
    return out


def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | bool | None = None,
    cache_seqlens: torch.Tensor | None = None,
    conv_state_indices: torch.Tensor | None = None,
    num_accept_tokens: torch.Tensor | None = None,
    intermediate_conv_window: torch.Tensor | None = None,
    intermediate_state_indices: torch.Tensor | None = None,
    retrieve_next_token: torch.Tensor | None = None,
    pad_slot_id: int = PAD_SLOT,
    **_: Any,
) -> torch.Tensor:
    """The same for decode and verify (kernels/ops/mamba/causal_conv1d_triton.py:1021).

    Args:
        x: [bs, dim] or [bs, dim, T].
        conv_state: [slots, dim, width - 1]; a verify advances it too, and the commit puts the right window back.
        intermediate_conv_window: [rows, T, dim, width - 1], the window after each token.

    Returns:
        The shape of x.
    """
    if cache_seqlens is not None or num_accept_tokens is not None or retrieve_next_token is not None:
        raise NotImplementedError("the CPU platform convolves chain drafts over a plain state only")
    assert conv_state_indices is not None
    inputs = x.unsqueeze(-1) if x.dim() == 2 else x
    bs, _dim, steps = inputs.shape
    slots = conv_state_indices[:bs].long()
    valid = slots != pad_slot_id
    width = conv_state.shape[-1]
    window = torch.cat([conv_state[slots.clamp(min=0)].to(x.dtype), inputs], -1)
    # The caller views the result with the strides of x.
    out = torch.empty_like(inputs).copy_(
        _convolve(window, weight, bias, "silu" if activation is True else activation or None)
    )
    out[~valid] = 0
    if intermediate_conv_window is not None and intermediate_state_indices is not None:
        # [bs, T, dim, width - 1]; the buffer's windows may share memory where they overlap, as these do in value.
        windows = window[..., 1:].unfold(-1, width, 1).transpose(1, 2)
        for row, kept in enumerate(intermediate_state_indices[:bs].tolist()):
            if kept >= 0:
                intermediate_conv_window[kept, :steps].copy_(windows[row])
    conv_state[slots[valid]] = window[valid][..., -width:].to(conv_state.dtype)
    return out.view_as(x)


def _convolve(
    window: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> torch.Tensor:
    """[bs, dim, width - 1 + T] -> [bs, dim, T]."""
    y = F.conv1d(
        window.float(), weight.float()[:, None], None if bias is None else bias.float(), groups=weight.shape[0]
    )
    return (F.silu(y) if activation in ("silu", "swish") else y).to(window.dtype)


def commit_states(
    dst: torch.Tensor,
    src: torch.Tensor,
    dst_indices_raw: torch.Tensor,
    step_indices_raw: torch.Tensor,
    src_indices_raw: torch.Tensor | None = None,
) -> None:
    """Copy the state after each request's last accepted token into its slot, in every layer.

    For both kernels/ops/mamba/mamba_state_scatter_triton.py:312 and :487.

    Args:
        dst: [layers, slots, ...]; src: [layers, rows, steps, ...].
        dst_indices_raw: [bs] slots; src_indices_raw: [bs] rows.
        step_indices_raw: [bs] steps, negative where nothing is to be copied.
    """
    for request, (slot, step) in enumerate(zip(dst_indices_raw.tolist(), step_indices_raw.tolist(), strict=True)):
        row = request if src_indices_raw is None else int(src_indices_raw[request])
        if step >= 0 and 0 <= slot < dst.shape[1] and 0 <= row < src.shape[1] and step < src.shape[2]:
            dst[:, slot] = src[:, row, step].to(dst.dtype)


def track_states(
    conv_states: torch.Tensor,
    ssm_states: torch.Tensor,
    cache_indices: torch.Tensor,
    mamba_track_mask: torch.Tensor,
    mamba_track_indices: torch.Tensor,
    batch_size: int,
    check_freed_slots: bool = False,
) -> None:
    """Copy one layer's states of the marked requests to their snapshot slots (mamba_state_scatter_triton.py:192)."""
    track_states_all_layers(
        conv_states[None],
        ssm_states[None],
        cache_indices,
        mamba_track_mask,
        mamba_track_indices,
        batch_size,
        check_freed_slots,
    )


def track_states_all_layers(
    conv_states_pool: torch.Tensor,
    ssm_states_pool: torch.Tensor,
    cache_indices: torch.Tensor,
    mamba_track_mask: torch.Tensor,
    mamba_track_indices: torch.Tensor,
    batch_size: int,
    check_freed_slots: bool = False,
) -> None:
    """The same for pools [layers, slots, ...] (mamba_state_scatter_triton.py:914)."""
    source, target = cache_indices[:batch_size].long(), mamba_track_indices[:batch_size].long()
    marked = mamba_track_mask[:batch_size].bool() & (source >= 0) & (target >= 0)
    for pool in (conv_states_pool, ssm_states_pool):
        pool[:, target[marked]] = pool[:, source[marked]]
