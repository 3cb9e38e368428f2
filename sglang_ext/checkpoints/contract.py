"""What a drafter's configuration and weights promise, and what a target's configuration asks for.

Fields are read as SGLang 0.5.23 reads them (speculative/dflash_utils.py:588, dspark_components/dspark_config.py:226):
nested in ``dflash_config`` first, then flat. A Carryover checkpoint is a DFlash or DSpark one with another architecture
name, ``carryover_config`` and one more tensor, ``carryover_embedding`` [K*H]: the learned vector of arXiv 2609.14717
section 2.1, added to a rejected row's target features before they are projected. A ReaDy checkpoint is a DSpark one
with ``ready_config`` and the reader's weights (``sglang_ext.ready``); a drafter may have both.

``carryover_config`` may also have ``lookup``, the bonuses of ``sglang_ext.carryover.lookup``, and ``carried_rows``, the
most rejected rows that the context carries (0: a drafter that never learned to read them; its embedding stays zero).
"""

from __future__ import annotations

import collections
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from sglang_ext.checkpoints.files import Tensor, read_json, read_tensors
from sglang_ext.errors import UsageError
from sglang_ext.ready.config import READER, ReadyConfig, RecurrentShape

EMBEDDING = "carryover_embedding"
CARRYOVER_CONFIG: dict[str, Any] = {"embedding": "learned", "rounds": 1}
CARRYOVER_OPTIONS = ("lookup", "carried_rows")  # of carryover_config: left out where there is nothing to say
_HIGHEST = 1e30  # of a bonus; more is no number that a logit could have
# carryover.lookup's LONGEST + 1 and WIDEST, which cannot be imported without torch.
LOOKUP_BONUSES = 5
LOOKUP_WIDEST = 64
CARRYOVER_ARCHITECTURE = {"dflash": "CarryoverDFlashDraftModel", "dspark": "CarryoverDSparkModel"}
READY_ARCHITECTURE = {"ready": "ReadyDSparkModel", "ready_carryover": "ReadyCarryoverDSparkModel"}
# Architecture name -> (kind, method). The stock names are those of models/dflash.py and models/dspark.py.
ARCHITECTURES = {
    "DFlashDraftModel": ("dflash", "none"),
    "DSparkDraftModel": ("dspark", "none"),
    "Qwen3DSparkModel": ("dspark", "none"),
    "LingDSparkModel": ("dspark", "none"),
    CARRYOVER_ARCHITECTURE["dflash"]: ("dflash", "carryover"),
    CARRYOVER_ARCHITECTURE["dspark"]: ("dspark", "carryover"),
    READY_ARCHITECTURE["ready"]: ("dspark", "ready"),
    READY_ARCHITECTURE["ready_carryover"]: ("dspark", "ready_carryover"),
}
METHOD_NAMES = {"none": "stock", "carryover": "Carryover", "ready": "ReaDy", "ready_carryover": "ReaDy and Carryover"}
ALGORITHMS = {
    ("dflash", "none"): "DFLASH",
    ("dspark", "none"): "DSPARK",
    ("dflash", "carryover"): "CARRYOVER_DFLASH",
    ("dspark", "carryover"): "CARRYOVER_DSPARK",
    ("dspark", "ready"): "READY",
    ("dspark", "ready_carryover"): "READY_CARRYOVER",
}
MARKOV_HEADS = ("vanilla", "gated", "rnn")
FLOATS = ("F32", "F16", "BF16")
_ALIASES = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}


@dataclass(frozen=True)
class Weights:
    """Totals over a checkpoint's safetensors headers."""

    tensors: int
    parameters: int
    nbytes: int
    dtype: str  # the dtype of most bytes

    @classmethod
    def of(cls, tensors: dict[str, Tensor]) -> Weights:
        by_dtype: collections.Counter[str] = collections.Counter()
        for tensor in tensors.values():
            by_dtype[tensor.dtype] += tensor.end - tensor.start
        dtype = by_dtype.most_common(1)[0][0] if by_dtype else "none"
        return cls(len(tensors), sum(t.count for t in tensors.values()), by_dtype.total(), dtype)


