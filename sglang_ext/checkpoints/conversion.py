"""Drafters made from others, their weights kept: with a Carryover embedding, a reader, or a lookup table."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_ext.checkpoints.contract import (
    CARRYOVER_ARCHITECTURE,
    CARRYOVER_CONFIG,
    EMBEDDING,
    FLOATS,
    METHOD_NAMES,
    READY_ARCHITECTURE,
    DraftContract,
    read_contract,
)
from sglang_ext.checkpoints.files import WEIGHTS_INDEX, read_json, write_with
from sglang_ext.checkpoints.rules import carryover_limits, ready_limits
from sglang_ext.errors import UsageError
from sglang_ext.ready.config import READER, ReadyConfig

Added = Mapping[str, tuple[str, tuple[int, ...], bytes]]


def convert(base: DraftContract, out: Path, **options: Any) -> DraftContract:
    """Write the Carryover form of a drafter, stock or with a reader, to a new directory and return its contract.

    ``options`` are further fields of its carryover_config (``CARRYOVER_OPTIONS``).

    Every file is copied; weights keep their bytes, and the file that holds ``fc.weight`` gets the embedding [K*H] of
    zeros in that weight's dtype. The directory appears whole or not at all. Raises UsageError when ``base`` carries
    already or has parts that Carryover does not cover, or when ``out`` exists.
    """
    if base.carries:
        raise UsageError(
            f"{base.path} is already a {METHOD_NAMES[base.method]} drafter ({base.architecture}); serve it as it is."
        )
    if limits := carryover_limits(base):
        raise UsageError(f"{base.path} cannot become a Carryover drafter: {limits[0].rstrip('.')}.")
    name = READY_ARCHITECTURE["ready_carryover"] if base.reads else CARRYOVER_ARCHITECTURE[base.kind]
    dtype = _float_dtype(base)
    zeros = bytes(base.feature_width * (4 if dtype == "F32" else 2))
    added = {EMBEDDING: (dtype, (base.feature_width,), zeros)}
    return _write(base, out, added, {"architectures": [name], "carryover_config": {**CARRYOVER_CONFIG, **options}})


def with_lookup(base: DraftContract, out: Path, table: list[float]) -> DraftContract:
    """Write a drafter with a lookup table to a new directory and return its contract.

    A drafter that does not carry becomes one that carries no rows: it has not learned to read them. Files as in
    :func:`convert`.
    """
    if base.carries:
        return _write(base, out, {}, {"carryover_config": {**(base.carryover or {}), "lookup": table}})
    return convert(base, out, lookup=table, carried_rows=0)


def convert_ready(base: DraftContract, out: Path, config: ReadyConfig, seed: int = 0) -> DraftContract:
    """Write a DSpark drafter, stock or Carryover, with an untrained reader to a new directory; return its contract.

    The reader's output is zero, so it drafts as ``base`` does; its other weights are random. Files as in
    :func:`convert`. Raises UsageError when ``base`` reads already or cannot have a reader, or when ``out`` exists.
    """
    if base.reads:
        raise UsageError(
            f"{base.path} is already a {METHOD_NAMES[base.method]} drafter ({base.architecture}); serve it as it is."
        )
    if limits := ready_limits(base):
        raise UsageError(f"{base.path} cannot have a reader: {limits[0].rstrip('.')}.")
    name = READY_ARCHITECTURE["ready_carryover" if base.carries else "ready"]
    added = _reader_weights(config, base, _float_dtype(base), seed)
    return _write(base, out, added, {"architectures": [name], "ready_config": config.as_json()})


def _reader_weights(config: ReadyConfig, base: DraftContract, dtype: str, seed: int) -> Added:
    """The weights of a fresh reader as bytes; the projections of the states stay float32."""
    import torch

    from sglang_ext.ready.reader import StateReader

    reader = StateReader(config, base.hidden_size, base.num_layers)
    reader.reset_parameters(torch.Generator().manual_seed(seed))
    types = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    added: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    for name, parameter in reader.named_parameters():
        kept = dtype if name.startswith("reads.") else "F32"
        tensor = parameter.detach().to(types[kept]).contiguous()
        added[f"{READER}.{name}"] = (kept, tuple(tensor.shape), tensor.view(torch.uint8).numpy().tobytes())
    return added


def _float_dtype(base: DraftContract) -> str:
    dtype = base.tensors["fc.weight"].dtype
    if dtype not in FLOATS:
        raise UsageError(f"{base.path} keeps fc.weight as {dtype}; convert the F32, F16 or BF16 checkpoint instead.")
    return dtype


def _write(base: DraftContract, out: Path, added: Added, changes: dict[str, Any]) -> DraftContract:
    """A copy of ``base`` with tensors added beside ``fc.weight`` and fields of config.json changed."""
    if out.exists():
        raise UsageError(f"{out} already exists; give a new directory or remove that one.")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as error:
        raise UsageError(f"{out} cannot be written ({error.strerror}); choose another place.") from None
    try:
        _write_files(base, partial, added, changes)
        partial.chmod(0o755)  # mkdtemp makes it private
        os.rename(partial, out)
    except OSError as error:
        raise UsageError(f"{out} cannot be written ({error.strerror}); free space or choose another place.") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return read_contract(out)


def _write_files(base: DraftContract, partial: Path, added: Added, changes: dict[str, Any]) -> None:
    holder = base.tensors["fc.weight"].file
    for source in sorted(base.path.iterdir()):
        if source.is_file() and (source != holder or not added):
            shutil.copyfile(source, partial / source.name)
    nbytes = write_with(holder, partial / holder.name, added) if added else 0
    _write_json(partial / "config.json", {**base.config, **changes})
    if (base.path / WEIGHTS_INDEX).exists():
        index = read_json(base.path / WEIGHTS_INDEX)
        index["weight_map"] |= dict.fromkeys(added, holder.name)
        metadata = index.get("metadata")
        if isinstance(metadata, dict) and "total_size" in metadata:
            metadata["total_size"] += nbytes
        _write_json(partial / WEIGHTS_INDEX, index)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
