"""What this plugin relies on in SGLang's private parts, and the only place that changes any of it.

The functions overridden or called are asserted by signature when a worker is made. (Attributes of SGLang's worker
objects are read where they are used.)

Written for SGLang 0.5.23. Another version is refused: its workers, pools and arguments differ.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from sglang_ext.errors import UsageError
from sglang_ext.sglang_version import SGLANG_VERSION

DRAFT_BACKENDS = ("triton", "flashinfer", "fa3", "fa4", "torch_native")
"""Attention backends whose draft block is an ordinary prefix plus a block (internals: read from req_to_token)."""

_DFLASH = "sglang.srt.speculative.dflash_worker_v2:DFlashWorkerV2"
_DSPARK = "sglang.srt.speculative.dspark_components.dspark_worker_v2:DSparkWorkerV2"

# Everything overridden or called, with the parameters it is relied upon to take.
TOUCH_POINTS: dict[str, tuple[str, ...]] = {
    f"{_DFLASH}.forward_batch_generation": ("batch", "on_publish", "grammar_barrier"),
    f"{_DFLASH}.alloc_memory_pool": ("memory_pool_config", "req_to_token_pool", "token_to_kv_pool_allocator"),
    f"{_DFLASH}._append_target_hidden_to_draft_kv_by_loc": (
        "target_hidden", "cache_loc", "positions", "cache_loc_2d", "commit_lens", "extend_lens",
    ),
    f"{_DFLASH}._maybe_build_draft_sampler": (),
    f"{_DFLASH}._greedy_sample_from_vocab_parallel_head": ("hidden_states", "lm_head"),
    f"{_DFLASH}._accept_block": ("candidates", "next_token_logits", "sampling_info", "target_predict"),
    "sglang.srt.speculative.dflash_worker_v2:_DflashDraftSampler.__call__": ("hidden_states", "input_ids"),
    "sglang.srt.speculative.dflash_utils:is_dense_head_weight": ("weight",),
    "sglang.srt.lora.layers:unwrap_lora_layer": (),
    "sglang.srt.managers.tp_worker:TpModelWorker.forward_batch_generation": ("batch", "forward_batch", "is_verify"),
    "sglang.srt.models.dspark:BaseDSparkMarkovHead.init_state": ("hidden_states",),
    "sglang.srt.models.dspark:BaseDSparkMarkovHead.step_bias": ("prev_tokens", "hidden_states", "state"),
    "sglang.srt.models.dspark:BaseDSparkMarkovHead.greedy_w2_weight": (),
    f"{_DSPARK}.forward_batch_generation": ("batch", "on_publish", "grammar_barrier", "pp_proxy_tensors"),
    f"{_DSPARK}.alloc_memory_pool": ("memory_pool_config", "req_to_token_pool", "token_to_kv_pool_allocator"),
    "sglang.srt.models.dspark:DSparkDraftModel.write_target_hidden_kv": (
        "target_hidden", "pool", "positions", "cache_loc", "cache_loc_2d", "commit_lens", "target_hidden_is_projected",
    ),
    f"{_DSPARK}.init_attention_backends": (),
    "sglang.srt.models.dflash:DFlashDecoderLayer.__init__": ("config", "layer_id"),
    "sglang.srt.models.dflash:DFlashDecoderLayer.forward": (
        "positions", "hidden_states", "forward_batch", "residual",
    ),
    "sglang.srt.models.dflash:DFlashDraftModel.forward": ("input_ids", "positions", "forward_batch"),
    "sglang.srt.layers.layernorm:RMSNorm.forward": (),
    "sglang.srt.mem_cache.memory_pool:HybridReqToTokenPool.translate_mamba_indices": ("mamba_indices",),
    "sglang.srt.layers.attention.hybrid_linear_attn_backend:"
    "HybridLinearAttnBackend.update_mamba_state_after_mtp_verify": (),
    "sglang.srt.models.dflash:DFlashDraftModel.__init__": ("config", "quant_config", "prefix"),
    "sglang.srt.models.dflash:DFlashDraftModel.load_weights": ("weights",),
    "sglang.srt.mem_cache.kv_index_translator:KVIndexTranslator.plan": (
        "req_pool_indices", "seq_lens", "seq_lens_cpu", "write_virtual", "read_extent",
    ),
    "sglang.srt.mem_cache.kv_loc_plan:KVLocPlan.bind": ("batch", "reader", "cols"),
    "sglang.srt.mem_cache.kv_cache_configurator:get_req_to_token_extra_context_len": (),
    "sglang.srt.mem_cache.allocation_sizing:get_alloc_reserve_per_decode": (),
    "sglang.srt.mem_cache.allocation_sizing:get_alloc_page_size": (),
    "sglang.srt.arg_groups.model_override_base:attention_backends_of": ("cfg",),
    "sglang.srt.arg_groups.overrides:resolved_view": (),
    "sglang.srt.model_executor.model_runner:ModelRunner._extend_forward_kwargs": ("forward_batch", "pp_proxy_tensors"),
}  # fmt: skip

# The same for metrics, which stock algorithms have too.
METRICS_TOUCH_POINTS: dict[str, tuple[str, ...]] = {
    "sglang.srt.managers.scheduler:Scheduler.on_idle": (),
    "sglang.srt.managers.scheduler_components.metrics_reporter:SchedulerMetricsReporter.snapshot_spec_decode_metrics": (
        "batch", "result",
    ),
    "sglang.srt.speculative.base_spec_worker:BaseSpecWorker.on_verify_complete_cpu": (
        "num_correct_drafts_per_req", "batch_size",
    ),
}  # fmt: skip


def check_touch_points(points: dict[str, tuple[str, ...]] = TOUCH_POINTS) -> None:
    """UsageError naming the first part of SGLang that is missing or no longer takes the parameters relied upon."""
    for point, parameters in points.items():
        module, _, path = point.partition(":")
        try:
            target: Any = import_module(module)
            for name in path.split("."):
                target = getattr(target, name)
            missing = [name for name in parameters if name not in inspect.signature(target).parameters]
        except (ImportError, AttributeError) as error:
            raise UsageError(
                f"SGLang has no {point} ({error}); install an unmodified SGLang {SGLANG_VERSION}."
            ) from None
        if missing:
            raise UsageError(
                f"SGLang's {point} takes no parameter {missing[0]!r}; install an unmodified SGLang {SGLANG_VERSION}."
            )


def on_scheduler_start(hook: Callable[[Any], None]) -> None:
    """Call ``hook`` with each scheduler that this process builds, once it is whole.

    A scheduler's process loads its plugins after it has imported the scheduler (scheduler.py:6323); the others are
    spared that import.
    """
    module = sys.modules.get("sglang.srt.managers.scheduler")
    if module is None:
        return
    stock = module.Scheduler.__init__

    @functools.wraps(stock)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        hook(self)

    module.Scheduler.__init__ = init


def choose_backends_like(bases: dict[str, str]) -> None:
    """Let an added algorithm get the default attention backend of its base.

    SGLang asks for DFLASH by name there (model_override_base.py:274), so on Blackwell an extension of it would get
    another target backend than DFLASH itself.
    """
    from sglang.srt.arg_groups import model_override_base

    stock = model_override_base._forces_eagle_topk_one
    if not getattr(stock, "knows_added_algorithms", False):

        def forces_eagle_topk_one(name: str) -> bool:
            return bool(stock(bases.get(str(name).upper(), name)))

        forces_eagle_topk_one.knows_added_algorithms = True  # type: ignore[attr-defined]
        model_override_base._forces_eagle_topk_one = forces_eagle_topk_one


def resolved_draft_backend(server_args: Any) -> str | None:
    """The draft's attention backend once its arguments are resolved; None where SGLang decides later."""
    from sglang.srt.arg_groups.model_override_base import attention_backends_of
    from sglang.srt.arg_groups.overrides import resolved_view

    view = resolved_view(server_args)
    backend: str | None = view.speculative_draft_attention_backend or attention_backends_of(view)[0]
    return backend


