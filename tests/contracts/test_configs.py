"""Configs are data: a tunable kernel registers them, a launch takes one, and a config that cannot run is refused."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from dataclasses import dataclass, make_dataclass

import pytest
import torch
from compiled_sizes import compiled
from op_kernels import own_registry  # noqa: F401
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from rooflab.bench.compile.cases import KernelCase
from rooflab.bench.core.call import packed
from rooflab.bench.core.check import check_kernel
from rooflab.bench.emulate.calls import call
from rooflab.kernels import registry
from rooflab.kernels import tuning as choices
from rooflab.kernels._cuda import CudaKernel
from rooflab.kernels.tuning import Tuning
from rooflab.reference.spec import SCHEMES, Case
from rooflab.roofline.occupancy import HOPPER

CPU = torch.device("cpu")
BF16, FP32 = SCHEMES["bf16"], SCHEMES["fp32"]
TUNABLE = [kernel for op in registry.ops() for kernel in registry.kernels(op).values() if kernel.tuning is not None]
every_tunable_kernel = pytest.mark.parametrize("kernel", TUNABLE, ids=lambda kernel: kernel.id)


def usual(kernel):
    """bf16, or the first of the op's schemes; of those in which the kernel takes a smoke case."""
    spec, meta = registry.get_op(kernel.op), torch.device("meta")
    names = (*(name for name in spec.schemes if name == "bf16"), *spec.schemes)
    tried = ((name, spec.make_inputs(case, SCHEMES[name], meta, 0)) for name in names for case in spec.cases["smoke"])
    return next(SCHEMES[name] for name, inputs in tried if kernel.why_not_args(inputs) is None)


def cases_of(kernel):
    """Every case of every suite that the kernel takes and that launches something."""
    spec = registry.get_op(kernel.op)
    for case in dict.fromkeys(case for suite in spec.cases.values() for case in suite):
        if kernel.why_not_args(spec.make_inputs(case, usual(kernel), torch.device("meta"), 0)) is None:
            yield case


def scheme_of(kernel, case):
    """fp32, which the interpreter computes in every kernel, or fp16 for those that do not take it; else the usual."""
    spec = registry.get_op(kernel.op)
    tried = (scheme for scheme in (FP32, SCHEMES["fp16"]) if scheme.name in spec.schemes)
    taken = (scheme for scheme in tried if kernel.why_not_args(spec.make_inputs(case, scheme, CPU, 0)) is None)
    return next(taken, None) or usual(kernel)


@every_tunable_kernel
def test_heuristics_are_legal_and_configs_are_data(kernel):
    """Also in the dtypes that it refuses: a record of the refusal has the config."""
    for case in cases_of(kernel):
        for scheme in (SCHEMES[name] for name in registry.get_op(kernel.op).schemes):
            config = kernel.tuning.heuristic(case, scheme)
            assert kernel.tuning.is_legal(config, case, scheme), f"{case.id} {scheme.name}"
    found = kernel.tunable.legal_configs(case, usual(kernel))
    assert found[0] == kernel.tuning.heuristic(case, usual(kernel)) and len(found) > 3 and len(set(found)) == len(found)
    for config in found:
        values = json.loads(json.dumps(dataclasses.asdict(config)))
        assert kernel.tunable.make_config(values) == config


def work(spec, case):
    """FLOPs and bytes of a case, of inputs with no values."""
    cost = spec.cost_of(spec.make_inputs(case, SCHEMES[spec.schemes[0]], torch.device("meta"), 0))
    return cost.flops + cost.bytes


def size(config):
    """The product of a config's sizes: what it takes to compile and to emulate it."""
    return math.prod(value for name, value in dataclasses.asdict(config).items() if name.startswith(("block", "tile")))


@pytest.mark.sampled(0, 16)
@every_tunable_kernel
def test_a_config_that_no_heuristic_chose_gives_the_right_result(kernel):
    """The smallest of six drawn at random, on the least work of the smoke cases."""
    spec, taken = registry.get_op(kernel.op), set(cases_of(kernel))
    case = min((case for case in spec.cases["smoke"] if case in taken), key=lambda case: work(spec, case))
    scheme = scheme_of(kernel, case)
    found = kernel.tunable.legal_configs(case, scheme)[1:]  # the heuristic's comes first
    config = min(random.Random(0).sample(found, min(6, len(found))), key=size)
    if kernel.why_not_here(CPU) is None and scheme.activation in (torch.float32, torch.float16):
        result = check_kernel(kernel.with_config(config), spec, case, scheme, planted=False)
        assert result.status == "OK", f"{config}: {result.describe()}"
    else:
        answer = call(KernelCase(kernel.op, kernel.name, case, scheme, config=config)).answer
        assert answer["status"] == "OK" and not answer["races"], f"{config}: {answer['reason']}"
        assert answer["of"] >= kernel.tuning.footprint(config, case, scheme).ctas, config


