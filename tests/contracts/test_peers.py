"""The peers of ops over rows: the arguments that they get, the input that they refuse by name, and their formulas."""

from __future__ import annotations

import inspect
import sys
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from op_kernels import CPU, assert_right

from rooflab.bench.compile.cases import KernelCase
from rooflab.bench.emulate.calls import call
from rooflab.kernels import registry
from rooflab.kernels.registry import get_kernel, kernels
from rooflab.reference.spec import SCHEMES

ROWS = ("rmsnorm", "fused_add_rmsnorm", "layernorm", "softmax", "silu_and_mul", "gelu_and_mul", "embedding")
Tensor = torch.Tensor


def quack_rmsnorm(
    x: Tensor,
    weight: Any = None,
    bias: Any = None,
    residual: Any = None,
    out_dtype: Any = None,
    residual_dtype: Any = None,
    eps: float = 1e-6,
    store_rstd: bool = False,
    weight_offset: float = 0.0,
) -> Any:
    """`rmsnorm_fwd` of quack-kernels 0.6.5."""
    assert bias is out_dtype is residual_dtype is None and not store_rstd
    total = x if residual is None else x + residual
    scaled = total.float() * torch.rsqrt(total.float().square().mean(-1, keepdim=True) + eps)
    return (scaled * (weight.float() + weight_offset)).to(x.dtype), total, None


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


@pytest.mark.more
@pytest.mark.timeout(300)  # compilations
@pytest.mark.parametrize("op", ["rmsnorm", "fused_add_rmsnorm", "layernorm", "softmax"])
def test_liger_itself_computes_what_its_adapters_say(op: str) -> None:
    """The package's own kernels, compiled for sm_90a and run in the emulator, with every option that they have."""
    spec, kernel = registry.get_op(op), get_kernel(op, "liger")
    taken = [{name: value} for name, value in OPTIONS.items() if name in spec.optional and name in kernel.accepted]
    for scheme, more in product((SCHEMES["fp32"], SCHEMES["bf16"]), ({}, *taken)):
        answer = call(KernelCase(op, "liger", spec.cases["smoke"][0].but(**more), scheme)).answer
        assert answer["status"] == "OK" and answer["launches"], (scheme.name, more, answer["reason"])


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
