"""Start the engines of ``engines.py`` in the background, several at a time, and record what a run was.

Environment: ``SGLANG_EXT_GPU_JOBS`` engines at once (default 4), ``SGLANG_EXT_GPU_FOLDER`` keeps logs and the record
(default ``build/gpu-tests``), ``SGLANG_EXT_GPU_TIMEOUT`` seconds for one engine (default 420),
``SGLANG_EXT_GPU_SECONDS`` for all of them (default 3600), after which the tests whose engine was not reached fail so.
"""

from __future__ import annotations

import atexit
import json
import os
import platform
import queue
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "engine"))
sys.path.append(str(ROOT / "tests" / "gpu"))

import harness  # noqa: E402
import rounds_dump  # noqa: E402
import state_dump  # noqa: E402
import target_reference  # noqa: E402
from engines import BASE, ENGINES, FP32_ENVIRONMENT, HYBRID, MODELS, Engine  # noqa: E402

from sglang_ext.settings import ORACLE_LOG  # noqa: E402

GPUS = torch.cuda.device_count()
DEVICE = os.environ.get("SGLANG_EXT_GPU_DEVICE", "cuda")  # "cpu" tries the plumbing out on a machine without one
FOLDER = Path(os.environ.get("SGLANG_EXT_GPU_FOLDER", ROOT / "build" / "gpu-tests"))
JOBS = int(os.environ.get("SGLANG_EXT_GPU_JOBS", "4"))
TIMEOUT = float(os.environ.get("SGLANG_EXT_GPU_TIMEOUT", "420"))
SECONDS = float(os.environ.get("SGLANG_EXT_GPU_SECONDS", "3600"))
LOOKUP_TABLE = [1.0, 100.0, 120.0, 140.0, 160.0]  # above the tiny drafters' margins of 70
CPU_FLAGS = {"device": "cpu", "attention_backend": "torch_native", "disable_cuda_graph": True, "dtype": "float32"}


class Engines:
    """Runs of engines by name; ``folder / name`` keeps each one's log, oracle lines, rounds and states."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.results: dict[str, Any] = {}
        self.seconds: dict[str, float] = {}
        self.done = {name: threading.Event() for name in ENGINES}
        self.waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.models: dict[str, Path] = {}
        self.threads: list[threading.Thread] = []
        self.end = time.monotonic() + SECONDS

    def start(self, names: list[str]) -> None:
        """Queue these engines; returns at once."""
        target_reference.start()
        self.models = _models(self.folder)
        for name in names:
            self.waiting.put(name)
        self.threads = [threading.Thread(target=self._work, daemon=True) for _ in range(JOBS)]
        for thread in self.threads:
            thread.start()
            time.sleep(2)  # their first seconds are the heaviest

    def _work(self) -> None:
        while True:
            try:
                name = self.waiting.get_nowait()
            except queue.Empty:
                return
            started = time.monotonic()
            if self.end - started < 20:
                return
            try:
                self.results[name] = self._run(name, ENGINES[name])
            except (AssertionError, OSError) as error:
                self.results[name] = AssertionError(f"engine {name}: {error}")
            self.seconds[name] = round(time.monotonic() - started, 1)
            ended = "failed" if isinstance(self.results[name], Exception) else "ended"
            print(f"[{time.strftime('%H:%M:%S')}] {name} {ended} after {self.seconds[name]} s", file=sys.__stderr__)
            self.done[name].set()

    def _run(self, name: str, engine: Engine) -> Any:
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        env = {"OMP_NUM_THREADS": "2", **(FP32_ENVIRONMENT if engine.dtype == "float32" else {}), **engine.env}
        if engine.oracle:
            env[ORACLE_LOG] = str(folder / "oracle.jsonl")
        if engine.states:
            env |= state_dump.environment(folder)
        if engine.rounds:
            env |= rounds_dump.environment(folder)
        flags: dict[str, Any] = {**BASE, "dtype": engine.dtype, **(HYBRID if "hybrid" in engine.target else {})}
        flags |= engine.flags
        if engine.drafter is not None:
            flags["speculative_algorithm"] = engine.algorithm
            flags["speculative_draft_model_path"] = str(self.models[f"{engine.drafter}:{engine.target}"])
        flags["nccl_port"] = _free_port(list(ENGINES).index(name))
        if DEVICE == "cpu":
            flags |= {**CPU_FLAGS, "max_mamba_cache_size": 96}
            if engine.gpus > 1:  # ranks on one NUMA node
                env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(engine.gpus)))
        flags = {key: value for key, value in flags.items() if value is not None}
        return harness.run_job(
            "generate",
            timeout=min(TIMEOUT, self.end - time.monotonic()),
            env=env,
            log=folder / "log",
            device=DEVICE,
            engine={"model_path": str(self.models[engine.target]), **flags},
            steps=engine.steps,
        )

    def __getitem__(self, name: str) -> dict[str, Any]:
        """What an engine generated, once it has; its failure is the test's."""
        if not self.done[name].wait(timeout=max(0.0, self.end - time.monotonic())):
            raise AssertionError(
                f"not reached: engine {name} had not ended when the {SECONDS:.0f} s of the run were up"
            )
        result = self.results[name]
        if isinstance(result, Exception):
            raise AssertionError(str(result))
        found: dict[str, Any] = result
        return found


