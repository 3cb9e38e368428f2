"""The library's DFlash and DSpark models, trained on given anchors with the published objectives.

Layers, heads, attention and the packed-block forward are those of ``speculators`` (models/dflash, models/dspark); this
module replaces how anchors are chosen (the batch brings them) and what the loss is (recorded tokens), through the
library's own seams ``_build_attention_mask`` and ``forward``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from loguru import logger
from speculators.models.attention import ALL_ATTENTION_FUNCTIONS, flex_attention_forward
from speculators.models.dflash.core import DFlashDraftModel
from speculators.models.dspark.core import DSparkDraftModel
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig, Qwen3Config

from sglang_ext.drafting import DraftBlock, Kind
from sglang_ext.errors import UsageError
from sglang_ext.training.masks import BlockRule, anchored_blocks, flex_mask
from sglang_ext.training.objectives import dflash_objective, dspark_objective

_TAIL = 128  # rows behind the packed documents, so that blocks at the very end index inside; one flex tile


@dataclass(frozen=True)
class DrafterShape:
    """What makes a drafter: its block, its layers, and the target layers (SGLang numbering) whose outputs it reads."""

    kind: Kind
    block_size: int
    num_layers: int
    feature_layers: tuple[int, ...]
    mask_token_id: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    markov_rank: int = 0  # DSpark only

    @property
    def block(self) -> DraftBlock:
        """The draft block's rules."""
        return DraftBlock(self.kind, self.block_size)


def pack(batch: dict[str, Tensor], features: Tensor, last_hidden: Tensor) -> dict[str, Tensor]:
    """Flatten a batch of rows [R, T] and its target features into one packed sequence [1, R * T + tail].

    Every row is its own document (``document_ids``), padding and tail are -1; positions start at 0 in each row.
    """
    ids, lengths = batch["input_ids"], batch["lengths"]
    rows, width = ids.shape
    position = torch.arange(width, device=ids.device).expand(rows, width)
    document = torch.arange(rows, device=ids.device)[:, None].expand(rows, width)
    document = document.masked_fill(position >= lengths[:, None], -1)

    def flat(x: Tensor, fill: int = 0) -> Tensor:
        pad = (0, _TAIL) if x.dim() == 2 else (0, 0, 0, _TAIL)
        return F.pad(x.reshape(1, rows * width, *x.shape[2:]), pad, value=fill)

    return {
        "hidden_states": flat(features),
        "input_ids": flat(ids),
        "last_hidden": flat(last_hidden),
        "document_ids": flat(document, -1),
        "position_ids": flat(position),
        **{name: batch[name] for name in ("anchors", "labels", "weights")},
    }


