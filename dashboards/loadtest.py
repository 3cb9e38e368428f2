"""Load-test view: methods side by side over one run. SGLang's and our series alone, so any load generator will do."""

from __future__ import annotations

from typing import Any

from dashboards import expressions as e
from dashboards import panels as p


def percentile(title: str, description: str, q: float, name: str) -> Any:
    """One quantile, a line per method."""
    return p.lines(title, description, "s", (e.quantile(q, name), e.LEGEND))


def build() -> Any:
    """The dashboard, not yet JSON."""
    board = p.new_dashboard(
        "sglang-ext-loadtest",
        "SGLang load test",
        "A load test as the servers saw it, by method: choose the run's time range and the methods to compare.",
        [p.MODEL, p.METHOD, p.INSTANCE],
    )
    p.add_section(
        board,
        "Load",
        p.lines(
            "Requests in the server",
            "Running and waiting ones: the load. Where it does not follow the run's plan, the generator was the limit.",
            "short",
            (f"{e.gauge('num_running_reqs')} + {e.gauge('num_queue_reqs')}", e.LEGEND),
        ),
        p.lines(
            "Running requests",
            "What the server decoded at once. Flat below the load: the server's limit.",
            "short",
            (e.gauge("num_running_reqs"), e.LEGEND),
        ),
        p.lines(
            "Finished requests",
            "Requests a second, by method and model.",
            "reqps",
            (e.theirs("num_requests_total"), e.LEGEND),
        ),
    )
    p.add_section(
        board,
        "Speed",
        p.lines("Decoded tokens", "By all servers of a method, a second.", "suffix: tok/s", (e.DECODED, e.LEGEND)),
        p.lines(
            "Decoded tokens per accelerator",
            "Throughput to compare methods by.",
            "suffix: tok/s",
            (e.PER_ACCELERATOR, e.LEGEND),
        ),
        p.lines(
            "Tokens a second per running request",
            "What one user feels. Where it meets plain decoding's line, speculation stops paying.",
            "suffix: tok/s",
            (f"{e.DECODED} / ({e.gauge('num_running_reqs')} > 0)", e.LEGEND),
        ),
    )
    p.add_section(
        board,
        "Latency",
        percentile("Time to first token, p50", "Queueing and prefill.", 0.5, "time_to_first_token_seconds"),
        percentile("Time to first token, p95", "Queueing and prefill.", 0.95, "time_to_first_token_seconds"),
        percentile("Time to first token, p99", "Queueing and prefill.", 0.99, "time_to_first_token_seconds"),
        percentile("Time per output token, p50", "Per request.", 0.5, "request_time_per_output_token_seconds"),
        percentile("Time per output token, p95", "Per request.", 0.95, "request_time_per_output_token_seconds"),
        percentile("End to end, p95", "From arrival to the last token.", 0.95, "e2e_request_latency_seconds"),
    )
    p.add_section(
        board,
        "Why",
        p.lines(
            "Acceptance length",
            "Tokens per verify step. It depends on the prompts, so runs must use the same ones.",
            "short",
            (e.LENGTH, e.LEGEND),
            low=1,
        ),
        p.lines(
            "Waiting requests",
            "A queue that grows with constant load: more was offered than the server can do.",
            "short",
            (e.gauge("num_queue_reqs"), e.LEGEND),
        ),
        p.lines(
            "KV cache in use",
            "Near 1 requests wait or are retracted.",
            "percentunit",
            (e.gauge("token_usage", "max"), e.LEGEND),
            limits=[(0.97, p.RED)],
            high=1,
        ),
    )
    return board
