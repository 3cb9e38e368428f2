"""Whole sweeps through the command: turns, journals, gates, and servers or endpoints that fail."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from mock_sse import QUICK
from sglang_ext_loadtest import launch, results
from sglang_ext_loadtest.cli import main
from sglang_ext_loadtest.generator import Generator
from sglang_ext_loadtest.runner import Runner, schedule
from sglang_ext_loadtest.settings import Load, Method, Requests, Sweep, Workload


def test_a_killed_sweep_is_reported_from_its_journal(
    mock: Any, prompts: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the kill cut the last line short."""
    sweep = Sweep(
        (Method("mock", url=mock.url),),
        workload=Workload(paths=(prompts(a_1=QUICK),)),
        load=Load(concurrency=(1, 2), repeats=1),
    )
    journal = results.Journal(tmp_path, sweep)
    with Runner(sweep, tmp_path, lambda line: None) as runner:
        for cell in runner.run(schedule(sweep)[:1]):
            journal.add(cell, runner.about)
    with (tmp_path / "journal.jsonl").open("a") as file:
        file.write('{"cell": {"method": "mo')
    assert main(["report", str(tmp_path)]) == 0
    assert "1 cells from the journal of a sweep that did not end" in capsys.readouterr().out
    assert "1 of 2 cells were measured" in (tmp_path / "index.html").read_text()
    document, recovered = results.read(tmp_path)
    assert recovered == sweep and len(document["cells"]) == 1
    assert document["methods"]["mock"]["accelerator"] == "Mock H200"
    assert not (tmp_path / "journal.jsonl").exists()
    (tmp_path / "results.json").unlink()
    assert main(["report", str(tmp_path)]) == 2


TURNS = """
title = "{name}"
[workload]
paths = ["{path}"]
[load]
concurrency = [1]
repeats = 2
side_by_side = true
[[methods]]
name = "{name}"
url = "{url}"
"""


