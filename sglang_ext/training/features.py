"""Target features for drafters, captured online from a transformers model.

Layer ids follow SGLang: id ``i`` is the output of decoder layer ``i`` (0-based), the residual stream that transformers
calls ``hidden_states[i + 1]``. SGLang itself hooks "before layer ``i + 1``" (srt/models/qwen3.py,
``set_dflash_layers_to_capture``), so the last layer has no feature: the largest id is ``num_hidden_layers - 2``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from sglang_ext.errors import UsageError


def check_layer_ids(layer_ids: Sequence[int], num_hidden_layers: int) -> None:
    """Refuse layer ids that the server could not capture: they must rise and lie in ``0 .. num_hidden_layers - 2``."""
    last = num_hidden_layers - 2
    ids = list(layer_ids)
    if not ids or sorted(set(ids)) != ids or ids[0] < 0 or ids[-1] > last:
        raise UsageError(
            f"target layer ids {ids} do not fit a target of {num_hidden_layers} layers, because the server captures "
            f"what enters the following layer; give rising ids between 0 and {last}"
        )


def default_layer_ids(num_hidden_layers: int, count: int = 3) -> list[int]:
    """``count`` ids spread evenly from layer 1 to layer ``num_hidden_layers - 3`` where the target is deep enough.

    This is the published DFlash choice. Targets too shallow for it (fewer than ``count`` layers in that range) get the
    ids spread over ``0 .. num_hidden_layers - 2`` instead.
    """
    first, last = 1, num_hidden_layers - 3
    if last - first + 1 < count:
        first, last = 0, num_hidden_layers - 2
    if last - first + 1 < count:
        raise UsageError(f"a target of {num_hidden_layers} layers has no {count} layers to take features from")
    if count == 1:
        return [num_hidden_layers // 2]
    return [first + round(i * (last - first) / (count - 1)) for i in range(count)]


class TargetFeatures:
    """Runs a frozen causal LM and returns what a drafter is trained on.

    ``model`` is a transformers causal LM whose decoder is ``model.model`` with ``layers`` and ``norm`` (Qwen3, Qwen3.5
    text). One instance at a time may be active on a model: its hooks write into the instance. Use it as a context
    manager, or call :meth:`close`, to take the hooks off again.
    """

    def __init__(self, model: nn.Module, layer_ids: Sequence[int]) -> None:
        decoder: Any = model.model
        check_layer_ids(layer_ids, len(decoder.layers))
        self.model = model
        self.layer_ids = list(layer_ids)
        self._decoder = decoder
        self._outputs: dict[int, Tensor] = {}
        self._last_hidden: Tensor | None = None
        self._handles = [decoder.layers[i].register_forward_hook(self._layer_hook(i)) for i in self.layer_ids]
        self._handles.append(decoder.norm.register_forward_pre_hook(self._norm_hook))

    def _layer_hook(self, layer_id: int) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            self._outputs[layer_id] = output[0] if isinstance(output, tuple) else output

        return hook

    def _norm_hook(self, _module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._last_hidden = inputs[0]

    @property
    def feature_size(self) -> int:
        """Width of one token's feature: number of captured layers times the target's hidden size."""
        return len(self.layer_ids) * int(self._decoder.config.hidden_size)

    @torch.no_grad()
    def __call__(
        self,
        input_ids: Tensor,
        past_key_values: Cache | None = None,
        attention: str | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Features of ``input_ids`` [B, T]; further keyword arguments (masks, position ids) go to the decoder.

        Returns ``(features [B, T, K*H], last_hidden [B, T, H])``: the captured layers side by side in the order of
        ``layer_ids``, and the residual stream before the final norm. The logits at a position are
        ``lm_head(norm(last_hidden))``, see :meth:`logits`. Keys and values are appended to ``past_key_values``.
        ``attention`` names the attention function of this call, if not the model's own.
        """
        config = self._decoder.config
        own = config._attn_implementation
        config._attn_implementation = attention or own
        try:
            self._decoder(
                input_ids=input_ids, past_key_values=past_key_values, use_cache=past_key_values is not None, **kwargs
            )
        finally:
            config._attn_implementation = own
        features = torch.cat([self._outputs[i] for i in self.layer_ids], dim=-1)
        last_hidden = self._last_hidden
        assert last_hidden is not None
        self._outputs.clear()
        self._last_hidden = None
        return features, last_hidden

    @torch.no_grad()
    def logits(self, last_hidden: Tensor) -> Tensor:
        """Target logits [..., V] of pre-final-norm states [..., H]."""
        head: Any = self.model.lm_head
        logits: Tensor = head(self._decoder.norm(last_hidden))
        return logits

    def close(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __enter__(self) -> TargetFeatures:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()
