"""The dashboards' JSON: in step with its code, complete, and nothing but valid PromQL."""

from __future__ import annotations

import re
from pathlib import Path

import promql_parser
import pytest

from dashboards import boards, build, drawing

PANELS = [
    (name, panel) for name in boards.NAMES for panel in boards.panels(boards.read(name)) if panel["type"] != "row"
]


def test_committed_files_are_what_the_code_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m dashboards.build --check` ends with 0, and with 1 once a file differs."""
    assert build.main(["--check"]) == 0
    for path, text in build.generate().items():
        (tmp_path / path.name).write_text(text)
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    assert build.main(["--check"]) == 0
    (tmp_path / "serving.json").write_text("{}")
    assert build.main(["--check"]) == 1
    assert build.main([]) == 0 and build.main(["--check"]) == 0


@pytest.mark.parametrize("name", boards.NAMES)
def test_every_expression_is_promql(name: str) -> None:
    """Parsed by the grammar that Prometheus uses, with the variables filled in."""
    found = list(boards.targets(name, "1m"))
    assert len(found) >= 15
    for title, expr in found:
        assert "$" not in expr, title
        promql_parser.parse(expr)


def test_panels_explain_themselves_and_ask_the_chosen_source() -> None:
    """A title, a description, a unit, a legend, and the data source that the variable names."""
    for name, panel in PANELS:
        where = f"{name}: {panel['title']}"
        assert len(panel["description"]) > 10, where
        assert panel["datasource"]["uid"] == "${datasource}", where
        if panel["type"] not in ("table", "heatmap"):
            assert panel["fieldConfig"]["defaults"]["unit"], where
        for target in panel["targets"]:
            assert "{{" in target["legendFormat"], where


def test_nothing_is_averaged_since_the_start() -> None:
    """A counter is only read through a rate over a window, never divided as it stands."""
    counter = re.compile(r"\b(?:sglang:|sglang_ext_)\w+(?:_total|_sum|_count|_bucket)\{[^}]*\}(?!\[)")
    assert counter.search("sglang_ext_verify_steps_total{a='b'} / 2")
    for name in boards.NAMES:
        for title, expr in boards.targets(name, "1m"):
            assert not counter.search(expr), f"{name}: {title}"


def test_dashboards_have_the_same_choices() -> None:
    """Data source first, then model, method and server; the canary only where it is compared."""
    for name in boards.NAMES:
        names = [variable["name"] for variable in boards.read(name)["templating"]["list"]]
        assert names[:4] == ["datasource", "model", "method", "instance"]
        assert names[4:] == (["stable", "canary"] if name == "speculation" else [])


@pytest.mark.parametrize(
    ("value", "scale"),
    [(3.7, ("0", "1", "2", "3", "4")), (0.0, ("0", "0.25", "0.5", "0.75", "1")), (101, ("0", "30", "60", "90", "120"))],
)
def test_a_drawn_scale_is_round_and_holds_every_value(value: float, scale: tuple[str, ...]) -> None:
    panel = {"fieldConfig": {"defaults": {"unit": "short", "min": 0}}}
    drawn = drawing.lines(panel, [("a", [(0.0, value)])], 400, 200, (0.0, 1.0), [])
    assert tuple(re.findall(r'text-anchor="end">([^<]+)<', drawn)) == scale
