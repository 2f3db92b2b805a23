"""The cases that rungs take are data of their registration: other cases are refused by name, and these run."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, product
from typing import Any

import pytest
import torch
from op_kernels import CPU, META, own_registry  # noqa: F401

from rooflab.kernels.launcher import kernel
from rooflab.kernels.registry import Kernel, get_kernel, kernels, ops
from rooflab.kernels.takes import Limit, Takes
from rooflab.reference.spec import SCHEMES

RUNGS = [rung for op in ops() for rung in kernels(op).values() if rung.takes != Takes()]


def allowed(rung: Kernel) -> dict[str, Any]:
    """The arguments of a case that the rung takes."""
    spec = ops()[rung.op]
    for scheme, case in product(spec.schemes, chain(*spec.cases.values())):
        inputs = spec.make_inputs(case, SCHEMES[scheme], META, 0)
        if rung.why_not_args(inputs) is None:
            return {**{each.name: each.default for each in spec.parameters}, **inputs}
    raise AssertionError(f"{rung.id} takes no case")


def beyond(limit: Limit) -> list[int]:
    """Sizes next to those that a limit allows."""
    if isinstance(limit, int):
        return [limit + 1]
    sizes = [limit[0] - 1, limit[-1] + 1]
    return [size for size in sizes if size > 0 and size not in limit]


def resized(rung: Kernel, inputs: dict[str, Any], dim: str, size: int) -> dict[str, Any]:
    """The arguments with tensors in which the dimension has this size."""
    if dim in inputs:
        return {**inputs, dim: size}
    contract = ops()[rung.op].contract
    dims = {**contract.sizes(inputs), dim: size}
    made = dict(inputs)
    for name, argument in contract.arguments.items():
        if inputs.get(name) is not None and dim in [each.name for each in argument.dims]:
            made[name] = torch.empty([each.size(dims) for each in argument.dims], dtype=inputs[name].dtype, device=META)
    return made


def refused(rung: Kernel, inputs: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Arguments that each break one entry of the data, with the name that the refusal says."""
    takes, contract = rung.takes, ops()[rung.op].contract
    for name, dtypes in takes.dtypes.items():
        other = next(each for each in (torch.float32, torch.float16, torch.float8_e4m3fn) if each not in dtypes)
        yield name, {**inputs, name: inputs[name].to(other)}
    for name, limit in takes.limits.items():
        named = (each for each, x in contract.arguments.items() if name in [dim.name for dim in x.dims])
        argument = next(named, name)
        for size in beyond(limit):
            yield argument, resized(rung, inputs, name, size)
    for name in takes.off:
        yield name, {**inputs, name: torch.empty(1, device=META)}
    for name in (*takes.whole, *takes.mapped):
        x = inputs[name]
        yield name, {**inputs, name: torch.empty(x.numel() + 1, dtype=x.dtype, device=META)[1:].view(x.shape)}
    for name in takes.contiguous:
        yield name, {**inputs, name: torch.empty_like(inputs[name]).repeat(2, 2)[::2, ::2]}


@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.id)
def test_what_the_data_refuses_is_refused_by_name_and_what_it_allows_is_taken(rung: Kernel) -> None:
    broken = list(refused(rung, allowed(rung)))
    assert broken or rung.takes == Takes(holds=rung.takes.holds)
    for name, arguments in broken:
        reason = str(rung.why_not_args({key: x for key, x in arguments.items() if key in rung.accepted}))
        assert reason.startswith(f"UNSUPPORTED: {rung.id}: {name}: expected "), reason


@pytest.mark.parametrize("op", ops())
def test_a_refusal_names_a_kernel_that_takes_the_arguments(op: str) -> None:
    """Of every kernel, over all cases and dtypes; only where naive refuses them too, there may be none."""
    spec = ops()[op]
    for scheme, case in product(spec.schemes, chain(*spec.cases.values())):
        inputs = spec.make_inputs(case, SCHEMES[scheme], META, 0)
        for rung in kernels(op).values():
            if (refusal := rung.why_not_args(inputs)) is None:
                continue
            reason, _, told = refusal.reason.rpartition("; ")
            taking = get_kernel(*told.removesuffix(" takes it").split("/")) if told.endswith(" takes it") else None
            assert (reason and taking is not None) or kernels(op)["naive"].why_not_args(inputs), refusal
            assert taking is None or taking.why_not_args(inputs) is None, refusal


@pytest.mark.usefixtures("own_registry")
@pytest.mark.parametrize("below", ["nobody", "mine"])
def test_a_rung_over_itself_or_over_nobody_is_refused_all_the_same(below: str) -> None:
    def mine(x: Any) -> Any:
        return x.softmax(-1)

    kernel(backend="torch", op="softmax", over=below, limits={"H": 8})(mine)
    refusal = get_kernel("softmax", "mine").why_not_args({"x": torch.ones(2, 9)})
    assert str(refusal).endswith("x: expected H of at most 8, got 9; softmax/library takes it")


def test_a_name_that_the_op_lacks_is_refused() -> None:
    def wrong(x: Any, out: Any) -> None:
        """Never registered."""

    for given, words in (({"limits": {"J": 8}}, "J: expected an argument or a dimension"), ({"limts": {}}, "'limts'")):
        with pytest.raises(TypeError, match=words):
            kernel(backend="torch", op="softmax", **given)(wrong)


def test_an_address_is_looked_at_in_every_launch_also_of_a_layout_that_was_taken() -> None:
    rung, spec = get_kernel("flash_attention", "tma"), ops()["flash_attention"]
    inputs = spec.make_inputs(spec.cases["smoke"][0].but(T=16, S=16), SCHEMES["fp16"], CPU, 0)
    rung.fn(**inputs)
    for name in (*rung.takes.whole, *rung.takes.mapped):
        x = inputs[name]
        moved = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)
        with pytest.raises(ValueError, match=f"{name}: expected"):
            rung.fn(**{**inputs, name: moved})
