"""What SGLang 0.5.23 does that a CPU cannot, and the answer to each: one named patch per place.

Every patch carries a digest of the SGLang code it answers. Where that code is not the code it was written against,
start-up ends with the patch's name: SGLang only logs what a plugin raises and would go on half patched.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import inspect
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from sglang_ext import compat
from sglang_ext.cpu import elementwise, gated_delta, mamba_state, sampling, slots


@dataclass(frozen=True)
class Patch:
    """One answer to one place in SGLang."""

    name: str
    #: The place in SGLang 0.5.23 (file:line under sglang/) and what a CPU cannot do there.
    answers: str
    #: "module:qualified.name" of the code that is answered.
    target: str
    #: First 16 hex digits of the SHA-256 of that code's source.
    digest: str
    apply: Callable[[str], None]


def source_digest(target: str) -> str:
    """Digest of the source of ``module:qualified.name``; "absent" where there is no such code."""
    try:
        source = inspect.getsource(inspect.unwrap(_resolve(target)))
    except (ImportError, AttributeError, OSError, TypeError):
        return "absent"
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def apply_patch(patch: Patch) -> None:
    """Apply one patch if SGLang's code is the code it answers; end the process (exit code 2) otherwise."""
    found = source_digest(patch.target)
    if found != patch.digest:
        _refuse(
            f"sglang-ext: CPU patch {patch.name!r} does not fit this SGLang: {patch.target} is not the code of 0.5.23 "
            f"(digest {found}, expected {patch.digest}); install sglang==0.5.23."
        )
    patch.apply(patch.target)


@functools.cache
def apply_all() -> None:
    """Apply every patch, once per process."""
    for patch in PATCHES:
        apply_patch(patch)


def _refuse(sentence: str) -> NoReturn:
    print(sentence, file=sys.stderr, flush=True)
    raise SystemExit(2)


def _resolve(target: str) -> Any:
    owner, name = _owner(target)
    return getattr(owner, name)


def _owner(target: str) -> tuple[Any, str]:
    """The module or class that holds ``module:qualified.name``, and the name in it."""
    module, _, path = target.partition(":")
    *classes, name = path.split(".")
    return functools.reduce(getattr, classes, importlib.import_module(module)), name


def _replace_with(replacement: Any) -> Callable[[str], None]:
    """Replace a function or method, and a function also wherever it was imported by name."""

    def apply(target: str) -> None:
        original = _resolve(target)
        owner, name = _owner(target)
        setattr(owner, name, replacement)
        for module in list(sys.modules.values()):
            if getattr(module, "__name__", "").startswith("sglang.") and vars(module).get(name) is original:
                setattr(module, name, replacement)

    return apply


def _rewrite(old: str, new: str) -> Callable[[str], None]:
    """Compile a module's function again with one expression changed; line numbers stay those of the file."""

    def apply(target: str) -> None:
        function = inspect.unwrap(_resolve(target))
        lines, first = inspect.getsourcelines(function)
        source = textwrap.dedent("".join(lines))
        assert source.count(old) == 1, target
        tree = ast.parse(source.replace(old, new))
        ast.increment_lineno(tree, first - 1)
        flags = function.__code__.co_flags & importlib.import_module("__future__").annotations.compiler_flag
        code = compile(tree, function.__code__.co_filename, "exec", flags=flags, dont_inherit=True)
        rewritten: dict[str, Any] = {}
        exec(code, function.__globals__, rewritten)
        _replace_with(rewritten[function.__name__])(target)

    return apply


def _without_pinning(target: str) -> None:
    """Pinned memory and stream bookkeeping mean nothing without an accelerator, but torch raises on both."""
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self  # type: ignore[method-assign]


def _without_streams(target: str) -> None:
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign, assignment]


def _register_attention_backend(target: str) -> None:
    from sglang.srt.arg_groups.choices import add_draft_attention_backend_choices
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    from sglang_ext.cpu.platform import ATTENTION_BACKEND

    def create(runner: Any) -> Any:
        from sglang_ext.cpu.attention import TorchAttentionBackend

        return TorchAttentionBackend(runner)

    ATTENTION_BACKENDS[ATTENTION_BACKEND] = create
    add_draft_attention_backend_choices([ATTENTION_BACKEND])


