"""The peers of ops over rows: what they are given, what they refuse by name, and the formulas that torch compiles."""

from __future__ import annotations

import inspect
import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from op_kernels import CPU, assert_right, python_without_interpreter

from rooflab.kernels import registry
from rooflab.kernels.registry import get_kernel, kernels
from rooflab.reference.spec import SCHEMES

ROWS = ("rmsnorm", "fused_add_rmsnorm", "layernorm", "softmax", "silu_and_mul", "gelu_and_mul", "embedding")
Tensor = torch.Tensor


def _norm(x: Tensor, weight: Tensor, eps: float, offset: float, first: bool) -> Tensor:
    scaled = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    return ((scaled.to(x.dtype).float() if first else scaled) * (weight.float() + offset)).to(x.dtype)


def quack_rmsnorm(
    x: Tensor, weight: Any = None, bias: Any = None, residual: Any = None, out_dtype: Any = None,
    residual_dtype: Any = None, eps: float = 1e-6, store_rstd: bool = False, weight_offset: float = 0.0,
) -> Any:  # fmt: skip
    """`rmsnorm_fwd` of quack-kernels 0.6.5."""
    assert bias is out_dtype is residual_dtype is None and not store_rstd
    total = x if residual is None else x + residual
    return _norm(total, weight, eps, weight_offset, False), total, None


FAKES = {"quack.rmsnorm": {"rmsnorm_fwd": quack_rmsnorm}, "quack.softmax": {"softmax_fwd": lambda x: x.softmax(-1)}}
OPTIONS = {"round_first": True, "weight_offset": 1.0}
PEERS = [kernel for op in ROWS for kernel in kernels(op).values() if kernel.role == "peer"]


@pytest.mark.parametrize("kernel", [k for k in PEERS if k.name == "quack"], ids=lambda kernel: kernel.id)
def test_what_a_package_is_given(kernel: registry.Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right results with every option that the peer has, from functions with the packages' own arguments."""
    for name, functions in FAKES.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**functions))
    spec, scheme = registry.get_op(kernel.op), SCHEMES["fp32"]
    (case,) = spec.cases["smoke"]
    taken = {name: value for name, value in OPTIONS.items() if name in spec.optional and name in kernel.accepted}
    for more in ({}, *({name: value} for name, value in taken.items())):
        inputs = spec.make_inputs(case.but(**more), scheme, CPU, 0)
        assert_right(spec, kernel(**inputs), inputs, scheme)
        with pytest.raises(ValueError, match="x: expected a contiguous tensor, got strides"):
            kernel(**inputs | {"x": torch.zeros(8, 128)[:, :64]})


LIGER = """
import json
import torch
from rooflab.bench.emulate import emulating
from rooflab.kernels import registry
from rooflab.reference.spec import SCHEMES

verdicts = {}
for op in ("rmsnorm", "fused_add_rmsnorm", "layernorm", "softmax"):
    spec, kernel = registry.get_op(op), registry.get_kernel(op, "liger")
    (case,) = spec.cases["smoke"]
    taken = [{name: value} for name, value in OPTIONS.items() if name in spec.optional and name in kernel.accepted]
    for scheme in (SCHEMES["fp32"], SCHEMES["bf16"]):
        for more in ({}, *taken):
            inputs = spec.make_inputs(case.but(**more), scheme, torch.device("cpu"), 0)
            with emulating(races=False) as run:
                found = kernel.fn(**inputs)
            outputs = found if isinstance(found, tuple) else (found,)
            judged = spec.judge(outputs, spec.oracle(inputs), inputs, scheme)
            verdicts[f"{op} {scheme.name} {more}"] = [bool(run.launches)] + [each.passed for each in judged]
print(json.dumps(verdicts))
"""


@pytest.mark.more
@pytest.mark.timeout(300)  # compilations
def test_liger_itself_computes_what_its_adapters_say() -> None:
    """The package's own kernels, compiled for sm_90a and run in the emulator, with every option that they have."""
    verdicts = json.loads(python_without_interpreter("-c", LIGER.replace("OPTIONS", repr(OPTIONS))))
    assert len(verdicts) >= 12 and all(all(passed) for passed in verdicts.values()), verdicts


@pytest.mark.parametrize("op", ROWS)
def test_the_formula_that_torch_compiles_is_one_graph_and_right(op: str) -> None:
    """Traced by torch.compile with `fullgraph`; the code that it then makes needs a CUDA device."""
    spec, scheme = registry.get_op(op), SCHEMES["fp32"]
    formula = inspect.unwrap(get_kernel(op, "compiled").fn)
    torch._dynamo.reset()
    traced = torch.compile(formula, fullgraph=True, dynamic=False, backend="aot_eager")
    case = spec.cases["smoke"][0]
    for more in ({}, OPTIONS) if spec.optional else ({},):
        inputs = spec.make_inputs(case.but(**more), scheme, CPU, 0)
        options = {name: more.get(name, value) for name, value in spec.optional.items()}
        assert_right(spec, traced(**inputs | options), inputs, scheme)
    torch._dynamo.reset()
    kernel = get_kernel(op, "compiled")
    assert (kernel.role, kernel.backend, kernel.devices) == ("peer", "torch", ("cuda",))
