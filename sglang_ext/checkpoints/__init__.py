"""The checkpoint contract: what a drafter promises, whether it is whole and fits its target, where its files lie.

Neither torch nor SGLang is imported: only JSON and safetensors headers are read.
"""

from __future__ import annotations

from pathlib import Path

from sglang_ext.checkpoints.contract import (
    ALGORITHMS,
    ARCHITECTURES,
    CARRYOVER_ARCHITECTURE,
    CARRYOVER_CONFIG,
    CARRYOVER_OPTIONS,
    EMBEDDING,
    FLOATS,
    LOOKUP_BONUSES,
    LOOKUP_WIDEST,
    METHOD_NAMES,
    READY_ARCHITECTURE,
    DraftContract,
    TargetInfo,
    Weights,
    is_drafter,
    read_contract,
    read_target,
)
from sglang_ext.checkpoints.files import locate, read_json, read_tensors
from sglang_ext.checkpoints.rules import carryover_limits, ready_limits, validate
from sglang_ext.errors import UsageError

__all__ = [
    "ALGORITHMS",
    "ARCHITECTURES",
    "CARRYOVER_ARCHITECTURE",
    "CARRYOVER_CONFIG",
    "CARRYOVER_OPTIONS",
    "EMBEDDING",
    "FLOATS",
    "LOOKUP_BONUSES",
    "LOOKUP_WIDEST",
    "METHOD_NAMES",
    "READY_ARCHITECTURE",
    "DraftContract",
    "TargetInfo",
    "Weights",
    "carryover_limits",
    "check",
    "find_target",
    "is_drafter",
    "locate",
    "read_contract",
    "read_json",
    "read_target",
    "read_tensors",
    "ready_limits",
    "validate",
]


def check(contract: DraftContract, target: TargetInfo | None = None) -> None:
    """Raise UsageError with the first problem of ``validate``, and the command that shows the others."""
    problems = validate(contract, target)
    if problems:
        fit = f" --target {target.path}" if target is not None else ""
        more = f" ({len(problems) - 1} more: sglang-ext inspect {contract.path}{fit})" if len(problems) > 1 else ""
        raise UsageError(f"The drafter {contract.path} cannot be used: {problems[0].rstrip('.')}{more}.")


def find_target(model: str, revision: str | None = None) -> TargetInfo | None:
    """What a drafter must fit; None where only SGLang can read the target (object storage, GGUF)."""
    if "://" in model or Path(model).is_file():
        return None
    return read_target(locate(model, revision=revision, weights=False))
