"""What a server says it runs: the labels of ``method_info``."""

from __future__ import annotations

import hashlib
from importlib.metadata import version
from pathlib import Path

import sglang_ext
from sglang_ext.checkpoints import DraftContract, locate, read_contract
from sglang_ext.errors import UsageError

_CONTRACT_LABELS = (
    "block_size",
    "verify_width",
    "target_layers",
    "markov_rank",
    "state_layers",
    "reader_ranks",
    "checkpoint",
)


def versions() -> dict[str, str]:
    """Labels that every server has."""
    return {"sglang_version": version("sglang"), "sglang_ext_version": sglang_ext.__version__}


def describe(contract: DraftContract | None) -> dict[str, str]:
    """Labels from a drafter's contract; all empty without one, since a label set must not depend on the method."""
    if contract is None:
        return dict.fromkeys(_CONTRACT_LABELS, "")
    reader = contract.reader() if contract.reads else None
    values = (
        contract.block_size,
        contract.verify_width,
        _listed(contract.target_layer_ids),
        contract.markov_rank or "",
        _listed(state_layers(contract)),
        f"{reader.rank_k}x{reader.rank_v}" if reader else "",
        fingerprint(contract.path),
    )
    return dict(zip(_CONTRACT_LABELS, map(str, values), strict=True))


def state_layers(contract: DraftContract | None) -> tuple[int, ...]:
    """The target's recurrent layers whose states a drafter reads; empty for a drafter without a reader."""
    return contract.reader().source_layers if contract is not None and contract.reads else ()


def contract_of(path: str | None, revision: str | None) -> DraftContract | None:
    """A drafter's contract; None for no drafter, and for one of a kind this project does not know (EAGLE, say)."""
    if path is None:
        return None
    try:
        return read_contract(locate(path, revision=revision))
    except UsageError:
        return None


def fingerprint(folder: Path) -> str:
    """First 12 hex digits of a SHA-256 over ``config.json`` and all weights, whatever the folder is called."""
    total = hashlib.sha256()
    for path in [folder / "config.json", *sorted(folder.glob("*.safetensors"))]:
        with path.open("rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()[:12]


def _listed(layers: tuple[int, ...]) -> str:
    return ",".join(map(str, layers))
