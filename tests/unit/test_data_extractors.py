"""Extractors on small fixtures, and the families of texts that must share a group."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pytest

from sglang_ext.training.text import arithmetic, files, pairs, questions
from sglang_ext.training.text.documents import CATEGORIES
from sglang_ext.training.text.sources import SOURCES

DOCSTRING = "Return the sum of both numbers.\n\n" + "The result is exact for integers of any size. " * 8
MODULE = f'"""Adding."""\n\n\ndef add(a, b):\n    """{DOCSTRING}"""\n    return a + b\n\n\n' + "".join(
    f"def add_{k}(a):\n    return add(a, {k})\n\n\n" for k in range(30)
)


def write(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content, encoding="utf-8")


def test_code_and_its_docstrings_share_the_file_as_group(tmp_path: Path) -> None:
    write(tmp_path / "pkg/mod.py", MODULE)
    write(tmp_path / "pkg/table.py", "data = [" + "1," * 2000 + "]\n")
    code = list(files.code(tmp_path, "pkg", (".py",)))
    answers = list(questions.docstrings(tmp_path, "pkg"))
    assert {text.group for text in code} == {"pkg/pkg/mod.py"} == {text.group for text in answers}
    (answer,) = answers
    assert "`add` in `pkg.mod`" in answer.prompt
    assert answer.response.startswith("Return the sum of both numbers.")


def test_html_keeps_blocks_and_code_and_drops_menus(tmp_path: Path) -> None:
    body = "<p>The first\nparagraph of {k} tells about the way in which servers answer, in {k} words or more.</p>"
    body += "<table><tr><td>left</td><td>right</td></tr></table>"
    body += "<pre>if x:\n    y()</pre>" + "<p>{k} is a paragraph with words enough to stay.</p>" * 12
    page = "<html><body><nav>Menu</nav><div class='body'><p>Shared line</p>" + body + "</div></body></html>"
    text = files.html_text(page.replace("{k}", "one"))
    assert "Menu" not in text
    assert "The first paragraph of one" in text
    assert "\nif x:\n    y()\n" in text
    assert "left right" in text
    for k in range(30):
        write(tmp_path / f"{k}.html", page.replace("{k}", f"number{k}"))
    texts = list(files.html(tmp_path, "docs"))
    assert len({text.group for text in texts}) == 30
    assert all("Shared line" not in text.prompt + text.response for text in texts)


def test_json_is_indented_and_grouped(tmp_path: Path) -> None:
    value = {f"key {k}": {"text": f"value number {k}"} for k in range(100)}
    for version in ("v1", "v2"):
        write(tmp_path / f"documents/drive.{version}.json", json.dumps(value))
    write(tmp_path / "documents/broken.json", "{")
    texts = list(files.json_files(tmp_path, "apis", pieces_per_file=2, group=questions.DISCOVERY_API))
    assert len(texts) == 4
    assert {text.group for text in texts} == {"apis/drive"}
    assert '\n  "key 0": {' in texts[0].prompt


def test_messages_pair_by_key_and_all_languages_share_the_group(tmp_path: Path) -> None:
    folder = tmp_path / "components/lamp/translations"
    write(folder / "en.json", json.dumps({"a": {"b": "Turn on the lamp", "c": "OK"}, "d": "The lamp is broken"}))
    write(folder / "de.json", json.dumps({"a": {"b": "Lampe einschalten", "c": "OK"}, "d": "Die Lampe ist defekt"}))
    write(folder / "fr.json", json.dumps({"a": {"b": "Allumer la lampe"}}))
    other = tmp_path / "components/other/translations"
    write(other / "en.json", json.dumps({"x": "Turn on the lamp"}))
    write(other / "es.json", json.dumps({"x": "Encender la luz"}))
    texts = list(pairs.messages(tmp_path, "ha", r"en\.json$", r"components/([^/]+)/"))
    by_prompt = {text.prompt.split("\n")[0]: text for text in texts}
    german = by_prompt["Translate from English into German:"]
    assert german.prompt.endswith("Turn on the lamp\nThe lamp is broken")
    assert german.response == "Lampe einschalten\nDie Lampe ist defekt"
    # The sentence that two components contain stays with the first: no group knows another's translations.
    assert {text.group for text in texts} == {"ha/lamp"}


def test_gettext_leaves_out_fuzzy_entries(tmp_path: Path) -> None:
    catalogue = 'msgid ""\nmsgstr "Content-Type: text/plain; charset=UTF-8\\n"\n\n'
    catalogue += 'msgid "Delete the page"\nmsgstr "Seite entfernen"\n\n'
    catalogue += '#, fuzzy\nmsgid "Move this page"\nmsgstr "Falsch geraten"\n'
    write(tmp_path / "app/locale/de/LC_MESSAGES/django.po", catalogue)
    (text,) = pairs.gettext(tmp_path, "app")
    assert text.response == "Seite entfernen"
    assert text.group == "app/app/locale/django.po"


def test_parallel_pages_share_the_group_of_the_english_page(tmp_path: Path) -> None:
    english = "<p>" + "The server answers every request in turn. " * 12 + "</p>"
    german = "<p>" + "Der Server beantwortet jede Anfrage der Reihe nach. " * 12 + "</p>"
    write(tmp_path / "manual/en/a.html", f"<body>{english}</body>")
    write(tmp_path / "manual/de/a.html", f"<body>{german}</body>")
    write(tmp_path / "manual/en/b.html", f"<body>{english}<p>One more paragraph here.</p></body>")
    write(tmp_path / "manual/de/b.html", f"<body>{german}</body>")
    (pair,) = pairs.parallel_pages(tmp_path, "docs", "manual")
    prose = list(files.html(tmp_path, "docs", only="^manual/en/a"))
    assert pair.group == "docs/manual/en/a.html" == prose[0].group
    assert pair.response.startswith("Der Server")


def test_jupyterlab_packages_of_all_languages_share_the_group(tmp_path: Path) -> None:
    write(tmp_path / "de/notebook.json", json.dumps({"": {}, "menu\x04Open the file": ["Datei öffnen"]}))
    write(tmp_path / "fr/notebook.json", json.dumps({"Open the file": ["Ouvrir le fichier"]}))
    german = list(pairs.jupyterlab(tmp_path / "de", "jupyterlab-language-pack-de-de"))
    french = list(pairs.jupyterlab(tmp_path / "fr", "jupyterlab-language-pack-fr-fr"))
    assert german[0].response == "Datei öffnen"
    assert {text.group for text in german + french} == {"jupyterlab/notebook"}


def test_aws_texts_share_the_service_and_come_from_its_newest_version(tmp_path: Path) -> None:
    documentation = "<p>Removes the item for good, with all of its tags. " + "It cannot be brought back. " * 12 + "</p>"
    for version, verb in (("2020-01-01", "OldDelete"), ("2021-01-01", "Delete")):
        model = {
            "metadata": {"serviceId": "Shelf"},
            "operations": {verb: {"documentation": documentation}},
            "shapes": {"Item": {"documentation": documentation}},
        }
        path = tmp_path / f"botocore/data/shelf/{version}/service-2.json.gz"
        path.parent.mkdir(parents=True)
        path.write_bytes(gzip.compress(json.dumps(model).encode()))
    example = {"description": "The following example deletes an item.", "input": {"Name": "cup"}}
    write(path.parent / "examples-1.json", json.dumps({"examples": {"Delete": [example]}}))
    (answer,) = questions.aws_operations(tmp_path, "botocore")
    (call,) = questions.aws_calls(tmp_path, "botocore")
    (prose,) = questions.aws_prose(tmp_path, "botocore")
    assert answer.prompt == "What does the operation Delete of Shelf do?"
    assert json.loads(call.response) == {"name": "shelf.Delete", "arguments": {"Name": "cup"}}
    assert answer.group == call.group == prose.group == "botocore/shelf"


def test_discovery_calls_use_the_values_of_the_request(tmp_path: Path) -> None:
    method = {
        "id": "shelf.items.get",
        "description": "Gets one item from the shelf by its identifier. More text.",
        "parameters": {"name": {"type": "string", "required": True, "pattern": "^items/[^/]+$"}},
    }
    other = {**method, "id": "shelf.items.list"}
    api = {"name": "shelf", "resources": {"items": {"methods": {"get": method, "list": other}}}}
    write(tmp_path / "discovery_cache/documents/shelf.v1.json", json.dumps(api))
    first, second = questions.discovery_calls(tmp_path, "google")
    call = json.loads(first.response)
    assert call["name"] == "shelf.items.get"
    assert call["arguments"]["name"].startswith("items/")
    assert f"name = {call['arguments']['name']}" in first.prompt
    assert first.group == second.group == "google/shelf"
    assert [first] == list(questions.discovery_calls(tmp_path, "google"))[:1]


def test_country_questions_and_json_share_the_country(tmp_path: Path) -> None:
    country = {
        "Government": {"Country name": {"conventional short form": {"text": "Atlantis"}}},
        "Geography": {"Climate": {"text": "Mild and wet all through the year, with a long autumn by the sea."}},
    }
    write(tmp_path / "sea/at.json", json.dumps(country))
    (text,) = questions.country_questions(tmp_path, "factbook")
    assert text.prompt == "What does the country profile of Atlantis say about geography - climate?"
    assert text.group == files.unit("factbook", "sea/at.json", files.FILE)


@pytest.mark.parametrize("kind", arithmetic.KINDS)
def test_every_answer_of_the_generator_is_right(kind: object) -> None:
    draw = random.Random(7)
    for _ in range(50):
        question, steps, answer = kind(draw)  # type: ignore[operator]
        assert steps and answer
        words = question.rstrip(".?").split()
        if question.startswith("Compute") and "/" not in question:
            a, sign, b = words[1:4]
            assert int(answer) == (int(a) + int(b) if sign == "+" else int(a) * int(b))
        elif question.startswith("Divide"):
            whole, _, rest = answer.split()
            assert int(whole) * int(words[3]) + int(rest) == int(words[1])
        elif question.startswith("Solve"):
            left, right = question.removeprefix("Solve ").split(" for ")[0].split(" = ")
            name, _, value = answer.split()
            factor, rest = left.split(name)
            assert int(factor) * int(value) + int(rest.replace(" ", "")) == int(right)
        elif question.startswith("What is"):
            assert int(answer) * 100 == int(words[2].rstrip("%")) * int(words[4])


def test_problems_are_distinct_and_fixed_by_the_seed() -> None:
    texts = list(arithmetic.problems(seed=3, size=20_000))
    assert len({text.prompt for text in texts}) == len(texts)
    assert texts == list(arithmetic.problems(seed=3, size=20_000))
    assert all(text.response.splitlines()[-1].startswith("Answer: ") for text in texts)


def test_the_manifest_is_pinned_and_complete() -> None:
    names = [source.package.name for source in SOURCES]
    assert len(set(names)) == len(names)
    assert all(source.package.version and source.package.licence and source.extracts for source in SOURCES)
    found = {extract.category for source in SOURCES for extract in source.extracts}
    assert found | {"math"} == set(CATEGORIES)
    small = {extract.category for source in SOURCES if source.small for extract in source.extracts}
    assert small | {"math"} == set(CATEGORIES)
    assert not any(source.small and source.package.manager == "debian" for source in SOURCES)
