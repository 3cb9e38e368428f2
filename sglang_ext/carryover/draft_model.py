"""SGLang draft models with one parameter more: the embedding that marks rejected rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.models.dflash import DFlashDraftModel
from sglang.srt.models.dspark import DSparkDraftModel
from torch import nn

from sglang_ext.carryover import rows
from sglang_ext.checkpoints import EMBEDDING


def write_all_rows(
    hidden: torch.Tensor, commit_lens: torch.Tensor, verify_width: int, embedding: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``rows.write_all_rows``; on CUDA in one launch."""
    if not hidden.is_cuda:
        return rows.write_all_rows(hidden, commit_lens, verify_width, embedding)
    from sglang_ext.carryover import kernels

    return kernels.write_all_rows(hidden, commit_lens, verify_width, embedding)


def shift(state: rows.CarryState, slot_rows: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """``rows.shift``; on CUDA in one launch."""
    if not slot_rows.is_cuda:
        return rows.shift(state, slot_rows, *args)
    from sglang_ext.carryover import kernels

    return kernels.shift(state, slot_rows, *args)


class _CarryoverEmbedding:
    """Adds ``carryover_embedding`` [D], as wide as the concatenated target features (paper section 2.1)."""

    # A hidden that arrives projected has lost the width that the embedding is added to.
    supports_pre_gather_target_hidden_projection = False

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__(config, quant_config=quant_config, prefix=prefix)  # type: ignore[call-arg]
        width = self.num_context_features * int(config.hidden_size)  # type: ignore[attr-defined]
        self.carryover_embedding = nn.Parameter(torch.zeros(width), requires_grad=False)
        self._embedding_loaded = False
        settings = getattr(config, "carryover_config", None) or {}
        self.lookup_table: list[float] | None = settings.get("lookup")
        self._carried_rows: int | None = settings.get("carried_rows")
        self.writes_all_rows = True  # the worker's choice; not where none is read

    def carried_rows_limit(self, switch: int | None) -> int | None:
        """At most this many rejected rows are read: what the drafter was made for and ``switch`` allow; None is all."""
        limits = [limit for limit in (self._carried_rows, switch) if limit is not None]
        return min(limits) if limits else None

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        """Load a drafter; ValueError when the embedding is missing or has another shape (SGLang would not say).

        Once it is there, a later call may bring any part of the weights (SGLang's weight updates come in buckets).
        """

        def watched() -> Iterable[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                if name.removeprefix("model.") == EMBEDDING:
                    if tensor.shape != self.carryover_embedding.shape:
                        raise ValueError(
                            f"{EMBEDDING} has shape {tuple(tensor.shape)}, but this drafter's features need "
                            f"{tuple(self.carryover_embedding.shape)}."
                        )
                    self._embedding_loaded = True
                yield name, tensor

        loaded = super().load_weights(watched())  # type: ignore[misc]
        if not self._embedding_loaded:
            raise ValueError(f"The draft checkpoint has no {EMBEDDING}; make one with `sglang-ext convert`.")
        return loaded


class CarryoverDFlashDraftModel(_CarryoverEmbedding, DFlashDraftModel):
    """DFlash drafter; its worker writes the context rows (dflash_worker_v2.py:1856)."""


class CarryoverDSparkModel(_CarryoverEmbedding, DSparkDraftModel):
    """DSpark drafter; it writes its own context rows (dspark.py:838)."""

    def write_target_hidden_kv(
        self,
        *,
        target_hidden: torch.Tensor,
        pool: Any,
        positions: torch.Tensor,
        cache_loc: torch.Tensor,
        cache_loc_2d: torch.Tensor | None = None,
        commit_lens: torch.Tensor | None = None,
        target_hidden_is_projected: bool = False,
    ) -> None:
        """Write a prefill's rows as the base does; of a verify step write all rows, the rejected ones marked."""
        if cache_loc_2d is not None and commit_lens is not None and self.writes_all_rows:
            target_hidden, commit_lens = write_all_rows(
                target_hidden, commit_lens, cache_loc_2d.shape[1], self.carryover_embedding
            )
        super().write_target_hidden_kv(
            target_hidden=target_hidden,
            pool=pool,
            positions=positions,
            cache_loc=cache_loc,
            cache_loc_2d=cache_loc_2d,
            commit_lens=commit_lens,
            target_hidden_is_projected=target_hidden_is_projected,
        )
