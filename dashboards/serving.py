"""Serving overview: is it up, is it fast, what limits it. For every method, plain decoding included."""

from __future__ import annotations

from typing import Any

from dashboards import expressions as e
from dashboards import panels as p

QUANTILES = (0.5, 0.95, 0.99)
CACHED = e.theirs("realtime_tokens_total", more=', mode="prefill_cache"')
PROMPT = e.theirs("realtime_tokens_total", more=', mode=~"prefill_.*"')


def latency(title: str, description: str, name: str, **options: Any) -> Any:
    """Median, 95th and 99th percentile of one of SGLang's histograms."""
    targets = [(e.quantile(q, name), f"p{q * 100:.0f} {e.LEGEND}") for q in QUANTILES]
    return p.lines(title, description, "s", *targets, **options)


def build() -> Any:
    """The dashboard, not yet JSON."""
    board = p.new_dashboard(
        "sglang-ext-serving",
        "SGLang serving",
        "Latency, throughput and limits of SGLang servers with sglang-ext, by model and method.",
        [p.MODEL, p.METHOD, p.INSTANCE],
    )
    p.add_section(
        board,
        "Now",
        p.number("Running", "Requests that are being decoded.", "short", (e.gauge("num_running_reqs"), e.LEGEND)),
        p.number(
            "Waiting",
            "Requests in the queue. A queue that stays is a server at its limit.",
            "short",
            (e.gauge("num_queue_reqs"), e.LEGEND),
            limits=[(1, p.AMBER), (16, p.RED)],
        ),
        p.number("Tokens", "Decoded tokens a second, all servers.", "suffix: tok/s", (e.DECODED, e.LEGEND), decimals=1),
        p.number(
            "Time to first token, p95",
            "Queueing and prefill of 95 % of the requests.",
            "s",
            (e.quantile(0.95, "time_to_first_token_seconds"), e.LEGEND),
            limits=[(1, p.AMBER), (5, p.RED)],
        ),
        p.number(
            "Time per output token, mean",
            "Of finished requests, behind their first token.",
            "s",
            (e.mean("request_time_per_output_token_seconds"), e.LEGEND),
        ),
        acceptance_length(),
    )
    p.add_section(
        board,
        "Latency",
        latency(
            "Time to first token",
            "From the request's arrival to its first token: queueing and prefill.",
            "time_to_first_token_seconds",
            limits=[(5, p.RED)],
        ),
        latency(
            "Time per output token",
            "Per request: time behind the first token over the tokens behind it, however many a step emits.",
            "request_time_per_output_token_seconds",
        ),
        latency("End to end", "From arrival to the last token.", "e2e_request_latency_seconds"),
    )
    p.add_section(
        board,
        "Throughput",
        p.lines(
            "Decoded tokens",
            "Tokens a second, all servers of a method together.",
            "suffix: tok/s",
            (e.DECODED, e.LEGEND),
        ),
        p.lines(
            "Decoded tokens per accelerator",
            "The figure to compare methods and machines by, at like load.",
            "suffix: tok/s",
            (e.PER_ACCELERATOR, e.LEGEND),
        ),
        p.lines(
            "Prompt tokens",
            "Computed in prefill, and taken from the prefix cache instead.",
            "suffix: tok/s",
            (e.theirs("realtime_tokens_total", more=', mode="prefill_compute"'), f"computed {e.LEGEND}"),
            (CACHED, f"cached {e.LEGEND}"),
        ),
        p.lines(
            "Finished requests",
            "Requests a second, by method and model.",
            "reqps",
            (e.theirs("num_requests_total"), e.LEGEND),
        ),
        p.lines(
            "Answers by status",
            "HTTP answers a second; anything but 200 deserves a look at the log.",
            "reqps",
            (
                f'sum by (status_code) (rate(sglang:http_responses_total{{instance=~"$instance", '
                f'endpoint=~"/generate|/v1/.*"}}{e.WINDOW}))',
                "{{status_code}}",
            ),
            stacked=True,
        ),
        p.lines(
            "Retracted requests",
            "Requests thrown back for want of KV slots; their prefill is done again.",
            "reqps",
            (
                f"{e.theirs('num_retracted_requests_total')} or 0 * {e.gauge('num_running_reqs')}",
                e.LEGEND,
            ),
            limits=[(1, p.RED)],
        ),
    )
    p.add_section(
        board,
        "Limits",
        p.lines(
            "Running and waiting requests",
            "Waiting requests with free slots point at the token budget; see the two panels beside.",
            "short",
            (e.gauge("num_running_reqs"), f"running {e.LEGEND}"),
            (e.gauge("num_queue_reqs"), f"waiting {e.LEGEND}"),
        ),
        p.lines(
            "KV cache in use",
            "Share of the token slots. Near 1 requests wait or are retracted.",
            "percentunit",
            (e.gauge("token_usage", "max"), e.LEGEND),
            limits=[(0.9, p.AMBER), (0.97, p.RED)],
            high=1,
        ),
        p.lines(
            "Recurrent-state slots in use",
            "Share of the Mamba slots of a hybrid target (0 for a dense one); a request takes several.",
            "percentunit",
            (e.gauge("mamba_usage", "max"), e.LEGEND),
            limits=[(0.9, p.AMBER), (0.95, p.RED)],
            high=1,
        ),
        p.lines(
            "Progress",
            "Tokens computed a second, prefill included, and requests as the HTTP process counts them (streamed ones a "
            "few seconds too long). Requests without tokens: the engine hangs, whatever /health says.",
            "short",
            (
                e.COMPUTED,
                "tokens a second {{instance}}",
            ),
            (e.IN_FLIGHT, "requests {{instance}}"),
        ),
        p.lines(
            "Prefix cache",
            "Share of the prompt tokens that were in the cache.",
            "percentunit",
            (
                f"{CACHED} / {PROMPT}",
                e.LEGEND,
            ),
            high=1,
        ),
        p.lines(
            "Scheduler's host time",
            "Seconds a second that the scheduler's process computes on the CPU. Near 1 the host limits the server.",
            "percentunit",
            (e.theirs("scheduler_process_cpu_seconds_total"), e.LEGEND),
            limits=[(0.9, p.AMBER)],
            high=1,
        ),
    )
    p.add_section(board, "What runs", contract())
    return board


def acceptance_length() -> Any:
    """The figure that says whether drafting pays."""
    return p.number(
        "Acceptance length",
        "Tokens per verify step, the target's own included. Below 1.2 drafting hardly pays.",
        "short",
        (e.LENGTH, e.LEGEND),
        limits=[(1.2, p.AMBER), (2, p.GREEN)],
        base=p.RED,
        decimals=2,
    )


def contract() -> Any:
    """The effective contract of every server, one row each."""
    return p.contract_table(
        "Effective contract",
        "What each server says it runs; the same checkpoint hash means the same drafter.",
        (f"sglang_ext_method_info{{{e.OURS}}}", "{{instance}}"),
        ("engine_type", "tp_rank", "pp_rank", "moe_ep_rank", "job"),
    )
