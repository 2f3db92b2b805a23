"""The domain of each op: the points drawn from it, the pairs that a cover meets, how a failing case becomes small."""

import json
import random
from itertools import combinations, product
from pathlib import Path

import pytest
import torch
from op_kernels import here

from rooflab.bench.checks.drawn import (
    HARDWARE_LIMITS,
    SOFTWARE_LIMITS,
    drawn_checks,
    drawn_points,
    own_numbers,
    smallest,
)
from rooflab.bench.core.check import check_kernel
from rooflab.bench.core.check_data import CheckData
from rooflab.bench.core.select import Selection
from rooflab.kernels.registry import Kernel, get_kernel, get_op, ops
from rooflab.reference import domain as domain_module
from rooflab.reference.domain import Domain, Sizes, shrunk
from rooflab.reference.spec import SCHEMES, Case

OPTIONS = Domain(
    {"a": (0, 1, 2), "b": (0, 1), "c": ("x", "y", "z"), "d": (False, True)},
    lambda **values: None if values["a"] == 2 and values["b"] == 1 else Case(**values),
)


def as_drawn(case):
    return case


def test_a_cover_meets_every_pair_that_may_be_combined_in_few_cases():
    points = list(OPTIONS.cover(3, as_drawn, 60))
    pairs = {pair for point in points for pair in combinations(point.values.items(), 2)}
    axes = OPTIONS.axes.items()
    wanted = {
        ((a, x), (b, y))
        for (a, xs), (b, ys) in combinations(axes, 2)
        for x in xs
        for y in ys
        if (a, x, b, y) != ("a", 2, "b", 1)
    }
    assert pairs == wanted and len(points) < 20, "30 of the 36 combinations are allowed"
    assert [p.case for p in OPTIONS.cover(3, as_drawn, 60)] == [p.case for p in points]
    assert [p.case for p in OPTIONS.cover(4, as_drawn, 60)] != [p.case for p in points]


def test_sizes_lie_where_kernels_have_edges():
    state = random.Random(0)
    sizes, even = ({axis.draw(state)[1] for _ in range(3000)} for axis in (Sizes(1, 70_000), Sizes(2, 300, 2)))
    assert {1, 255, 256, 257, 2047, 2049, 65_535, 65_537} <= sizes and max(sizes) <= 70_000
    assert {size % 2 for size in even} == {0} and {2, 254, 258} <= even


def test_a_failing_case_becomes_as_small_as_it_still_fails():
    domain = Domain({"M": Sizes(1, 5000), "N": Sizes(1, 5000), "bias": (False, True), "layout": ("NT", "NN")}, Case)
    asked = []

    def fails(case):
        asked.append(case)
        return case["N"] > 256 and case["bias"]

    points = domain.cover(0, as_drawn, 60)
    start = next(point for point in points if fails(point.case) and point.case["M"] > 1 and point.case["N"] > 600)
    found = shrunk(domain, start, as_drawn, fails, 60)
    assert found.case == Case(M=1, N=257, bias=True, layout="NT")
    asked.clear()
    assert shrunk(domain, start, as_drawn, fails, 3).case != start.case and len(asked) == 3


@pytest.mark.parametrize("op", ops())
def test_what_an_op_s_domain_draws_are_cases_of_the_op_and_vary_everything(op):
    spec = get_op(op)
    points = drawn_points(spec, 5, HARDWARE_LIMITS)
    assert len(points) >= 15 and len({point.case for point in points}) == len(points)
    assert all(spec.check_case(point.case) == point.case for point in points)
    for key in (*spec.cases["smoke"][0], *spec.optional):
        assert len({point.case.get(key) for point in points}) > 1, f"{key} has more than one value"
    assert all(point.case.get("H", 1) > 0 for point in points), "a row of no width"


def test_sizes_come_from_real_models_and_from_the_kernel_s_own_file(tmp_path):
    table = json.loads(Path(domain_module.__file__).with_name("model_dims.json").read_text())
    assert len(table["models"]) >= 40 and {len(row) for row in table["models"]} == {len(table["columns"])}
    sources = {row[-1] for row in table["models"] if not row[-1].startswith("huggingface.co/")}
    assert sources == set(table["sources"]), "every model names its source"
    axes = [axis for op in ops() if (d := get_op(op).domain) for axis in d.axes.values() if isinstance(axis, Sizes)]
    assert sum(bool(axis.model) for axis in axes) >= 30 and all(axis.real for axis in axes if axis.model)
    (tmp_path / "own.cpp").write_text("constexpr int ROWS = 79; float x = 0.5f;")
    (tmp_path / "other.cpp").write_text("int y = 99;")
    file = tmp_path / "own.py"
    lines = (
        "LIMIT = 3 * 1024",
        "REST = 77 - 9",
        "def f(x, block=96, fast=True):",
        '    return 1 << 9, "int z = 48;", "page 50"',
    )
    file.write_text("\n".join(lines) + "\n")
    assert own_numbers(file) == (3, 9, 48, 77, 79, 96, 512, 1024, 3072)
    points = Domain({"n": Sizes(1, 7000), "m": Sizes(1, 3)}, Case).cover(0, as_drawn, 60, (3072, 9_999))
    assert {3071, 3072, 3073, 6144, 6145} <= {point.case["n"] for point in points}


