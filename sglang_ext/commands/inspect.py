"""``sglang-ext inspect``: the effective contract of a checkpoint, and what is wrong with it."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from sglang_ext.checkpoints import (
    CARRYOVER_OPTIONS,
    METHOD_NAMES,
    DraftContract,
    TargetInfo,
    Weights,
    is_drafter,
    locate,
    read_contract,
    read_json,
    read_target,
    validate,
)
from sglang_ext.errors import UsageError

KINDS = {"dflash": "DFlash", "dspark": "DSpark"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The checkpoint, the target it should fit, and the output form."""
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="directory or Hugging Face name of a target or drafter"
    )
    parser.add_argument("--target", metavar="T", help="the target a drafter should fit")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def run(args: argparse.Namespace) -> int:
    """Print the contract; 0 when all is well, 2 when something is wrong."""
    directory = locate(args.checkpoint, weights=False)
    target = read_target(locate(args.target, weights=False)) if args.target else None
    drafter = is_drafter(read_json(directory / "config.json"))
    if target is not None and not drafter:
        raise UsageError(f"{args.checkpoint} is itself a target, so --target does not apply; leave it out.")
    checkpoint: DraftContract | TargetInfo
    if drafter:
        checkpoint = read_contract(locate(args.checkpoint))
    else:  # a target that lies on a hub is described by its configuration; its weights are not downloaded for that
        checkpoint = read_target(directory, weights=Path(args.checkpoint).is_dir())
    if isinstance(checkpoint, DraftContract):
        problems, facts = validate(checkpoint, target), drafter_facts(checkpoint)
    else:
        problems, facts = target_problems(checkpoint), target_facts(checkpoint)
    if args.json:
        print(json.dumps({**as_json(checkpoint), "problems": problems}, indent=2))
    else:
        print(render(args.checkpoint, facts, problems, target))
    return 2 if problems else 0


def drafter_facts(contract: DraftContract) -> list[tuple[str, str]]:
    """What a drafter promises, as (label, text) rows."""
    rows = [
        ("what", f"{KINDS[contract.kind]} drafter, {METHOD_NAMES[contract.method]} ({contract.architecture})"),
        ("served with", f"--speculative-algorithm {contract.algorithm}"),
        (
            "draft block",
            f"{contract.drafts} drafts from {contract.query_width} rows, mask token {contract.mask_token_id}",
        ),
        ("verify width", f"{contract.verify_width} rows of the target in a verify step (the anchor and the drafts)"),
    ]
    if contract.kind == "dspark":
        anchor = "anchor row drafts too" if contract.sample_from_anchor else "anchor row drafts nothing"
        rows.append(("Markov head", f"{contract.markov_head}, rank {contract.markov_rank}; {anchor}"))
    layers = ", ".join(map(str, contract.target_layer_ids))
    of = f" of {contract.num_target_layers}" if contract.num_target_layers else ""
    rows += [
        ("target layers", f"{layers}{of} (0-based, their outputs)"),
        (
            "features",
            f"{len(contract.target_layer_ids)} x {contract.hidden_size} = {contract.feature_width} values a row",
        ),
        ("layers", _layers(contract.num_layers, contract) + f", feed-forward {contract.intermediate_size}"),
        ("vocabulary", f"{contract.vocab_size} (embedding and head are the target's)"),
        ("weights", _weights(contract.weights)),
    ]
    return rows + _carryover_facts(contract) + (_reader_facts(contract) if contract.reads else [])


def _carryover_facts(contract: DraftContract) -> list[tuple[str, str]]:
    """What is done with rejected rows."""
    rows, limit, zero = [], contract.carried_rows_limit, contract.embedding_is_zero()
    if zero is not None:
        settings = ", ".join(f"{k} {v}" for k, v in (contract.carryover or {}).items() if k not in CARRYOVER_OPTIONS)
        state = "zero: still untrained" if zero else "trained"
        rows.append(("Carryover", f"embedding of {contract.feature_width} values, {state} ({settings})"))
    if contract.carries and limit is not None:
        rows.append(("carried rows", f"at most {limit} of a round" if limit else "none, and the embedding is not used"))
    if contract.lookup is not None:
        bonuses = ", ".join(f"{bonus:g}" for bonus in contract.lookup)
        rows.append(("lookup", f"bonus {bonuses} for matches of 0 to {len(contract.lookup) - 1} tokens"))
    return rows


