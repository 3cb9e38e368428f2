"""The one error type that a user may cause, and how it ends a process."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager


class UsageError(Exception):
    """Wrong use: the message is one sentence that says what is wrong, why, and what to do.

    Command lines print it without a traceback and exit with code 2.
    """


@contextmanager
def needs(extras: str) -> Iterator[None]:
    """Turn a package that is not installed into a UsageError with its name and the extras of ours that bring it."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if not package or importlib.util.find_spec(package) is not None:  # only a part of it is missing
            raise
        raise UsageError(
            f"The package {package} is needed for this and is not installed; in a checkout of sglang-ext run "
            f"`pip install '.[{extras}]'`."
        ) from None


@contextmanager
def refusal_ends_process() -> Iterator[None]:
    """Turn a UsageError into its sentence on stderr and SystemExit(2).

    For code that SGLang calls: it only logs an ordinary exception of a plugin and goes on without it
    (plugins/__init__.py:163), and elsewhere it prints a traceback.
    """
    try:
        yield
    except UsageError as error:
        print(f"sglang-ext: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None
