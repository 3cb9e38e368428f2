"""Speculation: does drafting work, where do drafts die, what is carried and read, and is the canary better."""

from __future__ import annotations

from typing import Any

from dashboards import expressions as e
from dashboards import panels as p
from dashboards.serving import acceptance_length, contract

STABLE = p.variable("stable", "Stable", "label_values(sglang_ext_method_info, instance)", "servers to compare with")
CANARY = p.variable("canary", "Canary", "label_values(sglang_ext_method_info, instance)", "servers to judge")

OVERSHOOT = e.rate("overshoot_steps_total")
FIRST = ', position="1"'
MODEL = 'model_name=~"$model"'


def on(servers: str, expr: str) -> str:
    """An expression over a choice of servers instead of ``$instance``, summed over methods."""
    return expr.replace('"$instance"', f'"${servers}"').replace(f"by ({e.BY}", "by (model_name")


def against(title: str, description: str, expr: str, better: str) -> Any:
    """The canary's figure over the stable servers'."""
    return p.lines(
        f"{title}: canary / stable",
        f"{description} 1 is equal, {better} is better.",
        "short",
        (f"({on('canary', expr)}) / ({on('stable', expr)})", "{{model_name}}"),
        limits=[(1, p.AMBER)],
        low=None,
    )


def build() -> Any:
    """The dashboard, not yet JSON."""
    board = p.new_dashboard(
        "sglang-ext-speculation",
        "SGLang speculative decoding",
        "Acceptance, prefix survival, carried rows and state reads of SGLang servers with sglang-ext.",
        [p.MODEL, p.METHOD, p.INSTANCE, STABLE, CANARY],
    )
    add_now(board)
    add_acceptance(board)
    add_sources(board)
    tpot = f"{e.mean('request_time_per_output_token_seconds')}"
    p.add_section(
        board,
        "Canary against stable",
        against("Acceptance length", "Tokens per verify step.", e.LENGTH, "above"),
        against("Time per output token", "Mean over finished requests; needs like load on both.", tpot, "below"),
        against(
            "First draft",
            "Share of steps that accept the first draft.",
            f"{e.rate('accepted_by_position_total', more=FIRST)} / {e.rate('verify_steps_total')}",
            "above",
        ),
    )
    p.add_section(board, "What runs", contract())
    return board


def add_now(board: Any) -> None:
    """The figures to look at first."""
    p.add_section(
        board,
        "Now",
        acceptance_length(),
        p.number(
            "Acceptance rate",
            "Accepted of drafted tokens. 0 % and over 98 % are signs of something broken, not of a drafter.",
            "percentunit",
            (e.share("accepted_tokens_total", "drafted_tokens_total"), e.LEGEND),
            limits=[(0.02, p.GREEN), (0.98, p.RED)],
            base=p.RED,
        ),
        p.number(
            "Steps with carried rows",
            "Share of verify steps whose draft read rejected rows of the step before; 0 for methods that carry none.",
            "percentunit",
            (e.share("carried_steps_total", "verify_steps_total"), e.LEGEND),
        ),
        p.number(
            "Emitted tokens",
            "A second, before stop strings and limits cut any.",
            "suffix: tok/s",
            (e.rate("emitted_tokens_total"), e.LEGEND),
            decimals=1,
        ),
        p.number(
            "Overshoot",
            "Share of all verify steps spent on requests that had ended: the price of overlap scheduling.",
            "percentunit",
            (
                f"{OVERSHOOT} / ({e.rate('verify_steps_total')} + {OVERSHOOT})",
                e.LEGEND,
            ),
            limits=[(0.2, p.AMBER)],
        ),
        p.number(
            "Speed-up (proxy)",
            "Baseline's time per output token, recorded by `python -m dashboards.baseline`, over this one's. Compare "
            "at like load only.",
            "suffix: x",
            (
                f"max by (model_name) (sglang_ext:baseline_time_per_output_token_seconds{{{MODEL}}})"
                f" / on (model_name) group_right () ({e.mean('request_time_per_output_token_seconds')})",
                e.LEGEND,
            ),
            limits=[(1, p.GREEN)],
            base=p.RED,
            decimals=2,
        ),
    )


