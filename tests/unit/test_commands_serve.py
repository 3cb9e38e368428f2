"""``sglang-ext serve`` up to the point where it becomes the server: the arguments it makes, and every refusal."""

from __future__ import annotations

import os
import signal
import socket
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoint_fixtures import edit_config, make_drafter, make_target

from sglang_ext import cpu, server, sglang_version
from sglang_ext.checkpoints import read_contract
from sglang_ext.checkpoints.conversion import convert
from sglang_ext.cli import main
from sglang_ext.cpu import SERVER_DEFAULTS
from sglang_ext.errors import UsageError

Capture = pytest.CaptureFixture[str]


class Launched(Exception):
    """Stands for this process becoming the server."""


@pytest.fixture(autouse=True)
def no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    def execv(path: str, argv: list[str]) -> None:
        raise Launched(argv)

    monkeypatch.setattr(os, "execv", execv)


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield int(listener.getsockname()[1])


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """target, dspark, dflash and the Carryover form of each drafter."""
    make_target(tmp_path / "target")
    for kind in ("dspark", "dflash"):
        make_drafter(tmp_path / kind, kind)
        convert(read_contract(tmp_path / kind), tmp_path / f"carryover-{kind}")
    return tmp_path


def launched(*words: object) -> list[str]:
    """SGLang's arguments that ``sglang-ext serve`` would start the server with."""
    with pytest.raises(Launched) as caught:
        main(["serve", *map(str, words)])
    argv: list[str] = caught.value.args[0]
    assert argv[:3] == [sys.executable, "-m", "sglang_ext.server"]
    return argv[3:]


