"""Switches read from the environment, since a plugin cannot add flags to SGLang's command line."""

from __future__ import annotations

import os

from sglang_ext.errors import UsageError

CARRIED_ROWS_LIMIT = "SGLANG_EXT_CARRIED_ROWS"
ORACLE_LOG = "SGLANG_EXT_ORACLE_LOG"
ROUNDS = "SGLANG_EXT_ROUNDS"


def carried_rows_limit() -> int | None:
    """At most this many rejected rows are carried: unset means all, 0 switches the carry off."""
    value = os.environ.get(CARRIED_ROWS_LIMIT)
    if value is None or value in ("", "all"):
        return None
    if not value.isdigit():
        raise UsageError(f"{CARRIED_ROWS_LIMIT}={value} is not a number of rows; set 0 (off), 1, 2, ... or 'all'.")
    return int(value)


def oracle_log() -> str | None:
    """File that the debug mode writes its comparisons to (JSON lines); unset means the mode is off."""
    return os.environ.get(ORACLE_LOG) or None


def rounds_folder() -> str | None:
    """Directory that the debug mode records rounds with their features in; unset means the mode is off."""
    return os.environ.get(ROUNDS) or None