def test_a_product_has_one_size_above_each_number_of_its_file_with_every_flag_on():
    spec, numbers = get_op("gemm"), (32, 2048)
    points = drawn_points(spec, 7, SOFTWARE_LIMITS, numbers)
    long_points = {point.principle: point for point in points if max(point.case[name] for name in "MNK") > 1024}
    assert {*long_points} == {"M above 2048", "N above 2048", "K above 2048"}
    for principle, point in long_points.items():
        sizes = sorted(point.case[name] for name in "MNK")
        assert sizes[2] == point.case[principle[0]] == 2064 and sizes[1] <= 32
        assert point.case["bias"] and point.case["residual"]
    split_k = long_points["K above 2048"]
    assert smallest(spec, split_k, SOFTWARE_LIMITS, lambda case: case["K"] >= 2048)["K"] >= 2048
    assert not any("above" in point.principle for point in drawn_points(spec, 7, HARDWARE_LIMITS, numbers))


def test_a_cheap_16_bit_case_is_first_and_outputs_over_inputs_are_early():
    kernel = get_kernel("gemm", "cooperative")
    checks = drawn_checks(Selection({"gemm": (kernel,)}, (), (), (), torch.device("cpu"), 5))
    assert checks[0].case == get_op("gemm").cases["edge"][0] and checks[0].scheme.name == "fp16"
    shared = next(task for task in checks[:10] if task.planted == task.principle == "in place")
    assert shared.case["residual"] and "out" in kernel.accepted


@pytest.mark.sampled(6, 8)
@pytest.mark.parametrize(
    "op", [pytest.param(op, marks=pytest.mark.slow) if op == "flash_attention_varlen" else op for op in ops()]
)
def test_nothing_at_all_is_a_case_of_every_op(op):
    spec, cpu = get_op(op), torch.device("cpu")
    points = [point for point in drawn_points(spec, 5, SOFTWARE_LIMITS) if point.principle == "empty"]
    assert len(points) == sum(isinstance(axis, Sizes) and axis.empty for axis in spec.domain.axes.values()) > 0
    for case, scheme in ((point.case, SCHEMES[spec.schemes[-1]]) for point in points):
        for inputs in (spec.make_inputs(case, scheme, cpu, 0), *(made for _, made in spec.sets(case, scheme, cpu, 0))):
            data = CheckData(spec, inputs, scheme)
            answer = tuple(right.to(dtype) for right, (_, dtype) in zip(data.oracle, data.forms, strict=True))
            assert not data.faults(answer)
    scheme = SCHEMES["fp16" if "fp16" in spec.schemes else spec.schemes[0]]
    for kernel, point in product(here(op), points):
        found = check_kernel(kernel, spec, point.case, scheme, planted=False)
        assert found.status in ("OK", "UNSUPPORTED"), found.describe()


def ours(op, **inputs):
    return get_kernel(op, "naive")(**inputs)


def counts_plus_infinity(outs, lses):
    return ours("merge_attention_states", outs=outs.nan_to_num(), lses=lses.clamp(max=1e4))


def orders_zeros_by_their_bits(logits, temperature, top_k, top_p, min_p, seed, position):
    logits = torch.where((logits == 0) & logits.signbit(), -1e-30, logits)
    return ours("sample", **locals())


@pytest.mark.parametrize(
    ("op", "wrong", "words"),
    [
        ("merge_attention_states", counts_plus_infinity, "values: parts without keys of -inf and of +inf"),
        ("sample", orders_zeros_by_their_bits, "values: every second row zeros"),
    ],
)
def test_a_kernel_that_is_right_on_usual_rows_is_found_by_a_planted_set(op, wrong, words):
    spec = get_op(op)
    kernel = Kernel(op, wrong.__name__, "optimized", "torch", wrong)
    found = check_kernel(kernel, spec, spec.cases["smoke"][0], SCHEMES["fp32"])
    assert found.status in ("INCORRECT", "RUNTIME_ERROR") and f"planted {words}" in found.reason, found.describe()
