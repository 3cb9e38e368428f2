"""The whole evaluation with a stand-in for the servers: its methods, document, tables, pictures and exit codes."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from checkpoint_fixtures import make_drafter, make_target

from sglang_ext.checkpoints import read_contract, read_target
from sglang_ext.checkpoints.conversion import convert
from sglang_ext.cli import main
from sglang_ext.errors import UsageError
from sglang_ext.evaluation import client, run
from sglang_ext.evaluation.client import Answer
from sglang_ext.evaluation.methods import baseline, choose, environment
from sglang_ext.evaluation.prompts import Prompt
from sglang_ext.settings import CARRIED_ROWS_LIMIT, LOOKUP


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A target, two stock drafters, a Carryover one and prompts of two categories."""
    make_target(tmp_path / "target")
    for kind in ("dspark", "dflash"):
        make_drafter(tmp_path / kind, kind)
    convert(read_contract(tmp_path / "dspark"), tmp_path / "carry")
    lines = [{"id": f"{c}-{n}", "category": c, "turns": ["one", "two"]} for c in ("code", "qa") for n in range(2)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return tmp_path


class Served:
    """Stands in for ``serving`` and the client: what was served, and answers that depend on it alone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, lead: float | None = 0.0) -> None:
        self.servers: list[tuple[list[str], str | None]] = []
        self.wrong: set[str] = set()
        self.asked: list[dict[str, Any]] = []
        monkeypatch.setattr(run, "serving", self.serving)
        monkeypatch.setattr(client, "ask", self.ask)
        monkeypatch.setattr(client, "tie", lambda port: 1e-3)
        monkeypatch.setattr(client, "lead", lambda port, input_ids, first, second: lead)

    @contextlib.contextmanager
    def serving(self, words: Sequence[str], *, port: int, log: Path, env: dict[str, str]) -> Iterator[None]:
        self.servers.append((list(words), env.get(CARRIED_ROWS_LIMIT)))
        yield

    def ask(self, port: int, prompts: Sequence[Prompt], **settings: Any) -> list[Answer]:
        self.asked.append(settings)
        words = self.servers[-1][0]
        drafter = Path(words[2]).name if "--draft" in words else ""
        histogram = {"carry": (0, 4, 4), "dspark": (2, 4, 2), "as-long": (1, 4, 3), "dflash": (4, 4), "": ()}[drafter]
        answers = [Answer(p, "", (1, 2, 9 if drafter in self.wrong else 3), histogram, (5,)) for p in prompts]
        for answer in answers:
            settings["done"](answer)
        return answers


def evaluate(models: Path, *words: object) -> int:
    out = ["--out", str(models / "out"), "--recorded-prompts", "0"]
    return main(["evaluate", str(models / "target"), "--draft", str(models / "carry"), *map(str, words), *out])


def test_every_method_is_served_and_compared(
    models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr("sys.argv", ["sglang-ext", "evaluate", "a target"])
    served = Served(monkeypatch)
    code = evaluate(models, "--compare", models / "dspark", "off", "--carried-rows", 2, "--dtype", "float16")
    assert code == 0
    limits = [limit for _, limit in served.servers]
    assert limits == ["2", None, "0", None]  # the drafter, its reference, itself without a carry, plain decoding
    assert all(words[-2:] == ["--dtype", "float16"] for words, _ in served.servers)
    assert [settings["temperature"] for settings in served.asked] == [0, 1, 0, 1, 0, 1, 0]

    document = json.loads((models / "out" / "evaluation.json").read_text())
    assert document["command"] == "sglang-ext evaluate 'a target'" and document["environment"]["sglang"]
    assert [m["name"] for m in document["methods"]] == ["carry, 2 carried", "dspark", "carry, carry off"]
    assert [m["embedding"] for m in document["methods"]] == ["zero, untrained", None, "zero, untrained"]
    (gain,) = [
        row
        for row in document["comparisons"]
        if (row["reference"], row["temperature"], row["category"]) == ("dspark", 0, "all")
    ]
    assert gain["gain"] == pytest.approx(2.5 / 2 - 1) and gain["interval"] == pytest.approx([0.25, 0.25])
    assert len(document["records"]) == 3 * 2 * 3 and len(document["traces"]) == 3 * 2 * 4
    assert all(row["identical"] for row in document["identity"])
    for name in ("acceptance.png", "survival.png"):
        assert (models / "out" / name).read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    for part in ("2.50 [2.50, 2.50]", "+25.0 %", "identical to plain", "zero, untrained", "percentile bootstrap"):
        assert part in printed, printed


def test_a_control_has_its_own_gain(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(models / "dspark", models / "as-long")
    Served(monkeypatch)
    assert evaluate(models, "--compare", models / "dspark", "--control", models / "as-long", "--temperature", 0) == 0
    document = json.loads((models / "out" / "evaluation.json").read_text())
    assert [method["name"] for method in document["methods"]] == ["carry", "dspark", "as-long"]
    everything = next(row for row in document["gains"] if row["category"] == "all")
    assert everything["gain_over_baseline"] == pytest.approx(2.5 / 2 - 1)
    assert everything["gain_over_control"] == pytest.approx(2.5 / 2.25 - 1)
    assert everything["gain_over_control_interval"] == pytest.approx([1 / 9, 1 / 9])


@pytest.mark.parametrize(
    ("lead", "code", "said"),
    [(5e-4, 0, "All are ties"), (0.5, 1, "NOT all are ties"), (None, 1, "no near choice")],
)
def test_a_different_output_is_judged_by_how_close_the_call_was(
    models: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    lead: float | None,
    code: int,
    said: str,
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    Served(monkeypatch, lead).wrong.add("carry")
    assert evaluate(models, "--compare", models / "dspark", "--temperature", 0, "--per-category", 1) == code
    printed = capsys.readouterr().out
    assert said in printed and "code-0 at token 2" in printed
    identity = json.loads((models / "out" / "evaluation.json").read_text())["identity"]
    assert [row["identical"] for row in identity] == [False, True]


def test_without_temperature_0_nothing_is_said_of_the_output(
    models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served = Served(monkeypatch)
    assert evaluate(models, "--temperature", 0.7, "--all-turns") == 0
    assert len(served.servers) == 1 and served.asked[0]["all_turns"]
    assert "was not compared" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--draft", "dspark", "--carried-rows", 1], "is no Carryover drafter"),
        (["--draft", "dspark", "--compare", "off"], "leave --compare off out"),
        (["--compare", "carry"], "carry would be measured twice"),
        (["--prompts", "missing.jsonl"], "There are no prompts at"),
        (["--draft", "target"], "target"),
    ],
)
def test_wrong_use_is_refused_before_a_server_starts(
    models: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[object],
    said: str,
) -> None:
    monkeypatch.chdir(models)
    served = Served(monkeypatch)
    assert evaluate(models, *words) == 2
    printed, error = capsys.readouterr()
    assert printed == "" and error.count("\n") == 1 and said in error and not served.servers


def test_a_baseline_is_a_stock_drafter_of_the_same_kind(models: Path) -> None:
    target = read_target(models / "target")
    carry, dspark, dflash = (str(models / name) for name in ("carry", "dspark", "dflash"))
    chosen = choose(carry, [dflash, dspark, "off"], None, target)
    found = baseline(chosen)
    assert found is not None and found.name == "dspark"
    assert baseline(choose(carry, [dflash, "off"], None, target)) is None
    with pytest.raises(UsageError, match="measured twice"):
        choose(carry, ["off"], 0, target)


def test_a_lookup_can_be_left_unused(models: Path, tmp_path: Path) -> None:
    target, folder = read_target(models / "target"), tmp_path / "looks-up"
    shutil.copytree(models / "carry", folder)
    config = json.loads((folder / "config.json").read_text())
    config["carryover_config"] |= {"lookup": [0, 1, 2, 3, 4], "carried_rows": 0}
    (folder / "config.json").write_text(json.dumps(config))
    ours, control = choose(str(folder), ["no-lookup"], None, target)
    assert (ours.name, control.name) == ("looks-up", "looks-up, no lookup")
    assert ours.describe()["lookup"] == (0, 1, 2, 3, 4) and control.describe()["lookup"] is None
    assert ours.describe()["embedding"] is None  # it is not used
    assert environment(looks_up=control.looks_up)[LOOKUP] == "off" and LOOKUP not in environment(looks_up=True)
    with pytest.raises(UsageError, match="has no lookup table"):
        choose(str(models / "carry"), ["no-lookup"], None, target)


def test_drafters_with_the_same_name_go_by_their_paths(models: Path) -> None:
    other = make_drafter(models / "elsewhere" / "dspark", "dspark")
    names = [m.name for m in choose(str(models / "dspark"), [str(other)], None, read_target(models / "target"))]
    assert names == [str(models / "dspark"), str(other)]
