"""What an endpoint says about itself: its model, its hardware, its counters."""

from __future__ import annotations

import json
import statistics
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from http.client import HTTPException
from types import TracebackType
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from sglang_ext_loadtest.records import RequestError

# Of /server_info only these are kept: the rest may hold keys and paths that do not belong in a report.
KEPT = (
    "version",
    "served_model_name",
    "dtype",
    "quantization",
    "device",
    "tp_size",
    "dp_size",
    "attention_backend",
    "page_size",
    "mem_fraction_static",
    "max_running_requests",
    "disable_radix_cache",
    "disable_overlap_schedule",
    "chat_template",
    "reasoning_parser",
    "speculative_algorithm",
    "speculative_num_draft_tokens",
    "speculative_dflash_block_size",
    "disable_cuda_graph",
    "cuda_graph_max_bs_decode",
    "max_total_num_tokens",
    "sleep_on_idle",
)
# How a gauge of several data-parallel ranks is made one figure.
GAUGES: dict[str, Callable[[Sequence[float]], float]] = {
    "sglang:num_running_reqs": sum,
    "sglang:num_queue_reqs": sum,
    "sglang:token_usage": max,
    "sglang:spec_accept_length": statistics.fmean,
}
# Counters that must rise by what the requests themselves say: SGLang's own, and those of sglang-ext's metrics.
TOKENS = ("sglang:generation_tokens_total",)
STEPS = ("sglang:spec_verify_calls_total", "sglang_ext_verify_steps_total")
ACCEPTED = ("sglang_ext_accepted_tokens_total",)
TOLERANCE = 0.02  # by how much the server's counters may differ from the sum over requests


class Endpoint:
    """One server, asked outside the measurement.

    Args:
        url: without ``/v1``.
        api_key: sent as a bearer token where given.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # Straight to the endpoint, as the measured requests go: no proxy of the environment.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def get(self, path: str, method: str = "GET") -> str:
        """The body of an answer.

        Raises:
            RequestError: ``connect``, ``unauthorized``, ``timeout`` or ``http_error``.
        """
        request = urllib.request.Request(self.url + path, headers=self._headers, method=method)
        try:
            with self._opener.open(request, timeout=30) as answer:
                return str(answer.read().decode(errors="replace"))
        except urllib.error.HTTPError as error:
            kind = "unauthorized" if error.code in (401, 403) else "http_error"
            raise RequestError(kind, f"HTTP {error.code} for {path}") from None
        except TimeoutError:
            raise RequestError("timeout", f"no answer to {path} within 30 s") from None
        except (OSError, ValueError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            reason = getattr(reason, "strerror", None) or f"{type(reason).__name__}: {reason}"
            raise RequestError("connect", f"{self.url}: {reason}") from None

    def model(self, wanted: str | None) -> str:
        """The model to ask for: the wanted one when it is listed, else the first.

        Raises:
            RequestError: ``wrong_model`` when it is not listed, or what ``get`` raises.
        """
        try:
            listed = [str(entry["id"]) for entry in json.loads(self.get("/v1/models"))["data"]]
        except RequestError as error:
            if wanted is None or error.kind != "http_error":
                raise
            return wanted  # a gateway that lists no models
        except (ValueError, KeyError, TypeError):
            raise RequestError("http_error", "/v1/models is no list of models") from None
        if wanted is not None and wanted not in listed:
            raise RequestError("wrong_model", f"{wanted!r} is not served here; there is {', '.join(listed) or 'none'}")
        if not listed:
            raise RequestError("wrong_model", "the endpoint lists no model")
        return wanted or listed[0]

    def about(self) -> dict[str, Any]:
        """Hardware, version and settings, as far as the server tells; never fails."""
        info, loads = self._json("/server_info"), self._json("/v1/loads?include=core")
        kept = {key: info[key] for key in KEPT if info.get(key) is not None}
        accelerator = loads.get("accelerator")
        if accelerator is None and info.get("device") == "cpu":
            accelerator = "CPU"
        kept["accelerator"] = accelerator or "not stated"
        if info:
            kept.setdefault("chat_template", "the model's own")
        kept["num_accelerators"] = loads.get("num_accelerators")
        return kept

    def flush(self) -> bool:
        """Empty the prefix cache; False where the server cannot or must not."""
        try:
            self.get("/flush_cache", method="POST")
        except RequestError:
            return False
        return True

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics by name, summed over labels as is right for counters; empty without any."""
        found: dict[str, float] = {}
        for name, _, value in self._samples():
            found[name] = found.get(name, 0.0) + value
        return found

    def gauges(self) -> dict[str, float]:
        """Each of ``GAUGES`` that the server has, over its data-parallel ranks.

        Series of one such rank are copies by the ranks of a tensor- or pipeline-parallel group, of which the largest
        counts; series by priority repeat what the one without says.
        """
        ranks: dict[str, dict[str, float]] = {}
        for name, labels, value in self._samples():
            if name in GAUGES and not labels.get("priority"):
                mine = ranks.setdefault(name, {})
                rank = labels.get("dp_rank", "")
                mine[rank] = max(value, mine.get(rank, value))
        return {name: float(GAUGES[name](list(values.values()))) for name, values in ranks.items()}

    def _samples(self) -> Iterator[tuple[str, dict[str, str], float]]:
        try:
            families = list(text_string_to_metric_families(self.get("/metrics")))
        except (RequestError, ValueError):
            return
        for family in families:
            for sample in family.samples:
                yield sample.name, sample.labels, sample.value

    def _json(self, path: str) -> dict[str, Any]:
        try:
            value = json.loads(self.get(path))
        except (RequestError, ValueError):
            return {}
        return value if isinstance(value, dict) else {}


class Gauges:
    """Samples the server's gauges every second while the block runs."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._samples: dict[str, list[float]] = {name: [] for name in GAUGES}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Gauges:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(35)

    def summary(self) -> dict[str, dict[str, float]]:
        """Mean and maximum of each gauge that the server has."""
        return {
            name: {"mean": round(sum(values) / len(values), 4), "max": max(values)}
            for name, values in self._samples.items()
            if values
        }

    def _sample(self) -> None:
        while not self._stop.wait(1.0):
            for name, value in self._endpoint.gauges().items():
                self._samples[name].append(value)


def cross_check(
    before: dict[str, float], after: dict[str, float], tokens: int, steps: int, accepted: int
) -> list[dict[str, Any]]:
    """The server's counters against the sum over our requests.

    Args:
        before, after: ``Endpoint.metrics`` around the cell.
        tokens: completion tokens of all requests, by their usage.
        steps, accepted: verify steps and accepted drafts of all requests, by their histograms.

    Returns:
        One entry per counter that the server has. A server that counts more than we asked for is used by others too.
    """
    expected = dict.fromkeys(TOKENS, tokens)
    if steps:
        expected |= dict.fromkeys(STEPS, steps) | dict.fromkeys(ACCEPTED, accepted)
    checks = []
    for name, ours in expected.items():
        if name in after:
            theirs = after[name] - before.get(name, 0.0)
            agrees = abs(theirs - ours) <= TOLERANCE * max(ours, 1)
            checks.append({"counter": name, "server": theirs, "requests": ours, "agrees": agrees})
    return checks
