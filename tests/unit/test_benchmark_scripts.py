"""Scripts of benchmarks/ refuse a wrong path as the command line does: one sentence, exit code 2."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("gpu/end_to_end.py", "{0}/nowhere --out {0}/record"),
        ("carryover/ceiling.py", "{0}/nowhere {0} {0}"),
        ("carryover/arbiter.py", "{0} {0}/nowhere {0}"),
        ("carryover/readable.py", "{0}/nowhere {0} {0}"),
    ],
)
def test_a_wrong_path_is_refused(
    script: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(FOLDER / "carryover")  # as where the script itself is run
    monkeypatch.setattr(sys, "argv", [script, *words.format(tmp_path).split()])
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(FOLDER / script), run_name="__main__")
    error = capsys.readouterr().err
    assert caught.value.code == 2 and error.count("\n") == 1 and str(tmp_path / "nowhere") in error