def register_draft_models() -> None:
    """Make the draft architectures loadable. Importing SGLang's registry imports every model, so only schedulers do."""
    from sglang.srt.models.registry import ModelRegistry

    from sglang_ext.carryover.draft_model import CarryoverDFlashDraftModel, CarryoverDSparkModel
    from sglang_ext.ready.draft_model import ReadyCarryoverDSparkModel, ReadyDSparkModel

    for model in (
        CarryoverDFlashDraftModel,
        CarryoverDSparkModel,
        ReadyDSparkModel,
        ReadyCarryoverDSparkModel,
    ):
        ModelRegistry.models.setdefault(model.__name__, model)


def widen_slot_rows() -> None:
    """Give each request's slot row the columns that decode may reserve.

    At page size 1 SGLang sizes a row for context + 4 + W columns (allocation_sizing.py:96), but reserves up to
    2 * W behind the committed length, and with overlap the round after a request's end verifies there: within
    a block of the context end, stock DFLASH and DSPARK run into the next request's row.
    """
    from sglang.srt.mem_cache import allocation_sizing, kv_cache_configurator

    stock = allocation_sizing.get_req_to_token_extra_context_len

    def extra_columns() -> int:
        reserve = allocation_sizing.get_alloc_reserve_per_decode() + allocation_sizing.get_alloc_page_size() - 1
        return max(stock(), reserve)

    # Imported there by name, so the name there is what counts.
    kv_cache_configurator.get_req_to_token_extra_context_len = extra_columns


