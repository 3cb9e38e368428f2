"""The reader's Triton kernels: interpreted on the CPU, against their plain forms; and compiled for GPUs, not run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kernel_cases import CASES


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    """Every case's differences, from a process of its own: Triton looks for the interpreter when it is imported."""
    script = Path(__file__).with_name("kernel_cases.py")
    root = str(script.parents[2])
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, script, "cpu"], env=env, cwd=root, capture_output=True, text=True, timeout=200
    )
    assert run.returncode == 0, run.stderr[-3000:]
    rows = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    return {row.pop("case"): row for row in rows}


@pytest.mark.parametrize("case", CASES)
def test_a_kernel_equals_its_plain_form(found: dict[str, dict[str, Any]], case: str) -> None:
    differences = found[case]
    assert differences["reduce"] < 1e-5 and differences["delta"] < 1e-4
    # Rounding to bfloat16 may go either way: one unit in the last place of values up to 8.
    assert max(differences["read"], differences["fused"]) < (0.04 if case == "bf16-queries" else 1e-5)
    assert "odd" in case or "shared" in case or differences["transposed"] > 1  # what a wrong layout would show


@pytest.mark.parametrize("capability", [90, 100])
def test_kernels_compile_for_hopper_and_blackwell(capability: int) -> None:
    """At the shape of a 27 B target: Triton's compiler needs no GPU, and finds what its interpreter lets pass."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from sglang_ext.ready import kernels

    reduce_types = dict.fromkeys(("temporal", "value_down", "key_down", "out"), "*fp32")
    reduce_types |= {"state_slots": "*i32", "request_slots": "*i64", "layers": "*i64", "eps": "fp32"}
    reduce_types |= {f"stride_{axis}": "i64" for axis in ("layer", "slot", "head", "value", "key")}
    reduce_shape = {"HEADS": 48, "V": 128, "K": 128, "RV": 8, "RK": 8, "BV": 64, "BK": 128, "BRV": 16, "BRK": 16}
    reduce_shape |= {"STAGES": 1, "PRECISION": "tf32x3", "EVICTION": "evict_first"}
    many = {"PRECISION": kernels.MANY.precision, "BV": kernels.MANY.rows, "STAGES": kernels.MANY.stages}
    many |= {"QUERY_HEADS": 48, "EARLY": False} | dict.fromkeys(("BRV", "BRK", "BROWS"), 8)
    fused_types = {**reduce_types, "queries": "*bf16", "out": "*bf16", "rows": "i32"}
    read_types = {"queries": "*bf16", "reduced": "*fp32", "out": "*bf16", "rows_per_request": "i32", "eps": "fp32"}
    read_shape = {"HEADS": 48, "QUERY_HEADS": 48, "PAIRS": 96, "RV": 8, "RK": 8, "BP": 64, "BRV": 8, "BRK": 8}
    for kernel, types, shape, warps in (
        (kernels._reduce_kernel, reduce_types, reduce_shape, 4),
        (kernels._read_kernel, read_types, read_shape, 4),
        (kernels._read_states_kernel, fused_types, reduce_shape | {"QUERY_HEADS": 48, "BROWS": 16, "EARLY": True}, 4),
        (kernels._read_states_kernel, fused_types, reduce_shape | many, kernels.MANY.warps),
    ):
        names = [*types, *shape]
        assert sorted(names) == sorted(kernel.arg_names)
        signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
        source = ASTSource(fn=kernel, signature=signature, constexprs=shape)
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
        assert f"sm_{capability}" in made.asm["ptx"] and len(made.asm["cubin"]) > 1000


def test_the_way_follows_how_many_states_are_read():
    """At the shape of a 27 B target from eight requests on, for few ranks."""
    from sglang_ext.ready import kernels

    few, many = kernels.FEW, kernels.MANY
    assert [kernels.served(requests, 2, 48, 8) for requests in (1, 7, 8, 64)] == [few, few, many, many]
    assert kernels.served(64, 2, 48, 9) == few != many == kernels.served(64, 2, 48, 4)


def test_the_kernels_ask_with_what_they_read(monkeypatch):
    import torch

    from sglang_ext.ready import kernels

    class Asked(Exception):
        pass

    def served(*sizes: int) -> None:
        raise Asked(sizes)

    monkeypatch.setattr(kernels, "served", served)
    value_down, key_down, slots = torch.zeros(2, 3, 4, 16), torch.zeros(2, 3, 6, 16), torch.zeros(5, dtype=torch.int64)
    for call, more in ((kernels.reduce_states, ()), (kernels.read_states, (torch.zeros(5, 7, 2, 3, 6),))):
        with pytest.raises(Asked) as asked:
            call(None, None, slots, value_down, key_down, *more)
        assert asked.value.args == ((5, 2, 3, 6),)