@pytest.fixture
def launched(monkeypatch):
    """`launched(kernel, case, scheme, **more)`: what the launcher tells Triton by name; nothing of CUDA C++."""

    def read(kernel, case, scheme, **more):
        told = {}
        for kind in (JITFunction, InterpretedFunction):
            monkeypatch.setattr(kind, "__getitem__", lambda self, grid: lambda *args, **options: told.update(options))
        monkeypatch.setattr(CudaKernel, "__call__", lambda self, *args, **options: None)
        spec = registry.get_op(kernel.op)
        inputs = spec.make_inputs(case, scheme, CPU, 0)
        if kernel.prepare is not None:
            inputs[spec.prepared] = packed(kernel.prepare, spec.prepared, inputs)
        kernel.fn(**{key: value for key, value in inputs.items() if key in kernel.accepted}, **more)
        return {key.lower(): value for key, value in told.items()}

    return read


@every_tunable_kernel
def test_a_launch_takes_its_heuristic_or_the_config_it_is_given(kernel, launched):
    spec = registry.get_op(kernel.op)
    for case in sorted(cases_of(kernel), key=lambda case: work(spec, case))[:3]:
        scheme = scheme_of(kernel, case)
        options = launched(kernel, case, scheme)
        wanted = dataclasses.asdict(kernel.tuning.heuristic(case, scheme))
        assert options == {} or {key: options[key] for key in wanted if key in options} == {
            key: wanted[key] for key in wanted if key in options
        }, case.id
        for config in kernel.tunable.legal_configs(case, scheme)[-2:]:
            options = launched(kernel, case, scheme, config=config)
            shared = {key: value for key, value in dataclasses.asdict(config).items() if key in options}
            assert not options or (shared and shared == {key: options[key] for key in shared})


@pytest.fixture
def tuned_file(monkeypatch):
    """`tuned_file(entries)` makes them what every op's `choices.json` says of the CPU."""

    def write(entries):
        monkeypatch.setattr(choices, "_load", lambda path: {"cpu": entries})

    return write


def test_a_launch_takes_what_a_record_found(tuned_file, launched):
    kernel = registry.get_kernel("gemm", "pipelined")
    case = Case(M=16, N=64, K=64, layout="NN", bias=False)
    found = kernel.tuning.config_type(16, 128, 32, num_warps=8, num_stages=3, group_m=1)
    configs = {"pipelined": dataclasses.asdict(found)}
    entry = {"kernel": "library", "record": "r", "scheme": "fp32", "configs": configs}
    tuned_file({"rows:16": entry})
    assert kernel.config_for(case, FP32, CPU) == found and launched(kernel, case, FP32)["block_n"] == 128
    assert kernel.config_for(case, BF16, CPU) == kernel.tuning.heuristic(case, BF16), "found in another dtype"
    assert kernel.config_for(case.but(M=17), FP32, CPU) == kernel.tuning.heuristic(case, FP32), "another bucket's"
    assert kernel.config_for(case, FP32, torch.device("meta")) == kernel.tuning.heuristic(case, FP32), "no card"
    tuned_file({"rows:16": {"kernel": "library", "record": "r"}})
    assert kernel.config_for(case, FP32, CPU) == kernel.tuning.heuristic(case, FP32), "nothing was tuned"


def test_a_tuned_config_that_does_not_fit_the_case_is_not_taken(tuned_file):
    kernel = registry.get_kernel("flash_attention", "online")
    config = kernel.tuning.config_type(128, 128, num_warps=8, num_stages=3)
    configs = {"online": dataclasses.asdict(config)}
    tuned_file({"rows:512": {"kernel": "online", "record": "r", "scheme": "bf16", "configs": configs}})
    case = Case(B=1, T=512, S=512, H=4, H_kv=4, D=128, causal=True)
    assert kernel.config_for(case, BF16, CPU) == config
    assert kernel.config_for(case.but(D=256), BF16, CPU) == kernel.tuning.heuristic(case.but(D=256), BF16)


