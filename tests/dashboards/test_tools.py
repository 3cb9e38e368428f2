"""Where Prometheus comes from."""

from __future__ import annotations

from pathlib import Path

import pytest

from dashboards import tools
from sglang_ext.errors import UsageError


def test_programs_on_path_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the user has installed is used as it is."""
    program = tmp_path / "promtool"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert tools.find("promtool") == program


def test_no_debian_is_said_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without apt-get there is nothing to fetch it with; the command ends with 2."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(tools, "FOLDER", tmp_path / "none")
    with pytest.raises(UsageError, match="put them on PATH"):
        tools.find("prometheus")
    assert tools.main() == 2
    assert capsys.readouterr().err.count("\n") == 1