@dataclass(frozen=True)
class DraftContract:
    """What a drafter promises to the server; widths are rows of one request in one verify step."""

    path: Path
    kind: str  # dflash | dspark
    method: str  # none | carryover | ready | ready_carryover
    architecture: str
    block_size: int  # as configured: DFlash counts the anchor, DSpark does not
    mask_token_id: int
    target_layer_ids: tuple[int, ...]  # 0-based, output of that decoder layer
    num_target_layers: int | None
    hidden_size: int  # H, the target's and the drafter's
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    markov_rank: int  # 0 for DFlash
    markov_head: str | None
    sample_from_anchor: bool  # DSpark: does the anchor's own row draft a token
    carryover: dict[str, Any] | None  # the checkpoint's carryover_config
    ready: Any  # the checkpoint's ready_config as it stands there, see reader()
    weights: Weights
    config: dict[str, Any] = field(repr=False)
    tensors: dict[str, Tensor] = field(repr=False)  # by the names SGLang loads them under

    @property
    def algorithm(self) -> str:
        """Name for ``--speculative-algorithm``."""
        return ALGORITHMS[self.kind, self.method]

    @property
    def base_algorithm(self) -> str:
        """The stock algorithm this drafter extends."""
        return ALGORITHMS[self.kind, "none"]

    @property
    def verify_width(self) -> int:
        """W: rows the target verifies, the anchor's included."""
        return self.block_size if self.kind == "dflash" else self.block_size + 1

    @property
    def query_width(self) -> int:
        """Q: rows of one draft block."""
        return self.block_size if self.kind == "dflash" or self.sample_from_anchor else self.block_size + 1

    @property
    def drafts(self) -> int:
        """Proposed tokens per verify step."""
        return self.verify_width - 1

    @property
    def feature_width(self) -> int:
        """K*H: the selected layers' hidden states of one token, side by side."""
        return len(self.target_layer_ids) * self.hidden_size

    @property
    def carries(self) -> bool:
        """Whether rejected rows are carried into the next draft (Carryover)."""
        return self.method in ("carryover", "ready_carryover")

    @property
    def lookup(self) -> tuple[float, ...] | None:
        """The lookup table: a bonus for each matched length, 0 to LONGEST; None without a (valid) one."""
        table = (self.carryover or {}).get("lookup")
        return tuple(map(float, table)) if is_lookup(table) else None

    @property
    def carried_rows_limit(self) -> int | None:
        """The most rejected rows that the context carries; None where it carries all."""
        rows = (self.carryover or {}).get("carried_rows")
        return rows if type(rows) is int else None

    @property
    def reads(self) -> bool:
        """Whether recurrent states are read (ReaDy)."""
        return self.method in READY_ARCHITECTURE

    def reader(self) -> ReadyConfig:
        """The reader's configuration; UsageError where it is missing or invalid."""
        return ReadyConfig.of(self.ready)

    def reader_tensors(self) -> dict[str, Tensor]:
        """The reader's tensors, by their names below ``state_reader.``."""
        prefix = f"{READER}."
        return {name.removeprefix(prefix): t for name, t in self.tensors.items() if name.startswith(prefix)}

    def reader_is_zero(self) -> bool | None:
        """Whether the reader's output is still all zeros, untrained; None without a readable one."""
        outputs = [tensor for name, tensor in self.reader_tensors().items() if name.endswith(".out")]
        if not self.reads or not outputs or any(tensor.dtype not in FLOATS for tensor in outputs):
            return None
        return not any(tensor.values().any() for tensor in outputs)

    def embedding_is_zero(self) -> bool | None:
        """Whether the Carryover embedding is still untrained; None without a readable one, or where it is not used."""
        embedding = self.tensors.get(EMBEDDING)
        if not self.carries or self.carried_rows_limit == 0 or embedding is None or embedding.dtype not in FLOATS:
            return None
        return not embedding.values().any()


@dataclass(frozen=True)
class TargetInfo:
    """The part of a target's configuration that a drafter has to fit."""

    path: Path
    architecture: str
    hidden_size: int
    num_layers: int
    recurrent_layers: int  # Gated DeltaNet layers; 0 for a dense target
    recurrent: RecurrentShape | None  # their states' shape; None for a dense target
    vocab_size: int
    num_heads: int | None
    num_kv_heads: int | None
    max_position_embeddings: int | None
    weights: Weights | None  # None when only the configuration was read


def is_lookup(value: Any) -> TypeGuard[list[float]]:
    """Whether a value of JSON is a lookup table: ``LOOKUP_BONUSES`` finite numbers, none below zero."""
    if not isinstance(value, list) or len(value) != LOOKUP_BONUSES:
        return False
    return all(type(bonus) in (int, float) and 0 <= bonus <= _HIGHEST for bonus in value)


def is_drafter(config: dict[str, Any]) -> bool:
    """Whether a configuration is a drafter's rather than a target's."""
    marks = (
        "dflash_config",
        "dspark_config",
        "carryover_config",
        "ready_config",
        "markov_rank",
        "speculators_model_type",
    )
    return _architecture(config) in ARCHITECTURES or any(mark in config for mark in marks)