def refused(capsys: Capture, *words: object) -> str:
    assert main(["serve", *map(str, words)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("sglang-ext serve: ") and err.endswith(".\n")
    return err


@pytest.mark.parametrize(
    ("draft", "method", "algorithm"),
    [
        ("dspark", "auto", "DSPARK"),
        ("dspark", "none", "DSPARK"),
        ("dflash", "auto", "DFLASH"),
        ("carryover-dspark", "auto", "CARRYOVER_DSPARK"),
        ("carryover-dspark", "carryover", "CARRYOVER_DSPARK"),
        ("carryover-dflash", "auto", "CARRYOVER_DFLASH"),
    ],
)
def test_the_algorithm_follows_drafter_and_method(
    models: Path, free_port: int, draft: str, method: str, algorithm: str
) -> None:
    target, path = str(models / "target"), str(models / draft)
    argv = launched(target, "--draft", path, "--method", method, "--port", free_port, "--tp", 2)
    speculation = ["--speculative-algorithm", algorithm, "--speculative-draft-model-path", path]
    assert argv == ["--model-path", target, "--port", str(free_port), "--tp", "2", *speculation]


def test_everything_else_passes_through_unchanged(models: Path, free_port: int) -> None:
    target = str(models / "target")
    flags = [
        "--json-model-override-args",
        '{"a": -1}',
        "--enable-metrics",
        f"--port={free_port}",
        "--stream-interval",
        "1",
    ]
    assert launched(target, *flags) == ["--model-path", target, *flags]
    assert launched("--model-path", target, *flags) == ["--model-path", target, *flags]
    own = ["--speculative-algorithm", "NGRAM"]
    assert launched(target, *own, *flags) == ["--model-path", target, *own, *flags]


def test_an_untrained_embedding_is_said(models: Path, free_port: int, capsys: Capture) -> None:
    launched(models / "target", "--draft", models / "carryover-dspark", "--port", free_port)
    assert "CARRYOVER_DSPARK on" in (said := capsys.readouterr().err) and "zero, still untrained" in said
    launched(models / "target", "--draft", models / "dspark", "--port", free_port)
    assert "still untrained" not in capsys.readouterr().err


def test_refusals_of_method_and_model(models: Path, capsys: Capture) -> None:
    target, draft, carried = models / "target", models / "dspark", models / "carryover-dspark"
    assert "sglang-ext convert" in refused(capsys, target, "--draft", draft, "--method", "carryover")
    assert "SGLANG_EXT_CARRIED_ROWS=0" in refused(capsys, target, "--draft", carried, "--method", "none")
    assert "without a reader of states" in refused(capsys, target, "--draft", draft, "--method", "ready")
    assert "needs a drafter" in refused(capsys, target, "--method", "carryover")
    assert "MODEL is missing" in refused(capsys, "--draft", draft)
    assert "There is no checkpoint directory" in refused(capsys, models / "nowhere")
    assert "There is no checkpoint directory" in refused(capsys, target, "--draft", models / "nowhere")
    assert "is a target model" in refused(capsys, target, "--draft", target)
    assert "not a target" in refused(capsys, draft, "--draft", draft)
    for flag in ("--speculative-algorithm=DFLASH", "--speculative-draft-model-path=x"):
        assert "leave it out" in refused(capsys, target, "--draft", draft, flag)


def test_refusals_of_a_wrong_target(models: Path, free_port: int, capsys: Capture) -> None:
    target, draft, port = models / "target", models / "dspark", ("--port", free_port)
    for words in ((draft,), (models / "carryover-dspark", "--method", "none"), (draft, "--draft", draft)):
        assert "is a drafter, not a target" in refused(capsys, *words)
    assert "has no config.json" in refused(capsys, models)
    weights = target / "model.safetensors"
    whole = weights.read_bytes()
    for content, sentence in ((whole[:-1], "is cut short or damaged"), (None, "has no weights")):
        weights.write_bytes(content) if content else weights.unlink()
        for words in ((), ("--draft", draft)):
            assert sentence in refused(capsys, target, "--check", *words)
            assert launched(target, *words, *port, "--load-format", "dummy")[:2] == ["--model-path", str(target)]
            capsys.readouterr()
    (target / "pytorch_model.bin").touch()
    assert launched(target, *port) == ["--model-path", str(target), *map(str, port)]


def test_a_target_whose_shape_only_sglang_knows_is_served_without_a_drafter(models: Path, free_port: int) -> None:
    edit_config(models / "target", hidden_size=None, n_embd=8, num_hidden_layers=None, n_layer=5)
    assert launched(models / "target", "--port", free_port)[0] == "--model-path"
    (models / "target" / "config.json").rename(models / "target" / "params.json")
    assert launched(models / "target", "--port", free_port)[0] == "--model-path"


def test_switches_of_the_environment_are_read_at_once(
    models: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    for name, value in (("SGLANG_EXT_CARRIED_ROWS", "some"), ("SGLANG_EXT_READ_STATES", "wrong")):
        with monkeypatch.context() as environment:
            environment.setenv(name, value)
            assert f"{name}={value} is n" in refused(capsys, models / "target", "--check")


def test_help_says_what_is_checked_and_what_model_is(capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "MODEL is the directory or Hugging Face name of the target" in text and "check everything" not in text
    assert "SGLang checks its own flags when it starts" in text and "without it: no speculation" in text


def test_refusals_of_a_wrong_drafter(models: Path, capsys: Capture) -> None:
    other = make_target(models / "other", num_hidden_layers=9)
    assert "target of 5 layers" in refused(capsys, other, "--draft", models / "dspark")
    edit_config(models / "carryover-dspark", carryover_config={"embedding": "learned", "depth": 1})
    assert "unknown key depth" in refused(capsys, models / "target", "--draft", models / "carryover-dspark")


def test_refusals_of_the_address(models: Path, busy_port: int, capsys: Capture) -> None:
    target = models / "target"
    assert f"Port {busy_port} on 127.0.0.1 is in use" in refused(capsys, target, "--port", busy_port)
    assert "is no port" in refused(capsys, target, "--port", "http")
    assert "is no port" in refused(capsys, target, "--port", "70000")
    assert "cannot be used" in refused(capsys, target, "--host", "192.0.2.1", "--port", busy_port)


def test_who_does_not_listen_needs_no_port(models: Path, busy_port: int) -> None:
    for flags in (["--node-rank", "1"], ["--config", "server.yaml"]):
        assert launched(models / "target", "--port", busy_port, *flags)[-2:] == flags


def test_unknown_method_and_other_commands_stay_strict(capsys: Capture) -> None:
    for argv in (["serve", "x", "--method", "magic"], ["inspect", "x", "--port", "1"]):
        with pytest.raises(SystemExit) as caught:
            main(argv)
        assert caught.value.code == 2
    assert "unrecognized arguments: --port 1" in capsys.readouterr().err


def test_cpu_defaults_give_way_to_what_was_given() -> None:
    argv = server.with_cpu_defaults(["--model-path", "m", "--dtype=bfloat16", "--max-total-tokens", "99"])
    assert argv[:4] == ["--model-path", "m", "--dtype=bfloat16", "--max-total-tokens"]
    assert argv.count("--dtype") == 0 and argv.count("--max-total-tokens") == 1
    added = argv[5:]
    assert added[added.index("--attention-backend") + 1] == SERVER_DEFAULTS["attention_backend"]
    assert "--disable-cuda-graph" in added and "True" not in added


def test_another_sglang_is_refused_before_it_is_imported(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(sglang_version, "version", lambda name: "0.5.22")
    with pytest.raises(SystemExit) as caught:
        server.main(["--model-path", "m"])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "SGLang 0.5.22 is installed" in error


@pytest.mark.parametrize(("code", "result"), [(2, 2), (1, None)])
def test_a_scheduler_that_refused_has_said_why(monkeypatch: pytest.MonkeyPatch, code: int, result: int | None) -> None:
    killed: list[int] = []

    def run_server(server_args: object) -> None:
        raise RuntimeError(f"Rank 0 scheduler died during initialization (exit code: {code}).")

    for name, content in {
        "sglang": {},
        "sglang.launch_server": {"run_server": run_server},
        "sglang.srt": {},
        "sglang.srt.utils": {"kill_process_tree": lambda pid, include_parent: killed.append(pid)},
    }.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(server, "resolve", lambda argv: None)
    monkeypatch.setattr(cpu, "activate", lambda: None)
    monkeypatch.setattr(signal, "signal", lambda signum, handler: None)
    if result is None:
        with pytest.raises(RuntimeError, match="exit code: 1"):
            server.main([])
    else:
        assert server.main([]) == result
    assert killed == [os.getpid()]


def test_the_last_of_a_repeated_flag_counts() -> None:
    assert server.take(["--a", "1", "x", "--a=2"], "--a") == ("2", ["x"])
    assert server.take(["--ab", "1"], "--a") == (None, ["--ab", "1"])
    assert server.address([]) == ("127.0.0.1", 30000)
    with pytest.raises(UsageError, match="is no port"):
        server.address(["--port", "0"])