def add_acceptance(board: Any) -> None:
    """How much is accepted, and where drafts die."""
    p.add_section(
        board,
        "Acceptance",
        p.lines(
            "Acceptance length",
            "Tokens per verify step, by method and model. The dashed line is where the alert fires.",
            "short",
            (e.LENGTH, e.LEGEND),
            limits=[(1.2, p.GREEN)],
            base=p.RED,
            low=1,
        ),
        p.lines(
            "Acceptance rate",
            "Accepted of drafted tokens.",
            "percentunit",
            (e.share("accepted_tokens_total", "drafted_tokens_total"), e.LEGEND),
            high=1,
        ),
        p.heat_map(
            "Tokens per verify step",
            "How often steps of each length happen. Two bands: some prompts draft well and others not.",
            "short",
            (f"sum by (le) (increase(sglang_ext_acceptance_length_bucket{{{e.OURS}}}{e.WINDOW}))", "{{le}}"),
            axis="tokens",
            buckets=True,
        ),
        p.heat_map(
            "Prefix survival",
            "Share of verify steps that accept the draft at a position and all before it. Where rows darken, the "
            "drafter or the text has changed.",
            "percentunit",
            (without_method(e.SURVIVAL), "{{position}}"),
            axis="position",
        ),
        p.bars(
            "Prefix survival by position",
            "The same now. A long flat tail allows a wider block, an early drop a narrower one.",
            "percentunit",
            (without_method(e.SURVIVAL), "{{position}}"),
            high=1,
        ),
        p.lines(
            "Accepted by position",
            "Accepted drafts a second at each position.",
            "suffix: tok/s",
            (e.rate("accepted_by_position_total", by="position"), "{{position}}"),
            stacked=True,
        ),
    )


def add_sources(board: Any) -> None:
    """What drafts were made from, and the work that was done for them."""
    p.add_section(
        board,
        "Carried rows, states, work",
        p.lines(
            "Steps without carried rows, by reason",
            "Share of all verify steps. first_round and full_acceptance are the method's nature; mixed_chunk costs "
            "carry under load, row_end is the end of the context, off is a switch.",
            "percentunit",
            (
                f"{e.rate('uncarried_steps_total', by='reason')} / ignoring (reason) group_left () "
                f"sum (rate(sglang_ext_verify_steps_total{{{e.OURS}}}{e.WINDOW}))",
                "{{reason}}",
            ),
            stacked=True,
            high=1,
        ),
        p.lines(
            "Carried rows per step",
            "Rejected rows that a draft reads, mean over all verify steps.",
            "short",
            (e.share("carried_rows_total", "verify_steps_total"), e.LEGEND),
        ),
        p.lines(
            "State reads",
            "Recurrent states read by drafts, a second: verify steps times source layers. 0 without a reader.",
            "ops",
            (e.rate("state_reads_total"), e.LEGEND),
        ),
        p.lines(
            "Drafted, accepted, emitted",
            "Tokens a second. Drafted minus accepted is verified in vain.",
            "suffix: tok/s",
            (e.rate("drafted_tokens_total"), f"drafted {e.LEGEND}"),
            (e.rate("accepted_tokens_total"), f"accepted {e.LEGEND}"),
            (e.rate("emitted_tokens_total"), f"emitted {e.LEGEND}"),
        ),
        p.lines(
            "Verify steps", "A second, one per request and round.", "ops", (e.rate("verify_steps_total"), e.LEGEND)
        ),
        p.lines(
            "Time per output token",
            "Mean over finished requests: what acceptance is worth in the end.",
            "s",
            (e.mean("request_time_per_output_token_seconds"), e.LEGEND),
        ),
    )


def without_method(expr: str) -> str:
    """Summed over models and methods: one series per position."""
    return expr.replace(f"by ({e.BY}, position)", "by (position)").replace(f"sum by ({e.BY}) ", "sum ")
