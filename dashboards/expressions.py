"""Pieces of PromQL that several panels share. Windows are Grafana's; nothing is averaged since a server's start."""

from __future__ import annotations

OURS = 'model_name=~"$model", method=~"$method", instance=~"$instance"'
THEIRS = 'model_name=~"$model", instance=~"$instance"'
WINDOW = "[$__rate_interval]"
BY = "model_name, method"

_METHOD = (
    'on (job, instance) group_left (method) max by (job, instance, method) (sglang_ext_method_info{method=~"$method"})'
)


def rate(name: str, labels: str = OURS, by: str = BY, more: str = "") -> str:
    """Increase per second of one of our counters, summed."""
    return f"sum by ({by}) (rate(sglang_ext_{name}{{{labels}{more}}}{WINDOW}))"


def share(part: str, whole: str) -> str:
    """One of our counters over another."""
    return f"{rate(part)} / {rate(whole)}"


def by_method(expr: str) -> str:
    """Give SGLang's own series, summed by (job, instance, ...), the method of its server."""
    return f"({expr}) * {_METHOD}"


def theirs(name: str, by: str = "model_name", more: str = "") -> str:
    """Increase per second of one of SGLang's counters, summed over the servers of the chosen methods."""
    inner = f"sum by (job, instance, {by}) (rate(sglang:{name}{{{THEIRS}{more}}}{WINDOW}))"
    return f"sum by ({by}, method) ({by_method(inner)})"


def gauge(name: str, how: str = "sum") -> str:
    """One of SGLang's gauges over the servers of the chosen methods; without its copies by priority."""
    inner = f'{how} by (job, instance, model_name) (sglang:{name}{{{THEIRS}, priority=""}})'
    return f"{how} by ({BY}) ({by_method(inner)})"


def quantile(q: float, name: str) -> str:
    """A quantile of one of SGLang's histograms by model and method."""
    return f"histogram_quantile({q}, {theirs(name + '_bucket', 'model_name, le')})"


def mean(name: str) -> str:
    """The mean of one of SGLang's histograms by model and method."""
    return f"{theirs(name + '_sum')} / {theirs(name + '_count')}"


SURVIVAL = (
    f"{rate('accepted_by_position_total', by=BY + ', position')}"
    f" / ignoring (position) group_left () {rate('verify_steps_total')}"
)
LENGTH = share("emitted_tokens_total", "verify_steps_total")
IN_FLIGHT = 'sum by (instance) (sglang:http_requests_active{instance=~"$instance", endpoint=~"/generate|/v1/.*"})'
DECODED = theirs("realtime_tokens_total", more=', mode="decode"')
COMPUTED = f'sum by (instance) (rate(sglang:realtime_tokens_total{{{THEIRS}, mode!="prefill_cache"}}{WINDOW}))'
PER_ACCELERATOR = f"{DECODED} / sum by ({BY}) (sglang_ext_accelerators{{{OURS}}})"
LEGEND = "{{method}} {{model_name}}"
