"""Switches read from the environment, since a plugin cannot add flags to SGLang's command line."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from sglang_ext.errors import UsageError

CARRIED_ROWS_LIMIT = "SGLANG_EXT_CARRIED_ROWS"
LOOKUP = "SGLANG_EXT_LOOKUP"
ORACLE_LOG = "SGLANG_EXT_ORACLE_LOG"
ROUNDS = "SGLANG_EXT_ROUNDS"
READ_STATES = "SGLANG_EXT_READ_STATES"
WRONG_STATES = ("zero", "stale", "shuffled")
EXPECTED_METHOD = "SGLANG_EXT_EXPECTED_METHOD"
BENCH_PLAN = "SGLANG_EXT_BENCH_PLAN"
SERVE_FLAGS = "SGLANG_EXT_SERVE_FLAGS"


def carried_rows_limit() -> int | None:
    """At most this many rejected rows are carried: unset means all, 0 switches the carry off."""
    value = os.environ.get(CARRIED_ROWS_LIMIT)
    if value is None or value in ("", "all"):
        return None
    if not value.isdigit():
        raise UsageError(f"{CARRIED_ROWS_LIMIT}={value} is not a number of rows; set 0 (off), 1, 2, ... or 'all'.")
    return int(value)


def lookup_is_off() -> bool:
    """Whether a drafter's lookup table is left unused, a control: 'off'; unset or 'on' means it is used."""
    value = os.environ.get(LOOKUP, "")
    if value not in ("", "on", "off"):
        raise UsageError(f"{LOOKUP}={value} is neither 'on' nor 'off'; set one of them.")
    return value == "off"


def wrong_states() -> str | None:
    """The control a reader is fed with (``ready.controls``); unset or 'committed' means the right states."""
    value = os.environ.get(READ_STATES, "")
    if value in ("", "committed"):
        return None
    if value not in WRONG_STATES:
        raise UsageError(f"{READ_STATES}={value} is no control; set {', '.join(WRONG_STATES)}, or 'committed' (right).")
    return value


def oracle_log() -> str | None:
    """File that the debug mode writes its comparisons to (JSON lines); unset means the mode is off."""
    return os.environ.get(ORACLE_LOG) or None


def rounds_folder() -> str | None:
    """Directory that the debug mode records rounds with their features in; unset means the mode is off."""
    return os.environ.get(ROUNDS) or None


def bench_plan() -> Path | None:
    """Plan of ``bench round``, which sets it for its engine; unset anywhere else."""
    plan = os.environ.get(BENCH_PLAN)
    return Path(plan) if plan else None


def expected_method() -> str | None:
    """Name of the algorithm an operator expects here (NONE for plain decoding); the metrics say if it is another."""
    return os.environ.get(EXPECTED_METHOD, "").upper() or None


def serve_flags() -> list[str]:
    """SGLang flags that ``sglang-ext serve`` adds where they are not given; the container image sets them."""
    text = os.environ.get(SERVE_FLAGS, "")
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{SERVE_FLAGS}={text} cannot be split into flags ({error}); correct its quotes.") from None
    if words and not words[0].startswith("--"):
        raise UsageError(f"{SERVE_FLAGS} must hold flags, and {words[0]} is none; write --name value.")
    return words
