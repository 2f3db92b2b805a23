"""Results that the tolerance of every op rejects: mistakes that its spec names, a neighbour's input, a missing option,
a result a little off; and the op's least work, compared with what the reference reads, writes and multiplies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch
from op_kernels import CPU
from torch.utils.flop_counter import FlopCounterMode

from rooflab.kernels.registry import get_op, ops
from rooflab.reference.spec import SCHEMES, Inputs, OpSpec, Outputs, Scheme

OFF = {
    "fp32": 1e-4,
    "tf32": 1e-4,
    "fp16": 0.005,
    "bf16": 0.02,
    "fp8_e4m3": 0.1,
    "kv_fp8": 0.01,
    "out_fp8": 0.05,
    "out_int8": 0.005,
    "w8a16": 0.01,
    **dict.fromkeys(("gguf_q4", "gguf_q8"), 0.01),
    **dict.fromkeys(("w4a16_g32", "w4a16_g64", "w4a16_g128"), 0.01),
}
"""By which share of each value a result is off that some case rejects, by scheme."""
UNSEEN = (
    "flash_attention_varlen: cu_seqlens_q",
    "flash_attention: no softcap",
    *(f"{op}: no round_first" for op in ("rmsnorm", "fused_add_rmsnorm")),
)
"""Changes that no case here shows: rolled offsets are none, softcap in fp8, and one rounding."""
NEED_LESS = (
    "embedding",
    "flash_attention",
    "flash_attention_varlen",
    "gemm_grouped",
    "kv_cache_write",
    "mla_decode",
    "paged_attention",
    "rope",
    "rope_and_cache",
    "sample",
    "speculative_verify",
)
"""Ops that read a part of an argument: rows that are asked for, keys that are seen."""
CASES = [(op, scheme) for op in ops() if op != "sample" for scheme in get_op(op).schemes]
"""But for draws: a change of their law may draw the same token."""


def changes(spec: OpSpec, inputs: Inputs) -> Iterator[tuple[str, Inputs]]:
    """Each tensor one place on in each of its dimensions, and each option left out."""
    defaults = {one.name: one.default for one in spec.parameters if one.default is not one.empty}
    for name, x in inputs.items():
        if isinstance(x, torch.Tensor):
            plain = x.float() if x.dtype.is_floating_point else x  # fp8 cannot be rolled
            for dim in (dim for dim in range(x.ndim) if x.shape[dim] > 1):
                yield f"{name}, dimension {dim}", {name: plain.roll(1, dim).to(x.dtype)}
        if defaults.get(name, x) is None if isinstance(x, torch.Tensor) else x != defaults.get(name, x):
            yield f"no {name}", {name: defaults[name]}


def differs(spec: OpSpec, inputs: Inputs, right: Outputs, change: Inputs, scheme: str) -> bool:
    try:
        wrong = spec.oracle({**inputs, **change})
    except ValueError:  # no lawful call
        return True
    if [x.shape for x in wrong] != [x.shape for x in right]:
        return True
    return not all(found.passed for found in spec.judge(wrong, right, inputs, SCHEMES[scheme]))


@pytest.mark.sampled(15, 25)
@pytest.mark.parametrize(("op", "scheme"), CASES)
def test_a_change_of_any_argument_and_a_result_a_little_off_are_rejected(op: str, scheme: str) -> None:
    spec, missed, found, factor = get_op(op), set[str](), set[str](), 1 + OFF[scheme]
    for number, case in enumerate((*spec.cases["smoke"], *spec.cases["edge"])):
        usual = spec.make_inputs(case, SCHEMES[scheme], CPU, 0)
        planted = spec.sets(case, SCHEMES[scheme], CPU, 0) if not number else ()
        for inputs in (usual, *(made for _, made in planted)):
            tried = {name: change for name, change in changes(spec, inputs) if name not in found}
            scaled = inputs is usual and spec.compare is None and not found.issuperset(spec.outputs)
            right = spec.oracle(inputs) if tried or scaled else ()  # of both, most of this test's time
            found |= {name for name, change in tried.items() if differs(spec, inputs, right, change, scheme)}
            missed |= tried.keys()
            if scaled:
                judged = spec.judge(tuple(factor * x.double() for x in right), right, inputs, SCHEMES[scheme])
                found |= {error.output for error in judged if not error.passed}
                missed |= {error.output for error in judged}
    unseen = [name for name in missed - found if not f"{op}: {name}".startswith(UNSEEN)]
    assert found and unseen == []


def runs(spec: OpSpec, scheme: Scheme) -> Iterator[Inputs]:
    """The planted inputs of the first case, then the usual ones of every case."""
    cases = (*spec.cases["smoke"], *spec.cases["edge"])
    yield from (inputs for _, inputs in spec.sets(cases[0], scheme, CPU, 0))
    yield from (spec.make_inputs(case, scheme, CPU, 0) for case in cases)


@pytest.mark.sampled(15, 25)
@pytest.mark.parametrize(("op", "scheme"), [(op, scheme) for op in ops() for scheme in get_op(op).schemes])
def test_each_mistake_that_a_spec_names_is_rejected(op: str, scheme: str) -> None:
    spec, inputs_of = get_op(op), runs(get_op(op), SCHEMES[scheme])
    left = {name for name in spec.wrong if scheme == "fp32" or not name.startswith("fp32")}
    assert left
    while left and (inputs := next(inputs_of, None)) is not None:
        right = spec.oracle(inputs)
        for name in sorted(left):
            with suppress(IndexError, ValueError):  # a mistake that these inputs do not allow: no key, no row
                results = spec.mistaken(name, inputs)
                left -= (
                    {name} if not all(e.passed for e in spec.judge(results, right, inputs, SCHEMES[scheme])) else set()
                )
    assert left == set()


@pytest.mark.parametrize("op", ops())
def test_a_cost_moves_the_arguments_and_results_once_and_multiplies_as_the_reference_does(op: str) -> None:
    """Exactly, but for ops that need not read or multiply all: these need less."""
    spec, scheme = get_op(op), SCHEMES[get_op(op).schemes[0]]
    for case in (*spec.cases["smoke"], *spec.cases["edge"]):
        inputs = spec.make_inputs(case, scheme, CPU, 0)
        with FlopCounterMode(display=False) as counted:
            results = spec.oracle(inputs)
        cost = spec.cost_of(inputs)
        whole = sum(x.nbytes for x in inputs.values() if isinstance(x, torch.Tensor))
        forms = [spec.output_dtypes.get(name, scheme.output) for name in spec.outputs]
        dtypes = [scheme.activation if form == "activation" else form for form in forms]
        written = sum(x.numel() * dtype.itemsize for x, dtype in zip(results, dtypes, strict=False))
        flops = sum(cost.tensor_flops.values())
        if op in NEED_LESS:
            assert cost.read_bytes <= whole and flops <= counted.get_total_flops(), case.id
        else:
            assert (cost.read_bytes, cost.write_bytes) == (whole, written), case.id
            assert flops == counted.get_total_flops(), case.id
