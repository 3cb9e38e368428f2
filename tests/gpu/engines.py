"""The engines that the GPU tests look at: each is started once, several at a time, and shared by its tests.

fp32: the tiny random models of the engine tests, whose carry shows in every round; attention by Triton, the one backend
with float32, and plain torch for what else has no float32 kernel. So each round can be compared to 1e-4. bf16: the
small trained models of ``models/`` with every backend (their heads of 64 suit all three), and everything with a hybrid
target, whose prefill kernel takes no float32.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_ext.settings import CARRIED_ROWS_LIMIT

MODELS = Path(__file__).resolve().parents[2] / "models"
GREEDY = {"temperature": 0.0, "max_new_tokens": 32, "ignore_eos": True}
PROMPTS = [
    "Hello, my name is Bob and",
    "def add(a, b):\n    return",
    '{"key": [1, 2, 3], "name":',
    "speculative decoding on a GPU: " * 4,
    "The capital of France is",
    "once upon a time there was",
    "the quick brown fox jumps over " * 5,
    "1 2 3 4 5 6 7 8",
]
CONCURRENT = 48
ABORTED = (3, 11, 17, 29, 40)
ALONE = 4
# One request after the other, so that every engine sees the same batches; then fresh prompts; their conversations going
# on (radix hits on what decoding committed); more requests of several lengths than the 32 slots, with some aborted on
# the way; new tenants of the slots they left.
CHURN: list[dict[str, Any]] = [
    *({"generate": [f"alone {index}: {PROMPTS[index]}"], "sampling": GREEDY} for index in range(ALONE)),
    {"generate": PROMPTS, "sampling": GREEDY},
    {"go_on": ALONE, "sampling": {**GREEDY, "max_new_tokens": 16}},
    {
        "generate": [f"{index}: {PROMPTS[index % len(PROMPTS)]} and more" for index in range(CONCURRENT)],
        "sampling": [{**GREEDY, "max_new_tokens": 16 + 4 * (index % 6)} for index in range(CONCURRENT)],
        "abort": list(ABORTED),
        "stagger": 0.003,
    },
    {"generate": [f"{text} again" for text in PROMPTS], "sampling": GREEDY},
]
FEW = CHURN[: ALONE + 2]
# More for dense targets, whose drafters need few rounds a request: how many run behind a request's end is chance.
MORE: list[dict[str, Any]] = [*CHURN, {"generate": [f"{text} once more" for text in PROMPTS], "sampling": GREEDY}]

BASE: dict[str, Any] = {
    "device": "cuda",
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "skip_server_warmup": True,
    # The pools are bounded below. A smaller fraction fails where others take memory while an engine starts.
    "mem_fraction_static": 0.8,
    "max_total_tokens": 16384,
    "max_running_requests": 32,
    "context_length": 512,
    "disable_prefill_cuda_graph": True,
    # Few sizes: each takes seconds to capture, and the sizes between are padded, as in service.
    "cuda_graph_bs_decode": [1, 8, 32],
    "log_level": "info",
}
HYBRID = {"max_running_requests": 16, "max_mamba_cache_size": 96, "cuda_graph_bs_decode": [1, 4, 16]}
EAGER = {"disable_cuda_graph": True}
# SGLang refuses two GPUs of which one has more in use, unless it is told not to look.
TWO_GPUS: dict[str, Any] = {
    "flags": {"tp_size": 2}, "env": {"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0"}, "steps": FEW, "gpus": 2,
}  # fmt: skip
FP32_ENVIRONMENT = {"TRITON_F32_DEFAULT": "ieee", "SGLANG_FORCE_FUSED_OP_BACKEND": "torch"}


@dataclass(frozen=True)
class Engine:
    """One engine: its models by name, its flags, what it is asked, and what is written down of it."""

    target: str
    drafter: str | None = None
    algorithm: str | None = None
    flags: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)  # or what its target makes of it
    oracle: bool = False
    rounds: bool = False
    states: bool = False
    gpus: int = 1
    verify_steps: int = 400  # at least, of all its requests

    def __post_init__(self) -> None:
        if not self.steps:
            object.__setattr__(self, "steps", CHURN if "hybrid" in self.target else MORE)

    @property
    def dtype(self) -> str:
        return "float32" if self.target == "tiny-dense" else "bfloat16"


def _carryover(kind: str, target: str = "tiny-dense", **settings: Any) -> Engine:
    return Engine(target, f"carryover-{kind}", f"CARRYOVER_{kind.upper()}", **settings)


_checked = functools.partial(_carryover, oracle=True, rounds=True)
_lookup = functools.partial(Engine, "tiny-dense", oracle=True, rounds=True)
_ready = functools.partial(Engine, "tiny-hybrid", "ready", "READY", oracle=True, states=True)

_trained = functools.partial(_carryover, target="dense", rounds=True)


def _backend(kind: str, backend: str, oracle: bool = False, **flags: Any) -> Engine:
    return _trained(kind, flags={"attention_backend": backend, **flags}, oracle=oracle)


# In the order in which they start: first those that compile longest, need two GPUs or have most tests waiting; those
# that draft with DFLASH later, since each waits for FlashInfer's sampling kernels, which compile for minutes.
ENGINES: dict[str, Engine] = {
    "trained-dflash-flashinfer": _backend("dflash", "flashinfer", oracle=True),
    "trained-dspark-flashinfer": _backend("dspark", "flashinfer", oracle=True),
    "two-gpus-ready": Engine("tiny-hybrid", "ready", "READY", rounds=True, **TWO_GPUS),
    "two-gpus-carryover": _trained("dspark", **TWO_GPUS),
    "page-16": _checked("dspark", flags={"page_size": 16}),
    "carryover-dspark": _checked("dspark"),
    "carryover-dspark-eager": _checked("dspark", flags=EAGER),
    "ready": _ready(),
    "plain": Engine("tiny-dense"),
    "trained-plain": Engine("dense"),
    "defaults": _trained(
        "dspark",
        # What SGLang chooses: fa3, graphs for prefills too, its own batch sizes, FlashInfer's sampling.
        flags=dict.fromkeys(
            ("attention_backend", "sampling_backend", "disable_prefill_cuda_graph", "cuda_graph_bs_decode")
        ),
    ),
    "trained-dspark-fa3": _backend("dspark", "fa3", oracle=True),
    "page-64": _checked("dflash", flags={"page_size": 64}),
    "carryover-dflash": _checked("dflash"),
    "carryover-dflash-eager": _checked("dflash", flags=EAGER),
    "lookup-dspark": _lookup("lookup-dspark", "CARRYOVER_DSPARK"),
    "lookup-dflash": _lookup("lookup-dflash", "CARRYOVER_DFLASH"),
    "two-gpus-dflash": _trained("dflash", **TWO_GPUS),
    "trained-dflash-fa3": _backend("dflash", "fa3", oracle=True),
    "one-gpu-ready": Engine("tiny-hybrid", "ready", "READY", rounds=True, steps=FEW),
    "no-overlap-mixed-chunk": _checked(
        "dspark",
        flags={"disable_overlap_schedule": True, "chunked_prefill_size": 32, "enable_mixed_chunk": True},
        verify_steps=120,  # while prompts wait, each chunk brings the running requests one token, without a draft
    ),
    "retraction": _checked("dspark", flags={"max_total_tokens": 1024}, env={"SGLANG_TEST_RETRACT": "1"}),
    "plain-hybrid": Engine("tiny-hybrid"),
    "ready-eager": _ready(flags={**EAGER, "disable_overlap_schedule": True}),
    "chunked-prefill-page-16": _checked("dflash", flags={"chunked_prefill_size": 32, "page_size": 16}),
    "trained-dspark-triton": _backend("dspark", "triton"),
    "trained-dflash-triton": _backend("dflash", "triton"),
    "dspark": Engine("tiny-dense", "dspark", "DSPARK", rounds=True),
    "carryover-dspark-off": _carryover("dspark", env={CARRIED_ROWS_LIMIT: "0"}, rounds=True),
    "ready-carryover": Engine("tiny-hybrid", "ready-carryover", "READY_CARRYOVER", oracle=True, states=True),
    "hybrid-dspark": Engine("tiny-hybrid", "dspark", "DSPARK", rounds=True),
    "ready-zero": Engine("tiny-hybrid", "ready-zero", "READY", rounds=True),
    "dflash": Engine("tiny-dense", "dflash", "DFLASH", rounds=True),
    "carryover-dflash-off": _carryover("dflash", env={CARRIED_ROWS_LIMIT: "0"}, rounds=True),
    "fa3-page-64": _backend("dspark", "fa3", page_size=64),
    "flashinfer-page-16": _backend("dflash", "flashinfer", page_size=16),
}
