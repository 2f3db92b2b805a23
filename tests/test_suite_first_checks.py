"""First checks on a card reach every kernel, in a case and dtype that it takes: one that none has reached is never
timed."""

from __future__ import annotations

from rooflab.bench.calls.selection import first_taken
from rooflab.bench.check.isolated import FirstRun
from rooflab.bench.suite import measures, tasks
from rooflab.bench.suite.entries import Context
from rooflab.kernels import registry
from rooflab.kernels._contract import Refusal
from rooflab.kernels.registry import Kernel

EVERY = [kernel for op in registry.ops() for kernel in registry.kernels(op).values()]
RISKY = [kernel for kernel in EVERY if kernel.backend not in registry.CPU_BACKENDS]


def test_every_kernel_has_a_case_and_a_dtype_that_it_takes():
    for kernel in RISKY:
        case, scheme = first_taken(kernel, "bf16")
        spec = registry.get_op(kernel.op)
        small = case in (*spec.cases["smoke"], *spec.cases["edge"])
        assert scheme.name in spec.schemes, kernel.id
        assert small or kernel.role == "peer", f"{kernel.id}: an oracle of a model's size takes seconds"


def test_the_default_dtype_comes_first_and_the_ops_own_after_it():
    def chosen(op: str, name: str, default: str = "bf16") -> str:
        return first_taken(registry.get_kernel(op, name), default)[1].name

    assert chosen("gemm", "gemv") == chosen("rmsnorm", "fused") == "bf16"
    assert chosen("gemm", "tma", "fp32") != "fp32" and chosen("flash_attention", "fp8") == "fp8_e4m3"
    assert chosen("gemm_w4a16", "gemv").startswith("w4a16")
    assert first_taken(registry.get_kernel("gemm", "gemv"), "bf16")[0]["M"] <= 4


def test_what_is_right_is_verified_and_what_is_not_installed_takes_no_process(monkeypatch, tmp_path):
    tried: dict[str, str] = {}

    def in_own_process(kernel, case, scheme, timeout_s, *, device):
        tried[kernel.id] = scheme.name
        return FirstRun("WRONG", "off") if kernel.name == "swap_ab" else FirstRun("OK", "")

    def why_not_here(self, device):
        return Refusal("UNAVAILABLE", "it is not installed") if self.role == "peer" else None

    monkeypatch.setattr("rooflab.bench.check.isolated.first_in_own_process", in_own_process)
    monkeypatch.setattr(Kernel, "why_not_here", why_not_here)
    ops = ("gemm", "gemm_fp8", "gemm_w4a16", "flash_attention")
    found = tasks.first_checks(Context("first", tmp_path, "cuda", False, 100.0), ops)
    ours = {kernel.id for kernel in RISKY if kernel.op in ops and kernel.role != "peer"}
    assert tried.keys() == ours and tried["gemm_fp8/promoted"] == tried["flash_attention/fp8"] == "fp8_e4m3"
    assert list(found.excluded) == ["gemm/swap_ab"] and ours - {"gemm/swap_ab"} <= set(found.verified)
    assert found.figures["not here"] == sum(k.role == "peer" and k.op in ops for k in RISKY)


def test_models_shapes_are_timed_in_a_dtype_that_the_op_has(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(
        measures, "measure_op", lambda spec, kernels, cases, scheme, device, **_: asked.append(scheme.name) or iter(())
    )
    for op in ("gemm", "gemm_fp8", "gemm_w8a16"):
        kernels, cases = list(registry.kernels(op).values()), registry.get_op(op).get_cases("smoke")[:1]
        measures.measure(Context("bench", tmp_path, "cpu", False, 100.0), op, kernels, cases)
    assert asked == ["fp32", "fp8_e4m3", "w8a16"]