def _models(folder: Path) -> dict[str, Path]:
    """Folders by name; ``DRAFTER:TARGET`` for drafters. The tiny ones are made without a GPU in sight."""
    code = "from tests.gpu.target_reference import plain_torch; plain_torch()\n"
    code += "from tests.tiny_models import tiny_models; tiny_models()"
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=hidden, check=True, timeout=240)
    from tests.ready_models import make_ready
    from tests.tiny_models import tiny_models

    tiny = tiny_models()
    found = {"tiny-dense": tiny["dense"], "tiny-hybrid": tiny["hybrid"], "dense": MODELS / "dense-target"}
    for name, path in tiny.items():
        if name not in ("dense", "hybrid"):
            drafter, _, target = name.rpartition("-")
            found[f"{drafter}:tiny-{target}"] = path
    for kind in ("dspark", "dflash"):
        found[f"carryover-{kind}:dense"] = MODELS / f"carryover-{kind}-dense"
        found[f"lookup-{kind}:tiny-dense"] = _with_lookup(
            tiny[f"carryover-{kind}-dense"], folder / "models" / f"lookup-{kind}"
        )
    for name, base, settings in (
        ("ready", "dspark", {}),
        ("ready-zero", "dspark", {"scale": 0}),
        ("ready-carryover", "carryover-dspark", {}),
    ):
        out = folder / "models" / name
        shutil.rmtree(out, ignore_errors=True)
        found[f"{name}:tiny-hybrid"] = make_ready(
            tiny[f"{base}-hybrid"], tiny["hybrid"], out, source_layers=(0, 2), **settings
        )
    return found


def _with_lookup(drafter: Path, out: Path) -> Path:
    """The drafter with a lookup table, in ``out``."""
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(drafter, out)
    config = json.loads((out / "config.json").read_text())
    config["carryover_config"]["lookup"] = LOOKUP_TABLE
    (out / "config.json").write_text(json.dumps(config))
    return out


def _free_port(place: int) -> int:
    """A port that no other engine takes: SGLang draws one at random long before it listens there."""
    for port in range(17000 + 20 * place, 17020 + 20 * place):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):  # nobody listens
                return port
    raise OSError(f"no free port from {port - 19} to {port}")


_ENGINES = Engines(FOLDER)
_OUTCOMES: dict[str, dict[str, Any]] = {}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "engines(*names): the engines that a test looks at")


def names_of(item: pytest.Item) -> list[str]:
    """The engines that a test wants: those of its marker, or its parameter ``engine``."""
    marked = [name for marker in item.iter_markers("engines") for name in marker.args]
    parameter = getattr(item, "callspec", None)
    chosen = parameter.params.get("engine") if parameter else None
    return marked + ([chosen] if isinstance(chosen, str) else [])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "gpu" not in item.path.parts:
            continue
        names = names_of(item)
        if not names:
            continue
        item.add_marker(pytest.mark.timeout(SECONDS + 600))  # it may wait for other engines first
        gpus = max(ENGINES[name].gpus for name in names)
        if DEVICE == "cuda" and gpus > GPUS:
            have = f"this machine has {GPUS or 'none'}"
            item.add_marker(pytest.mark.skip(reason=f"needs {gpus} CUDA device{'s' * (gpus > 1)}; {have}"))
    # In the order in which their engines end, so that no test waits while another could run.
    order = {name: place for place, name in enumerate(ENGINES)}
    items.sort(key=lambda item: max((order[name] for name in _wanted(item)), default=-1))


def _wanted(item: pytest.Item) -> list[str]:
    skipped = any(marker.name == "skip" for marker in item.iter_markers())
    return names_of(item) if "gpu" in item.path.parts and not skipped else []


@pytest.fixture(scope="session", autouse=True)
def engines(request: pytest.FixtureRequest) -> Iterator[Engines]:
    """All engines that the selected tests want, started in the order of the table before the first test runs."""
    wanted = {name for item in request.session.items for name in _wanted(item)}
    if wanted:
        _ENGINES.start([name for name in ENGINES if name in wanted])
    yield _ENGINES
    while not _ENGINES.waiting.empty():
        _ENGINES.waiting.get_nowait()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if "gpu" in item.path.parts and (report.when == "call" or report.outcome != "passed"):
        row: dict[str, Any] = {"outcome": report.outcome, "seconds": round(report.duration, 1)}
        if report.skipped and isinstance(report.longrepr, tuple):
            row["reason"] = report.longrepr[2]
        elif report.failed:
            row["reason"] = str(report.longrepr)[-1500:]
        row |= dict(item.user_properties)
        _OUTCOMES[item.nodeid.rpartition("tests/gpu/")[2] or item.nodeid] = row
        _write_record()


def _write_record() -> None:
    if not GPUS and DEVICE == "cuda":
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    counts = {
        kind: sum(row["outcome"] == kind for row in _OUTCOMES.values()) for kind in ("passed", "failed", "skipped")
    }
    record = {
        "command": "make test-gpu",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "environment": environment(),
        "counts": counts,
        "engine_seconds": _ENGINES.seconds,
        "tests": _OUTCOMES,
    }
    (FOLDER / "tests.json").write_text(json.dumps(record, indent=1) + "\n")


def environment() -> dict[str, Any]:
    """What the run ran on."""
    versions: dict[str, str | None] = {}
    for name in ("sglang", "torch", "triton", "flashinfer-python", "sglang-kernel", "transformers"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "gpus": [torch.cuda.get_device_name(index) for index in range(GPUS)],
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "packages": versions,
        "engines_at_once": JOBS,
    }


def _driver() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    lines = subprocess.run(words, capture_output=True, text=True, timeout=30).stdout.split()
    return lines[0] if lines else None


@atexit.register
def _write_last_record() -> None:
    if _ENGINES.seconds:
        _write_record()
