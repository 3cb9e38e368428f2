"""The parser of our command lines: help with every default, and the right usage behind a word it does not know."""

from __future__ import annotations

import argparse
from typing import Any


class HelpFormatter(argparse.HelpFormatter):
    """Appends an option's default to its help, unless the words have it or it says nothing (None, a switch, empty)."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if not action.option_strings or not action.help or "default" in action.help:
            return action.help
        default = action.default
        if default is None or default is False or default in ([], {}, argparse.SUPPRESS):
            return action.help
        shown = " ".join(map(str, default)) if isinstance(default, list) else "%(default)s"
        return f"{action.help} (default: {shown})"


class Parser(argparse.ArgumentParser):
    """Refuses unknown words with the usage of the subcommand that they stand behind, unless that one ``takes_rest``."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": HelpFormatter} | options)
        self.takes_rest = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does it; it hands a subcommand's words to the subcommand's own parser in the same way."""
        namespace, rest = super().parse_known_args(args, namespace)
        if rest and not self.takes_rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return namespace, rest
