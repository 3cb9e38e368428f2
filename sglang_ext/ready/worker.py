"""SGLang workers whose drafter reads the target's recurrent states; the round itself is SGLang's."""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.dspark_components.dspark_worker_v2 import DSparkWorkerV2

from sglang_ext.carryover.worker import CarryoverDSparkWorker
from sglang_ext.compat import check_reading_worker, check_state_commit
from sglang_ext.errors import refusal_ends_process
from sglang_ext.ready.controls import WrongStates
from sglang_ext.ready.states import committed_states
from sglang_ext.settings import oracle_log, wrong_states

logger = logging.getLogger(__name__)


class ReadMixin:
    """Shows the drafter where the states lie, once the pools exist and before any graph is captured."""

    def alloc_memory_pool(self, *args: Any, **kwargs: Any) -> None:
        """Allocate SGLang's pools, then attach the target's states to the drafter."""
        super().alloc_memory_pool(*args, **kwargs)  # type: ignore[misc]
        worker: Any = self
        model = worker.draft_model
        with refusal_ends_process():
            check_reading_worker(worker)
            pool = worker.target_worker.model_runner.req_to_token_pool
            model.attach_states(committed_states(pool, model.ready_config, model.shards))
            control = wrong_states()
        if control is not None:
            slots, reduced = pool.req_to_token.shape[0], model.state_reader.reduced_shape()
            model.control = WrongStates(control, slots, reduced, model.states.temporal.device)
            logger.warning("The reader is fed %s states, a control: expect less acceptance.", control)
        if get_parallel().tp_rank == 0:
            logger.info(
                "ReaDy is on: draft layers %s read the states of target layers %s through ranks %s and %s, output %s; "
                "beside SGLang's memory at most %s bytes a running request.",
                list(model.state_reader.layers),
                list(model.ready_config.source_layers),
                model.ready_config.rank_k,
                model.ready_config.rank_v,
                "trained" if any(read.out.any() for read in model.state_reader.reads) else "zero (untrained)",
                model.state_reader.bytes_per_request(int(worker.query_token_num)),
            )

    def forward_batch_generation(
        self, batch: Any, on_publish: Any = None, grammar_barrier: Any = None, **kwargs: Any
    ) -> Any:
        """One scheduler step; a control forgets the requests that a prefill starts or takes up again."""
        control = self.draft_model.control  # type: ignore[attr-defined]
        if control is not None and (batch.forward_mode.is_extend() or batch.is_extend_in_batch):
            control.forget(batch.req_pool_indices)
        return super().forward_batch_generation(  # type: ignore[misc]
            batch, on_publish, grammar_barrier, **kwargs
        )

    def init_attention_backends(self) -> None:
        """Build SGLang's attention backends, then see that this target's states are committed at all."""
        super().init_attention_backends()  # type: ignore[misc]
        with refusal_ends_process():
            check_state_commit(self)


class ReadyDSparkWorker(ReadMixin, DSparkWorkerV2):
    """DSPARK with a reader."""

    def alloc_memory_pool(self, *args: Any, **kwargs: Any) -> None:
        """As the mixin; then the debug mode of ``settings``, which a Carryover worker attaches by itself."""
        super().alloc_memory_pool(*args, **kwargs)
        if (log := oracle_log()) and get_parallel().tp_rank == 0:
            from sglang_ext.carryover import oracle

            with refusal_ends_process():
                oracle.attach(self, log)

    def carry_widths(self) -> tuple[int, int]:
        """(W, Q): rows of one verify step, rows of one draft block."""
        return int(self.verify_num_draft_tokens), int(self.query_token_num)


class ReadyCarryoverWorker(ReadMixin, CarryoverDSparkWorker):
    """DSPARK with a reader and carried rows: one rewrites the batch, the other needs its request slots only."""
