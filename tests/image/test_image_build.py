"""The Dockerfile's stages, really built (buildah, chroot isolation) and really run.

The bases are this machine's Debian packages, with SGLang's own wheel for the server, in the place of the official
images. So everything is real here but the CUDA libraries, and torch.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from buildah import PINS, Builder, why_not
from checkpoint_fixtures import make_drafter, make_target

from sglang_ext import __version__

pytestmark = pytest.mark.timeout(600)
SERVE, LOADTEST = "localhost/sglang-ext", "localhost/sglang-ext-loadtest"
BOM = "/usr/local/share/sbom/python.cdx.json"


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builder]:
    if reason := why_not():
        pytest.skip(reason)
    # Layers are copied several times over: in memory, where there is room for 2 GB of them, in half the time.
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and shutil.disk_usage(memory).free > 6e9
    with tempfile.TemporaryDirectory(dir=memory if roomy else tmp_path_factory.getbasetemp()) as folder:
        builder = Builder(Path(folder))
        try:
            builder.make_bases()
            yield builder
        finally:
            builder.call("rm", "--all")
            builder.call("rmi", "--all", "--force")


@pytest.fixture(scope="module")
def serve(builder: Builder) -> str:
    arguments = {"PYTHON_IMAGE": "localhost/python", "SGLANG_IMAGE": "localhost/sglang"}
    built = builder.must(builder.build("serve", SERVE, **arguments))
    assert "SGLang 0.5.23 will load the plugin." in built.stdout  # checked by the build, as the final user
    return SERVE


@pytest.fixture(scope="module")
def loadtest(builder: Builder) -> str:
    builder.must(builder.build("loadtest", LOADTEST, PYTHON_IMAGE="localhost/python"))
    return LOADTEST


def test_the_server_image_says_its_version_as_its_own_user(builder: Builder, serve: str) -> None:
    shown = builder.must(builder.run(serve, "sh", "-c", "sglang-ext --version; id -u; id -g; cd; pwd"))
    assert shown.stdout.split("\n")[:4] == [f"sglang-ext {__version__}", "10001", "10001", "/home/sglang"]
    configuration = builder.configuration(serve)["Docker"]["config"]
    assert configuration["User"] == "10001:10001"
    assert configuration["Entrypoint"] == ["sglang-ext", "serve"]
    assert configuration["Labels"]["org.opencontainers.image.base.name"] == "localhost/sglang"
    assert configuration["ExposedPorts"] == {"30000/tcp": {}}


def test_its_health_check_leaves_sglang_the_time_it_takes(builder: Builder, serve: str) -> None:
    check = builder.configuration(serve)["Docker"]["config"]["Healthcheck"]
    assert check["Test"] == ["CMD", "python3", "-m", "sglang_ext.healthcheck"]
    second = 10**9
    assert check["Timeout"] > 25 * second and check["StartPeriod"] >= 1800 * second and check["Retries"] > 1
    result = builder.run(serve, *check["Test"][1:])
    assert result.returncode == 1 and "/health does not answer" in result.stdout


def test_without_a_driver_it_ends_with_one_sentence_instead_of_serving_on_the_cpu(builder: Builder, serve: str) -> None:
    refused = builder.run(serve, "sglang-ext", "serve", "/models/target", "--port", "30111")
    assert (refused.returncode, refused.stdout) == (2, ""), refused.stderr
    (sentence,) = [line for line in refused.stderr.splitlines() if line.startswith("sglang-ext")]
    assert "There is no NVIDIA driver here" in sentence and "nvidia.com/gpu" in sentence
    assert "Traceback" not in refused.stderr


def test_it_checks_checkpoints_that_are_mounted(builder: Builder, serve: str, tmp_path: Path) -> None:
    make_target(tmp_path / "target")
    make_drafter(tmp_path / "drafter", "dspark")
    for path in (tmp_path, *tmp_path.rglob("*")):
        path.chmod(0o755)  # the container's user is another
    command = ["sglang-ext", "serve", "/models/target", "--draft", "/models/drafter", "--device", "cpu", "--check"]
    passed = builder.must(builder.run(serve, *command, volumes=(f"{tmp_path}:/models:ro",)))
    assert "DSPARK on /models/target" in passed.stderr
    (tmp_path / "drafter" / "config.json").unlink()
    refused = builder.run(serve, *command, volumes=(f"{tmp_path}:/models:ro",))
    assert refused.returncode == 2 and "has no config.json" in refused.stderr


def test_any_user_of_group_0_may_write_where_kernels_are_kept(builder: Builder, serve: str) -> None:
    script = 'touch "$SGLANG_CACHE_DIR/x" "$HOME/.cache/x" && sglang-ext --version'
    builder.must(builder.run(serve, "sh", "-c", script, user="123456:0"))


def test_nothing_of_the_build_is_left_behind(builder: Builder, serve: str, loadtest: str) -> None:
    settings = (builder.folder / "pip.conf").read_text().splitlines()[1:]
    script = "ls -d /src /dist /opt/build /opt/sglang-ext /etc/pip.conf 2>/dev/null; find /root -mindepth 1"
    for image in (serve, loadtest):
        assert builder.must(builder.run(image, "sh", "-c", script, user="0")).stdout == ""
        known = json.dumps(builder.configuration(image))
        assert not any(line.partition(" = ")[2] in known for line in settings if "index" in line)


def test_the_load_test_image_shows_its_help(builder: Builder, loadtest: str) -> None:
    shown = builder.must(builder.run(loadtest, "sh", "-c", "sglang-ext-loadtest --help; locust --version; id -u; pwd"))
    assert "sweep" in shown.stdout and f"locust {PINS['locust']}" in shown.stdout
    assert shown.stdout.split()[-2:] == ["10001", "/results"]
    assert builder.configuration(loadtest)["Docker"]["config"]["Entrypoint"] == ["sglang-ext-loadtest"]


def test_each_image_brings_the_bill_of_its_packages(builder: Builder, serve: str, loadtest: str) -> None:
    def packages(image: str) -> dict[str, str]:
        bill = json.loads(builder.must(builder.run(image, "cat", BOM)).stdout)
        return {component["name"]: component["version"] for component in bill["components"]}

    server, load = packages(serve), packages(loadtest)
    assert server["sglang-ext"] == load["sglang-ext"] == __version__
    assert server["sglang"] == PINS["sglang"] and "sglang" not in load and "torch" not in load
    wrong = {name: version for name, version in load.items() if name != "sglang-ext" and version not in PINS.values()}
    assert load["locust"] == PINS["locust"] and not wrong


def test_a_base_without_sglang_would_end_the_build(builder: Builder, serve: str) -> None:
    script = "rm -r /usr/local/lib/python3*/dist-packages/sglang-*.dist-info && python3 -m sglang_ext.preflight"
    refused = builder.run(serve, "sh", "-c", script, user="0")
    assert refused.returncode == 2 and "SGLang is not installed" in refused.stderr
