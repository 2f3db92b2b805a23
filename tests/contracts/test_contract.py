"""The contract of an op's tensors: every kernel refuses every argument that breaks it, with the same message."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from op_kernels import CPU, META, here

from rooflab.bench.core.call import packed
from rooflab.kernels.registry import Kernel, kernels, ops
from rooflab.reference.contract import ANY_SHAPE, PACKED_TEXT, Argument, Contract, Dim
from rooflab.reference.spec import SCHEMES, as_tuple

BOUND = {spec.name: spec for spec in ops().values() if spec.contract is not None}
KERNELS = [kernel for op in BOUND for kernel in kernels(op).values() if kernel.role != "peer"]
HERE = {kernel.id for op in BOUND for kernel in here(op)}


def calls(kernel: Kernel) -> Iterator[dict[str, Any]]:
    """Arguments of the cases with the most tensors that together have each one that the kernel takes."""
    spec, seen = BOUND[kernel.op], set[str]()
    found = []
    for scheme, case in product(spec.schemes, (*spec.cases["smoke"], *spec.cases["edge"])):
        priced = spec.make_inputs(case, SCHEMES[scheme], META, 0)  # makes no values
        tensors = {name for name, x in priced.items() if isinstance(x, torch.Tensor) and name in kernel.accepted}
        if all(priced[name].numel() for name in tensors) and kernel.why_not_args(priced) is None:
            found.append((tensors, scheme, case))
    for tensors, scheme, case in sorted(found, key=lambda one: -len(one[0])):
        if not tensors <= seen:
            seen |= tensors
            made = spec.make_inputs(case, SCHEMES[scheme], CPU, 0)
            yield packed_for(kernel, {name: value for name, value in made.items() if name in kernel.accepted})


def packed_for(kernel: Kernel, inputs: dict[str, Any]) -> dict[str, Any]:
    prepared = BOUND[kernel.op].prepared
    if kernel.prepare is None or inputs.get(prepared) is None:
        return inputs
    return {**inputs, prepared: packed(kernel.prepare, prepared, inputs)}


def wrong_tensors(name: str, argument: Argument, x: torch.Tensor, shown: set[str]) -> Iterator[tuple[Any, str]]:
    """Values for one argument that break what the op asks of it, and how the refusal goes on behind its name.

    `shown` are the dimensions that arguments before it show.
    """
    yield "text", "expected a tensor, got str"
    if argument.shape != ANY_SHAPE:
        yield x[None], r"expected shape \("
    for axis, dim in enumerate(argument.dims):
        longer = torch.cat((x, x.narrow(axis, 0, 1)), dim=axis) if x.shape[axis] else x
        if dim.name is None or dim.name in shown or dim.times > 1:
            yield longer, r"expected shape \("
    other = torch.int16 if isinstance(argument.dtype, str) or torch.int16 not in argument.dtype else torch.bool
    yield x.to(other), rf"expected .*, got {other}"
    if argument.layout != "any" and x.ndim and x.shape[-1] > 1:
        yield x.repeat_interleave(2, -1)[..., ::2], "expected (stride 1 in the last dimension|a contiguous tensor)"


def wrong_outs(made: tuple[torch.Tensor, ...]) -> Iterator[tuple[Any, str]]:
    """Outputs that cannot take the results `made`."""

    def whole(first: Any) -> Any:
        return first if len(made) == 1 else (first, *made[1:])

    first = made[0]
    yield whole(torch.cat((first, first), dim=-1)), r"out: expected shape \("
    yield whole(first.to(torch.int16)), "out: expected torch"
    yield whole(first.repeat_interleave(2, -1)[..., ::2]), "out: expected (stride 1|a contiguous tensor)"
    if first.shape[0] > 1:
        yield (
            whole(first[:1].expand_as(first)),
            "out: expected (elements with memory of their own|a contiguous tensor|stride 1)",
        )
    yield (*made, first), rf"out: expected {len(made)} tensors, got {len(made) + 1}"


def refusals(kernel: Kernel, inputs: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Changes to one argument each, and the words that refuse them."""
    shown: set[str] = set()
    for name, argument in BOUND[kernel.op].contract.arguments.items():
        if kernel.prepare is not None and name == BOUND[kernel.op].prepared:
            wanted = "a tensor" if isinstance(inputs[name], torch.Tensor) else PACKED_TEXT
            yield {name: "text"}, f"{name}: expected ({wanted}|{PACKED_TEXT}), got str"
            continue
        if inputs.get(name) is not None:
            for value, words in wrong_tensors(name, argument, inputs[name], shown):
                yield {name: value}, f"{name}: {words}"
        shown |= {dim.name for dim in argument.dims}