def _reader_facts(contract: DraftContract) -> list[tuple[str, str]]:
    """What the reader reads and where the result goes; nothing where its configuration is invalid (a problem)."""
    try:
        reader = contract.reader()
        places = ", ".join(map(str, reader.reading_layers(contract.num_layers)))
    except UsageError:
        return []
    zero = contract.reader_is_zero()
    trained = "unreadable" if zero is None else "zero: still untrained" if zero else "trained"
    queries = f"{reader.value_heads} queries a source" if reader.query == "value_head" else "one query a source"
    where = f"draft layer {places}, {reader.inject.replace('_', ' ')}"
    return [
        ("reads states", f"of target layers {', '.join(map(str, reader.source_layers))}, {reader.value_heads} heads of "
         f"{reader.value_dim} x {reader.key_dim} each"),
        ("reader", f"rank {reader.rank_k} for keys and {reader.rank_v} for values, {queries}, in {where}; "
         f"output {trained}"),
    ]  # fmt: skip


def target_facts(target: TargetInfo) -> list[tuple[str, str]]:
    """What a drafter has to fit, as (label, text) rows."""
    attention = target.num_layers - target.recurrent_layers
    kind = f"{attention} attention and {target.recurrent_layers} recurrent" if target.recurrent_layers else "attention"
    rows = [
        ("what", f"{'hybrid' if target.recurrent_layers else 'dense'} target ({target.architecture})"),
        ("served with", "plain decoding; --draft D adds a drafter"),
        ("layers", f"{_layers(target.num_layers, target)} ({kind})"),
        ("vocabulary", str(target.vocab_size)),
        ("positions", str(target.max_position_embeddings or "not given")),
    ]
    if states := target.recurrent:
        layers = ", ".join(map(str, states.layers))
        shape = f"{states.value_heads} heads of {states.value_dim} x {states.key_dim} (values x keys)"
        rows.append(("states", f"of layers {layers}: {shape}"))
    return rows + ([("weights", _weights(target.weights))] if target.weights else [])


def target_problems(target: TargetInfo) -> list[str]:
    """What keeps a target from being served, as far as its files can tell."""
    return (
        []
        if target.weights is None or target.weights.tensors
        else ["it has no safetensors weights; copy them into the directory."]
    )


def render(name: str, facts: list[tuple[str, str]], problems: list[str], target: TargetInfo | None) -> str:
    """The aligned text."""
    width = max(len(label) for label, _ in facts)
    lines = [name, *(f"  {label:<{width}}  {text}" for label, text in facts)]
    against = f" with {target.path}" if target is not None else ""
    if problems:
        lines += [f"  {'wrong' + against}:", *(f"    - {problem}" for problem in problems)]
    else:
        lines.append(f"  {'fits':<{width}}  {target.path}" if target is not None else f"  {'state':<{width}}  complete")
    return "\n".join(lines)


def as_json(checkpoint: DraftContract | TargetInfo) -> dict[str, Any]:
    """The same facts under their field names."""
    fields = {f.name for f in dataclasses.fields(checkpoint)} - {"config", "tensors"}
    values = {name: getattr(checkpoint, name) for name in sorted(fields)}
    values = {
        name: dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value
        for name, value in values.items()
    }
    if isinstance(checkpoint, DraftContract):
        for name in ("algorithm", "verify_width", "query_width", "drafts", "feature_width"):
            values[name] = getattr(checkpoint, name)
        values["lookup"], values["carried_rows_limit"] = checkpoint.lookup, checkpoint.carried_rows_limit
        values["embedding_is_zero"] = checkpoint.embedding_is_zero()
        values["reader_is_zero"] = checkpoint.reader_is_zero()
    return {key: str(value) if isinstance(value, Path) else value for key, value in values.items()}


def _layers(count: int, checkpoint: DraftContract | TargetInfo) -> str:
    heads = (
        f", {checkpoint.num_heads} query and {checkpoint.num_kv_heads} key/value heads" if checkpoint.num_heads else ""
    )
    return f"{count} of hidden size {checkpoint.hidden_size}{heads}"


def _weights(weights: Weights) -> str:
    return (
        f"{weights.parameters / 1e6:,.2f} M parameters in {weights.tensors} tensors, {weights.dtype}, "
        f"{weights.nbytes / 1e6:,.1f} MB"
    )
