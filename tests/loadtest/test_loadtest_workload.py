"""Prompts, settings and arrival times."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from pyarrow import Table, parquet
from sglang_ext_loadtest import demo, settings, workload
from sglang_ext_loadtest.arrivals import arrivals
from sglang_ext_loadtest.cli import parser
from sglang_ext_loadtest.gates import Gate
from sglang_ext_loadtest.runner import schedule
from sglang_ext_loadtest.settings import Load, Method, Requests, Sweep, Workload

from sglang_ext.errors import UsageError

SHIPPED = Path(__file__).parents[2] / "models/prompts.jsonl"


def test_the_shipped_prompts_come_category_by_category_in_turn() -> None:
    found = workload.load(Workload(paths=(str(SHIPPED),), per_category=2), seed=1)
    assert found.broken == []
    assert len(found.prompts) == 12
    assert len({prompt.category for prompt in found.prompts[:6]}) == 6


def test_broken_lines_are_named_and_the_rest_is_used(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    rows = [
        '{"id": 1, "turns": ["a"]}',
        "{",
        "[]",
        '{"id": 2}',
        '{"id": 1, "turns": ["b"]}',
        '{"turns": ["c"], "max_tokens": 0}',
    ]
    path.write_text("\n".join(rows) + '\n\n{"question_id": 9, "category": "qa", "turns": ["d", "e"]}\n')
    found = workload.load(Workload(paths=(str(path),), turns=2), seed=1)
    assert [(prompt.id, prompt.category, prompt.turns) for prompt in found.prompts] == [
        ("1", "p", ("a",)),
        ("9", "qa", ("d", "e")),
    ]
    assert [sentence.split(":")[0] for sentence in found.broken] == [
        f"p.jsonl, line {number}" for number in (2, 3, 4, 5, 6)
    ]
    path.write_text("{\n")
    with pytest.raises(UsageError, match="No prompt can be used \\(1 broken lines"):
        workload.load(Workload(paths=(str(path),)), seed=1)
    with pytest.raises(UsageError, match="There are no prompts at"):
        workload.load(Workload(paths=(str(tmp_path / "none"),)), seed=1)


def test_sharegpt_and_parquet(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    talk = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "x"}, {"from": "human", "value": "b"}]
    path.write_text(json.dumps([{"id": "k", "conversations": talk}, {"id": "broken"}]))
    found = workload.load(Workload(kind="sharegpt", paths=(str(path),), turns=5), seed=1)
    assert [prompt.turns for prompt in found.prompts] == [("a", "b")]
    assert len(found.broken) == 1
    table = tmp_path / "speed.parquet"
    rows = [{"question_id": "q1", "category": "coding", "turns": ["write it"], "multiturn": False}]
    parquet.write_table(Table.from_pylist(rows), table)
    (prompt,) = workload.load(Workload(paths=(str(table),)), seed=1).prompts
    assert (prompt.id, prompt.category, prompt.turns) == ("q1", "coding", ("write it",))


def test_synthetic_lengths_and_shared_prefixes_follow_the_seed() -> None:
    spec = Workload(
        kind="shared_prefix", count=6, groups=2, prefix_words=30, input_words=(5, 9), output_tokens=(20, 40)
    )
    first, again, other = (workload.load(spec, seed).prompts for seed in (1, 1, 2))
    assert first == again != other
    groups: dict[str, set[tuple[str, ...]]] = {}
    for prompt in first:
        words = prompt.turns[0].split()
        assert 35 <= len(words) <= 39
        assert prompt.exact and prompt.max_tokens is not None and 20 <= prompt.max_tokens <= 40
        groups.setdefault(prompt.category, set()).add(tuple(words[:30]))
    assert {name: len(prefixes) for name, prefixes in groups.items()} == {"prefix-0": 1, "prefix-1": 1}


def test_a_request_states_all_that_changes_acceptance() -> None:
    prompt = workload.Prompt("p", "c", ("one", "two"), system="be brief", schema={"type": "object"})
    asked = Requests(temperature=0.7, seed=5, thinking=False, max_tokens=9, extra={"top_p": 0.9})
    body = workload.body(prompt, ["first answer"], asked, "m", number=3)
    assert [message["content"] for message in body["messages"]] == ["be brief", "one", "first answer", "two"]
    assert (body["temperature"], body["seed"], body["max_tokens"], body["top_p"]) == (0.7, 8, 9, 0.9)
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert body["response_format"]["json_schema"]["schema"] == {"type": "object"}
    exact = workload.Prompt("p", "c", ("one",), max_tokens=4, exact=True)
    plain = workload.body(exact, [], Requests(api="completions"), "m", number=0)
    assert (plain["prompt"], plain["max_tokens"], plain["ignore_eos"]) == ("one", 4, True)


def test_arrivals_are_fixed_and_shared_among_workers(tmp_path: Path) -> None:
    def some(load: Load, rate: float, worker: int = 0) -> list[float]:
        return list(itertools.islice(arrivals(load, rate, worker), 3000))

    poisson = some(Load(arrivals="poisson"), 20.0)
    gaps = np.diff(poisson)
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.06)
    assert gaps.std() == pytest.approx(1 / 20, rel=0.08)
    assert poisson == some(Load(arrivals="poisson"), 20.0)
    assert np.diff(some(Load(arrivals="constant"), 4.0)) == pytest.approx(0.25)
    shares = [some(Load(arrivals="poisson", workers=2), 20.0, worker) for worker in (0, 1)]
    assert sorted(shares[0] + shares[1])[:3000] == poisson
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 2500}\n{"timestamp": 1000}\n4\n')
    assert some(Load(arrivals="trace", trace=str(trace)), 0.0) == [0.0, 1.5, 3.0]
    trace.write_text("1\nsoon\n")
    with pytest.raises(UsageError, match=r"Line 2 of .* is no arrival time"):
        some(Load(arrivals="trace", trace=str(trace)), 0.0)


def test_methods_take_turns() -> None:
    def order(*methods: Method) -> list[tuple[str, float, int]]:
        sweep = Sweep(methods, load=Load(concurrency=(1, 2), repeats=2, seed=3))
        return [(slot.method.name, slot.level, slot.repeat) for slot in schedule(sweep)]

    up = order(Method("a", url="http://x"), Method("b", url="http://y"))
    assert len(set(up)) == 8
    for first, second in zip(up[::2], up[1::2], strict=True):
        assert first[1:] == second[1:] and first[0] != second[0]
    started = order(Method("a", serve=("t",)), Method("b", serve=("t",)))
    assert [name for name, _, _ in started] == ["a", "a", "b", "b", "b", "b", "a", "a"]
    beside = Sweep(
        (Method("a", serve=("t",)), Method("b", serve=("t",))),
        load=Load(concurrency=(1, 2), repeats=2, seed=3, side_by_side=True),
    )
    assert [(slot.method.name, slot.level, slot.repeat) for slot in schedule(beside)] == up


GOOD: dict[str, Any] = {"methods": [{"name": "a", "url": "http://h:1"}]}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"load": {"concurency": [1]}}, "unknown key 'concurency'"),
        ({"load": {"concurrency": ["1"]}}, "concurrency must be int"),
        ({"load": {"repeats": True}}, "repeats must be int"),
        ({"load": {"concurrency": []}}, "ladder of concurrencies is empty"),
        ({"load": {"requests": 4, "seconds": 3}}, "both requests and seconds"),
        ({"load": {"arrivals": "poisson"}}, "need rates"),
        ({"load": {"arrivals": "trace"}}, "need its file"),
        ({"load": {"arrivals": "gamma"}}, "use poisson, constant or trace"),
        ({"methods": []}, "has no methods"),
        ({"methods": [{"url": "http://h"}]}, "lacks the key 'name'"),
        ({"methods": [{"name": "a"}]}, "either a url or words"),
        ({"methods": [{"name": "a", "url": "u", "role": "best"}]}, "use plain, stock"),
        ({"methods": [{"name": "a", "url": "u"}, {"name": "a", "url": "v"}]}, "Two methods are called 'a'"),
        ({"methods": [{"name": "a", "url": "localhost:30000"}]}, "'localhost:30000' is no endpoint"),
        ({"methods": [{"name": "a", "url": "http://h:port"}]}, "'http://h:port' is no endpoint"),
        (
            {"methods": [{"name": name, "url": "http://h", "role": "plain"} for name in "ab"]},
            "Two methods have the role plain",
        ),
        ({"load": {"requests": 0}}, "load: requests is 0"),
        ({"load": {"seconds": -1.5}}, "load: seconds is -1.5"),
        ({"workload": {"turns": 0}}, "workload: turns is 0"),
        ({"workload": {"kind": "shared_prefix", "groups": 0}}, "workload: groups is 0"),
        ({"workload": {"input_words": [10, 5]}}, "input_words is .10, 5.; give .low, high."),
        ({"requests": {"max_tokens": 0}}, "requests: max_tokens is 0"),
        ({"workload": {"input_words": [1]}}, "must have 2 entries"),
        ({"requests": {"api": "chats"}}, "use chat or completions"),
        ({"load": {"side_by_side": 1}}, "side_by_side must be bool"),
        ({"load": {"users_per_worker": 0}}, "workers and users_per_worker must be 1 or more"),
        ({"load": {"requests_per_user": 0}}, "load: requests_per_user is 0"),
        ({"load": {"start_seconds": 0.0}}, "load: start_seconds is 0"),
        ({"requests": {"temperature": -1.0}}, "requests: temperature is -1; give 0"),
        ({"slo": {"ttft_ms": 0.0}}, "slo: ttft_ms is 0"),
        ({"slo": {"attainment": 99.0}}, "slo: attainment is 99; give a share"),
        ({"gates": ["error_rate = 0"]}, "is no gate"),
        ({"gates": ["b@1:error_rate<=0"]}, "no method b; name one of a, or"),
        ({"gates": ["a@3:error_rate<=0"]}, "3 is not on the ladder; name one of 1, 2, 4, 8"),
        ({"gates": ["*:eror_rate<=0"]}, "eror_rate is no figure; name one of summary.groups"),
        ({"gates": ["ttft_ms<=100"]}, "ttft_ms is no figure"),
        ({"gates": ["a:speedup.stock>=1"]}, "speed-ups need a closed loop and a method with the role stock"),
    ],
)
def test_a_sweep_that_is_wrong_is_refused_by_name(change: dict[str, Any], sentence: str) -> None:
    assert settings.check_sweep(settings.parse(Sweep, GOOD, "sweep.toml")).methods[0].name == "a"
    with pytest.raises(UsageError, match=sentence):
        settings.check_sweep(settings.parse(Sweep, GOOD | change, "sweep.toml"))


def test_gates_read_figures_of_groups() -> None:
    groups = [
        {
            "method": "A",
            "level": 1.0,
            "ttft_ms": {"p95": 80.0},
            "speedup": {"plain": {"value": 1.4}},
            "error_rate": 0.0,
        },
        {"method": "A", "level": 4.0, "ttft_ms": {"p95": 300.0}, "speedup": {}, "error_rate": 0.0},
    ]
    assert Gate.parse("*:error_rate<=0").check(groups) == []
    assert Gate.parse("A@1:ttft_ms.p95 <= 100").check(groups) == []
    assert Gate.parse("A@1:speedup.plain>=1.2").check(groups) == []
    assert Gate.parse("ttft_ms.p95<=100").check(groups) == ["ttft_ms.p95<=100: A at 4 has 300."]
    assert "no figure speedup.plain" in Gate.parse("A@4:speedup.plain>1").check(groups)[0]
    assert "nothing was measured" in Gate.parse("B:error_rate<1").check(groups)[0]
    with pytest.raises(UsageError, match="is no gate"):
        Gate.parse("error_rate = 0")
    with pytest.raises(UsageError, match="is no gate"):
        Gate.parse("error_rate<=1.2.3")


def test_the_demo_serves_the_reference_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = settings.check_sweep(demo.demo_sweep(SHIPPED.parent, 1, 48))
    roles = [(method.name, method.role) for method in chosen.methods]
    assert roles == [("plain", "plain"), ("DSPARK", "stock"), ("CARRYOVER_DSPARK", None)]
    assert demo.main(["--models", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "dense-target is missing" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_the_sweeps_that_are_shipped_are_valid(tmp_path: Path) -> None:
    root = SHIPPED.parents[1]
    ladder = (1, 2, 4, 8, 16, 32, 64)
    for name, levels in {"dense": ladder, "hybrid": ladder, "medium": (1, 4, 16, 32)}.items():
        shipped = settings.read_sweep(root / f"benchmarks/loadtest/{name}.toml")
        assert shipped.load.concurrency == levels
    dense = settings.read_sweep(root / "benchmarks/loadtest/dense.toml")
    assert workload.load(dense.workload, dense.load.seed).broken == []
    config, claim, job = yaml.safe_load_all((root / "loadtest/job.yaml").read_text())
    inside = tmp_path / "sweep.toml"
    inside.write_text(config["data"]["sweep.toml"])
    assert len(workload.load(settings.read_sweep(inside).workload, 1).prompts) == 256
    pod = job["spec"]["template"]["spec"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["results"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    (container,) = pod["containers"]
    command = [word.replace("/config", str(tmp_path)) for word in container["command"]]
    args = parser().parse_args(command[1:])
    assert args.files == [inside]
