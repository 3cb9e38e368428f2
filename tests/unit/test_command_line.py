"""What the command lines share: help with defaults, usage behind unknown words, one sentence for a missing package."""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoint_fixtures import make_drafter, make_target
from sglang_ext_loadtest.cli import parser as loadtest_parser

from sglang_ext import cli
from sglang_ext.checkpoints import read_contract
from sglang_ext.checkpoints.conversion import convert
from sglang_ext.command_line import Parser
from sglang_ext.errors import needs

Capture = pytest.CaptureFixture[str]


def leaves(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Parsers without subcommands of their own."""
    inner = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    for action in inner:
        for subparser in action.choices.values():
            yield from leaves(subparser)
    if not inner:
        yield parser


def every_parser() -> list[argparse.ArgumentParser]:
    found = list(leaves(loadtest_parser()))
    for name, (module, _, _) in cli.COMMANDS.items():
        parser = Parser(prog=f"sglang-ext {name}")
        importlib.import_module(module).add_arguments(parser)
        found += leaves(parser)
    return found


def test_help_says_what_every_option_is_and_its_default_once() -> None:
    parsers = every_parser()
    assert len(parsers) == 5 + 4 + 3 + 10  # load test, single commands, benchmarks, stages
    for parser in parsers:
        formatter = parser._get_formatter()
        for action in parser._actions:
            text, where = formatter._get_help_string(action), f"{parser.prog} {action.dest}"
            assert text, where
            if action.option_strings and action.default not in (None, [], {}, argparse.SUPPRESS) and action.nargs != 0:
                assert text.replace("%(default)s", "").count("default") == 1, where


def test_lists_and_zeros_are_shown_as_they_are_typed(capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        cli.main(["evaluate", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "of the answers (default: 0.0 1.0)" in text and "of the servers (default: 0)" in text


@pytest.mark.parametrize(
    "words", [["inspect", "x"], ["bench", "kernels"], ["train", "encode"], ["train", "data", "--sources", "small"]]
)
def test_an_unknown_word_shows_the_usage_of_its_own_command(words: list[str], capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([*words, "--foo", "1"])
    error = capsys.readouterr().err
    command = " ".join(words[: 2 if words[0] in ("bench", "train") else 1])
    assert caught.value.code == 2 and error.startswith(f"usage: sglang-ext {command} [-h]")
    assert f"sglang-ext {command}: error: unrecognized arguments: --foo 1" in error


@pytest.mark.parametrize("command", ["sglang-ext", "sglang-ext-loadtest"])
def test_top_level_help_is_about_the_command(command: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"]) if command == "sglang-ext" else loadtest_parser().parse_args(["--help"])
    text = capsys.readouterr().out
    assert "``" not in text and "imported" not in text and text.count(command) == 1


def without(package: str, *words: object, entry: str = "sglang_ext.cli") -> str:
    """The one line on stderr of a command that is called where a package is not installed."""
    code = f"import sys; sys.modules[{package!r}] = None; from {entry} import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    return done.stderr


def test_a_missing_package_is_named_with_the_extra_that_brings_it(tmp_path: Path) -> None:
    target, out = make_target(tmp_path / "target"), tmp_path / "out"
    convert(read_contract(make_drafter(tmp_path / "dflash", "dflash")), tmp_path / "carryover")
    run = ("--target", target, "--data", tmp_path, "--out", out, "--steps", 1)
    for package, extra, words in (
        ("numpy", "sglang", ("inspect", tmp_path / "carryover")),
        ("matplotlib", "sglang,evaluate", ("evaluate", target, "--draft", tmp_path / "dflash")),
        ("datasketch", "data", ("train", "data", "--out", out)),
        ("speculators", "train", ("train", "drafter", "--kind", "dflash", *run)),
    ):
        said = without(package, *words)
        assert f"The package {package} is needed" in said and f"`pip install '.[{extra}]'`" in said
    assert "'.[loadtest]'" in without("jinja2", "report", tmp_path, entry="sglang_ext_loadtest.cli")


def test_sglang_is_missed_before_what_comes_with_it(tmp_path: Path) -> None:
    """``pip install .`` alone brings neither."""
    code = (
        "import sys, importlib.metadata as metadata; sys.modules['numpy'] = None\n"
        "def version(name): raise metadata.PackageNotFoundError(name)\n"
        "metadata.version = version\n"
        "from sglang_ext.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "serve", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "SGLang is not installed" in done.stderr and done.stderr.count("\n") == 1


def test_a_missing_module_of_an_installed_package_stays_an_error() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_module"), needs("train"):
        importlib.import_module("sglang_ext.no_such_module")