def test_several_sweeps_take_turns_repeat_by_repeat(
    mock: Any, prompts: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """So that what an early end cuts off is the last repeat of all of them."""
    files = [tmp_path / "first.toml", tmp_path / "second.toml"]
    for file in files:
        file.write_text(TURNS.format(name=file.stem, path=prompts(a_1=QUICK), url=mock.url))
    out = tmp_path / "out"
    assert main(["sweep", *map(str, files), "--out", str(out)]) == 0
    said = [line.split("s  ")[1].split(":")[0] for line in capsys.readouterr().out.splitlines() if "repeat " in line]
    assert said == [
        "[1/2] first at 1, repeat 1",
        "[1/2] second at 1, repeat 1",
        "[2/2] first at 1, repeat 2",
        "[2/2] second at 1, repeat 2",
    ]
    for file in files:
        found = json.loads((out / file.stem / "results.json").read_text())
        assert [cell["method"] for cell in found["cells"]] == 2 * [file.stem]
        assert "2 repeats" in (out / file.stem / "index.html").read_text()
    (tmp_path / "again").mkdir()
    same = tmp_path / "again" / "first.toml"
    same.write_text(files[0].read_text())
    assert main(["sweep", str(files[0]), str(same), "--out", str(out)]) == 2
    assert "the same file name" in capsys.readouterr().err


def test_a_generator_runs_again_and_says_what_came_of_a_run_that_ended_long_ago(tmp_path: Path) -> None:
    generator = Generator()
    try:
        for number, (arguments, code) in enumerate([(["--version"], 0), (["--no-such-option"], 1)]):
            log = tmp_path / f"{number}.log"
            generator.begin(arguments, log)
            time.sleep(2 - number)  # both of what it says, the process and its end, wait to be read
            assert generator.end(30) == code
            assert log.read_text()
        generator.begin(["--help"], tmp_path / "late.log")
        assert generator.end(0.0) is None  # no time at all
    finally:
        generator.close()


@pytest.mark.parametrize("fault", ["silent", None])
def test_a_server_that_hangs_is_given_up_and_costs_two_cells(
    mock: Any, prompts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str | None
) -> None:
    """The mock server stands in for one that the sweep has started."""

    @contextmanager
    def started(words: Any, *, port: int, log: Path) -> Any:
        process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        yield process
        process.kill()
        process.communicate()

    monkeypatch.setattr(launch, "started", started)
    monkeypatch.setattr(launch, "free_port", lambda: int(mock.url.rsplit(":", 1)[1]))
    monkeypatch.setattr(launch, "trouble", lambda *_: None)
    monkeypatch.setattr(launch, "answers", lambda port: True)
    script = QUICK if fault is None else {**QUICK, "fault": fault}
    sweep = Sweep(
        (Method("mock", serve=("TARGET",)),),
        workload=Workload(paths=(prompts(a_1=script),)),
        requests=Requests(timeout_s=0.5),
        load=Load(concurrency=(1,), repeats=4, side_by_side=True, warmup_requests=0, stop_errors=1),
    )
    with Runner(sweep, tmp_path, lambda line: None) as running:
        running.start()
        running.ready()
        cells = list(running.run(schedule(sweep)))
    if fault is None:
        assert all(cell["requests"]["ok"] == 1 and not cell["invalid"] for cell in cells)
    else:
        assert [cell["requests"]["measured"] for cell in cells] == [1, 1, 0, 0]
        assert "asked no more" in cells[2]["invalid"][0] and "asked no more" in cells[3]["invalid"][0]


SWEEP = """
title = "Two endpoints, one of them down"
gates = ["good@2:ttft_ms.p50<={limit}"]
[workload]
paths = ["{path}"]
[load]
concurrency = [1, 2]
repeats = 1
[[methods]]
name = "good"
url = "{url}"
role = "plain"
[[methods]]
name = "down"
url = "http://127.0.0.1:9"
role = "stock"
"""


def test_a_sweep_with_an_endpoint_that_is_down_still_reports_the_other(
    mock: Any, prompts: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(prompts(a_1=QUICK, b_1=QUICK))
    path.write_text(path.read_text() + '{"id": "c", "turns": [\n')
    file = tmp_path / "sweep.toml"
    file.write_text(SWEEP.format(path=path, url=mock.url, limit=1000))
    out = tmp_path / "out"
    assert main(["sweep", str(file), "--out", str(out)]) == 1
    said = capsys.readouterr().out
    assert "left out: prompts.jsonl, line 3" in said
    assert "the endpoint could not be reached" in said
    results = json.loads((out / "results.json").read_text())
    assert results["prompts"]["broken"][0].startswith("prompts.jsonl, line 3")
    assert [group["method"] for group in results["summary"]["groups"]] == ["good", "good"]
    assert results["methods"]["good"]["accelerator"] == "Mock H200"
    assert "secret" not in json.dumps(results)
    page = (out / "index.html").read_text()
    assert "At concurrency 1 to 2: good." in page
    assert "2 of 4 cells are invalid" in page
    assert (out / "cells.csv").read_text().count("\n") == 5
    assert (out / "requests.csv").read_text().count("\n") == 5


def test_a_port_that_speaks_no_http_makes_the_cell_invalid(
    prompts: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
                connection.recv(65536)

        threading.Thread(target=answer, daemon=True).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        words = ["run", url, "--prompts", prompts(a_1=QUICK), "--concurrency", "1", "--repeats", "1"]
        assert main([*words, "--out", str(tmp_path / "out")]) == 1
    assert f"the endpoint could not be reached ({url}: BadStatusLine" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--out", "{file}"), "cannot be a directory of results"),
        (("--tokenizer", "{file}.none"), "There is no tokenizer at"),
        (("--temperature", "-1"), "temperature is -1; give 0"),
        (("--gate", "endpont:error_rate<=0"), "cannot hold: the sweep has no method endpont; name one of endpoint,"),
    ],
)
def test_what_would_spoil_a_run_is_refused_before_it(
    prompts: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, str], sentence: str
) -> None:
    file = prompts(a_1=QUICK)
    more = [word.format(file=file) for word in words]
    assert main(["run", "http://127.0.0.1:9", "--prompts", file, "--out", str(tmp_path / "out"), *more]) == 2
    said = capsys.readouterr()
    assert sentence in said.err and not list(tmp_path.glob("out/cells/*"))


@pytest.mark.parametrize(("limit", "code"), [("10000", 0), ("1", 1)])
def test_the_exit_code_follows_the_gates(mock: Any, prompts: Any, tmp_path: Path, limit: str, code: int) -> None:
    words = ["run", mock.url, "--prompts", prompts(a_1=QUICK), "--concurrency", "1", "--repeats", "1"]
    assert main([*words, "--gate", f"*:ttft_ms.p50<={limit}", "--out", str(tmp_path / "out")]) == code


def test_an_interrupted_sweep_leaves_a_report_and_nothing_running(mock: Any, prompts: Any, tmp_path: Path) -> None:
    slow = {"ttft": 0.1, "gap": 0.3, "tokens": [1] * 100}
    words = ["run", mock.url, "--prompts", prompts(a_1=QUICK, b_1=slow), "--per-category", "1", "--concurrency", "1"]
    out = tmp_path / "out"
    command = [sys.executable, "-m", "sglang_ext_loadtest.cli", *words, "--out", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not list(out.glob("cells/*/records.jsonl")) and time.monotonic() < deadline:
        time.sleep(0.2)
    process.terminate()
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Interrupted after 0 of 3 cells" in said
    assert "Nothing valid was measured." in (out / "index.html").read_text()
    plan = f"{out}/cells/endpoint-1-1/plan.json"
    assert [running for running in psutil.process_iter(["cmdline"]) if plan in (running.info["cmdline"] or [])] == []