def read_contract(directory: Path) -> DraftContract:
    """Read a drafter's contract; UsageError (one sentence) when it has none. ``rules.validate`` says if it is fit."""
    config = read_json(directory / "config.json")
    architecture = _architecture(config)
    if "speculators_model_type" in config:
        raise UsageError(
            f"{directory} is in the speculators training layout, which SGLang does not load; "
            "export it to a served checkpoint first."
        )
    if architecture not in ARCHITECTURES:
        what = "is no drafter of a known architecture" if is_drafter(config) else "is a target model, not a drafter"
        known = ", ".join(ARCHITECTURES)
        raise UsageError(f"{directory} {what} (it is {architecture}); give a drafter of one of these: {known}.")
    kind, method = ARCHITECTURES[architecture]
    nested = _object(config, "dflash_config", directory)
    own = {**nested, **_object(config, "dspark_config", directory)} if kind == "dspark" else nested

    def integer(name: str, places: dict[str, Any] = nested, minimum: int = 1) -> int:
        return _integer(places.get(name, config.get(name)), name, directory, minimum)

    ids = nested.get("target_layer_ids", config.get("target_layer_ids"))
    if not isinstance(ids, list) or not ids:
        raise UsageError(f"{directory}/config.json has no list target_layer_ids; add the one it was trained with.")
    layers = nested.get("num_target_layers", config.get("num_target_layers"))
    carryover = config.get("carryover_config")
    if carryover is not None and not isinstance(carryover, dict):
        raise UsageError(f"carryover_config in {directory}/config.json must be an object like {CARRYOVER_CONFIG}.")
    heads = integer("num_attention_heads", {})
    hidden = integer("hidden_size", {})
    raw = read_tensors(directory)
    return DraftContract(
        path=directory,
        kind=kind,
        method=method,
        architecture=architecture,
        block_size=integer("block_size", minimum=2 if kind == "dflash" else 1),
        mask_token_id=integer("mask_token_id", own, minimum=0),
        target_layer_ids=tuple(_integer(i, "each of target_layer_ids", directory, 0) for i in ids),
        num_target_layers=None if layers is None else _integer(layers, "num_target_layers", directory, 1),
        hidden_size=hidden,
        intermediate_size=integer("intermediate_size", {}),
        num_layers=integer("num_hidden_layers", {}),
        num_heads=heads,
        num_kv_heads=_integer(config.get("num_key_value_heads", heads), "num_key_value_heads", directory, 1),
        head_dim=_integer(config.get("head_dim") or hidden // heads, "head_dim", directory, 1),
        vocab_size=integer("vocab_size", {}),
        markov_rank=integer("markov_rank", own) if kind == "dspark" else 0,
        markov_head=str(own.get("markov_head_type", config.get("markov_head_type"))) if kind == "dspark" else None,
        sample_from_anchor=kind == "dspark" and bool(config.get("sample_from_anchor", True)),
        carryover=carryover,
        ready=config.get("ready_config"),
        weights=Weights.of(raw),
        config=config,
        tensors={_loaded_name(name): tensor for name, tensor in raw.items()},
    )


def read_target(directory: Path, *, weights: bool = False) -> TargetInfo:
    """Read what a drafter must fit (published Qwen3.5 checkpoints nest it in ``text_config``), weights on request."""
    config = read_json(directory / "config.json")
    if is_drafter(config):
        raise UsageError(f"{directory} is a drafter ({_architecture(config)}), not a target; give the model it serves.")
    text = config.get("text_config")
    text = text if isinstance(text, dict) else config

    def integer(name: str) -> int:
        return _integer(text.get(name), name, directory, 1)

    num_layers = integer("num_hidden_layers")
    kinds = text.get("layer_types")
    if isinstance(kinds, list):
        recurrent = kinds.count("linear_attention")
    elif "full_attention_interval" in text:
        recurrent = num_layers - num_layers // integer("full_attention_interval")
    else:
        recurrent = 0
    return TargetInfo(
        path=directory,
        architecture=_architecture(config),
        hidden_size=integer("hidden_size"),
        num_layers=num_layers,
        recurrent_layers=recurrent,
        recurrent=RecurrentShape.of(text),
        vocab_size=integer("vocab_size"),
        num_heads=text.get("num_attention_heads"),
        num_kv_heads=text.get("num_key_value_heads"),
        max_position_embeddings=text.get("max_position_embeddings"),
        weights=Weights.of(read_tensors(directory)) if weights else None,
    )


def _architecture(config: dict[str, Any]) -> str:
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else "without architectures"


def _loaded_name(name: str) -> str:
    """The parameter name SGLang resolves a tensor to (models/dflash.py:900)."""
    return _ALIASES.get(name, name.removeprefix("model."))


def _object(config: dict[str, Any], name: str, directory: Path) -> dict[str, Any]:
    value = config.get(name)
    if value is not None and not isinstance(value, dict):
        raise UsageError(f"{name} in {directory}/config.json must be an object, not {value!r}; correct it.")
    return value or {}


def _integer(value: Any, name: str, directory: Path, minimum: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        found = "missing" if value is None else repr(value)
        raise UsageError(f"{name} in {directory}/config.json must be an integer of at least {minimum}; it is {found}.")
    return value
