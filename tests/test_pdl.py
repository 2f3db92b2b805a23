"""Programmatic dependent launch: a kernel waits for the one before it, and asks for constants first; what a layer
launches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rooflab.bench.compile.static import compile_kernel
from rooflab.bench.emulate.calls import call
from rooflab.bench.predict.cases import Target
from rooflab.bench.suite.decode_layer import PLANS, plan_targets
from rooflab.engine.llm import LLM
from rooflab.kernels import registry
from rooflab.reference.spec import SCHEMES, Case
from rooflab.roofline.architecture import get_architecture

BF16 = SCHEMES["bf16"]
FILE = """
from functools import wraps
from rooflab.kernels._pdl import pdl
from rooflab.kernels.registry import get_kernel, register
fused = get_kernel("{op}", "fused")
@register(op="{op}", name="dependent", role="optimized", backend="triton", tuning=fused.tuning)
@wraps(fused.fn)
def dependent(*args, **kwargs):
    with pdl():
        return fused.fn(*args, **kwargs)
"""
ROPE = "T=3,H=4,H_kv=2,D=64,rotary=64,max_position=64,num_blocks=4,block_size=16,skipped=1,interleaved=false"


@pytest.mark.timeout(300)  # ten seconds until the emulator's processes are there
@pytest.mark.parametrize(
    ("op", "case", "constants"),
    [
        ("rope_and_cache", f"{ROPE},norm_eps=0.01", (5, 7)),  # slots twice: the threads take other rows of v than of k
        ("fused_add_rmsnorm", "T=3,H=1024,eps=0.01", (1,)),
        ("silu_and_mul", "T=3,I=1024", (0,)),
    ],
)
def test_a_dependent_kernel_waits_after_what_no_kernel_writes_and_before_all_else(
    op: str, case: str, constants: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry._kernels, op, dict(registry.kernels(op)))
    file = tmp_path / "dependent.py"
    file.write_text(FILE.format(op=op))
    registry.load_file(file)
    (plain,) = compile_kernel(op, "fused", Case.parse(case), BF16)
    (dependent,) = compile_kernel(op, "dependent", Case.parse(case), BF16, file=file)
    assert "ACQBULK" not in plain.sass
    before, *rest = dependent.sass.split("ACQBULK")
    # One wait on each way through the kernel, which has so many loads before it, no store, and then its trigger.
    ways = [part.rpartition("EXIT")[2] for part in (before, *rest[:-1])]
    assert [way.count("LDG") for way in ways] == list(constants) and "STG" not in "".join(ways)
    assert all(part.index("PREEXIT") < part.index("STG") and "LDG" in part for part in rest)
    answer = call(Target(op, "dependent", Case.parse(case), BF16, file)).answer
    assert answer["status"] == "OK" and not answer["races"], answer["reason"]


def test_the_plans_of_the_decode_study_launch_less_and_less() -> None:
    arch = get_architecture("qwen3-0.6b")
    counts = {plan: sum(calls for _, calls in plan_targets(arch, 4, plan)) for plan in PLANS[2:]}
    assert list(counts.values()) == [6, 4, 3]
    kernels = {plan: {target.kernel for target, _ in plan_targets(arch, 4, plan)} for plan in PLANS}
    assert (
        kernels["naive"] == {"naive"} and kernels["library"] == {"library", "naive"} and kernels[PLANS[3]] == {"fused"}
    )


def test_pdl_is_refused_where_no_graph_or_no_hopper_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ValueError, match=r"pdl: expected CUDA graphs on a GPU of compute capability 9.0 or .*, got cpu"
    ):
        LLM("smollm2-135m", dummy=True, device="cpu", pdl=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    with pytest.raises(ValueError, match=r"pdl: .*, got compute capability 8.0"):
        LLM("smollm2-135m", dummy=True, device="cuda", pdl=True)
    with pytest.raises(ValueError, match="pdl: .*, got enforce_eager"):
        LLM("smollm2-135m", dummy=True, device="cuda", enforce_eager=True, pdl=True)