def keep_embedding_dtype() -> None:
    """Let a draft block's embeddings reach the drafter in the runner's dtype; a second call changes nothing.

    Without a CUDA graph SGLang casts them to bfloat16 (model_runner.py:1772), so a DFlash drafter in float32 or
    float16 fails at its first block: with graphs off, or in a batch above the largest one captured.
    """
    from sglang.srt.model_executor.model_runner import ModelRunner

    stock = ModelRunner._extend_forward_kwargs
    if getattr(stock, "keeps_embedding_dtype", False):
        return

    @functools.wraps(stock)
    def extend_forward_kwargs(self: Any, forward_batch: Any, pp_proxy_tensors: Any) -> dict[str, Any]:
        kwargs: dict[str, Any] = stock(self, forward_batch, pp_proxy_tensors)
        if forward_batch.input_embeds is not None and forward_batch.replace_embeds is None:
            kwargs["input_embeds"] = forward_batch.input_embeds.to(self.dtype)
        return kwargs

    extend_forward_kwargs.keeps_embedding_dtype = True  # type: ignore[attr-defined]
    ModelRunner._extend_forward_kwargs = extend_forward_kwargs


def check_draft_runner(worker: Any) -> None:
    """UsageError for what only a built worker knows: its attention backend and the drafter's variant."""
    backend = worker.draft_model_runner.draft_attention_backend
    if backend not in DRAFT_BACKENDS:
        raise UsageError(
            f"The draft attention backend {backend} is not verified with carried rows; "
            f"set --speculative-draft-attention-backend to one of {', '.join(DRAFT_BACKENDS)}."
        )
    if not hasattr(worker.draft_model, "carryover_embedding"):
        raise UsageError(
            f"The draft model {type(worker.draft_model).__name__} has no carryover_embedding; "
            "make a Carryover drafter of it with `sglang-ext convert BASE --carryover OUT`."
        )
    for variant in ("selector", "lilicorr"):
        if getattr(worker, variant, None) is not None:
            raise UsageError(
                f"A drafter with a {variant} is not supported with carried rows; serve it as stock DFLASH."
            )


def check_reading_worker(worker: Any) -> None:
    """UsageError unless a built worker's drafter has a reader and shares the target's request slots."""
    if not hasattr(worker.draft_model, "state_reader"):
        raise UsageError(
            f"The draft model {type(worker.draft_model).__name__} has no reader of states; "
            "make a ReaDy drafter of it with `sglang-ext convert BASE --ready OUT --target TARGET`."
        )
    if worker.draft_model_runner.req_to_token_pool is not worker.target_worker.model_runner.req_to_token_pool:
        raise UsageError("The drafter has request slots of its own, so it cannot find the target's states.")


def check_state_commit(worker: Any) -> None:
    """UsageError unless the worker commits recurrent states after each verify step, into the pool.

    SGLang leaves the commit out where the target's attention backend has none (dspark_worker_v2.py:574); a fused KDA
    verify keeps the accepted length instead of the state (hybrid_linear_attn_backend.py:1583).
    """
    linear = getattr(worker.model_runner.attn_backend, "linear_attn_backend", None)
    if not worker._need_mamba_verify_commit or getattr(linear, "accept_lens_pool", None) is not None:
        raise UsageError(
            "The target's attention backend does not commit its recurrent states after a verify step, so READY would "
            "read old ones; choose another --attention-backend, or serve a drafter without a reader."
        )


def rebind_block(runner: Any, forward_batch: Any, block_slots: torch.Tensor, query_width: int) -> None:
    """Plan the draft block's reads and writes anew after its lengths and slots ([bs * Q] int64) have changed."""
    translator = runner.kv_index_translator
    translator.plan(
        req_pool_indices=forward_batch.req_pool_indices,
        seq_lens=forward_batch.seq_lens,
        seq_lens_cpu=forward_batch.seq_lens_cpu,
        write_virtual=block_slots,
        read_extent=query_width,
    ).bind(forward_batch, translator)
