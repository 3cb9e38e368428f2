"""Follow a built SGLang scheduler: what its verify steps did, without a read of the device.

SGLang hands the accepted drafts of each round to ``on_verify_complete_cpu`` once they are on the host
(batch_result_processor.py:804). The same call chain says before which requests they belong to
(``snapshot_spec_decode_metrics``, line 779), so that rounds of requests already ended are told apart.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from sglang_ext import compat
from sglang_ext.errors import refusal_ends_process
from sglang_ext.metrics import contract
from sglang_ext.metrics.rounds import Carry, Tally, on_decode, on_extend
from sglang_ext.settings import expected_method

logger = logging.getLogger(__name__)

FLUSH_SECONDS = 0.25
"""Rounds are added up for so long before they are shown; an idle scheduler shows what is left at once."""

_BEFORE = "_sglang_ext_before"


def attach(scheduler: Any) -> None:
    """Give a scheduler our series, where it was started with --enable-metrics; one rank of each group has them."""
    context = scheduler.metrics_collector_context
    if not (context.enable_metrics and context.is_stats_logging_rank):
        return
    with refusal_ends_process():
        compat.check_touch_points(compat.METRICS_TOUCH_POINTS)
        _attach(scheduler)


def _attach(scheduler: Any) -> None:
    from sglang.srt.runtime_context import get_parallel, get_spec

    from sglang_ext.metrics.series import SpeculationSeries, publish_method

    # "priority" is a label of SGLang's queue gauges only.
    labels = {name: str(value) for name, value in scheduler.metrics_collector.labels.items() if name != "priority"}
    labels["method"] = scheduler.spec_algorithm.name
    worker, settings, parallel = scheduler.draft_worker, get_spec(), get_parallel()
    drafter = None
    # Verify steps of the others (trees, adaptive widths) need other sums; SGLang's gauges are there for them.
    if worker is not None and scheduler.spec_algorithm.is_dflash_family():
        drafter = contract.contract_of(settings.speculative_draft_model_path, settings.speculative_draft_model_revision)
        tally = Tally(int(settings.speculative_num_draft_tokens), carry_of(worker), len(contract.state_layers(drafter)))
        follow(scheduler, worker, tally, SpeculationSeries(labels, tally.verify_width).add)
    described = contract.describe(drafter) | carrying(worker) | contract.versions()
    publish_method(labels, described, parallel.tp_size // parallel.attn_dp_size, expected_method())
    logger.info("Metrics of %s are on /metrics: %s", labels["method"], described)


def carry_of(worker: Any) -> Carry | None:
    """How a worker carries rows, as context or, all of them, for its lookup; None where it does not."""
    if not hasattr(worker, "carry_columns"):
        return None
    limit = None if worker.lookup is not None else worker.carried_rows
    return Carry(query_width=worker.carry_widths()[1], columns=worker.carry_columns, limit=limit)


def carrying(worker: Any) -> dict[str, str]:
    """Labels: the most rows that are context of a draft, and the lookup table in use; empty where there is none."""
    if carry_of(worker) is None:
        return {"carried_rows": "", "lookup": ""}
    table = [] if worker.lookup is None else worker.lookup.table.tolist()
    rows = "all" if worker.carried_rows is None else str(worker.carried_rows)
    return {"carried_rows": rows, "lookup": ",".join(f"{bonus:g}" for bonus in table)}


def follow(scheduler: Any, worker: Any, tally: Tally, show: Callable[[Tally], None]) -> None:
    """Add each round of ``scheduler`` to ``tally`` and call ``show`` with it from time to time.

    Args:
        worker: the scheduler's speculative worker; the methods of this one object are wrapped.
        show: takes the sums before they are cleared.
    """
    snapshot = scheduler.metrics_reporter.snapshot_spec_decode_metrics
    verified, idle = worker.on_verify_complete_cpu, scheduler.on_idle
    settled: Any = None  # SGLang's (batch, result) that the next call of on_verify_complete_cpu is about
    due = 0.0

    def flush() -> None:
        nonlocal due
        show(tally)
        tally.clear()
        due = time.monotonic() + FLUSH_SECONDS

    def snapshot_spec_decode_metrics(batch: Any, result: Any) -> Any:
        nonlocal settled
        settled = batch, result
        return snapshot(batch, result)

    def on_verify_complete_cpu(num_correct_drafts_per_req: list[int], batch_size: int = 0) -> None:
        nonlocal settled
        batch, result = settled
        settled = None
        caps = None if result.cap_lens is None else result.cap_lens.tolist()
        tally.add(batch.reqs, num_correct_drafts_per_req, getattr(result, _BEFORE, None), caps)
        if time.monotonic() >= due:
            flush()
        verified(num_correct_drafts_per_req, batch_size=batch_size)

    def on_idle() -> Any:
        if tally:
            flush()
        return idle()

    scheduler.metrics_reporter.snapshot_spec_decode_metrics = snapshot_spec_decode_metrics
    scheduler.on_idle = on_idle
    worker.on_verify_complete_cpu = on_verify_complete_cpu
    if tally.carry is not None:
        _note_launches(worker)


def _note_launches(worker: Any) -> None:
    """Let each round's result say what came before the round for each request: known at the launch, needed later."""
    forward = worker.forward_batch_generation

    def forward_batch_generation(batch: Any, *args: Any, **kwargs: Any) -> Any:
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            on_extend(batch.reqs, batch.decoding_reqs or ())
            return forward(batch, *args, **kwargs)
        before = on_decode(batch.reqs or ())
        result = forward(batch, *args, **kwargs)
        setattr(result, _BEFORE, before)
        return result

    worker.forward_batch_generation = forward_batch_generation
