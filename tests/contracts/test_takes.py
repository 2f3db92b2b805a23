"""What rungs take, as data of their registration: what it refuses is refused by name, and what it allows is taken."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, product
from typing import Any

import pytest
import torch
from op_kernels import CPU, META, own_registry  # noqa: F401

from rooflab.kernels import _device
from rooflab.kernels.launcher import kernel
from rooflab.kernels.registry import Kernel, get_kernel, kernels, ops
from rooflab.kernels.takes import OF_FIRST, Limit, Takes
from rooflab.reference.spec import SCHEMES

RUNGS = [rung for op in ops() for rung in kernels(op).values() if rung.takes != Takes()]


def given(rung: Kernel) -> Iterator[dict[str, Any]]:
    """The arguments of the op's cases."""
    spec = ops()[rung.op]
    for scheme, case in product(spec.schemes, chain(*spec.cases.values())):
        inputs = spec.make_inputs(case, SCHEMES[scheme], META, 0)
        yield {**{each.name: each.default for each in spec.parameters}, **inputs}


def allowed(rung: Kernel) -> Iterator[dict[str, Any]]:
    """Those that the rung takes."""
    return (inputs for inputs in given(rung) if rung.why_not_args(inputs) is None)


def beyond(limit: Limit) -> list[int]:
    """Sizes next to those that a limit allows."""
    if isinstance(limit, int):
        return [limit + 1]
    sizes = [limit[0] - 1, limit[-1] + 1]
    return [size for size in sizes if size > 0 and size not in limit]


HOLDS = [(rung, text) for rung in RUNGS for text in rung.takes.holds]
VALUES = (None, True, False, -1.0, 4, "ieee", "tf32")


def changed(rung: Kernel, inputs: dict[str, Any], name: str) -> Iterator[dict[str, Any]]:
    """The arguments with other values, sizes or strides under this name."""
    contract = ops()[rung.op].contract
    argument, x, sizes = contract.arguments.get(name), inputs.get(name), contract.sizes(inputs)
    if argument is None:
        known = sizes.get(name, 1)
        values = VALUES if name in inputs else (known + 1, known + 8, 2 * known, 3 * known, 1, 5, 2**20)
        for value in values:
            yield {**inputs, name: value} if name in inputs else resized(rung, inputs, name, value)
    elif x is None:
        yield {**inputs, name: torch.empty([dim.size(sizes) for dim in argument.dims], device=META)}
    else:
        wide = torch.empty((*x.shape, 2), dtype=x.dtype, device=META)[..., 0]
        apart = wide.repeat(2, *[1] * (x.ndim - 1))[::2] if x.ndim else wide
        others = [wide, apart, *([x.mT.contiguous().mT] if x.ndim > 1 else []), *([None] if argument.optional else [])]
        if not argument.dims:
            others += [torch.empty(1, device=META), torch.empty(4, 4, device=META)]
        yield from ({**inputs, name: other} for other in others)


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
    inputs = next(allowed(rung))
    broken = list(refused(rung, inputs))
    assert broken or rung.takes == Takes(holds=rung.takes.holds)
    for name, arguments in broken:
        reason = str(rung.why_not_args({key: x for key, x in arguments.items() if key in rung.accepted}))
        assert reason.startswith(f"UNSUPPORTED: {rung.id}: {name}: expected "), reason


@pytest.mark.parametrize(("rung", "text"), HOLDS, ids=lambda value: value.id if isinstance(value, Kernel) else value)
def test_what_must_hold_is_asked_for_in_its_words(rung: Kernel, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A case, or a case with one change, is refused so."""
    names = [name for name in compile(text, "", "eval").co_names if name not in OF_FIRST]
    for device, inputs in product(("cpu", "cuda"), given(rung)):
        monkeypatch.setattr(_device, "counted", device)
        for arguments in (inputs, *(each for name in names for each in changed(rung, inputs, name))):
            reason = rung.why_not_args({key: x for key, x in arguments.items() if key in rung.accepted})
            if reason is not None and f": expected {rung.takes.holds[text]}, got " in reason.reason:
                return
    raise AssertionError(f"{text}: no change was refused in these words")


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
            assert reason and taking is not None or kernels(op)["naive"].why_not_args(inputs), refusal
            assert taking is None or taking.why_not_args(inputs) is None, refusal


def test_a_launch_names_it_too() -> None:
    a, b = torch.ones(5, 16), torch.ones(16, 16)
    with pytest.raises(ValueError, match="a: expected M of at most 4, got 5; gemm/library takes it"):
        get_kernel("gemm", "gemv").fn(a, b)


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
