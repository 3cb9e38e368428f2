"""Preflight of ``sglang-ext serve``: the installation, and driver, GPUs and memory behind a stand-in for the driver."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest
from checkpoint_fixtures import make_drafter, make_target

from sglang_ext import cpu, preflight, server, sglang_version
from sglang_ext.errors import UsageError
from sglang_ext.gpus import Driver, Gpu

GIB = 1 << 30
COMPILER = shutil.which("cc") or shutil.which("gcc")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="the stand-in for the driver is C, and there is no cc")


@pytest.fixture(scope="module")
def driver_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder for LD_LIBRARY_PATH with both of the driver's libraries."""
    folder = tmp_path_factory.mktemp("driver")
    source = Path(__file__).with_name("fake_driver.c")
    assert COMPILER is not None
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", folder / "libcuda.so.1", source], check=True)
    shutil.copy(folder / "libcuda.so.1", folder / "libnvidia-ml.so.1")
    return folder


@pytest.fixture
def models(tmp_path: Path) -> Path:
    make_target(tmp_path / "target")
    make_drafter(tmp_path / "dspark", "dspark")
    return tmp_path


def serve(folder: Path | None, *words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """``sglang-ext serve ... --check`` as the image calls it, in a process of its own."""
    # SGLang, imported by any earlier test, chooses the CPU platform for this process's children too.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG_")}
    flags = {"SGLANG_EXT_SERVE_FLAGS": "--device cuda --host 127.0.0.1", "LD_LIBRARY_PATH": str(folder or "")}
    return subprocess.run(
        [sys.executable, "-m", "sglang_ext.cli", "serve", *map(str, words), "--check", "--port", "30199"],
        capture_output=True,
        text=True,
        env={**kept, **flags, **environment},
    )


def refused(folder: Path | None, *words: object, **environment: str) -> str:
    result = serve(folder, *words, **environment)
    assert (result.returncode, result.stdout) == (2, "") and result.stderr.count("\n") == 1, result.stderr
    return result.stderr


@needs_compiler
def test_all_is_well(driver_folder: Path, models: Path) -> None:
    result = serve(driver_folder, models / "target", "--draft", models / "dspark", "--tp", 2, FAKE_GPUS="4")
    assert result.returncode == 0, result.stderr
    found, chosen = result.stderr.splitlines()
    assert "2 of 4 GPUs (NVIDIA H200, sm90), driver 580.95.05 with CUDA 13.0; 140.0 GiB free" in found
    assert "DSPARK on" in chosen


@needs_compiler
@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({"FAKE_INIT": "100"}, "shows this container no GPU"),
        ({"FAKE_GPUS": "0"}, "shows this container no GPU"),
        ({"FAKE_INIT": "803"}, "of different versions"),
        ({"FAKE_INIT": "999"}, "cuInit gives error 999"),
        ({"FAKE_CUDA": "12080"}, "580.95.05 runs CUDA 12.8 at most"),
        ({"FAKE_SM": "75"}, "sm75) has no bfloat16"),
        ({"FAKE_FREE": "100"}, "The weights take at least 0.0 GiB of each GPU"),
        ({"SGLANG_PLATFORM": "sglang_ext_cpu"}, "contradict each other"),
        ({"SGLANG_EXT_SERVE_FLAGS": "cuda"}, "must hold flags"),
        ({"SGLANG_EXT_SERVE_FLAGS": "--a 'b"}, "cannot be split"),
    ],
)
def test_what_will_not_do_is_said_in_one_sentence(
    driver_folder: Path, models: Path, environment: dict[str, str], sentence: str
) -> None:
    assert sentence in refused(driver_folder, models / "target", "--draft", models / "dspark", **environment)


@needs_compiler
def test_too_few_gpus(driver_folder: Path, models: Path) -> None:
    target = models / "target"
    assert "ask for 2 GPUs from number 0 on, and 1 are" in refused(driver_folder, target, "--tp-size=2")
    assert "ask for 1 GPUs from number 2 on" in refused(driver_folder, target, "--base-gpu-id", 2, FAKE_GPUS="2")
    assert "--tensor-parallel-size zero is no number" in refused(
        driver_folder, target, "--tensor-parallel-size", "zero"
    )


@needs_compiler
def test_a_slice_of_a_gpu_and_a_container_without_nvml(driver_folder: Path, models: Path) -> None:
    sliced = serve(driver_folder, models / "target", FAKE_MIG="1", FAKE_TOTAL=str(70 * GIB), FAKE_FREE=str(69 * GIB))
    assert sliced.returncode == 0 and "69.0 GiB free" in sliced.stderr
    silent = serve(driver_folder, models / "target", FAKE_NVML="12", FAKE_SM="80")
    assert silent.returncode == 0 and "driver unknown" in silent.stderr and "150.0 GiB free" in silent.stderr
    assert "meant for H200 and B200" in silent.stderr


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has an NVIDIA driver")
def test_no_driver(models: Path) -> None:
    assert "There is no NVIDIA driver here" in refused(None, models / "target")
    on_cpu = serve(None, models / "target", "--device", "cpu")
    assert on_cpu.returncode == 0 and "GPU" not in on_cpu.stderr  # what is given comes before the image's flags


