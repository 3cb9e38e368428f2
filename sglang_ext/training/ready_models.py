"""DSpark drafters that read recurrent states, and LoRA on them.

The reader is the one that serves (:mod:`sglang_ext.ready.reader`); here it sits in the training library's decoder
layers. It is added to a finished model, since transformers initialises the weights of a model it constructs, and a
reader must start with an output of zero: such a drafter computes what the one without a reader does, bit for bit.
"""

from __future__ import annotations

from typing import Any

from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from speculators.models.dflash.model_definitions import Qwen3DFlashDecoderLayer
from torch import Tensor, nn

from sglang_ext.ready.config import READER, ReadyConfig
from sglang_ext.ready.reader import StateReader
from sglang_ext.training.carryover_models import CarryingDSpark
from sglang_ext.training.drafter_models import AnchoredDSpark

LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The projections of the draft layers. Fusion layer, Markov head and confidence head stay as they are."""


class _ReadingLayer(Qwen3DFlashDecoderLayer):
    """The library's decoder layer with a read of states after its attention, or in front of it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reading: tuple[StateReader, int] | None = None  # in a tuple: the reader is the model's, not the layer's
        self.reduced: Tensor | None = None  # [A, L, HV, r_v, r_k] of the blocks' anchors, while a batch runs

    def forward(self, target_hidden: Tensor, hidden_states: Tensor, **attention: Any) -> Tensor:
        """Hidden states [1, A * B, H] of all blocks, ``target_hidden`` [1, T, H] their context."""
        if self.reads("before_attention"):
            hidden_states = hidden_states + self.read(hidden_states)
        attended, _ = self.self_attn(
            hidden_states=self.input_layernorm(hidden_states), target_hidden=target_hidden, **attention
        )
        if self.reads("after_attention"):
            attended = attended + self.read(hidden_states + attended)
        hidden_states = hidden_states + attended
        output: Tensor = hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
        return output

    def reads(self, place: str) -> bool:
        """Whether this layer reads at a place ("after_attention", "before_attention")."""
        return self.reading is not None and self.reduced is not None and self.reading[0].config.inject == place

    def read(self, hidden: Tensor) -> Tensor:
        """What the layer reads for its hidden states [1, A * B, H], in their shape."""
        assert self.reading is not None and self.reduced is not None
        reader, index = self.reading
        return reader.read(hidden.view(len(self.reduced), -1, hidden.shape[-1]), self.reduced, index).view_as(hidden)


class _ReadingBlocks:
    """Mixin over the anchored drafters: every block reads the states at its anchor."""

    def __init__(self, config: Any, **kwargs: Any) -> None:
        super().__init__(config, **kwargs)  # type: ignore[call-arg]
        self.state_reader: StateReader | None = None

    def _make_decoder_layer(self, config: Any, layer_idx: int) -> nn.Module:
        return _ReadingLayer(config.transformer_layer_config, layer_idx)

    def add_reader(self, config: ReadyConfig) -> None:
        """Give the drafter a fresh reader; its output is zero."""
        model: Any = self
        layers = model.layers
        self.state_reader = StateReader(config, model.fc.out_features, len(layers))
        for index, layer in enumerate(self.state_reader.layers):
            layers[layer].reading = (self.state_reader, index)

    def blocks(self, states: Tensor | None = None, **packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As the base's; with ``states`` [A, L, HV, V, K] at the anchors, which the reading layers read."""
        reader = self.state_reader
        if reader is None or states is None:
            return super().blocks(**packed)  # type: ignore[misc]
        reduced = reader.reduce(states)
        layers = [self.layers[layer] for layer in reader.layers]  # type: ignore[attr-defined]
        for layer in layers:
            layer.reduced = reduced
        try:
            return super().blocks(**packed)  # type: ignore[misc]
        finally:
            for layer in layers:
                layer.reduced = None


class ReadingDSpark(_ReadingBlocks, AnchoredDSpark):  # type: ignore[misc]
    """DSpark with a reader."""


class ReadingCarryingDSpark(_ReadingBlocks, CarryingDSpark):  # type: ignore[misc]
    """DSpark with a reader and carried rows."""


def train_reader_only(model: Any) -> None:
    """Freeze everything but the reader."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(f"{READER}."))


def train_with_lora(model: Any, rank: int, alpha: int, embedding: bool = False) -> None:
    """Freeze the drafter, put LoRA of ``rank`` on its layers; adapters, reader and on demand the embedding train."""
    # Tied to the draft layers by path: the target's head and the reader are no part of them.
    pattern = rf"layers\.\d+\.(self_attn|mlp)\.({'|'.join(LORA_TARGETS)})"
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=alpha, target_modules=pattern), model)
    for name, parameter in model.named_parameters():
        own = name.startswith(f"{READER}.") or (embedding and name == "carryover_embedding")
        parameter.requires_grad_(own or ".lora_" in name)


def merge_lora(model: nn.Module) -> None:
    """Add every adapter to the weights it adapts and take it off; a model without adapters stays as it is."""
    adapted = [(name, module) for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)]
    for name, module in adapted:
        module.merge()
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, module.get_base_layer())
