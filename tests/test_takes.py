"""What rungs take, as data of their registration: what it refuses is refused by name, and what it allows is taken."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, product
from typing import Any

import pytest
import torch
from op_kernels import META

from rooflab.kernels.launcher import kernel
from rooflab.kernels.registry import Kernel, kernels, ops
from rooflab.kernels.takes import Limit, Takes
from rooflab.reference.spec import SCHEMES

RUNGS = [rung for op in ops() for rung in kernels(op).values() if rung.takes != Takes()]


def allowed(rung: Kernel) -> Iterator[dict[str, Any]]:
    """The arguments of cases that the rung takes."""
    spec = ops()[rung.op]
    for scheme, case in product(spec.schemes, chain(*spec.cases.values())):
        inputs = spec.make_inputs(case, SCHEMES[scheme], META, 0)
        if rung.why_not_args(inputs) is None:
            yield {**{each.name: each.default for each in spec.parameters}, **inputs}


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
    for name in takes.mapped:
        x = inputs[name]
        yield name, {**inputs, name: torch.empty(x.numel() + 1, dtype=x.dtype, device=META)[1:].view(x.shape)}
    for name in takes.contiguous:
        yield name, {**inputs, name: torch.empty_like(inputs[name]).repeat(2, 2)[::2, ::2]}


@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.id)
def test_what_the_data_refuses_is_refused_by_name_and_what_it_allows_is_taken(rung: Kernel) -> None:
    inputs = next(allowed(rung))
    broken = list(refused(rung, inputs))
    assert broken
    for name, arguments in broken:
        reason = str(rung.why_not_args({key: x for key, x in arguments.items() if key in rung.accepted}))
        assert reason.startswith(f"UNSUPPORTED: {rung.id}: {name}: expected "), reason


def test_a_name_that_the_op_lacks_is_refused() -> None:
    def wrong(x: Any, out: Any) -> None:
        """Never registered."""

    with pytest.raises(TypeError, match="J: expected an argument or a dimension of the op"):
        kernel(backend="torch", op="softmax", limits={"J": 8})(wrong)
    with pytest.raises(TypeError, match="'limts'"):
        kernel(backend="torch", op="softmax", limts={"H": 8})(wrong)


def test_a_kernel_with_such_data_is_a_key() -> None:
    assert len({rung: rung.id for rung in RUNGS}) == len(RUNGS)
