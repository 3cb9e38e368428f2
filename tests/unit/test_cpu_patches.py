"""When the CPU platform is chosen, what it does to SGLang, and what happens where SGLang is not the one it knows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from sglang_ext import cpu
from sglang_ext.cpu import patches

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*cpu.environment(), "SGLANG_USE_CPU_ENGINE"):
        # Set first, so that what activate() sets is undone as well.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_chosen_where_there_is_no_accelerator() -> None:
    assert cpu.activate() == "sglang_ext.cpu.platform:CpuPlatform"


def test_left_alone_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert cpu.activate() is None
    monkeypatch.setenv("SGLANG_PLATFORM", cpu.PLATFORM_NAME)
    assert cpu.activate() is not None


@pytest.mark.parametrize(("name", "value"), [("SGLANG_USE_CPU_ENGINE", "1"), ("SGLANG_PLATFORM", "another")])
def test_left_alone_where_another_platform_is_asked_for(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    assert cpu.activate() is None


def test_importing_the_package_loads_neither_torch_nor_sglang() -> None:
    code = "import sys, sglang_ext.cpu; print(sorted({'torch', 'sglang', 'transformers'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert result.stdout.strip() == "[]"


def test_every_patch_fits_this_sglang_and_names_its_place() -> None:
    for patch in patches.PATCHES:
        assert patches.source_digest(patch.target) == patch.digest, patch.name
        file, line = patch.answers.split()[0].split(":")
        assert line.isdigit()
        assert file.endswith(".py")
    names = [patch.name for patch in patches.PATCHES]
    assert len(set(names)) == len(names)


def changed(target: str) -> patches.Patch:
    return patches.Patch("a-name", "file.py:1 does something", target, "0" * 16, lambda target: pytest.fail("applied"))


@pytest.mark.parametrize("target", ["json:dumps", "json:no_such_function", "no.such.module:f"])
def test_a_patch_whose_code_changed_ends_the_process_with_its_name(
    target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ending:
        patches.apply_patch(changed(target))
    assert ending.value.code == 2
    message = capsys.readouterr().err
    assert "'a-name'" in message
    assert target in message
    assert message.count("\n") == 1


def test_it_ends_the_process_from_within_sglangs_plugin_loader(tmp_path: Path) -> None:
    """SGLang logs what a plugin raises and goes on; this must get through."""
    info = tmp_path / "changed-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: changed\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nchanged = changed:register\n")
    (tmp_path / "changed.py").write_text(
        "from sglang_ext import cpu\nfrom sglang_ext.cpu import patches\n"
        "def register():\n"
        "    patches.PATCHES = (patches.Patch('a-name', 'f.py:1 x', 'json:dumps', '0' * 16, print),)\n"
        "    patches.apply_all.cache_clear()\n"
        "    cpu.install()\n"
    )
    code = "from sglang.srt.plugins import load_plugins; load_plugins()"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)
    assert result.returncode == 2, result.stderr[-2000:]
    assert "CPU patch 'a-name' does not fit" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_replaced_function_is_replaced_where_it_was_imported_too(monkeypatch: pytest.MonkeyPatch) -> None:
    home, user = ModuleType("sglang.test_home"), ModuleType("sglang.test_user")
    exec("def f():\n    return 1", vars(home))
    user.f, user.g = home.f, max
    monkeypatch.setitem(sys.modules, "sglang.test_home", home)
    monkeypatch.setitem(sys.modules, "sglang.test_user", user)
    patches._replace_with(max)("sglang.test_home:f")
    assert home.f is user.f is max


def test_platform_runs_the_two_drafting_algorithms_and_one_attention_backend() -> None:
    from sglang_ext.cpu.platform import CpuPlatform

    platform = CpuPlatform()
    assert platform.is_out_of_tree()
    assert [name for name in ("DFLASH", "DSPARK", "EAGLE") if platform.supports_speculative_algorithm(name)] == [
        "DFLASH",
        "DSPARK",
    ]
    assert platform.supports_speculative_draft_attention_backend("DFLASH", platform.get_default_attention_backend())
    assert not platform.supports_speculative_draft_attention_backend("DFLASH", "triton")


def test_platform_fills_in_what_a_cpu_must_have_and_refuses_another_dtype() -> None:
    from sglang_ext.cpu.platform import CpuPlatform

    given = SimpleNamespace(dtype="auto", attention_backend="intel_amx", grammar_backend=None)
    CpuPlatform().apply_server_args_defaults(given)
    assert vars(given) == {"dtype": "float32", "attention_backend": "torch_native", "grammar_backend": "none"}
    with pytest.raises(ValueError, match="float32, not bfloat16"):
        CpuPlatform().apply_server_args_defaults(SimpleNamespace(dtype="bfloat16"))
