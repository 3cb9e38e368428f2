"""An evaluation from its servers to its document: every method served in turn by the real server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.progress import Progress

from sglang_ext.carryover.reference import ReferenceDrafter
from sglang_ext.evaluation import client, figures, rounds
from sglang_ext.evaluation.client import Answer
from sglang_ext.evaluation.figures import ALL, PromptTrace
from sglang_ext.evaluation.methods import Method, baseline, environment
from sglang_ext.evaluation.prompts import Prompt
from sglang_ext.evaluation.replay import Variant, recall, replay
from sglang_ext.evaluation.servers import free_port, serving
from sglang_ext.settings import ROUNDS

PLAIN = "plain decoding"

# A recording needs every prompt's rows computed (no cached prefix) and the target's logits (no graph keeps them).
RECORDING_FLAGS = ("--disable-radix-cache", "--disable-cuda-graph")

Answers = dict[str, dict[float, list[Answer]]]  # by method and temperature


@dataclass(frozen=True)
class Plan:
    """What to ask, and how."""

    target: str  # as the server takes it
    target_path: Path
    methods: list[Method]  # the one under evaluation first
    control: Method | None  # one of them: as much training without the mechanism
    prompts: list[Prompt]
    temperatures: list[float]
    max_tokens: int
    concurrency: int
    all_turns: bool
    recorded_prompts: int  # of each category
    seed: int
    flags: tuple[str, ...]  # for every server
    work: Path  # logs and recordings

    @property
    def baseline(self) -> Method | None:
        """The drafter that the one under evaluation started from; see :func:`methods.baseline`."""
        return baseline([method for method in self.methods if method != self.control])


def evaluate(plan: Plan, bar: Progress) -> dict[str, Any]:
    """Measure every method and return records, comparisons, identity and Carryover's own figures (JSON types)."""
    answers = {method.name: _measure(plan, method, bar) for method in plan.methods}
    identity = _identity(plan, answers, bar) if 0.0 in plan.temperatures else None
    traces = {
        name: {at: figures.traces(found) for at, found in by_temperature.items()}
        for name, by_temperature in answers.items()
    }
    first, *others = plan.methods
    records, comparisons = [], []
    for temperature in plan.temperatures:
        for method in plan.methods:
            rows = figures.records(traces[method.name][temperature], method.contract.drafts, plan.seed)
            records += [{"method": method.name, "temperature": temperature, **row} for row in rows]
        for other in others:
            rows = figures.comparisons(
                traces[first.name][temperature],
                traces[other.name][temperature],
                first.contract.drafts,
                other.contract.drafts,
                plan.seed,
            )
            head = {"method": first.name, "reference": other.name, "temperature": temperature}
            comparisons += [{**head, **row} for row in rows]
    references = {"gain_over_baseline": plan.baseline, "gain_over_control": plan.control}
    named = {role: method.name for role, method in references.items() if method is not None}
    carry = None
    if first.contract.method == "carryover" and first.context_rows != 0 and plan.recorded_prompts:
        carry = _carry(plan, bar)
        carry["correlation"] = _correlation(carry["by_category"], records, comparisons, plan.baseline)
    return {
        "methods": [method.describe() for method in plan.methods],
        "records": records,
        "comparisons": comparisons,
        "gains": figures.gains(comparisons, named),
        "identity": identity,
        "carry": carry,
        "traces": _as_json(traces),
    }


def _ask(plan: Plan, port: int, prompts: list[Prompt], temperature: float, name: str, bar: Progress) -> list[Answer]:
    turns = sum(1 + len(prompt.more) if plan.all_turns else 1 for prompt in prompts)
    task = bar.add_task(f"{name}, temperature {temperature:g}", total=turns)
    return client.ask(
        port,
        prompts,
        max_tokens=plan.max_tokens,
        concurrency=plan.concurrency,
        done=lambda answer: bar.update(task, advance=1),
        temperature=temperature,
        all_turns=plan.all_turns,
    )


def _measure(plan: Plan, method: Method, bar: Progress) -> dict[float, list[Answer]]:
    port, log = free_port(), plan.work / f"{plan.methods.index(method)}.log"
    starting = bar.add_task(f"{method.name}: starting the server", total=None)
    env = environment(method.carried_rows, method.states, method.looks_up)
    with serving(method.words(plan.target, plan.flags), port=port, log=log, env=env):
        bar.remove_task(starting)
        return {at: _ask(plan, port, plan.prompts, at, method.name, bar) for at in plan.temperatures}


