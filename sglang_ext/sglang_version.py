"""The SGLang release that this plugin is written for; neither torch nor SGLang is imported to check it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from sglang_ext.errors import UsageError

SGLANG_VERSION = "0.5.23"


def check_version() -> None:
    """UsageError unless the installed SGLang is the one this plugin is written for."""
    try:
        found = version("sglang")
    except PackageNotFoundError:
        raise UsageError(
            f"SGLang is not installed, but this plugin extends SGLang {SGLANG_VERSION}; "
            f"run `pip install sglang=={SGLANG_VERSION}`."
        ) from None
    if found.split("+")[0] != SGLANG_VERSION:
        raise UsageError(
            f"SGLang {found} is installed, but this plugin relies on private parts of SGLang {SGLANG_VERSION}; "
            f"run `pip install sglang=={SGLANG_VERSION}`."
        )
