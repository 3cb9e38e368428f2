"""How the servers of a sweep come up: ports, looks in turns, second tries. The servers are processes that play one."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from sglang_ext_loadtest import cli, launch
from sglang_ext_loadtest.launch import Server, wait

from sglang_ext.errors import UsageError
from sglang_ext.evaluation import servers
from sglang_ext.evaluation.servers import EPHEMERAL, PORTS, free_port, serving

PLAY = (sys.executable, str(Path(__file__).with_name("play_server.py")))
Start = Callable[..., Server]


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]) -> Iterator[Start]:
    """Starts a server that plays a part, and ends it with the test."""
    monkeypatch.setattr(servers, "SERVE", PLAY)
    monkeypatch.setattr(servers, "ASK_SECONDS", 0.3)
    monkeypatch.setattr(launch, "TURN_SECONDS", 0.05)
    monkeypatch.setattr(launch, "DROP_SECONDS", 0.5)
    running: list[Server] = []

    def begin(part: str, argument: str | None = None, seconds: float = 30.0) -> Server:
        words = (part, argument or str(tmp_path / part))
        running.append(Server(part, words, tmp_path / f"{part}-{len(running)}.log", seconds, said.append))
        return running[-1]

    yield begin
    for server in running:
        server.close()


def pid(log: Path) -> int:
    return int(log.read_text().split()[1])


def test_one_that_hangs_takes_no_time_from_the_others(start: Start) -> None:
    """It stands first and its time ends last: those behind it come up, one of them with a second try, before that."""
    begun = time.monotonic()
    hangs, late, slow = start("hangs", seconds=6.0), start("late", "0.5", 2.0), start("late", "60", 1.0)
    robbed = start("robbed", seconds=5.0)
    wait([hangs, slow, robbed, late])
    assert late.ready and late.failure is None
    assert robbed.ready and robbed.failure is None
    assert not hangs.ready and "did not answer in time" in str(hangs.failure)
    assert not slow.ready and "did not answer in time" in str(slow.failure)
    assert time.monotonic() - begun < 12


def test_who_comes_to_the_wait_late_still_asks_every_server(start: Start) -> None:
    """As where the runner was stopped for longer than servers may load."""
    loaded = [start("late", "0", seconds=0.1) for _ in range(2)]
    deadline = time.monotonic() + 20
    while not all(map(listens, loaded)) and time.monotonic() < deadline:
        time.sleep(0.05)
    never = start("late", "60", seconds=0.0)
    wait([never, *loaded])
    assert all(server.ready for server in loaded)
    assert "did not answer in time" in str(never.failure)


def listens(server: Server) -> bool:
    with socket.socket() as probe:
        return not probe.connect_ex(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))


@pytest.mark.parametrize(
    ("part", "reason"),
    [("robbed", "lost its port"), ("deaf", "does not listen"), ("dies", "ended with code 1")],
)
def test_a_second_try_on_another_port(start: Start, said: list[str], tmp_path: Path, part: str, reason: str) -> None:
    server = start(part)
    before = server.url
    wait([server])
    assert server.ready and server.failure is None
    assert server.url != before
    assert len(said) == 1 and f"{part} gets a second try, on port {server.url.rsplit(':', 1)[1]}." in said[0]
    assert reason in said[0]
    assert not psutil.pid_exists(pid(tmp_path / f"{part}-0.log"))  # what was left of the first
    assert psutil.pid_exists(pid(tmp_path / f"{part}-0-again.log"))


def test_no_third_try_and_none_where_it_cannot_help(start: Start, said: list[str], tmp_path: Path) -> None:
    missing = str(tmp_path / "nowhere" / "file")  # it cannot note its first try there, so it dies each time
    dies, refuses, late = start("dies", missing), start("refuses"), start("dies", seconds=0.0)
    wait([dies, refuses])
    late._process.wait(20)
    wait([late])
    assert "ended with code 1" in str(dies.failure)
    assert "ended with code 2" in str(refuses.failure) and "This drafter does not fit" in str(refuses.failure)
    assert late.failure is not None
    assert len(said) == 1 and said[0].startswith("dies gets a second try")


def test_ports_are_distinct_free_and_outside_what_the_system_gives_out() -> None:
    low, high = map(int, EPHEMERAL.read_text().split())
    ports = [free_port() for _ in range(40)]
    assert len(set(ports)) == 40
    assert all(port in PORTS and not low <= port <= high for port in ports)


def test_a_port_that_is_taken_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        free = free_port()
        monkeypatch.setattr(servers, "_ports", iter([port, free, port]))
        assert free_port() == free
        with pytest.raises(UsageError, match="is free"):
            free_port()


@pytest.mark.parametrize(("low", "high"), [("15000", "60999"), ("1024", "65535"), (None, None)])
def test_another_range_of_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, low: str, high: str) -> None:
    """Where it leaves nothing, or cannot be read, ours is taken as it is."""
    monkeypatch.setattr(servers, "EPHEMERAL", tmp_path / "range")
    if low:
        (tmp_path / "range").write_text(f"{low}\t{high}\n")
    found = servers._outside_ephemeral()
    assert found == list(range(10_000, 15_000) if low == "15000" else PORTS)


@pytest.mark.parametrize("more", [(), ("--nccl-port", "5"), ("--dp-size=2",), ("--dp", "2")])
def test_the_port_of_the_process_group_is_given_where_it_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]
) -> None:
    monkeypatch.setattr(servers, "SERVE", (sys.executable, "-c", "import sys; print(*sys.argv)"))
    log = tmp_path / "log"
    server = Server("x", ("TARGET", *more), log, 10.0, lambda line: None)
    server._process.wait(10)
    server.close()
    words = log.read_text().split()[1:]
    assert words[: 1 + len(more)] == ["TARGET", *more]
    assert words.count("--nccl-port") == (more == () or "--nccl-port" in more)
    assert words[-2:] == ["--port", server.url.rsplit(":", 1)[1]]
    if not more:
        assert int(words[2]) in PORTS and words[2] != words[4]


def test_a_server_on_its_own_that_lost_its_port_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "SERVE", PLAY)
    monkeypatch.setattr(servers, "STOP_SECONDS", 0.5)
    log = tmp_path / "log"
    with (
        pytest.raises(UsageError, match="lost its port"),
        serving(("robbed", str(tmp_path / "x")), port=free_port(), log=log),
    ):
        pytest.fail("it cannot have answered")
    assert not psutil.pid_exists(pid(log))


SWEEP = """
[load]
concurrency = [1]
repeats = 1
side_by_side = true
start_seconds = {seconds}
[[methods]]
name = "{part}"
serve = ["{part}", "{argument}"]
"""


def test_sweeps_in_turns_wait_for_the_servers_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second one's server is tried again while the first one's still hangs."""
    monkeypatch.setattr(servers, "SERVE", PLAY)
    monkeypatch.setattr(servers, "ASK_SECONDS", 0.3)
    monkeypatch.setattr(launch, "DROP_SECONDS", 0.5)
    files = [tmp_path / "first.toml", tmp_path / "second.toml"]
    for file, part in zip(files, ("hangs", "robbed"), strict=True):
        file.write_text(SWEEP.format(part=part, argument=tmp_path / part, seconds=4))
    assert cli.main(["sweep", *map(str, files), "--out", str(tmp_path / "out")]) == 1
    out = capsys.readouterr().out
    assert "robbed gets a second try" in out
    assert "hangs at 1, repeat 1: INVALID" in out and "did not answer in time" in out
    # It came up; what it lacks is an API.
    assert "robbed at 1, repeat 1: INVALID" in out and out.count("did not answer in time") == 1