@pytest.mark.parametrize(
    ("flags", "first", "taken", "split"),
    [
        ([], 0, 1, 1),
        (["--tp", "8"], 0, 8, 8),
        (["--tp-size=4", "--dp-size", "2", "--base-gpu-id", "1"], 1, 8, 4),
        (["--tp", "8", "--dp", "8", "--enable-dp-attention"], 0, 8, 8),
        (["--tp", "16", "--nnodes", "2", "--node-rank", "1"], 0, 8, 16),
    ],
)
def test_gpus_of_this_node(flags: list[str], first: int, taken: int, split: int) -> None:
    assert preflight.Layout.of(flags) == preflight.Layout(first, taken, split)


def gpu(free: float | None = 140, total: float = 140) -> Gpu:
    return Gpu("NVIDIA H200", (9, 0), int(total * GIB), None if free is None else int(free * GIB))


def test_memory_that_is_certainly_too_small_is_refused() -> None:
    weights = (130 * GIB, 6 * GIB)
    assert preflight.estimate_memory([gpu(), gpu(139)], [], *weights).left == 3 * GIB  # the GPU with less counts
    estimate = preflight.estimate_memory([gpu()] * 2, ["--tp", "2", "--mem-fraction-static", "0.9"], *weights)
    assert (estimate.target, estimate.drafter) == (65 * GIB, 3 * GIB)
    assert estimate.left == pytest.approx((140 * 0.9 - 68) * GIB, abs=2)
    with pytest.raises(UsageError, match=r"at least 136\.0 GiB of each GPU, but NVIDIA H200 has 135\.0 GiB of 140"):
        preflight.estimate_memory([gpu(135)], [], *weights)
    with pytest.raises(UsageError, match=r"--mem-fraction-static keeps 14\.0 GiB back"):
        preflight.estimate_memory([gpu(None)], ["--mem-fraction-static=0.9"], *weights)
    with pytest.raises(UsageError, match="is no fraction"):
        preflight.estimate_memory([gpu()], ["--mem-fraction-static", "90"], *weights)


def test_memory_that_cannot_be_known_is_not_refused() -> None:
    assert preflight.estimate_memory([gpu()], [], None, GIB) is None
    shrunk = preflight.estimate_memory([gpu(20)], ["--quantization", "fp8"], 30 * GIB, 0)
    assert shrunk is not None and shrunk.left < 0
    driver = Driver("580.95.05", 13000, (gpu(20),))
    assert "at most 0.0 GiB for caches" in preflight.describe(driver, [gpu(20)], shrunk)
    assert "no memory estimate" in preflight.describe(driver, [gpu(20)], None)


def test_the_size_of_the_weights(models: Path, tmp_path: Path) -> None:
    assert preflight.weight_bytes("s3://bucket/model") is None
    assert preflight.weight_bytes(str(models / "target")) == 256
    (models / "target/model.safetensors").unlink()
    assert preflight.weight_bytes(str(models / "target")) is None  # no weights beside the configuration
    (models / "target/model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 7e9}}))
    assert preflight.weight_bytes(str(models / "target")) == 7_000_000_000
    drafter = models / "dspark"
    header = (drafter / "model.safetensors").stat().st_size - (preflight.weight_bytes(str(drafter)) or 0)
    assert 0 < header < 5000
    (drafter / "model.safetensors").write_bytes((drafter / "model.safetensors").read_bytes()[:-8])
    with pytest.raises(UsageError, match="cut short"):
        preflight.weight_bytes(str(drafter))


def test_the_plugin_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert preflight.main() == 0
    monkeypatch.setenv("SGLANG_PLUGINS", "other, sglang_ext")
    preflight.check_plugin()
    monkeypatch.setenv("SGLANG_PLUGINS", "other")
    with pytest.raises(UsageError, match="SGLANG_PLUGINS=other makes SGLang skip"):
        preflight.check_plugin()
    monkeypatch.delenv("SGLANG_PLUGINS")
    monkeypatch.setenv("SGLANG_PLATFORM", "cuda")
    with pytest.raises(UsageError, match="SGLANG_PLATFORM=cuda makes SGLang skip"):
        preflight.check_plugin()
    monkeypatch.delenv("SGLANG_PLATFORM")
    other = EntryPoints([EntryPoint("other", "other:register", "sglang.srt.plugins")])
    monkeypatch.setattr(preflight, "entry_points", lambda group: other.select(group=group))
    with pytest.raises(UsageError, match="would not find this plugin"):
        preflight.check_plugin()
    monkeypatch.setattr(sglang_version, "version", lambda name: "0.5.24")
    capsys.readouterr()
    assert preflight.main() == 2
    assert "SGLang 0.5.24 is installed" in (error := capsys.readouterr().err) and error.count("\n") == 1


def test_the_server_process_does_not_fall_back_to_the_cpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A driver that answers but that torch cannot use."""
    monkeypatch.setattr(cpu, "activate", lambda: "sglang_ext.cpu.platform:CpuPlatform")
    with pytest.raises(SystemExit) as caught:
        server.main(["--model-path", "m", "--device", "cuda"])
    assert caught.value.code == 2
    assert "torch finds no usable GPU" in capsys.readouterr().err
