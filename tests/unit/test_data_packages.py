"""Fetching packages with clients that the tests put on the PATH, and the data command."""

from __future__ import annotations

import argparse
import json
import os
import tarfile
from pathlib import Path

import pytest

from sglang_ext.errors import UsageError
from sglang_ext.training import data
from sglang_ext.training.text import corpus
from sglang_ext.training.text.packages import Package, fetch
from sglang_ext.training.text.sources import Source

PACKAGE = Package("@scope/words", "npm", "1.2.3", "MIT")


def client(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch, name: str = "npm") -> None:
    """Put a shell script on the PATH as a package manager's client."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("#!/bin/sh\n" + script)
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def archive(path: Path) -> Path:
    inner = path.parent / "package"
    inner.mkdir(parents=True)
    (inner / "text.md").write_text("hello")
    with tarfile.open(path, "w:gz") as tar:
        tar.add(inner, "package")
    return path


def test_a_package_is_fetched_once_and_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = archive(tmp_path / "words-1.2.3.tgz")
    client(tmp_path / "bin", f'echo "$@" >> {tmp_path}/calls\ncp {made} .\n', monkeypatch)
    for _ in range(2):
        fetched = fetch(PACKAGE, tmp_path / "packages")
        assert (fetched.root / "package/text.md").read_text() == "hello"
    assert (tmp_path / "calls").read_text().splitlines() == ["pack --silent @scope/words@1.2.3"]
    assert fetched.version == "1.2.3" and fetched.archive_bytes == made.stat().st_size


def test_a_failed_source_is_named_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client(tmp_path / "bin", "echo 'first line' >&2\necho 'no such version' >&2\nexit 1\n", monkeypatch)
    lines: list[str] = []
    with pytest.raises(UsageError) as failure:
        corpus.fetch_all([Source(PACKAGE, ())], tmp_path / "packages", lines.append)
    message = str(failure.value)
    assert "source @scope/words 1.2.3 could not be downloaded from npm (no such version)" in message
    assert "--skip @scope/words" in message and "\n" not in message
    assert lines == ["[1/1] npm @scope/words: failed"]
    assert not list((tmp_path / "packages").rglob("*.tgz"))


def test_a_missing_client_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="source @scope/words needs `npm`"):
        fetch(PACKAGE, tmp_path / "packages")


def test_a_damaged_archive_is_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client(tmp_path / "bin", "echo damaged > words-1.2.3.tgz\n", monkeypatch)
    with pytest.raises(UsageError, match="cannot be unpacked"):
        fetch(PACKAGE, tmp_path / "packages")
    made = archive(tmp_path / "words-1.2.3.tgz")
    client(tmp_path / "bin", f"cp {made} .\n", monkeypatch)
    assert (fetch(PACKAGE, tmp_path / "packages").root / "package/text.md").exists()


def test_debian_falls_back_to_the_version_the_archive_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = f'case "$2" in *=*) echo "E: Version not found" >&2; exit 100;; esac\necho "$2" > {tmp_path}/asked\n'
    client(tmp_path / "bin", pinned + 'echo x > "guide_1%3a2.1-1_all.deb"\n', monkeypatch, "apt-get")
    client(tmp_path / "bin", 'cp "$2" "$3/manual.txt"\n', monkeypatch, "dpkg-deb")
    fetched = fetch(Package("guide", "debian", "1:2.0-1", "MIT"), tmp_path / "packages")
    assert fetched.version == "1:2.1-1"
    assert (tmp_path / "asked").read_text() == "guide\n"


def test_skip_must_name_a_source() -> None:
    with pytest.raises(UsageError, match="--skip nothing names no source"):
        corpus.select("all", ["nothing"])
    names = [source.package.name for source in corpus.select("all", ["sympy"])]
    assert "sympy" not in names and "django" in names
    assert set(corpus.select("small")) < set(corpus.select("all"))


def call(*words: str) -> int:
    parser = argparse.ArgumentParser()
    data.add_arguments(parser)
    return data.run(parser.parse_args(words))


def test_own_text_becomes_a_corpus(tmp_path: Path) -> None:
    source = tmp_path / "mine"
    (source / "poems/deep").mkdir(parents=True)
    for k in range(40):
        text = "\n".join(f"Verse {n} of poem {k * 37 % 101} speaks of thing {k * n % 23}." for n in range(40))
        (source / "poems/deep" / f"{k}.txt").write_text(text)
    lines = [{"prompt": f"How much is {k}?", "response": f"It is {k * k} and no more."} for k in range(60)]
    (source / "qa").mkdir()
    (source / "qa/pairs.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert call("--from-text", str(source), "--out", str(tmp_path / "out"), "--held-out", "0.2") == 0
    counts = json.loads((tmp_path / "out/manifest.json").read_text())["counts"]
    for category in ("poems", "qa"):
        assert counts["train"][category]["documents"] > counts["heldout"][category]["documents"] > 0
    assert {path.name for path in (tmp_path / "out/train").iterdir()} == {"poems.jsonl", "qa.jsonl"}


@pytest.mark.parametrize(
    ("line", "message"),
    [('{"prompt": "a"', "line 2 is not valid JSON"), ('{"other": 1}', "line 2 has neither")],
)
def test_a_broken_line_of_own_text_is_named(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "mine/qa").mkdir(parents=True)
    (tmp_path / "mine/qa/x.jsonl").write_text('{"prompt": "a", "response": "b"}\n' + line + "\n")
    with pytest.raises(UsageError, match=message):
        call("--from-text", str(tmp_path / "mine"), "--out", str(tmp_path / "out"))


@pytest.mark.parametrize(("make", "message"), [(False, "is not a folder"), (True, "has no usable text")])
def test_own_text_must_exist(tmp_path: Path, make: bool, message: str) -> None:
    if make:
        (tmp_path / "mine").mkdir()
    with pytest.raises(UsageError, match=message):
        call("--from-text", str(tmp_path / "mine"), "--out", str(tmp_path / "out"))
    with pytest.raises(UsageError, match="between 0 and 1"):
        call("--held-out", "2", "--out", str(tmp_path / "out"))
