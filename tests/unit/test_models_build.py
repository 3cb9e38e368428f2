"""models/build.sh makes the reference models by the commands that their provenance records."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.training.cli import add_arguments
from sglang_ext.training.drafters import PRESETS

MODELS = Path(__file__).parents[2] / "models"
STAGES = ("targets", "answers", "drafters", "carryover", "hybrid", "ready", "lookup")
RECORDS = {path.parent.name: json.loads(path.read_text()) for path in sorted(MODELS.glob("*/provenance.json"))}
BOOKKEEPING = {"out", "device", "workers", "compile", "log_every", "eval_every", "save_every", "held_out_batches"}


def settings(words: str) -> dict[str, Any]:
    """What a ``train`` command makes its result from: paths by their last part, unset options from the preset."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    given = vars(parser.parse_args(shlex.split(words)))
    for name, value in PRESETS["reference"]["both"].items():
        given[name] = given.get(name) or value
    kept = {name: value for name, value in given.items() if name not in BOOKKEEPING}
    return {name: shipped(value.name) if isinstance(value, Path) else value for name, value in kept.items()}


def shipped(name: str) -> str:
    """The name here of what the script calls otherwise."""
    return name.replace("carryover-on-", "carryover-")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The settings of every command of the script, by the name under which its output is shipped; nothing is run."""
    folder = tmp_path_factory.mktemp("build")
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nshift 3; echo "$@" >> {folder}/commands\n')
    python.chmod(0o755)
    environment = {"PATH": os.environ["PATH"], "PYTHON": str(python), "BUILD": str(folder / "build")}
    subprocess.run([MODELS / "build.sh", *STAGES], env=environment, check=True, timeout=60)
    lines = (folder / "commands").read_text().splitlines()
    names = (Path(line.split(" --out ")[1].split()[0]).name for line in lines)
    return {name: settings(line) for name, line in zip(names, lines, strict=True)}


@pytest.mark.parametrize("name", RECORDS)
def test_a_model_is_made_by_its_recorded_command(made: dict[str, dict[str, Any]], name: str) -> None:
    record = RECORDS[name]
    assert made[name] == settings(record["command"].removeprefix("sglang-ext train "))
    if "lookup" in record:  # then what the table was fitted for was trained before
        before = {"ready-carryover-dspark-hybrid": "ready-dspark-hybrid"}.get(name, name.replace("-", "-on-", 1))
        trained = json.loads((MODELS / name / "trained.json").read_text())
        assert record["drafter"] == trained["command"]
        assert made[before] == settings(trained["command"].removeprefix("sglang-ext train "))


@pytest.mark.parametrize(("name", "drafter"), [("answers", "dspark-dense"), ("answers-hybrid", "dspark-hybrid")])
def test_answers_are_made_by_their_recorded_command(made: dict[str, dict[str, Any]], name: str, drafter: str) -> None:
    answers = RECORDS[drafter]["data"]["answers"]
    assert made[name] == settings(answers["command"].removeprefix("sglang-ext train "))


def test_a_reader_and_its_control_differ_in_the_reader_alone(made: dict[str, dict[str, Any]]) -> None:
    reader = {"reader", "source_layers", "layers", "rank"}
    for stage, control, changed in (
        ("ready-dspark-hybrid-1", "control-1", reader),
        ("ready-dspark-hybrid-2", "control-2", {"reader", "drafter"}),
        ("ready-dspark-hybrid", "control-dspark-hybrid", {"reader", "drafter"}),
        ("ready-carried-dspark-hybrid", "carryover-dspark-hybrid", {"reader", "drafter"}),
        ("ready-carried-dspark-hybrid", "ready-dspark-hybrid-2", {"carry", "embedding_start"}),
    ):
        assert {name for name, value in made[stage].items() if made[control][name] != value} == changed, stage
    assert made["ready-dspark-hybrid-1"]["drafter"] == made["control-1"]["drafter"] == "dspark-hybrid"