def _identity(plan: Plan, answers: Answers, bar: Progress) -> list[dict[str, Any]]:
    """Every method's greedy answers against plain decoding's; it also says how close a call each difference was."""
    port = free_port()
    starting = bar.add_task(f"{PLAIN}: starting the server", total=None)
    with serving([plan.target, *plan.flags], port=port, log=plan.work / "plain.log", env=environment()):
        bar.remove_task(starting)
        plain = _ask(plan, port, plan.prompts, 0.0, PLAIN, bar)
        tie = client.tie(port)
        result = []
        for name, by_temperature in answers.items():
            found = []
            for difference in figures.differences(by_temperature[0.0], plain):
                lead = None
                if difference.expected is not None and difference.found is not None:
                    lead = client.lead(port, difference.input_ids, difference.expected, difference.found)
                entry = {"id": difference.id, "position": difference.position, "lead": lead}
                found.append({**entry, "tie": lead is not None and lead <= tie})
            ties_only = all(entry["tie"] for entry in found)
            head = {"method": name, "identical": not found, "ties_only": ties_only, "tie": tie}
            result.append({**head, "differences": found})
    return result


def _carry(plan: Plan, bar: Progress) -> dict[str, Any]:
    """Serve the Carryover drafter once more with its rounds recorded, and draft them again without a server."""
    method, folder, port = plan.methods[0], plan.work / "rounds", free_port()
    groups: dict[str, list[Prompt]] = {}
    for prompt in plan.prompts:
        groups.setdefault(prompt.category, []).append(prompt)
    prompts = [prompt for group in groups.values() for prompt in group[: plan.recorded_prompts]]
    words = method.words(plan.target, [*plan.flags, *RECORDING_FLAGS])
    starting = bar.add_task(f"{method.name}: starting the server to record", total=None)
    env = environment(method.carried_rows, looks_up=method.looks_up, **{ROUNDS: str(folder)})
    with serving(words, port=port, log=plan.work / "record.log", env=env):
        bar.remove_task(starting)
        answers = _ask(plan, port, prompts, 0.0, f"{method.name}, recorded", bar)
    tokens = {a.request: (a.prompt.category, (*a.input_ids, *a.token_ids)) for a in answers}
    requests = rounds.read(folder, tokens, method.contract.feature_width, method.context_rows)
    by_category = {
        category: rounds.carry_figures([request for request in requests if request.category == category])
        for category in groups
    }
    by_category[ALL] = rounds.carry_figures(requests)
    variants, reason = _variants(plan)
    found = None
    if variants:
        task = bar.add_task("recall: drafting the recorded rounds", total=len(requests))
        ranks = replay(requests, variants, lambda: bar.update(task, advance=1))
        found = recall(ranks, [variant.name for variant in variants], variants[-1].name, plan.seed)
    return {"method": method.name, "by_category": by_category, "recall": found, "no_recall": reason}


def _variants(plan: Plan) -> tuple[list[Variant], str | None]:
    """On, off and, where a reference is one, the baseline; or why the dense reference cannot draft them."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = [plan.methods[0], *filter(None, [plan.baseline])]
    try:
        drafters = [ReferenceDrafter(m.contract.path, plan.target_path, device) for m in chosen]
    except ValueError as error:
        return [], str(error)
    heads = {m.contract.markov_head for m in chosen} - {None, "vanilla"}
    if heads:
        return [], f"The reference drafter covers vanilla Markov heads only, not {heads.pop()}."
    names = ["baseline"][: len(chosen) - 1]
    carry = chosen[0]
    variants = [Variant("on", drafters[0], carry.contract, carry=True), Variant("off", drafters[0], carry.contract)]
    variants += [Variant(n, d, m.contract) for n, d, m in zip(names, drafters[1:], chosen[1:], strict=True)]
    return variants, None


def _correlation(
    by_category: dict[str, dict[str, Any]],
    records: Sequence[dict[str, Any]],
    comparisons: Sequence[dict[str, Any]],
    reference: Method | None,
) -> dict[str, Any] | None:
    """Pearson's r over categories between re-convergence and the gain over the baseline at temperature 0."""
    if reference is None:
        return None
    points = []
    for row in comparisons:
        if (row["reference"], row["temperature"]) != (reference.name, 0.0) or row["category"] == ALL:
            continue
        seen = by_category[row["category"]]["reconverged_per_rejected_round"]
        head = (reference.name, 0.0, row["category"])
        length = next(r["acceptance_length"] for r in records if (r["method"], r["temperature"], r["category"]) == head)
        if None not in (seen, row["gain"], length):
            points.append((row["gain"], seen, seen / length))
    if not points:
        return None
    gains, seen, normalised = zip(*points, strict=True)
    return {
        "reference": reference.name,
        "categories": len(points),
        "reconverged": rounds.correlation(seen, gains),
        "reconverged_normalised": rounds.correlation(normalised, gains),
    }


def _as_json(traces: dict[str, dict[float, list[PromptTrace]]]) -> list[dict[str, Any]]:
    return [
        {"method": name, "temperature": at, **asdict(trace)}
        for name, by_temperature in traces.items()
        for at, found in by_temperature.items()
        for trace in found
    ]
