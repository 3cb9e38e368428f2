"""SGLang workers that let the next draft block read the rejected rows of the last verify step.

The round itself is SGLang's. Two things differ: the write after a verify step covers all its rows
(``rows.write_all_rows``), and the draft block's forward is told that its prefix is
longer by the carried rows (``CarryMixin._draft_forward``). A drafter with a lookup table has a third: the verify
step's inputs and the target's choices are kept for the next draft (``lookup_serving``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sglang.srt.lora.layers import unwrap_lora_layer
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.dflash_utils import is_dense_head_weight
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
from sglang.srt.speculative.dspark_components.dspark_worker_v2 import DSparkWorkerV2

from sglang_ext.carryover.draft_model import shift, write_all_rows
from sglang_ext.carryover.lookup_serving import Lookup, LookupDraftSampler, MarkovLookup, choose
from sglang_ext.carryover.rows import CarryState
from sglang_ext.compat import check_draft_runner, rebind_block
from sglang_ext.errors import UsageError, refusal_ends_process
from sglang_ext.settings import LOOKUP, carried_rows_limit, lookup_is_off, oracle_log, rounds_folder

logger = logging.getLogger(__name__)


class CarryMixin:
    """Keeps one integer per request slot and shifts each draft block behind the carried rows."""

    # What the mixin needs of SGLang's workers; compat.TOUCH_POINTS asserts their signatures.
    draft_model_runner: Any
    draft_model: Any
    target_worker: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        with refusal_ends_process():
            check_draft_runner(self)
        self.lookup: Lookup | None = None
        # Of the round's verify step: inputs, and how to get the target's choices once its logits are final.
        self._verified: tuple[torch.Tensor, Callable[[], torch.Tensor]] | None = None
        self._anchor: torch.Tensor | None = None
        self._round: Any = None
        # Both workers call the block's forward through this attribute, once a round
        # (dflash_worker_v2.py:2688, dspark_draft.py:648); graph capture does not go through it.
        self._stock_draft_forward: Callable[..., Any] = self.draft_model_runner.forward
        self.draft_model_runner.forward = self._draft_forward

    def carry_widths(self) -> tuple[int, int]:
        """(W, Q): rows of one verify step, rows of one draft block. Each worker says its own."""
        raise NotImplementedError

    def alloc_memory_pool(self, *args: Any, **kwargs: Any) -> None:
        """Allocate SGLang's pools, then the per-slot state beside them."""
        super().alloc_memory_pool(*args, **kwargs)  # type: ignore[misc]
        pool = self.draft_model_runner.req_to_token_pool
        self._slot_rows: torch.Tensor = pool.req_to_token
        self._generation: torch.Tensor = pool.req_generation
        self.carry = CarryState(self._slot_rows.shape[0], self._slot_rows.device)
        # Attention backends size their page tables for the context, not for the row's headroom behind it.
        self.carry_columns = min(self._slot_rows.shape[1], int(self.draft_model_runner.model_config.context_len))
        switch, table = carried_rows_limit(), self.draft_model.lookup_table
        self.carried_rows = self.draft_model.carried_rows_limit(switch)
        self.draft_model.writes_all_rows = self.carried_rows != 0
        if table is not None and switch != 0 and not lookup_is_off():
            self._attach_lookup(table)
        if get_parallel().tp_rank == 0:  # every rank has the same state and all features
            self._announce()
            self._attach_observers()

    def _attach_lookup(self, table: list[float]) -> None:
        """Keep verify steps from now on. Each worker also lets its sampler look them up, before any is captured."""
        self.lookup = Lookup(table, self._slot_rows.shape[0], self.carry_widths()[0], self._slot_rows.device)

    def _announce(self) -> None:
        verify_width, query_width = self.carry_widths()
        rows = verify_width - 1 if self.carried_rows is None else min(self.carried_rows, verify_width - 1)
        trained = bool(self.draft_model.carryover_embedding.detach().any())
        embedding = "trained" if trained else "zero (untrained: expect less acceptance, not more)"
        logger.info(
            "Carryover is on: %s, draft block of %s rows; beside SGLang's memory %s bytes a request slot on the device "
            "and %s on the host.",
            f"up to {rows} of {verify_width} verified rows are context, embedding {embedding}"
            if rows
            else "no rejected row is context",
            query_width,
            *self.carry.bytes_per_slot(),
        )
        if self.lookup is not None:
            logger.info(
                "Its lookup is on: what the target chose in rejected rows gets a bonus of %s in the next draft's "
                "logits; %s bytes more a request slot.",
                [round(value, 2) for value in self.lookup.table.tolist()],
                self.lookup.bytes_per_slot(),
            )

    def _attach_observers(self) -> None:
        """The debug modes of ``settings``, off unless asked for."""
        if log := oracle_log():
            from sglang_ext.carryover import oracle

            with refusal_ends_process():
                oracle.attach(self, log)
        if folder := rounds_folder():
            from sglang_ext.carryover import observer, recorder

            observer.attach(self, recorder.Recorder(Path(folder), self.carry_widths()[0]))

    def forward_batch_generation(
        self, batch: Any, on_publish: Any = None, grammar_barrier: Any = None, **kwargs: Any
    ) -> Any:
        """One scheduler step, on the forward stream; state is reset and advanced here and nowhere else."""
        self._verified = None  # another worker's, where several share a target
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            self._forget(batch)
        elif not batch.forward_mode.is_idle() and batch.reqs:
            # A slot may start decoding without a prefill seen here.
            new = self.carry.admit(batch.req_pool_indices_cpu, self._generation)
            if self.lookup is not None and new is not None:
                self.lookup.forget(new)
            self._round = batch
        slots = batch.req_pool_indices
        try:
            result = super().forward_batch_generation(  # type: ignore[misc]
                batch, on_publish, grammar_barrier, **kwargs
            )
        finally:
            self._round = None
        if self.lookup is not None and self._verified is not None:
            (inputs, choices), self._verified = self._verified, None
            self.lookup.remember(slots, inputs, choices(), result.accept_lens)
        return result

    def _forget(self, batch: Any) -> None:
        """A prefill, or the one-token extend of a running request in a mixed chunk, ends what its slot carries."""
        slots_cpu = batch.req_pool_indices_cpu
        if slots_cpu is not None and slots_cpu.numel():
            self.carry.forget(batch.req_pool_indices, slots_cpu)
            if self.lookup is not None:
                self.lookup.forget(batch.req_pool_indices)
            self.carry.tenant[slots_cpu] = self._generation[slots_cpu]

    def _draft_forward(self, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        """The draft runner's forward; the block of an armed decode round is shifted first, if rows may be carried."""
        batch, self._round = self._round, None
        if batch is not None and forward_batch.batch_size > 0 and forward_batch.forward_mode.is_target_verify():
            if self.lookup is not None:
                self.lookup.begin(forward_batch.req_pool_indices)
                self._anchor = forward_batch.input_ids.view(forward_batch.batch_size, -1)[:, 0]
            if self.carried_rows != 0:
                self._shift(forward_batch, batch)
        return self._stock_draft_forward(forward_batch, *args, **kwargs)

    def _shift(self, forward_batch: Any, batch: Any) -> None:
        """Tell the block that its prefix is committed + carried rows; its positions stay.

        Lengths and slots are given as new tensors: SGLang reuses the ones it passed.
        """
        verify_width, query_width = self.carry_widths()
        block_slots, lengths = shift(
            self.carry,
            self._slot_rows,
            forward_batch.req_pool_indices,
            forward_batch.seq_lens,
            forward_batch.out_cache_loc.view(-1, query_width),
            verify_width,
            self.carry_columns,
            self.carried_rows,
        )
        if batch.seq_lens_cpu is not None and forward_batch.seq_lens_cpu is not None:
            # The host lengths are exact here, so the host can follow without waiting for the device. Where
            # they are absent, SGLang passes bounds that cover the shift already.
            carried_cpu = self.carry.carried_cpu(
                batch.req_pool_indices_cpu,
                batch.seq_lens_cpu,
                query_width,
                verify_width,
                self.carry_columns,
                self.carried_rows,
            )
            forward_batch.seq_lens_cpu = forward_batch.seq_lens_cpu + carried_cpu
            forward_batch.seq_lens_sum = int(forward_batch.seq_lens_cpu.sum())
        forward_batch.seq_lens = lengths
        rebind_block(self.draft_model_runner, forward_batch, block_slots, query_width)


class CarryoverDFlashWorker(CarryMixin, DFlashWorkerV2):
    """DFLASH with carried rows; here the worker projects and writes the context (dflash_worker_v2.py:1856)."""

    def carry_widths(self) -> tuple[int, int]:
        """W = Q = block size: the anchor and block - 1 drafts, all verified."""
        return int(self.block_size), int(self.block_size)

    def _attach_lookup(self, table: list[float]) -> None:
        """As the mixin; the rows of the target's head are what choices are judged by."""
        super()._attach_lookup(table)
        self._head: Any = unwrap_lora_layer(self.target_worker.model_runner.model.lm_head)
        if not is_dense_head_weight(getattr(self._head, "weight", None)):
            with refusal_ends_process():
                raise UsageError(
                    "the lookup of a DFlash drafter needs the rows of the target's head, and this one is quantised; "
                    f"set {LOOKUP}=off."
                )

    def _maybe_build_draft_sampler(self) -> Any:
        sampler = super()._maybe_build_draft_sampler()
        if self.lookup is None or sampler is None:
            return sampler
        return LookupDraftSampler(sampler, self.lookup, self._head)

    def _greedy_sample_from_vocab_parallel_head(
        self, *, hidden_states: torch.Tensor, lm_head: Any, **kwargs: Any
    ) -> torch.Tensor:
        """The drafts [bs * P] of a block that no graph drafted."""
        tokens: torch.Tensor = super()._greedy_sample_from_vocab_parallel_head(
            hidden_states=hidden_states, lm_head=lm_head, **kwargs
        )
        anchor, self._anchor = self._anchor, None
        if self.lookup is None or anchor is None:
            return tokens
        blocks = hidden_states.view(anchor.shape[0], -1, hidden_states.shape[-1])
        own = tokens.view(anchor.shape[0], -1)
        return choose(self.lookup, lm_head, blocks, own, anchor).flatten()

    def _accept_block(
        self,
        *,
        candidates: torch.Tensor,
        next_token_logits: Any,
        sampling_info: Any,
        target_predict: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """The target's choices are its predictions, which a greedy batch is accepted by."""
        if self.lookup is not None:
            choices = torch.argmax(next_token_logits, -1) if target_predict is None else target_predict
            if sampling_info is None or sampling_info.is_all_greedy:
                target_predict = choices
            self._verified = candidates, lambda: choices
        return super()._accept_block(
            candidates=candidates,
            next_token_logits=next_token_logits,
            sampling_info=sampling_info,
            target_predict=target_predict,
            **kwargs,
        )

    def _append_target_hidden_to_draft_kv_by_loc(
        self,
        *,
        target_hidden: torch.Tensor,
        cache_loc: torch.Tensor,
        positions: torch.Tensor,
        cache_loc_2d: torch.Tensor | None = None,
        commit_lens: torch.Tensor | None = None,
        extend_lens: Any = None,
    ) -> None:
        if cache_loc_2d is not None and commit_lens is not None and self.draft_model.writes_all_rows:
            with torch.inference_mode():
                target_hidden, commit_lens = write_all_rows(
                    target_hidden, commit_lens, cache_loc_2d.shape[1], self.draft_model.carryover_embedding
                )
        super()._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=target_hidden,
            cache_loc=cache_loc,
            positions=positions,
            cache_loc_2d=cache_loc_2d,
            commit_lens=commit_lens,
            extend_lens=extend_lens,
        )


class CarryoverDSparkWorker(CarryMixin, DSparkWorkerV2):
    """DSPARK with carried rows; the context is written by the draft model (draft_model.CarryoverDSparkModel)."""

    def carry_widths(self) -> tuple[int, int]:
        """W = gamma + 1; Q = gamma, or gamma + 1 where the anchor's slot predicts nothing."""
        return int(self.verify_num_draft_tokens), int(self.query_token_num)

    def _attach_lookup(self, table: list[float]) -> None:
        """As the mixin; the Markov head looks up, and a verify step's logits are read at the round's end."""
        super()._attach_lookup(table)
        assert self.lookup is not None
        MarkovLookup(self.draft_model.markov_head, self.lookup)
        stock_verify = self.target_worker.forward_batch_generation

        def verify(*args: Any, **kwargs: Any) -> Any:
            output = stock_verify(*args, **kwargs)
            if kwargs.get("is_verify"):
                logits = output.logits_output
                self._verified = kwargs["forward_batch"].input_ids, lambda: logits.next_token_logits.argmax(-1)
            return output

        self.target_worker.forward_batch_generation = verify
