"""Rules a drafter checkpoint must meet; each broken one is a sentence that says what, why and what to do."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from typing import Any

from sglang_ext.checkpoints.contract import (
    CARRYOVER_ARCHITECTURE,
    CARRYOVER_CONFIG,
    CARRYOVER_OPTIONS,
    EMBEDDING,
    FLOATS,
    LOOKUP_BONUSES,
    LOOKUP_WIDEST,
    MARKOV_HEADS,
    READY_ARCHITECTURE,
    DraftContract,
    TargetInfo,
    is_lookup,
)
from sglang_ext.errors import UsageError
from sglang_ext.ready.config import READER

# Variants of the DFlash family whose block is not the plain one Carryover was built and checked for.
_UNCOVERED = {
    "selector_rank": "a DFlash2 candidate selector",
    "conv_kernel_size": "grouped convolutions",
    "attention_sink_bias": "attention sinks",
    "attention_value_scale": "scaled values",
}


def validate(contract: DraftContract, target: TargetInfo | None = None) -> list[str]:
    """Everything that keeps this drafter from being served (on this target), one sentence each."""
    problems = _config_problems(contract) + _tensor_problems(contract)
    problems += _carryover_problems(contract) + _ready_problems(contract)
    return problems + (_target_problems(contract, target) if target is not None else [])


def _config_problems(contract: DraftContract) -> list[str]:
    """Fields that contradict each other, or that SGLang reads at another place than they are written."""
    config, problems = contract.config, []
    nested, dspark = config.get("dflash_config") or {}, config.get("dspark_config") or {}
    for name in ("block_size", "target_layer_ids", "num_target_layers"):
        used = nested.get(name, config.get(name))
        if any(place.get(name, used) != used for place in (config, dspark)):
            problems.append(f"config.json gives {name} twice with different values; keep one (SGLang takes {used}).")
    if contract.kind == "dspark":
        # models/dspark.py builds the heads from the flat fields alone; the nested ones only pass its first check.
        for name in ("markov_rank", "markov_head_type", "sample_from_anchor"):
            inner = {**nested, **dspark}.get(name)
            if inner is not None and config.get(name) != inner:
                problems.append(
                    f"{name} is {inner!r} inside the nested configuration but {config.get(name)!r} at the top level "
                    "of config.json, where SGLang builds the model from; write it there too."
                )
        if contract.markov_head not in MARKOV_HEADS:
            problems.append(f"markov_head_type is {contract.markov_head!r}; SGLang has {', '.join(MARKOV_HEADS)}.")
    ids = contract.target_layer_ids
    if list(ids) != sorted(set(ids)):
        # The target collects features in the order of its layers, each once, whatever the list says.
        problems.append(f"target_layer_ids {list(ids)} must rise strictly, because features come in layer order.")
    if contract.num_target_layers is not None and ids[-1] >= contract.num_target_layers - 1:
        problems.append(_beyond(ids[-1], contract.num_target_layers, "num_target_layers"))
    if contract.mask_token_id >= contract.vocab_size:
        problems.append(f"mask_token_id {contract.mask_token_id} lies outside the vocabulary of {contract.vocab_size}.")
    drafted = config.get("draft_vocab_size")
    if drafted is not None and drafted != contract.vocab_size:
        problems.append(
            f"the draft vocabulary ({drafted}) is smaller than the target's ({contract.vocab_size}), which SGLang's "
            "DFLASH and DSPARK do not support; use a drafter with the full vocabulary."
        )
    return problems


def _tensor_problems(contract: DraftContract) -> list[str]:
    """Missing and wrong-shaped tensors; a quantised checkpoint's packed layout is left to SGLang's loader."""
    if contract.config.get("quantization_config"):
        return []
    shapes = dict(_expected_tensors(contract))
    missing = [name for name in shapes if name not in contract.tensors]
    problems = []
    if missing:
        rest = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        problems.append(f"the weights lack {', '.join(missing[:3])}{rest}; export or copy the checkpoint again.")
    for name, shape in shapes.items():
        tensor = contract.tensors.get(name)
        if tensor is not None and tensor.shape != shape:
            problems.append(
                f"{name} is {list(tensor.shape)} where config.json promises {list(shape)}{_why(name, contract)}; "
                "correct the configuration or use the weights it belongs to."
            )
    return problems


def _carryover_problems(contract: DraftContract) -> list[str]:
    """What is wrong with the parts that Carryover adds."""
    if not contract.carries:
        if contract.carryover is None:
            return []
        name = READY_ARCHITECTURE["ready_carryover"] if contract.reads else CARRYOVER_ARCHITECTURE[contract.kind]
        return [f"config.json has carryover_config but the architecture {contract.architecture}; it must be {name}."]
    problems = []
    unknown = sorted(set(contract.carryover or {}) - {*CARRYOVER_CONFIG, *CARRYOVER_OPTIONS})
    if contract.carryover is None:
        problems.append(f"config.json has no carryover_config; add {json.dumps(CARRYOVER_CONFIG)}.")
    elif unknown:
        known = ", ".join([*CARRYOVER_CONFIG, *CARRYOVER_OPTIONS])
        problems.append(f"carryover_config has the unknown key {', '.join(unknown)}; the known ones are {known}.")
    else:
        for key, supported in CARRYOVER_CONFIG.items():
            value = contract.carryover.get(key, supported)
            if type(value) is not type(supported) or value != supported:
                problems.append(f"carryover_config.{key} is {value!r}; only {supported!r} is supported.")
        problems += _option_problems(contract.carryover, contract.verify_width)
    embedding, width = contract.tensors.get(EMBEDDING), contract.feature_width
    if embedding is None:
        problems.append(f"the weights lack {EMBEDDING} [{width}]; make the checkpoint with sglang-ext convert.")
    elif embedding.shape != (width,):
        problems.append(
            f"{EMBEDDING} is {list(embedding.shape)} but must be [{width}], one value per feature "
            f"({len(contract.target_layer_ids)} layers of {contract.hidden_size}); make it with sglang-ext convert."
        )
    elif embedding.dtype not in FLOATS:
        problems.append(f"{EMBEDDING} has the dtype {embedding.dtype}; it must be F32, F16 or BF16.")
    elif not embedding.finite():
        problems.append(f"{EMBEDDING} holds values that are not finite; take an earlier training checkpoint.")
    return problems + carryover_limits(contract)


def _option_problems(config: dict[str, Any], verify_width: int) -> list[str]:
    """What is wrong with the fields of carryover_config that may be left out."""
    problems = []
    table, rows = config.get("lookup", [0] * LOOKUP_BONUSES), config.get("carried_rows", 0)
    if not is_lookup(table):
        problems.append(
            f"carryover_config.lookup is {table!r}, but a lookup table has {LOOKUP_BONUSES} finite numbers of at least "
            "0; make it with sglang-ext train lookup or leave it out."
        )
    elif "lookup" in config and verify_width > LOOKUP_WIDEST:
        problems.append(
            f"carryover_config.lookup is made for verify steps of up to {LOOKUP_WIDEST} rows, and this drafter's have "
            f"{verify_width}; leave it out."
        )
    if type(rows) is not int or rows < 0:
        problems.append(
            f"carryover_config.carried_rows is {rows!r}; it must be an integer of at least 0, or left out where all "
            "rejected rows are carried."
        )
    return problems


def carryover_limits(contract: DraftContract) -> list[str]:
    """Features of the base drafter that Carryover does not cover."""
    config = {**contract.config, **(contract.config.get("dflash_config") or {})}
    found = [what for name, what in _UNCOVERED.items() if config.get(name)]
    if config.get("projector_type") == "domino":
        found.append("a Domino projector")
    if "sliding_attention" in (contract.config.get("layer_types") or []):
        found.append("sliding-window layers")
    if contract.config.get("quantization_config"):
        found.append("quantised weights")
    return [f"the drafter has {what}, which Carryover does not cover; serve it with --method none." for what in found]


def _ready_problems(contract: DraftContract) -> list[str]:
    """What is wrong with the parts that ReaDy adds."""
    if not contract.reads:
        if contract.ready is None:
            return []
        name = READY_ARCHITECTURE["ready_carryover" if contract.carries else "ready"]
        return [f"config.json has ready_config but the architecture {contract.architecture}; it must be {name}."]
    if contract.ready is None:
        return ["config.json has no ready_config; make the checkpoint with sglang-ext convert."]
    try:
        shapes = contract.reader().weight_shapes(contract.hidden_size, contract.num_layers)
    except UsageError as error:
        return [str(error)]
    tensors, problems = contract.reader_tensors(), []
    if missing := [f"{READER}.{name}" for name in shapes if name not in tensors]:
        problems.append(f"the weights lack {', '.join(missing[:3])}; export or copy the checkpoint again.")
    if unknown := sorted(set(tensors) - set(shapes)):
        problems.append(f"the weights have {READER}.{unknown[0]}, which ready_config has no place for; correct it.")
    for name, shape in shapes.items():
        tensor = tensors.get(name)
        if tensor is None:
            continue
        dtypes = ("F32",) if name in ("value_down", "key_down") else FLOATS
        if tensor.shape != shape:
            problems.append(
                f"{READER}.{name} is {list(tensor.shape)} where ready_config promises {list(shape)}; correct the "
                "configuration or use the weights it belongs to."
            )
        elif tensor.dtype not in dtypes:
            problems.append(f"{READER}.{name} has the dtype {tensor.dtype}; it must be {' or '.join(dtypes)}.")
        elif not tensor.finite():
            problems.append(f"{READER}.{name} holds values that are not finite; take an earlier training checkpoint.")
    return problems + ready_limits(contract)


def ready_limits(contract: DraftContract) -> list[str]:
    """What keeps a drafter from having a reader."""
    found = []
    if contract.kind != "dspark":
        found.append("a DFlash drafter")
    if contract.config.get("use_gemma_norm"):
        found.append("a drafter with Gemma norms, which add one to their weights")
    if contract.config.get("quantization_config"):
        found.append("a quantised drafter")
    return [f"it is {what}, and ReaDy reads states in plain DSpark drafters only; use one of those." for what in found]


def _target_problems(contract: DraftContract, target: TargetInfo) -> list[str]:
    """Where drafter and target do not fit each other."""
    problems = []
    for name, ours, theirs in (
        ("hidden size", contract.hidden_size, target.hidden_size),
        ("vocabulary", contract.vocab_size, target.vocab_size),
    ):
        if ours != theirs:
            problems.append(
                f"its {name} is {ours} and that of the target {target.path} is {theirs}, but it drafts with the "
                "target's own embedding and head; use the drafter that was trained for this target."
            )
    if contract.num_target_layers not in (None, target.num_layers):
        problems.append(
            f"it was trained on a target of {contract.num_target_layers} layers and {target.path} has "
            f"{target.num_layers}; use the drafter that was trained for this target."
        )
    elif contract.target_layer_ids[-1] >= target.num_layers - 1 and contract.num_target_layers is None:
        problems.append(_beyond(contract.target_layer_ids[-1], target.num_layers, f"the target {target.path}"))
    if contract.reads and contract.ready is not None:
        with contextlib.suppress(UsageError):  # _ready_problems says it
            problems += contract.reader().target_problems(target.recurrent)
    return problems


def _expected_tensors(contract: DraftContract) -> Iterable[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor the stock model needs (models/dflash.py:664, models/dspark.py:161-330)."""
    d, ffn, head_dim = contract.hidden_size, contract.intermediate_size, contract.head_dim
    q, kv = contract.num_heads * head_dim, contract.num_kv_heads * head_dim
    yield "fc.weight", (d, contract.feature_width)
    yield "hidden_norm.weight", (d,)
    yield "norm.weight", (d,)
    for layer in range(contract.num_layers):
        at = f"layers.{layer}"
        yield f"{at}.input_layernorm.weight", (d,)
        yield f"{at}.post_attention_layernorm.weight", (d,)
        for name, rows, columns in (("q", q, d), ("k", kv, d), ("v", kv, d), ("o", d, q)):
            yield f"{at}.self_attn.{name}_proj.weight", (rows, columns)
            if contract.config.get("attention_bias"):
                yield f"{at}.self_attn.{name}_proj.bias", (rows,)
        yield f"{at}.self_attn.q_norm.weight", (head_dim,)
        yield f"{at}.self_attn.k_norm.weight", (head_dim,)
        yield f"{at}.mlp.gate_proj.weight", (ffn, d)
        yield f"{at}.mlp.up_proj.weight", (ffn, d)
        yield f"{at}.mlp.down_proj.weight", (d, ffn)
    rank, vocab = contract.markov_rank, contract.vocab_size
    if contract.kind == "dspark":
        yield "markov_head.markov_w1.weight", (vocab, rank)
        yield "markov_head.markov_w2.weight", (vocab, rank)
    if contract.markov_head == "gated":
        yield "markov_head.gate_proj.weight", (rank, d + rank)
        yield "markov_head.gate_proj.bias", (rank,)
    if contract.markov_head == "rnn":
        yield "markov_head.joint_proj.weight", (3 * rank, 2 * rank + d)
        yield "markov_head.joint_proj.bias", (3 * rank,)


def _why(name: str, contract: DraftContract) -> str:
    if name != "fc.weight":
        return ""
    return f" ({len(contract.target_layer_ids)} target_layer_ids of hidden size {contract.hidden_size})"


def _beyond(layer: int, layers: int, where: str) -> str:
    # models/qwen3.py:805 and its siblings capture before layer id + 1, so the last layer's output is never captured.
    return (
        f"target_layer_ids reach layer {layer}, but with {layers} layers ({where}) SGLang can capture the outputs of "
        f"layers 0 to {layers - 2} only; use the drafter that was trained for this target."
    )
