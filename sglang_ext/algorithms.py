"""The speculative algorithms this plugin adds to SGLang, what each is built on, and what each refuses."""

from __future__ import annotations

import inspect
import os
from functools import partial
from typing import Any

from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo, get_spec

from sglang_ext import compat
from sglang_ext.checkpoints import check, find_target, locate, read_contract
from sglang_ext.errors import UsageError, refusal_ends_process
from sglang_ext.settings import carried_rows_limit, lookup_is_off, wrong_states

BASES = {
    "CARRYOVER_DFLASH": SpeculativeAlgorithm.DFLASH,
    "CARRYOVER_DSPARK": SpeculativeAlgorithm.DSPARK,
    "READY": SpeculativeAlgorithm.DSPARK,
    "READY_CARRYOVER": SpeculativeAlgorithm.DSPARK,
}
"""Each added algorithm and the built-in one it extends."""

_OWN = frozenset({"create_worker", "handle_server_args", "register", "from_string"})


class ExtendedAlgorithm(CustomSpecAlgo):
    """Answers every question about itself as the built-in algorithm does that it extends.

    SGLang asks more of an algorithm than ``CustomSpecAlgo`` defines (``create_future_map``, scheduler.py:1681),
    so every public method of the built-in enum is delegated, those of later patch releases included.
    """

    @property
    def base(self) -> SpeculativeAlgorithm:
        """The built-in algorithm behind this one."""
        return BASES[self.name]

    def handle_server_args(self, server_args: Any) -> None:
        """Resolve the arguments as the base does, then check the draft backend that came of it."""
        self.base.handle_server_args(server_args)
        with refusal_ends_process():
            check_draft_backend(self.name, compat.resolved_draft_backend(server_args))


def _delegate(name: str) -> Any:
    def ask_base(self: ExtendedAlgorithm, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.base, name)(*args, **kwargs)

    ask_base.__name__ = name
    return ask_base


for _name, _member in vars(SpeculativeAlgorithm).items():
    if inspect.isfunction(_member) and not _name.startswith("_") and _name not in _OWN:
        setattr(ExtendedAlgorithm, _name, _delegate(_name))


def register() -> None:
    """Add the algorithms to SGLang's registry; a second call changes nothing."""
    compat.choose_backends_like({name: base.name for name, base in BASES.items()})
    for name in BASES:
        if get_spec(name) is None:
            SpeculativeAlgorithm.register(
                name, supports_overlap=True, validate_server_args=_validate, spec_class=ExtendedAlgorithm
            )(partial(_worker_class, name))


def _worker_class(name: str, server_args: Any) -> type:
    """The worker of an algorithm; called in the scheduler process, before any pool exists."""
    with refusal_ends_process():
        compat.check_touch_points()
    compat.register_draft_models()
    compat.widen_slot_rows()
    compat.keep_embedding_dtype()
    from sglang_ext.carryover.worker import CarryoverDFlashWorker, CarryoverDSparkWorker
    from sglang_ext.ready.worker import ReadyCarryoverWorker, ReadyDSparkWorker

    return {
        "CARRYOVER_DFLASH": CarryoverDFlashWorker,
        "CARRYOVER_DSPARK": CarryoverDSparkWorker,
        "READY": ReadyDSparkWorker,
        "READY_CARRYOVER": ReadyCarryoverWorker,
    }[name]


def _validate(server_args: Any) -> None:
    with refusal_ends_process():
        check_server_args(server_args)
        check_drafter(server_args)