class _AnchoredBlocks:
    """Mixin over the library's models: blocks at given anchors, loss sums instead of a loss."""

    attention: str = "eager"
    _masks: Any = None

    def compile_objective(self) -> None:
        """Compile blocks, heads and loss as one graph (the masks are made outside it)."""
        self.objective = torch.compile(self.objective)  # type: ignore[method-assign]

    def objective(self, labels: Tensor, weights: Tensor, **packed: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss sum and metric sums of one packed batch (see :func:`pack`). Each kind has its own."""
        raise NotImplementedError

    def forward(self, labels: Tensor, weights: Tensor, **packed: Tensor) -> dict[str, Tensor]:
        """``{"loss": weighted loss sum, ...}``: the objective's sums of one packed batch."""
        self._masks = self.attention_masks(packed["document_ids"], packed["anchors"])
        loss, metrics = self.objective(labels, weights, **packed)
        return {"loss": loss, **metrics}

    @torch.compiler.disable
    def _build_attention_mask(self, loss_mask: Tensor, max_anchors: int, document_ids: Tensor, device: Any) -> Any:
        # The library draws anchors here; ours come with the batch, and the mask has been made before.
        return self._masks

    def attention_masks(self, document_ids: Tensor, anchors: Tensor) -> tuple[Any, Any, Tensor, Tensor]:
        """Masks for the packed sequence [1, T] and anchors [A]: (full, sliding, anchors, all valid)."""
        rule = self.visibility(document_ids[0], anchors)
        if self.attention == "flex":
            mask: Any = flex_mask(rule)
        else:
            model: Any = self  # the library's form of dense masks: boolean for sdpa, additive for eager attention
            size = {"Q_LEN": rule.queries, "KV_LEN": rule.keys}
            mask = model._create_mask_fn(rule.visible, B=None, H=None, **size, device=document_ids.device)
        return mask, None, anchors, torch.ones_like(anchors, dtype=torch.bool)

    def visibility(self, document_ids: Tensor, anchors: Tensor) -> BlockRule:
        """What the block at each anchor [A] may see of the packed sequence [T] and of the blocks behind it.

        The seam for training stages that add context rows: override it and append the rows to the batch.
        """
        return anchored_blocks(document_ids, anchors, self.block_size)  # type: ignore[attr-defined]

    def blocks(
        self,
        hidden_states: Tensor,
        input_ids: Tensor,
        last_hidden: Tensor,
        document_ids: Tensor,
        position_ids: Tensor,
        anchors: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draft every block in one pass: (hidden [A, B, H], base logits [A, B, V], target logits [A, B, V]).

        Target logits are those that predict the token a row drafts. All inputs are packed, see :func:`pack`. Called
        with the masks in place, by :meth:`forward` and :meth:`draft_blocks`.
        """
        model: Any = self
        hidden, logits, targets, _, _ = model._backbone_forward(
            hidden_states,
            input_ids,
            torch.ones_like(input_ids, dtype=torch.bool),
            last_hidden,
            document_ids,
            position_ids,
            max_anchors=anchors.shape[0],
        )
        shape = (anchors.shape[0], model.block_size, -1)
        return hidden.view(shape), logits.view(shape), targets.view(shape)

    @torch.no_grad()
    def draft_blocks(self, **packed: Tensor) -> tuple[Tensor, Tensor]:
        """What the drafter makes of every anchor: block hidden states [A, B, H] and base logits [A, B, V]."""
        self._masks = self.attention_masks(packed["document_ids"], packed["anchors"])
        hidden, logits, _ = self.blocks(**packed)
        return hidden, logits


class AnchoredDFlash(_AnchoredBlocks, DFlashDraftModel):
    """DFlash over given anchors."""

    def objective(self, labels: Tensor, weights: Tensor, **packed: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss sum and metric sums of one packed batch (see :func:`pack`, :func:`dflash_objective`)."""
        _, logits, _ = self.blocks(**packed)
        return dflash_objective(logits[:, 1:], labels, weights)


class AnchoredDSpark(_AnchoredBlocks, DSparkDraftModel):
    """DSpark over given anchors; the Markov head follows the recorded tokens."""

    def objective(self, labels: Tensor, weights: Tensor, **packed: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss sum and metric sums of one packed batch (see :func:`pack`, :func:`dspark_objective`)."""
        hidden, logits, targets = self.blocks(**packed)
        anchor_tokens = packed["input_ids"][0, packed["anchors"]]
        previous = torch.cat([anchor_tokens[:, None], labels[:, :-1]], dim=1)
        embedding = self.markov_head.prev_embeddings(previous)
        bias = self.markov_head.block_bias(prev_token_ids=previous, hidden_states=hidden, prev_emb=embedding)
        confidence = self.confidence_head(torch.cat([hidden, embedding.to(hidden.dtype)], dim=-1))
        return dspark_objective(logits + bias, targets, confidence, labels, weights)


def text_config(target: str | Path) -> PretrainedConfig:
    """The language model's configuration of a target checkpoint directory."""
    return AutoConfig.from_pretrained(str(target)).get_text_config()


def layer_config(shape: DrafterShape, target: PretrainedConfig) -> Qwen3Config:
    """Configuration of the drafter's own layers, which share width, vocabulary and context length with the target."""
    return Qwen3Config(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        hidden_act="silu",
        max_position_embeddings=target.max_position_embeddings,
        rms_norm_eps=target.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=False,
        attention_bias=False,
    )


def build_drafter(
    shape: DrafterShape,
    target: str | Path,
    attention: str = "eager",
    compile_blocks: bool = False,
    model_class: Any = None,
) -> Any:
    """A fresh drafter in fp32 for the target checkpoint, embeddings and head taken from it and frozen.

    ``model_class`` is a subclass of the kind's own (:class:`AnchoredDFlash`, :class:`AnchoredDSpark`).

    ``attention``: "flex" (compiled block-sparse masks, GPU), "sdpa" or "eager" (dense masks). ``compile_blocks``
    compiles the whole forward pass and objective.
    """
    config = text_config(target)
    arguments: dict[str, Any] = {
        "verifier_name_or_path": str(target),
        # The library counts layers by transformers' hidden_states: one more than SGLang's ids.
        "target_layer_ids": [i + 1 for i in shape.feature_layers],
        "mask_token_id": shape.mask_token_id,
        "draft_vocab_size": config.vocab_size,
        "block_size": shape.block_size,
        "draft_attn_impl": "simple_flex_attention" if attention == "flex" else attention,
    }
    layers = layer_config(shape, config)
    logger.disable("speculators")  # it warns that a target with tied embeddings has no lm_head
    if shape.kind == "dflash":
        model: Any = (model_class or AnchoredDFlash).from_training_args(layers, **arguments)
    else:
        if shape.markov_rank < 1:
            raise UsageError("a DSpark drafter needs a Markov rank of at least 1; give --markov-rank.")
        model = (model_class or AnchoredDSpark).from_training_args(layers, markov_rank=shape.markov_rank, **arguments)
    model.attention = attention
    if attention == "flex":
        for layer in model.layers:
            layer.self_attn.config._attn_implementation = FLEX
    if compile_blocks:
        model.compile_objective()
    return model


@torch.compile
def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float) -> Tensor:
    return flex_attention_forward(None, query, key, value, mask, scaling=scaling)[0]


def _flex(
    _module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, *, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    # Under autocast the query and key norms return fp32 while the values stay bf16; flex attention wants one dtype.
    # The module stays outside the compiled function, which would be compiled anew for each layer otherwise.
    return _attend(query.to(value.dtype), key.to(value.dtype), value, mask, scaling), None


FLEX = "anchored_flex"
"""Name under which transformers finds the compiled flex attention."""
ALL_ATTENTION_FUNCTIONS.register(FLEX, _flex)
