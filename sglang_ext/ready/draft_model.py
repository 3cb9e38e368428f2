"""SGLang draft models that read the target's recurrent states in some of their layers.

A layer's forward is SGLang's own. With ``after_attention`` its ``post_attention_layernorm`` is the seam: it is called
with the attention output and the residual, between attention and MLP (models/dflash.py:645).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from sglang.srt.distributed import tensor_model_parallel_all_reduce
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.models.dflash import DFlashDecoderLayer
from sglang.srt.models.dspark import DSparkDraftModel
from sglang.srt.runtime_context import get_parallel
from torch import Tensor

from sglang_ext.carryover.draft_model import CarryoverDSparkModel
from sglang_ext.ready.config import READER, ReadyConfig
from sglang_ext.ready.controls import WrongStates
from sglang_ext.ready.reader import StateReader, shard_dimension
from sglang_ext.ready.states import CommittedStates

Read = Callable[[Tensor], Tensor]  # representations [bs * Q, H] -> delta [bs * Q, H]


class _ReadingNorm(RMSNorm):
    """The norm between attention and MLP; its input first takes in what the layer reads, the residual stays."""

    def __init__(self, stock: RMSNorm, read: Read) -> None:
        super().__init__(stock.hidden_size, eps=stock.variance_epsilon)
        self.read = read

    def forward(self, x: Tensor, residual: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(x + self.read(x + residual), residual, *args, **kwargs)


class _ReadyDecoderLayer(DFlashDecoderLayer):
    """A layer that may read, before or after its attention; SGLang's until a read is attached."""

    read: Read | None = None
    post_attention_layernorm: Any

    def attach(self, read: Read, inject: str) -> None:
        """Let this layer read; called before its weights are loaded."""
        if inject == "before_attention":
            self.read = read
        else:
            self.post_attention_layernorm = _ReadingNorm(self.post_attention_layernorm, read)

    def forward(self, positions: Tensor, hidden_states: Tensor, forward_batch: Any, residual: Tensor | None) -> Any:
        if self.read is not None and hidden_states.numel():
            stream = hidden_states if residual is None else hidden_states + residual
            hidden_states = hidden_states + self.read(stream)
        return super().forward(positions, hidden_states, forward_batch, residual)


