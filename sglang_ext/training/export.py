"""Drafters as SGLang 0.5.23 loads them: config.json, model.safetensors, the target's tokenizer files; and back.

What differs between the training library and the server (srt/speculative/dflash_utils.py ``parse_dflash_draft_config``,
srt/speculative/dspark_components/dspark_config.py, srt/models/dflash.py ``load_weights``):

- target layers: the library's id j is transformers' ``hidden_states[j]``, the server's i the output of layer i = j - 1;
- ``block_size`` is the number of block rows in both, so DFlash drafts one token fewer and DSpark as many; the server
  verifies ``block_size`` rows for DFlash and ``block_size + 1`` for DSpark, whose config says ``sample_from_anchor``;
- configuration: nested in the library, flat Qwen3 fields with ``dflash_config`` in the server, ``rope_theta`` flat;
- weights: the same names, without the target's embedding, head and norm, which the server takes from the target.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sglang_ext.checkpoints import CARRYOVER_ARCHITECTURE, CARRYOVER_CONFIG, EMBEDDING, READY_ARCHITECTURE
from sglang_ext.drafting import KINDS, Kind
from sglang_ext.errors import UsageError
from sglang_ext.ready.config import READER, ReadyConfig
from sglang_ext.training.drafter_models import DrafterShape, build_drafter, text_config

ARCHITECTURES = {"dflash": "DFlashDraftModel", "dspark": "Qwen3DSparkModel"}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
_TARGETS_OWN = ("embed_tokens.", "lm_head.", "verifier_lm_head.", "verifier_norm.")
_FULL_PRECISION = (f"{READER}.value_down", f"{READER}.key_down")
_CONFIDENCE = {"enable_confidence_head": True, "confidence_head_with_markov": True}


def drafter_config(shape: DrafterShape, target: str | Path, dtype: torch.dtype) -> dict[str, Any]:
    """The served config.json of a drafter of this shape for this target checkpoint."""
    config = text_config(target)
    fields: dict[str, Any] = {
        "architectures": [ARCHITECTURES[shape.kind]],
        "model_type": "qwen3",
        "dtype": str(dtype).removeprefix("torch."),
        "block_size": shape.block_size,
        "num_target_layers": config.num_hidden_layers,
        "dflash_config": {"mask_token_id": shape.mask_token_id, "target_layer_ids": list(shape.feature_layers)},
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "max_position_embeddings": config.max_position_embeddings,
        "layer_types": ["full_attention"] * shape.num_layers,
        "attention_bias": False,
        "tie_word_embeddings": False,
    }
    if shape.kind == "dspark":
        fields |= {"markov_rank": shape.markov_rank, "markov_head_type": "vanilla", "sample_from_anchor": True}
        fields |= _CONFIDENCE
    return fields


def drafter_weights(model: torch.nn.Module) -> dict[str, Tensor]:
    """The tensors of a drafter by their served names, on the CPU in the model's dtype: all but the target's own."""
    named = model.named_parameters()
    return {name: p.detach().cpu().contiguous() for name, p in named if not name.startswith(_TARGETS_OWN)}


def export_drafter(
    model: torch.nn.Module,
    shape: DrafterShape,
    target: str | Path,
    out: str | Path,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write a served checkpoint into the directory ``out`` (made if missing): weights in ``dtype``, bf16 or fp32.

    A reader's two projections of the state stay fp32, as they are applied to it.
    """
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    weights = {
        name: tensor if name in _FULL_PRECISION else tensor.to(dtype) for name, tensor in drafter_weights(model).items()
    }
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)  # safetensors writes it for its owner alone
    config = drafter_config(shape, target, dtype)
    if EMBEDDING in weights:
        config |= {"architectures": [CARRYOVER_ARCHITECTURE[shape.kind]], "carryover_config": CARRYOVER_CONFIG}
    reader = getattr(model, READER, None)
    if reader is not None:
        name = READY_ARCHITECTURE["ready_carryover" if EMBEDDING in weights else "ready"]
        config |= {"architectures": [name], "ready_config": reader.config.as_json()}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name in _TOKENIZER_FILES:
        if (Path(target) / name).is_file():
            shutil.copyfile(Path(target) / name, out / name)


def read_shape(drafter: str | Path) -> DrafterShape:
    """The shape that a served checkpoint's config.json promises; fields may be nested in ``dflash_config``."""
    path = Path(drafter) / "config.json"
    try:
        fields = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is no readable drafter configuration ({error}); give a drafter directory.") from error
    nested = {**fields.get("dflash_config", {}), **fields.get("dspark_config", {})}

    def field(name: str, default: Any = None) -> Any:
        value = nested.get(name, fields.get(name, default))
        if value is None:
            raise UsageError(f"{path} has no {name}, so it is no DFlash or DSpark drafter; give one of those.")
        return value

    rank = int(field("markov_rank", 0))
    kind: Kind = "dspark" if rank else "dflash"
    assert kind in KINDS
    return DrafterShape(
        kind=kind,
        block_size=int(field("block_size")),
        num_layers=int(field("num_hidden_layers")),
        feature_layers=tuple(int(i) for i in field("target_layer_ids")),
        mask_token_id=int(field("mask_token_id")),
        intermediate_size=int(field("intermediate_size")),
        num_heads=int(field("num_attention_heads")),
        num_kv_heads=int(field("num_key_value_heads")),
        head_dim=int(field("head_dim")),
        rope_theta=float(fields.get("rope_theta") or fields.get("rope_parameters", {}).get("rope_theta", 10000.0)),
        markov_rank=rank,
    )


def load_drafter(
    drafter: str | Path,
    target: str | Path,
    attention: str = "eager",
    reader: ReadyConfig | None = None,
    **build: Any,
) -> tuple[Any, DrafterShape]:
    """A served checkpoint as a trainable fp32 model, with its shape; UsageError when the weights do not fit it.

    ``build`` goes to :func:`build_drafter`. A stock drafter loaded into a Carryover class starts with a zero embedding,
    and with ``reader`` (for the classes of ``ready_models``) one that has no reader starts with a fresh one.
    """
    shape = read_shape(drafter)
    model = build_drafter(shape, target, attention, **build)
    if reader is not None:
        model.add_reader(reader)
    weights = load_file(Path(drafter) / "model.safetensors")
    own = drafter_weights(model)
    for name, tensor in own.items():
        if name == EMBEDDING or name.startswith(f"{READER}."):
            weights.setdefault(name, tensor)
    wanted = {name: tuple(tensor.shape) for name, tensor in own.items()}
    found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    if wanted != found:
        wrong = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
        raise UsageError(
            f"the weights of {drafter} do not fit its configuration and the target {target}: {wrong[0]} is "
            f"{found.get(wrong[0], 'missing')}, expected {wanted.get(wrong[0], 'no such tensor')}; give the target "
            "this drafter was trained for."
        )
    model.load_state_dict({name: tensor.float() for name, tensor in weights.items()}, strict=False)
    return model, shape