def test_a_tuned_config_of_other_fields_is_refused_by_name(tuned_file):
    tuned_file({"rows:1": {"kernel": "fused", "record": "r", "scheme": "fp32", "configs": {"fused": {"warps": 3}}}})
    with pytest.raises(ValueError, match="config: expected block_t, num_warps, got warps"):
        registry.get_kernel("rmsnorm", "fused").config_for(Case(T=1, H=64, eps=1e-6), FP32, CPU)


def test_with_config_pins_kernel_and_traffic():
    kernel = registry.get_kernel("gemm", "tensor_core")
    spec = registry.get_op("gemm")
    inputs = spec.make_inputs(Case(M=512, N=64, K=64, layout="NN", bias=False), BF16, torch.device("meta"), 0)
    narrow = kernel.tuning.config_type(16, 64, 64, num_warps=4, group_m=1)
    pinned = kernel.with_config(narrow)
    assert pinned.id == kernel.id and "out" in pinned.accepted
    assert pinned.traffic_of(inputs).bytes > kernel.traffic_of(inputs).bytes
    with pytest.raises(ValueError, match="^config: expected"):
        kernel.with_config(registry.get_kernel("rmsnorm", "fused").tuning.heuristic(Case(T=1, H=8)))


BOUNDARY = [
    ("gemm", "pipelined", Case(M=512, N=512, K=512, layout="NT", bias=False)),
    ("flash_attention", "online", Case(B=1, T=512, S=512, H=4, H_kv=4, D=128, causal=True)),
]


@pytest.mark.more
def test_what_is_called_illegal_cannot_run():
    """Legal exactly where the compiled kernel fits, and the arithmetic at most a quarter below what it really takes: of
    the ten configs nearest to what fits, on either side of it, the smallest tiles, which compile soonest."""
    requests = []
    for op, name, case in BOUNDARY:
        tuning = registry.get_kernel(op, name).tuning
        needed = {config: tuning.footprint(config, case, BF16) for config in tuning.configs(case, BF16)}
        near = sorted(needed, key=lambda config: abs(needed[config].shared_bytes - HOPPER.shared_bytes_per_cta))
        for fits in (True, False):
            config = min([config for config in near if needed[config].fits is fits][:10], key=size)
            requests.append(KernelCase(op, name, case, BF16, config=config))
    for request, info in compiled(requests):
        said = registry.get_kernel(request.op, request.kernel).tuning.footprint(request.config, request.case, BF16)
        what = f"{request.op}: {request.config}"
        assert 0.75 * info.shared_bytes <= said.shared_bytes <= info.shared_bytes, what
        assert said.fits or info.shared_bytes > HOPPER.shared_bytes_per_cta or info.stack_bytes, f"{what} would run"
        assert said.registers <= info.registers or info.stack_bytes, f"{what}: fewer than said"
        assert info.threads == said.threads and said.ctas == info.grid[0] * (info.grid[1] if len(info.grid) > 1 else 1)


@dataclass(frozen=True)
class Chunk:
    rows: int


def norm(x, weight, eps=1e-6, *, config=None):
    return x


@pytest.mark.usefixtures("own_registry")
def test_a_tunable_kernel_registers_every_part():
    parts = {
        "config_type": Chunk,
        "configs": lambda case, scheme=BF16: (Chunk(1),),
        "rule": lambda config, case, scheme=BF16: True,
        "heuristic": lambda case, scheme=BF16: Chunk(1),
    }

    def attempt(fn=norm, tunable=True, **changes):
        options = {"tuning": Tuning(**{**parts, **changes})} if tunable else {}
        registry.register(op="rmsnorm", name="test_part", role="optimized", backend="torch", **options)(fn)

    for fn, changes, message in [
        (norm, {"tunable": False}, "expected both tuning and a keyword-only argument config=None, or neither"),
        (norm, {"config_type": make_dataclass("Thawed", ["rows"])}, "expected Thawed to be a frozen dataclass"),
        (norm, {"config_type": make_dataclass("Nested", [("rows", tuple)], frozen=True)}, "Nested.rows to be a JSON"),
        (norm, {"config_type": dict}, "expected dict to be a frozen dataclass"),
        (lambda x, weight, eps=1e-6: x, {}, "expected both tuning and a keyword-only argument config=None, or neither"),
        (lambda x, weight, eps=1e-6, *, config=1: x, {}, "a keyword-only argument config=None, or neither"),
    ]:
        with pytest.raises(TypeError, match=message):
            attempt(fn, **changes)
    attempt()
    kernel = registry.get_kernel("rmsnorm", "test_part")
    assert kernel.tuning is not None and kernel.accepted == {"x", "weight", "eps", "config"}
    assert registry.get_kernel("rmsnorm", "naive").tuning is None