# Argument, the values it may have, and the end of the sentence that refuses any other.
_REFUSED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("pp_size", (1,), "draft state lives on one pipeline stage; set --pp-size 1"),
    ("attn_dp_size", (1, None), "idle ranks skip the draft that keeps the state; drop --enable-dp-attention"),
    ("attn_cp_size", (1, None), "context parallelism splits the draft prefix; set --attn-cp-size 1"),
    ("dcp_size", (1, None), "decode context parallelism splits the draft prefix; set --dcp-size 1"),
    ("enable_pdmux", (False, None), "its split prefill is not verified; drop --enable-pdmux"),
    (
        "speculative_draft_model_quantization",
        (None, "unquant"),
        "quantised drafters are not verified; set --speculative-draft-model-quantization unquant",
    ),
    ("speculative_draft_window_size", (None,), "a windowed draft cache is not verified with it; drop the flag"),
    ("enable_unified_memory", (False, None), "its slot translation is not verified; drop --enable-unified-memory"),
    ("enable_linear_replayssm_spec", (False, None), "its state commit is not verified; drop the flag"),
    ("disaggregation_mode", ("null", None), "a decode-only server is not verified; serve prefill and decode together"),
    ("speculative_adaptive", (False, None), "it needs one fixed verify width; drop --speculative-adaptive"),
)

# The same for the algorithms that read recurrent states.
_REFUSED_READING: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("enable_linear_replayssm", (False, None), "its states lag behind the committed tokens; drop the flag"),
)

_REFUSED_ENVIRONMENT: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("SGLANG_RAGGED_VERIFY_MODE", ("static",), "it needs a fixed verify width; unset it or set 'static'"),
    (
        "SGLANG_DSPARK_DEFER_CONTEXT_KV",
        ("0", "false", "no", "n"),
        "it writes draft context behind the plugin's back; unset it",
    ),
)


def check_server_args(server_args: Any) -> None:
    """UsageError for the first setting that an algorithm is not built or not verified for.

    Args:
        server_args: SGLang's arguments, or any object with their attributes; missing ones are not checked.
    """
    algorithm = server_args.speculative_algorithm
    reads = algorithm.upper().startswith("READY")
    for name, allowed, reason in _REFUSED + (_REFUSED_READING if reads else ()):
        value = getattr(server_args, name, allowed[0])
        if value not in allowed:
            raise UsageError(f"{algorithm} cannot run with {name}={value}: {reason}.")
    for name, allowed_text, reason in _REFUSED_ENVIRONMENT:
        text = os.environ.get(name, allowed_text[0]).lower()
        if text not in allowed_text:
            raise UsageError(f"{algorithm} cannot run with {name}={text} in the environment: {reason}.")
    check_draft_backend(algorithm, getattr(server_args, "speculative_draft_attention_backend", None))
    carried_rows_limit()  # all three are read in the scheduler; a wrong value is better refused before it exists
    lookup_is_off()
    wrong_states()
    if getattr(server_args, "speculative_draft_model_path", None) is None:
        raise UsageError(f"{algorithm} needs a drafter made for it: set --speculative-draft-model-path.")


def check_draft_backend(algorithm: str, backend: str | None) -> None:
    """UsageError for an attention backend that the shifted block was not verified with; None is undecided yet."""
    if "CARRYOVER" not in algorithm.upper():
        return  # a reader leaves attention alone
    if backend is not None and backend not in compat.DRAFT_BACKENDS:
        raise UsageError(
            f"{algorithm} cannot draft with the attention backend {backend}: it is not verified with carried rows; "
            f"set --speculative-draft-attention-backend to one of {', '.join(compat.DRAFT_BACKENDS)}."
        )


def check_drafter(server_args: Any) -> None:
    """UsageError unless the drafter is whole, made for the chosen algorithm, and fits the target."""
    algorithm, path = server_args.speculative_algorithm.upper(), server_args.speculative_draft_model_path
    contract = read_contract(locate(path, revision=server_args.speculative_draft_model_revision))
    if contract.algorithm != algorithm:
        raise UsageError(
            f"{path} is a drafter for {contract.algorithm}, not for {algorithm}; choose that algorithm, or make "
            "another drafter with `sglang-ext convert` (--carryover or --ready)."
        )
    check(contract, find_target(server_args.model_path, server_args.revision))
    widths = {
        "speculative_num_draft_tokens": contract.verify_width,
        f"speculative_{contract.kind}_block_size": contract.block_size,
    }
    for name, trained in widths.items():
        value = getattr(server_args, name)
        if value not in (None, trained):
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{flag} {value} differs from the {trained} that {path} was trained with; leave it out.")