class _StateReading:
    """Adds the reader to a DSpark drafter. States are reduced once per forward and shared by a block's positions.

    Where one layer reads, on CUDA, a kernel reduces and reads them there in one launch, and M^ is never stored.
    """

    decoder_layer_cls = _ReadyDecoderLayer

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__(config, quant_config=quant_config, prefix=prefix)  # type: ignore[call-arg]
        self.ready_config = ReadyConfig.of(getattr(config, "ready_config", None))
        self.shards = get_parallel().tp_size
        layers: Any = self.layers  # type: ignore[attr-defined]
        self.state_reader = StateReader(self.ready_config, int(config.hidden_size), len(layers), self.shards)
        for parameter in self.state_reader.parameters():
            parameter.requires_grad_(False)
        for name, parameter in self.state_reader.named_parameters():
            parameter.weight_loader = partial(_load_shard, name)  # type: ignore[attr-defined]
        for index, layer in enumerate(self.state_reader.layers):
            layers[layer].attach(partial(self._read, index=index), self.ready_config.inject)
        self.states: CommittedStates | None = None
        self.control: WrongStates | None = None
        self._kernels: Any = None
        self._slots: Tensor | None = None
        self._reduced: Tensor | None = None
        self._reader_loaded: set[str] = set()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Any:
        """Load a drafter; ValueError when a weight of the reader is missing or unknown (SGLang would not say).

        Once all are there, a later call may bring any part of the weights (SGLang's weight updates come in buckets).
        """
        wanted = {f"{READER}.{name}" for name, _ in self.state_reader.named_parameters()}

        def watched() -> Iterable[tuple[str, Tensor]]:
            for name, tensor in weights:
                own = name.removeprefix("model.")
                if own.startswith(f"{READER}."):
                    if own not in wanted:
                        raise ValueError(f"The draft checkpoint has {own}, which its ready_config has no place for.")
                    self._reader_loaded.add(own)
                yield name, tensor

        loaded = super().load_weights(watched())  # type: ignore[misc]
        if missing := sorted(wanted - self._reader_loaded):
            raise ValueError(f"The draft checkpoint has no {missing[0]}; make one with `sglang-ext convert`.")
        return loaded

    @torch.no_grad()
    def forward(self, input_ids: Tensor, positions: Tensor, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        """The block's forward, behind one reduction of each request's states; an idle batch has none."""
        if input_ids.numel() and forward_batch.batch_size:
            slots = self._slots = forward_batch.req_pool_indices
            reduced = None if self._at_once else self._reduce(slots)
            self._reduced = reduced if self.control is None or reduced is None else self.control(reduced, slots)
        return super().forward(input_ids, positions, forward_batch, *args, **kwargs)  # type: ignore[misc]

    def attach_states(self, states: CommittedStates) -> None:
        """Read from here; called once the pools exist and before any graph is captured. On CUDA kernels do it."""
        self.states = states
        if states.temporal.is_cuda:
            from sglang_ext.ready import kernels

            self._kernels = kernels
            self._layers = torch.tensor(states.layers, device=states.temporal.device)

    def _reduce(self, request_slots: Tensor) -> Tensor:
        """Reduced states [bs, L, HV, r_v, r_k] of the requests in these slots [bs]."""
        assert self.states is not None, "the worker has not attached the states"
        reader = self.state_reader
        if self._kernels is None:
            return reader.reduce(self.states.gather(request_slots))
        reduced: Tensor = self._kernels.reduce_states(
            self.states, self._layers, request_slots, reader.value_down, reader.key_down
        )
        return reduced

    @property
    def _at_once(self) -> bool:
        """Whether the states are reduced where they are read, in one launch: with kernels and one reading layer."""
        return self._kernels is not None and self.control is None and len(self.state_reader.layers) == 1

    def _read(self, hidden: Tensor, index: int) -> Tensor:
        """What a reading layer adds to its ``hidden`` [bs * Q, H], summed over the ranks' value heads."""
        assert self._slots is not None
        reader, blocks = self.state_reader, hidden.view(self._slots.shape[0], -1, hidden.shape[-1])
        if self._reduced is None:
            layer: Any = reader.reads[index]
            reads = self._kernels.read_states(
                self.states, self._layers, self._slots, reader.value_down, reader.key_down, layer.queries(blocks)
            )
            delta = layer.output(reads, hidden.dtype)
        else:
            kernel = self._kernels.read_reduced if self._kernels is not None else None
            delta = reader.read(blocks, self._reduced, index, kernel)
        delta = delta.view_as(hidden)
        return tensor_model_parallel_all_reduce(delta) if self.shards > 1 else delta


def _load_shard(name: str, parameter: torch.nn.Parameter, loaded: Tensor) -> None:
    """Copy this rank's value heads of a whole weight; ValueError for a wrong shape."""
    dimension = shard_dimension(name, tuple(loaded.shape))
    if dimension is not None:
        heads, first = parameter.shape[dimension], get_parallel().tp_rank * parameter.shape[dimension]
        loaded = loaded.narrow(dimension, first, heads)
    if loaded.shape != parameter.shape:
        raise ValueError(f"{READER}.{name} is {list(loaded.shape)} but must be {list(parameter.shape)}.")
    parameter.data.copy_(loaded)


class ReadyDSparkModel(_StateReading, DSparkDraftModel):
    """DSpark drafter with a reader."""


class ReadyCarryoverDSparkModel(_StateReading, CarryoverDSparkModel):
    """DSpark drafter with a reader and carried rows."""
