"""``ready_config``: which recurrent states a drafter reads, through which ranks, and where the result goes.

Pure Python, so that checkpoints can be checked without torch. Terms: a *source* is a recurrent (Gated DeltaNet) layer
of the target; its state is one [V, K] matrix per value head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from sglang_ext.errors import UsageError

Inject = Literal["after_attention", "before_attention"]
Query = Literal["value_head", "source"]
INJECT: tuple[Inject, ...] = ("after_attention", "before_attention")
QUERY: tuple[Query, ...] = ("value_head", "source")
READER = "state_reader"
"""What the reader's weights are named below in a checkpoint."""
DEFAULT_RANK = 8
"""The paper's fastest setting, for keys and values alike (section 4.4)."""


@dataclass(frozen=True)
class RecurrentShape:
    """The recurrent layers of a target and the shape of one layer's state, [value_heads, value_dim, key_dim]."""

    num_layers: int  # of the target, attention layers included
    layers: tuple[int, ...]  # the recurrent ones, 0-based
    value_heads: int  # HV
    value_dim: int  # V
    key_dim: int  # K

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> RecurrentShape | None:
        """Read it from a target's text configuration (Qwen3-Next, Qwen3.5); None without such layers."""
        num_layers, kinds = config.get("num_hidden_layers"), config.get("layer_types")
        interval = config.get("full_attention_interval")
        sizes = [config.get(f"linear_{name}") for name in ("num_value_heads", "value_head_dim", "key_head_dim")]
        if not isinstance(num_layers, int) or not all(isinstance(size, int) and size > 0 for size in sizes):
            return None
        if isinstance(kinds, (list, tuple)):
            layers = tuple(layer for layer, kind in enumerate(kinds) if kind == "linear_attention")
        elif isinstance(interval, int) and interval > 0:
            layers = tuple(layer for layer in range(num_layers) if (layer + 1) % interval)
        else:
            return None
        return cls(num_layers, layers, *(int(size) for size in sizes if size is not None)) if layers else None

    def default_sources(self) -> tuple[int, ...]:
        """The last recurrent layer of each half of the target: 30 and 62 of 64, the paper's best pair (section 4.4)."""
        first = [layer for layer in self.layers if layer < self.num_layers // 2]
        return tuple(dict.fromkeys([*first[-1:], self.layers[-1]]))


@dataclass(frozen=True)
class ReadyConfig:
    """A checkpoint's ``ready_config``; invalid values are refused when it is made (UsageError).

    ``value_heads``, ``value_dim`` and ``key_dim`` are the target's (HV, V, K): a reader fits no other state.
    """

    source_layers: tuple[int, ...]
    value_heads: int
    value_dim: int
    key_dim: int
    rank_k: int = DEFAULT_RANK
    rank_v: int = DEFAULT_RANK
    inject: Inject = "after_attention"
    layers: Literal["last"] | tuple[int, ...] = "last"
    query: Query = "value_head"

    def __post_init__(self) -> None:
        for name in ("value_heads", "value_dim", "key_dim", "rank_k", "rank_v"):
            if not _is_count(getattr(self, name), minimum=1):
                raise UsageError(
                    f"ready_config.{name} is {getattr(self, name)!r}; it must be an integer of at least 1."
                )
        _check_layers("source_layers", self.source_layers, "the recurrent target layers to read, for example [30, 62]")
        if self.layers != "last":
            _check_layers("layers", self.layers, "'last' or the draft layers that read, for example [0, 2, 4]")
        for rank, size in (("rank_k", "key_dim"), ("rank_v", "value_dim")):
            if getattr(self, rank) > getattr(self, size):
                raise UsageError(
                    f"ready_config.{rank} is {getattr(self, rank)}, above the {size} of {getattr(self, size)} that it "
                    "compresses; give a smaller rank."
                )
        for name, values in (("inject", INJECT), ("query", QUERY)):
            if getattr(self, name) not in values:
                raise UsageError(f"ready_config.{name} is {getattr(self, name)!r}; it must be {' or '.join(values)}.")

    @classmethod
    def of(cls, value: Any) -> ReadyConfig:
        """From JSON; UsageError for a missing, unknown or invalid key."""
        if not isinstance(value, Mapping):
            raise UsageError(f"ready_config must be an object with source_layers and ranks, not {value!r}; correct it.")
        known = cls.__dataclass_fields__
        if unknown := sorted(set(value) - set(known)):
            raise UsageError(
                f"ready_config has the unknown key {', '.join(unknown)}; the known ones are {', '.join(known)}."
            )
        for name in ("source_layers", "value_heads", "value_dim", "key_dim"):
            if name not in value:
                raise UsageError(f"ready_config has no {name}; add the one that the drafter was trained with.")
        settings: dict[str, Any] = {key: tuple(item) if isinstance(item, list) else item for key, item in value.items()}
        return cls(**settings)

    @classmethod
    def for_target(cls, target: RecurrentShape, **settings: Any) -> ReadyConfig:
        """For a target's states; settings left out (or None) keep their defaults, the sources ``default_sources``."""
        given = {
            "source_layers": list(target.default_sources()),
            "rank_k": min(DEFAULT_RANK, target.key_dim),
            "rank_v": min(DEFAULT_RANK, target.value_dim),
        } | {name: value for name, value in settings.items() if value is not None}
        shape = {"value_heads": target.value_heads, "value_dim": target.value_dim, "key_dim": target.key_dim}
        config = cls.of({**given, **shape})
        if problems := config.target_problems(target):
            raise UsageError(problems[0])
        return config

    def as_json(self) -> dict[str, Any]:
        """The object for config.json."""
        return {key: list(item) if isinstance(item, tuple) else item for key, item in asdict(self).items()}

    def reading_layers(self, num_draft_layers: int) -> tuple[int, ...]:
        """The draft layers (0-based) that read, of a drafter with so many; UsageError when there is no such layer."""
        if self.layers == "last":
            return (num_draft_layers - 1,)
        if self.layers[-1] >= num_draft_layers:
            raise UsageError(
                f"ready_config.layers has draft layer {self.layers[-1]}, but the drafter has layers 0 to "
                f"{num_draft_layers - 1}; name layers among them, or leave layers out for the last one."
            )
        return self.layers

    def weight_shapes(self, hidden_size: int, num_draft_layers: int) -> dict[str, tuple[int, ...]]:
        """Name (without prefix) and shape of every weight of ``reader.StateReader``."""
        sources, heads = len(self.source_layers), self.value_heads
        shapes: dict[str, tuple[int, ...]] = {
            "value_down": (sources, heads, self.rank_v, self.value_dim),
            "key_down": (sources, heads, self.rank_k, self.key_dim),
        }
        query_heads = heads if self.query == "value_head" else 1
        for index in range(len(self.reading_layers(num_draft_layers))):
            shapes[f"reads.{index}.norm"] = (hidden_size,)
            shapes[f"reads.{index}.query"] = (sources, query_heads, self.rank_k, hidden_size)
            shapes[f"reads.{index}.out"] = (hidden_size, sources, heads, self.rank_v)
        return shapes

    def target_problems(self, target: RecurrentShape | None) -> list[str]:
        """Why these states cannot be read from this target, one sentence each."""
        if target is None:
            return [
                "the target has no Gated DeltaNet layers (as Qwen3-Next and Qwen3.5 have), so there is no state to "
                "read; serve a drafter without a reader."
            ]
        problems = []
        if wrong := [layer for layer in self.source_layers if layer not in target.layers]:
            problems.append(
                f"ready_config.source_layers has {', '.join(map(str, wrong))}, which is no recurrent layer of the "
                f"target; its recurrent layers are {', '.join(map(str, target.layers))}."
            )
        for name in ("value_heads", "value_dim", "key_dim"):
            ours, theirs = getattr(self, name), getattr(target, name)
            if ours != theirs:
                problems.append(
                    f"ready_config.{name} is {ours} and that of the target's states is {theirs}; use the drafter that "
                    "was trained for this target."
                )
        return problems


def _is_count(value: Any, minimum: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def _check_layers(name: str, layers: Any, meaning: str) -> None:
    whole = isinstance(layers, tuple) and layers and all(_is_count(layer, minimum=0) for layer in layers)
    if not whole or list(layers) != sorted(set(layers)):
        shown = list(layers) if isinstance(layers, tuple) else layers
        raise UsageError(f"ready_config.{name} is {shown!r}; it must rise strictly and name {meaning}.")