def results(kernel: Kernel, inputs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """Tensors that the kernel could return."""
    spec = BOUND[kernel.op]
    contract = spec.contract
    unlike = spec.prepared if kernel.prepare is not None and isinstance(inputs[spec.prepared], torch.Tensor) else None
    dims = contract.sizes({name: value for name, value in inputs.items() if name != unlike})
    wanted = [result for result in contract.results.values() if result.wanted(inputs)]
    return tuple(torch.ones([dim.size(dims) for dim in each.dims]).to(each.dtype_of(inputs)) for each in wanted)


@pytest.mark.sampled(15, 30)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.id)
def test_each_argument_that_breaks_the_contract_is_refused(kernel: Kernel) -> None:
    for inputs in calls(kernel):
        check_refusals(kernel, inputs)


@pytest.mark.parametrize("op", BOUND)
def test_a_reference_spreads_nothing(op: str) -> None:
    """One row in place of several is refused, in the words of the kernels."""
    spec = BOUND[op]
    for inputs in calls(kernels(op)["naive"]):
        shown: set[str] = set()
        for name, argument in spec.contract.arguments.items():
            known = [dim.name is None or dim.name in shown for dim in argument.dims]
            shown |= {dim.name for dim in argument.dims}
            if not isinstance(x := inputs.get(name), torch.Tensor) or x.ndim != len(known):
                continue
            for axis in (axis for axis, told in enumerate(known) if told and x.shape[axis] > 1):
                with pytest.raises(ValueError, match=r"^\w+: expected"):
                    spec.reference(**{**inputs, name: x.narrow(axis, 0, 1)})


def check_refusals(kernel: Kernel, inputs: dict[str, Any]) -> None:
    runs = kernel.id in HERE and not BOUND[kernel.op].mutates and kernel.nondeterministic is None
    found = as_tuple(kernel.fn(**inputs)) if runs else ()
    tried = [*refusals(kernel, inputs)]
    assert len(tried) > 2
    if "out" in kernel.accepted:
        tried += [({"out": out}, words) for out, words in wrong_outs(results(kernel, inputs))]
    before = {name: x.clone() for name, x in inputs.items() if isinstance(x, torch.Tensor)}
    for change, words in tried:
        with pytest.raises(ValueError, match=f"^{words}") as error:
            kernel.fn(**{**inputs, **change})
        assert "\n" not in str(error.value)
    for name, x in before.items():  # which may hold NaN: where nothing was written
        assert torch.allclose(inputs[name].double(), x.double(), rtol=0, atol=0, equal_nan=True), name
    again = as_tuple(kernel.fn(**inputs)) if runs else ()
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True)), "it keeps a wrong call"


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.id)
def test_a_call_has_the_arguments_of_the_op_by_place_and_by_name(kernel: Kernel) -> None:
    first = next(iter(BOUND[kernel.op].parameters)).name
    inputs = next(calls(kernel))
    with pytest.raises(TypeError, match="multiple values|unexpected|positional"):
        kernel.fn(inputs[first], **inputs)
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        kernel.fn(**inputs, colour=1)
    with pytest.raises(TypeError, match=f"missing a required argument: '{first}'"):
        kernel.fn(**{name: value for name, value in inputs.items() if name != first})


def test_dimensions_are_computed_from_names() -> None:
    assert [Dim.parse(text).size({"I": 6, "B": 3}) for text in ("2I", "I/2", "B+1", "7", "X")] == [12, 3, 4, 7, None]
    assert [Dim.parse(text).solve(7) for text in ("I", "2I", "I/2", "B+1", "9+8")] == [7, None, 14, 6, None]
    with pytest.raises(ValueError, match="shape: expected dimensions such as T, 2I, K/2 or B"):
        Dim.parse("-1")


def test_a_layout_is_checked_once_and_every_other_one_again(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[int] = []
    check = Contract.check
    monkeypatch.setattr(Contract, "check", lambda self, given: checked.append(1) or check(self, given))
    naive = kernels("rmsnorm")["naive"].fn

    def ask(x: torch.Tensor, **options: Any) -> int:
        before = len(checked)
        naive(x, torch.ones(x.shape[1], dtype=x.dtype), **options)
        return len(checked) - before

    x = torch.ones(7, 1021)
    assert ask(x) == 1 and ask(x + 1) == 0
    assert [ask(other) for other in (x[:, :1019], x[:2], x.half(), x.clone())] == [1, 1, 1, 0]
    assert ask(x, eps=0.25) == 1 and ask(x, eps=0.25) == 0
    assert ask(x, out=torch.empty(7, 2000)[:, :1021]) == 1 and ask(x, out=torch.ones(7, 2000)[:, :1021]) == 0