def _sampling_verify(target: str) -> None:
    from sglang.kernels.ops.speculative import verify_sampling
    from sglang.srt.speculative import dflash_utils

    from sglang_ext.cpu.sampling import tree_speculative_sampling_target_only

    verify_sampling.tree_speculative_sampling_target_only = tree_speculative_sampling_target_only
    dflash_utils.tree_speculative_sampling_target_only = tree_speculative_sampling_target_only
    dflash_utils._DFLASH_SAMPLING_VERIFY_AVAILABLE = True


_OPS = "sglang.kernels.ops"

PATCHES: tuple[Patch, ...] = (
    Patch(
        "no-pinned-memory",
        "srt/managers/schedule_batch.py:3830 pins a host tensor without asking the platform",
        "sglang.srt.managers.schedule_batch:ScheduleBatch.prepare_for_decode",
        "1690ff7deee18f0f",
        _without_pinning,
    ),
    Patch(
        "no-streams",
        "srt/speculative/dflash_worker_v2.py:2481 records a stream on a host tensor",
        "sglang.srt.speculative.dflash_worker_v2:DFlashWorkerV2.forward_batch_generation",
        "f42a3bb18adba2a5",
        _without_streams,
    ),
    Patch(
        "attention-backend",
        "srt/layers/attention/torch_native_backend.py:101 takes neither a verify nor a draft block; srt/speculative/"
        "draft_worker_common.py:51 lets no drafter use it",
        "sglang.srt.speculative.draft_worker_common:resolve_draft_worker_attention_backend",
        "cda11210a998ccac",
        _register_attention_backend,
    ),
    Patch(
        "dspark-device",
        "srt/arg_groups/speculative_hook.py:669 lists the devices of DSPARK and asks no out-of-tree platform",
        "sglang.srt.arg_groups.speculative_hook:_handle_dspark",
        "1013ddf3436fdd68",
        _rewrite(
            'cfg.device.startswith(("cuda", "npu", "xpu"))', 'cfg.device.startswith(("cuda", "npu", "xpu", "cpu"))'
        ),
    ),
    Patch(
        "embedding-dtype",
        "srt/model_executor/model_runner.py:1772 casts a drafter's input embeddings to bfloat16 at any dtype",
        "sglang.srt.model_executor.model_runner:ModelRunner._extend_forward_kwargs",
        "2fb8dbbf8d795a06",
        lambda target: compat.keep_embedding_dtype(),
    ),
    Patch(
        "dflash-sampling-verify",
        "srt/speculative/dflash_utils.py:46 has no sampling verify off CUDA and verifies greedily at temperature > 0",
        "sglang.srt.speculative.dflash_utils:compute_dflash_sampling_correct_drafts_and_bonus",
        "91c0eb0372089e6c",
        _sampling_verify,
    ),
    Patch(
        "dspark-sampling-verify",
        "kernels/ops/speculative/reject_sampling.py:242 launches a Triton kernel",
        f"{_OPS}.speculative.reject_sampling:chain_speculative_sampling_triton",
        "405e6a077e7f13b4",
        _replace_with(sampling.chain_speculative_sampling),
    ),
    Patch(
        "slot-assignment",
        "srt/mem_cache/allocation.py:737 launches a Triton kernel",
        "sglang.srt.mem_cache.allocation:assign_req_to_token_pool_func",
        "fdbe87d4a60cc13a",
        _replace_with(slots.assign_req_to_token_pool),
    ),
    Patch(
        "kv-copy-warm-up",
        "srt/mem_cache/memory_pool.py:2307 warms up a Triton kernel (moves go by SGLANG_NATIVE_MOVE_KV_CACHE)",
        "sglang.srt.mem_cache.memory_pool:MHATokenToKVPool._init_kv_copy_and_warmup",
        "8b563b1e5c696e24",
        _replace_with(lambda pool: None),
    ),
    Patch(
        "attention-gate",
        "kernels/ops/elementwise/elementwise.py:53 launches a Triton kernel",
        f"{_OPS}.elementwise.elementwise:fused_sigmoid_mul",
        "35737a93045d38c7",
        _replace_with(elementwise.sigmoid_mul),
    ),
    Patch(
        "gdn-projection-split",
        "kernels/ops/attention/triton_gdn_fused_proj.py:272 launches a Triton kernel",
        f"{_OPS}.attention.triton_gdn_fused_proj:fused_qkvzba_split_reshape_cat_contiguous",
        "ffb71f6b2f5ff855",
        _replace_with(gated_delta.split_projections),
    ),
    Patch(
        "gdn-prefill",
        "kernels/ops/attention/fla/chunk.py:136 launches Triton kernels, and refuses float32",
        f"{_OPS}.attention.fla.chunk:chunk_gated_delta_rule",
        "2352618b28143203",
        _replace_with(gated_delta.chunk_gated_delta_rule),
    ),
    Patch(
        "gdn-verify",
        "kernels/ops/attention/linear/fused_sigmoid_gating_recurrent.py:538 launches a Triton kernel",
        f"{_OPS}.attention.linear.fused_sigmoid_gating_recurrent:fused_sigmoid_gating_delta_rule_update",
        "f66af14f8c40efaa",
        _replace_with(gated_delta.fused_sigmoid_gating_delta_rule_update),
    ),
    Patch(
        "gdn-decode",
        "kernels/ops/attention/fla/fused_recurrent.py:269 launches a Triton kernel",
        f"{_OPS}.attention.fla.fused_recurrent:fused_recurrent_gated_delta_rule_packed_decode",
        "bbccc140e57ba357",
        _replace_with(gated_delta.fused_recurrent_gated_delta_rule_packed_decode),
    ),
    Patch(
        "gdn-gates",
        "kernels/ops/attention/linear/fused_gdn_gating.py:44 launches a Triton kernel",
        f"{_OPS}.attention.linear.fused_gdn_gating:fused_gdn_gating",
        "f789a9c0d1253846",
        _replace_with(gated_delta.fused_gdn_gating),
    ),
    Patch(
        "gdn-norm",
        "kernels/ops/attention/fla/layernorm_gated.py:234 launches a Triton kernel",
        f"{_OPS}.attention.fla.layernorm_gated:_layer_norm_fwd",
        "06073efe4c3c6903",
        _replace_with(gated_delta.gated_norm),
    ),
    Patch(
        "conv-prefill",
        "kernels/ops/mamba/causal_conv1d_triton.py:408 launches a Triton kernel",
        f"{_OPS}.mamba.causal_conv1d_triton:causal_conv1d_fn",
        "f6fdaaa1136a5be4",
        _replace_with(mamba_state.causal_conv1d_fn),
    ),
    Patch(
        "conv-decode",
        "kernels/ops/mamba/causal_conv1d_triton.py:1021 launches a Triton kernel",
        f"{_OPS}.mamba.causal_conv1d_triton:causal_conv1d_update",
        "9deee5a1f64dea91",
        _replace_with(mamba_state.causal_conv1d_update),
    ),
    Patch(
        "state-commit",
        "kernels/ops/mamba/mamba_state_scatter_triton.py:312 refuses CPU tensors",
        f"{_OPS}.mamba.mamba_state_scatter_triton:fused_mamba_state_scatter_with_mask",
        "a94dfc407eee32a2",
        _replace_with(mamba_state.commit_states),
    ),
    Patch(
        "conv-commit",
        "kernels/ops/mamba/mamba_state_scatter_triton.py:487 refuses CPU tensors",
        f"{_OPS}.mamba.mamba_state_scatter_triton:fused_conv_window_scatter_with_mask",
        "ebe82705a8f1fe84",
        _replace_with(mamba_state.commit_states),
    ),
    Patch(
        "state-snapshot",
        "kernels/ops/mamba/mamba_state_scatter_triton.py:192 launches a Triton kernel",
        f"{_OPS}.mamba.mamba_state_scatter_triton:track_mamba_states_if_needed",
        "eafa9759dc375d20",
        _replace_with(mamba_state.track_states),
    ),
    Patch(
        "state-snapshot-all-layers",
        "kernels/ops/mamba/mamba_state_scatter_triton.py:914 launches a Triton kernel",
        f"{_OPS}.mamba.mamba_state_scatter_triton:track_mamba_states_all_layers",
        "a9721a5e349bd0f0",
        _replace_with(mamba_state.track_states_all_layers),
    ),
)
