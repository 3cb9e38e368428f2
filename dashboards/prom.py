"""A Prometheus of one's own, and its query API."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dashboards import tools
from sglang_ext.errors import UsageError
from sglang_ext.evaluation.servers import stop

RULES = Path(__file__).resolve().parent / "rules"
JOB = "sglang-ext"  # the scrape job that the alerts ServerDown and PluginMissing look for
START_SECONDS = 30.0

# Asked for OpenMetrics without escaping=allow-utf-8, as Prometheus before 3.0 asks, prometheus_client (seen in 0.26)
# writes sglang_x for SGLang's series sglang:x. Their names are mended, those of sglang-ext are left alone.
MEND_NAMES = [
    {"source_labels": ["__name__"], "regex": "sglang_(.*)", "target_label": "__name__", "replacement": "sglang:$1"},
    {"source_labels": ["__name__"], "regex": "sglang:(ext_.*)", "target_label": "__name__", "replacement": "sglang_$1"},
]


def configuration(targets: Sequence[str], rules: Sequence[Path], interval: float) -> str:
    """prometheus.yml (JSON is YAML) that scrapes ``targets`` (host:port) and evaluates the rule files."""
    every = f"{interval * 1000:.0f}ms"
    value = {
        "global": {"scrape_interval": every, "evaluation_interval": every},
        "rule_files": [str(path.resolve()) for path in rules],
        "scrape_configs": [
            {"job_name": JOB, "static_configs": [{"targets": list(targets)}], "metric_relabel_configs": MEND_NAMES}
        ],
    }
    return json.dumps(value, indent=1)


def rule_files(*more: Path) -> list[Path]:
    """The rules of this folder, and others where they exist."""
    return [*sorted(RULES.glob("*.yaml")), *(path for path in more if path.exists())]


@contextlib.contextmanager
def running(
    folder: Path, targets: Sequence[str], *, port: int, interval: float = 5.0, rules: Sequence[Path] | None = None
) -> Iterator[str]:
    """Run Prometheus on 127.0.0.1 until the block ends; yields its URL once it is ready.

    Args:
        folder: for its configuration, log and data.
        targets: host:port of the servers to scrape.
        interval: seconds between scrapes, and between evaluations of the rules.
        rules: rule files; those of this folder by default.
    """
    program = tools.find("prometheus")
    folder.mkdir(parents=True, exist_ok=True)
    config, log = folder / "prometheus.yml", folder / "prometheus.log"
    config.write_text(configuration(targets, rule_files() if rules is None else rules, interval))
    url = f"http://127.0.0.1:{port}"
    words = [
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(program), *words], stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    try:
        _wait_until_ready(process, url, log)
        yield url
    finally:
        stop(process)


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(urllib.error.URLError, OSError):
            urllib.request.urlopen(f"{url}/-/ready", timeout=5).close()
            return
        time.sleep(0.2)
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    raise UsageError(f"Prometheus does not start ({lines[-1] if lines else 'it printed nothing'}); read {log}.")


def query(url: str, expr: str) -> list[dict[str, Any]]:
    """The samples of an instant query: ``metric`` (labels) and ``value`` (time, text) each."""
    return _get(url, "query", query=expr)


def query_range(url: str, expr: str, start: float, end: float, step: float) -> list[dict[str, Any]]:
    """The series of a range query: ``metric`` and ``values`` each. Times in seconds since the epoch."""
    return _get(url, "query_range", query=expr, start=start, end=end, step=step)


def _get(url: str, path: str, **parameters: Any) -> list[dict[str, Any]]:
    """UsageError with Prometheus's own words for what it refuses, or where it cannot be reached."""
    address = f"{url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
    try:
        with urllib.request.urlopen(address, timeout=30) as answer:
            result: list[dict[str, Any]] = json.load(answer)["data"]["result"]
            return result
    except urllib.error.HTTPError as error:
        text = error.read().decode("utf-8", "replace")
        raise UsageError(f"Prometheus refuses {parameters['query']!r} ({text[:300]}); correct the query.") from None
    except OSError as error:
        raise UsageError(f"Prometheus at {url} cannot be reached ({error}); start it, or correct the URL.") from None
