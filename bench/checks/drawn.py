"""Chooses the checks of a command, and reduces a failing case to a smaller case.

The user lists cases, or cases are drawn at random from an op's domain (its valid cases).  The drawn cases cover pairs
of parameter values.  A principle is a kind of input that reveals errors of many kernels, such as an empty tensor.
`CheckTask.principle` names the principle that a check tests.
"""

from __future__ import annotations

import ast
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import chain, product, zip_longest
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from rooflab.bench.core import CheckTask, Selection, source_of
from rooflab.kernels import registry
from rooflab.kernels.registry import Kernel
from rooflab.reference.domain import Domain, DomainPoint, Sizes, shrunk
from rooflab.reference.spec import Case, OpSpec, Scalar, Scheme, get_scheme

WAY_AXIS = "otherwise"
"""The name of an axis that is added to the axes of a case.  Its value is the one of `CheckTask.ways` for the check."""
MAX_TRIES = 25
"""The largest number of checks to make one failing case smaller."""


TILED_SIZES = {"S": 320, "context": 320, "V": 5120, "K": 384, "I": 4616, "H": 4616}
"""Sizes at which a program computes several tiles.  Only the first of these axes that the case has gets its size."""
MAX_AXIS_SIZES = {"B": 1, "T": 16, "M": 16, "N": 48}
"""The largest sizes of the other axes, so that a check of all adversarial sets takes a few seconds in the emulator."""


class Most(NamedTuple):
    """Limits the drawn cases: the number of cases of an op, and the amount of work of one case."""

    cases: int
    elements: int
    """The largest number of elements of all inputs together."""
    flops: float
    rows: int
    """For an op without a matrix product: the rows of the first input.  Most kernels have a CTA for each row."""
    side: int
    """For an op with a matrix product: the longest dimension of an input.  Kernels have a CTA or step for each tile."""


HARDWARE_LIMITS = Most(48, 2**22, 2.0**28, 2**17, 2**22)
"""Limits on hardware: a call takes tens of milliseconds on one CPU core, which also computes the oracle."""
SOFTWARE_LIMITS = Most(24, 2**17 + 2**12, 2.0**22, 40, 1024)
"""Limits in the emulator or in Triton's interpreter: a check takes a few seconds, and at most half a minute.  A product
with 4,771 rows took three."""

MAX_LONG_POINTS, BESIDE_LONG, LONG_EXTRA = 4, 32, 16
"""The number of cases with one long side, their largest other size, and the excess over the number of the source.  TMA
takes rows of a multiple of 16 bytes."""


def listed_checks(chosen: Selection) -> list[CheckTask]:
    """Returns the checks of every kernel in `chosen` on every case in `chosen`, in every scheme (dtypes)."""
    return [
        CheckTask(kernel, case, scheme, chosen.seed)
        for op, kernels in chosen.kernels.items()
        for case in chosen.cases_of(registry.get_op(op))
        for scheme in chosen.schemes_of(registry.get_op(op))
        for kernel in kernels
    ]


def drawn_checks(chosen: Selection, every: bool = False) -> list[CheckTask]:
    """Returns the checks of the kernels in `chosen`, on cases from the domain (the valid cases) of each op.

    Small fixed cases (smoke) come first, in every scheme (dtypes).  Edge cases and randomly drawn cases follow in turn,
    each in one scheme.  With `every`, an edge case runs in every scheme and with all adversarial inputs.

    A few checks move to the front, because they find errors of many kernels.  The cheapest check is the first, so that
    a kernel that the emulator runs slowly is judged within the time limit."""
    all_checks = []
    for op, kernels in chosen.kernels.items():
        spec = registry.get_op(op)
        schemes = chosen.schemes_of(spec)
        if not schemes:
            continue
        cheapest_case, fast_scheme = _cheapest(spec, schemes)
        for kernel in kernels:
            case_limits = most_work(kernel, chosen.device)
            points = drawn_points(spec, chosen.seed, case_limits, own_numbers(source_of(kernel)))
            every_set = every or case_limits == HARDWARE_LIMITS
            tasks = [CheckTask(kernel, cheapest_case, fast_scheme, chosen.seed, every_set)]
            for case, scheme in product(spec.cases["smoke"], schemes):
                is_full_check = every_set or case == spec.cases["smoke"][0] or scheme == schemes[-1]
                tasks.append(CheckTask(kernel, case, scheme, chosen.seed, is_full_check, SMALL))
            if spec.in_place and "out" in kernel.accepted:
                options = {name: True for name in spec.in_place.values() if name in spec.optional}
                shared_case = spec.check_case(spec.cases["smoke"][0].but(**options))
                tasks.append(CheckTask(kernel, shared_case, fast_scheme, chosen.seed, "in place", "in place"))
            if tiled_case := of_several_tiles(spec):
                tasks.append(CheckTask(kernel, tiled_case, schemes[-1], chosen.seed, "planted alone", TILES))
            for edge_index, (edge, point) in enumerate(zip_longest(most_different(spec.cases_in("edge")), points)):
                scheme = schemes[edge_index % len(schemes)]
                for dtypes in (schemes if every else (scheme,)) if edge is not None else ():
                    tasks.append(CheckTask(kernel, edge, dtypes, chosen.seed, every_set, _is_empty(spec, edge, dtypes)))
                if point is not None:
                    extra_runs: Any = point.values.get(WAY_AXIS, every_set)
                    tasks.append(CheckTask(kernel, point.case, scheme, chosen.seed, extra_runs, point.principle))
            all_checks += principles_first(_offered(tasks, spec, schemes), lambda item: item.principle)
    return all_checks


def _offered(asked: Sequence[CheckTask], spec: OpSpec, schemes: Sequence[Scheme]) -> list[CheckTask]:
    """Replaces each check that the kernel refuses: drops the refused options, or uses another scheme.  Also keeps one
    refused check for each reason, so that a result reports the reason."""
    refusals, tasks = dict[str, CheckTask](), dict[tuple[Case, Scheme, object], CheckTask]()
    for task in asked:
        task = task._replace(schemes=(task.scheme, *(scheme for scheme in schemes if scheme != task.scheme)))
        accepted_task = task.taken(spec)
        if accepted_task != task:
            inputs = spec.make_inputs(task.case, task.scheme, torch.device("meta"), task.seed)
            refusals.setdefault(re.sub(r"\d+", "N", str(task.kernel.why_not_args(inputs, spec))), task)
        if accepted_task is not None:
            tasks.setdefault((accepted_task.case, accepted_task.scheme, accepted_task.planted), accepted_task)
    accepted_tasks = [*tasks.values()]
    return [*accepted_tasks[:1], *refusals.values(), *accepted_tasks[1:]]


def _cheapest(spec: OpSpec, schemes: Sequence[Scheme]) -> tuple[Case, Scheme]:
    """Returns the smoke or edge case with the least work, and a 16-bit scheme if there is one.  The emulator computes
    products of fp32 more slowly."""
    scheme = next((scheme for scheme in schemes if scheme.activation.itemsize == 2), schemes[0])

    def work(case: Case) -> float:
        return spec.cost_of(spec.make_inputs(case, scheme, torch.device("meta"), 0)).flops or math.inf

    return min((*spec.cases["smoke"], *spec.cases_in("edge")), key=work), scheme


def _is_empty(spec: OpSpec, case: Case, scheme: Scheme) -> str:
    """Returns the word "empty" if an input tensor of the case has no elements.  Otherwise returns ""."""
    inputs = spec.make_inputs(case, scheme, torch.device("meta"), 0).values()
    return EMPTY_INPUT if any(isinstance(value, torch.Tensor) and not value.numel() for value in inputs) else ""


def most_work(kernel: Kernel, device: torch.device) -> Most:
    """Returns the limits for the randomly drawn cases of a kernel: their number, elements, FLOPs and dimensions.  The
    limits are lower for a kernel that an emulator or interpreter runs."""
    return SOFTWARE_LIMITS if device.type == "cpu" and kernel.has_code else HARDWARE_LIMITS


def drawn_points(spec: OpSpec, seed: int, most: Most, numbers: tuple[int, ...] = ()) -> list[DomainPoint[Case]]:
    """Draws random input cases of an op.  Returns each case with its sizes, its options and the kind of additional run.

    `numbers` holds integers from the kernel's source file, such as tile sizes.  If there are any, a third of the cases
    have sizes near these integers.  Returns no cases if the op does not describe its valid inputs (`spec.domain`).
    """
    if spec.domain is None:
        return []
    sampler = partial(_wider(spec.domain).cover, seed, partial(_settled, spec, most))
    long_points, num_near = _long_points(spec, seed, most, numbers), most.cases // 3 if numbers else 0
    near_points = list(sampler(num_near - len(long_points), numbers))
    usual_points = list(sampler(most.cases - num_near))
    ordered_points = chain.from_iterable(zip_longest(usual_points[::2], near_points, usual_points[1::2]))
    return list({point.case: point for point in (*long_points, *ordered_points) if point is not None}.values())


def _long_points(spec: OpSpec, seed: int, most: Most, numbers: tuple[int, ...]) -> list[DomainPoint[Case]]:
    """Draws cases with one size just above one of `numbers` and above `most.side`.  Other sizes are small, and every
    flag is on.  Only such a case runs a path that the kernel takes for long sizes, such as a split of K."""
    assert spec.domain is not None, "the caller has asked"
    domain, points = _wider(spec.domain), list[DomainPoint[Case]]()
    sizes = {name: axis for name, axis in domain.axes.items() if isinstance(axis, Sizes)}
    small = {name: replace(axis, most=max(axis.least, min(axis.most, BESIDE_LONG))) for name, axis in sizes.items()}
    flags = {name: (True,) for name, axis in domain.axes.items() if axis == (False, True)}
    for number, (name, axis) in product(numbers, sizes.items()):
        size = (number + LONG_EXTRA) // axis.step * axis.step
        if most.side < size <= axis.most:
            long_domain = Domain({**domain.axes, **small, **flags, name: (size,)}, domain.make)
            settle = partial(_settled, spec, most._replace(side=size), has=size)
            drawn = long_domain.cover(seed, settle, 1, (number,))
            points += [replace(point, principle=f"{name} above {number}") for point in drawn]
    return random.Random(seed).sample(points, min(len(points), MAX_LONG_POINTS))


@cache
def own_numbers(path: Path) -> tuple[int, ...]:
    """Returns the integers from 2 to 2**20 in a kernel's file, and in its C++ code.  Such integers are tile sizes,
    limits and defaults.  Larger integers are left out, because no case has such a size."""
    source_text, integers = path.read_text(encoding="utf-8"), set[int]()
    for ast_node in ast.walk(ast.parse(source_text)):
        if isinstance(ast_node, ast.Constant) and type(ast_node.value) is str and ";" in ast_node.value:
            integers |= _numbers_of_c(ast_node.value)
        integers |= set(_folded(ast_node))
    for source_file in path.parent.iterdir():
        if source_file.suffix in (".cu", ".cpp") and (source_file.stem == path.stem or source_file.name in source_text):
            integers |= _numbers_of_c(source_file.read_text(encoding="utf-8"))
    return tuple(sorted(integer for integer in integers if 1 < integer <= 2**20))


def _folded(node: ast.AST) -> Iterator[int]:
    """Yields a syntax node's value if it is an integer literal, or a product, power or shift of two such literals."""
    match node:
        case ast.Constant(value=int(value)):
            yield int(value)
        case ast.BinOp(left=ast.Constant(value=int(left)), op=op, right=ast.Constant(value=int(right))):
            if isinstance(op, ast.Mult):
                yield left * right
            elif right <= 20 and isinstance(op, ast.Pow | ast.LShift):
                yield left**right if isinstance(op, ast.Pow) else left << right


def _numbers_of_c(text: str) -> set[int]:
    return {int(number_text) for number_text in re.findall(r"(?<![\w.])\d{1,7}(?![\w.])", text)}


def of_several_tiles(spec: OpSpec) -> Case | None:
    """Returns a small case in which one thread block computes several tiles, or None if the op has no tiled axis."""
    case = spec.cases["smoke"][0]
    tiled_axis = next((name for name in TILED_SIZES if name in case), "")
    if not tiled_axis or (tiled_axis == "H" and "D" in case):  # there H is a number of heads
        return None
    max_sizes = MAX_AXIS_SIZES | ({"T": 2} if tiled_axis in ("I", "H") else {})
    sizes = {name: min(int(case[name]), size) for name, size in max_sizes.items() if name in case}
    return case.but(**sizes, **{tiled_axis: TILED_SIZES[tiled_axis]})


def most_different(cases: Sequence[Case]) -> list[Case]:
    """Sorts cases so that each next case has the most settings that no earlier case has.  Sizes are not settings.

    With this order, 74 wrong kernels took 414 checks instead of 477.  One fault (an attention window longer than the
    keys) was found in check 21 instead of 59."""
    remaining_cases, ordered_cases, seen_pairs = list(cases), list[Case](), set[tuple[str, Scalar]]()
    while remaining_cases:
        case = max(remaining_cases, key=lambda one: len(_settings(one) - seen_pairs))  # max takes the first of the best
        remaining_cases.remove(case)
        ordered_cases.append(case)
        seen_pairs |= _settings(case)
    return ordered_cases


def _settings(case: Case) -> set[tuple[str, Scalar]]:
    sizes = {name for name, value in case.items() if type(value) is int and name[0].isupper()}
    return {(name, value) for name, value in case.items() if name not in sizes}


def smallest(spec: OpSpec, point: DomainPoint[Case], most: Most, fails: Callable[[Case], bool]) -> Case:
    """Returns the simplest case for which `fails` is true, found with at most `MAX_TRIES` calls of `fails`."""
    assert spec.domain is not None, "the point is one of its domain"
    longest = max(value for value in point.case.values() if type(value) is int)  # may be above the limit
    most = most._replace(side=max(most.side, longest))
    return shrunk(_wider(spec.domain), point, partial(_settled, spec, most), fails, MAX_TRIES).case


def _wider(domain: Domain) -> Domain:
    """Returns an op's domain with one more axis.  A domain describes the valid input cases by axes (sizes and options).
    The new axis selects an additional run of a check, such as a run with huge strides.  It does not change the case."""

    def make(**values: Scalar) -> Mapping[str, Scalar] | None:
        return domain.make(**{name: value for name, value in values.items() if name != WAY_AXIS})

    return Domain({**domain.axes, WAY_AXIS: CheckTask.ways()}, make)


def _settled(spec: OpSpec, most: Most, made: Mapping[str, Scalar], has: int | None = None) -> Case | None:
    """Makes a case from the drawn values.  Returns None if the op refuses it, if it exceeds the limits `most`, or if it
    has no size `has`."""
    if has is not None and has not in made.values():
        return None
    try:
        case = spec.check_case(Case(**made))
        inputs = spec.make_inputs(case, get_scheme(spec.schemes[0]), torch.device("meta"), 0)
    except ValueError:
        return None
    tensors = [value for value in inputs.values() if isinstance(value, torch.Tensor)]
    input_cost, first_tensor = spec.cost_of(inputs), tensors[0]
    rows = first_tensor.numel() // max(1, first_tensor.shape[-1] if first_tensor.ndim > 1 else 1)
    max_dimension = max(max(tensor.shape, default=0) for tensor in tensors)
    shape_amounts = (0, max_dimension) if input_cost.tensor_flops else (rows, 0)
    amounts = sum(tensor.numel() for tensor in tensors), input_cost.flops, *shape_amounts
    return case if all(work_amount <= limit for work_amount, limit in zip(amounts, most[1:], strict=True)) else None


def turns_of(checks: Sequence[CheckTask]) -> list[int]:
    """Returns a number for each check; checks with lower numbers run first.  The number is 0 for the first check that a
    kernel does not refuse.  Every other check is numbered by its position, from 1, among the kernel's checks."""
    check_counts, begun_ids, priorities = Counter[str](), set[str](), []
    for task in checks:
        name, spec = task.kernel.id, registry.get_op(task.kernel.op)
        inputs = {} if name in begun_ids else spec.make_inputs(task.case, task.scheme, torch.device("meta"), task.seed)
        is_first_accepted = bool(inputs) and task.kernel.why_not_args(inputs, spec) is None
        begun_ids |= {name} if is_first_accepted else set()
        check_counts[name] += 1
        priorities.append(0 if is_first_accepted else check_counts[name])
    return priorities


EMPTY_INPUT, TILES, SMALL = "empty", "several tiles", "smoke"
"""The names of three principles: a tensor without elements, a program that computes several tiles, a smoke case."""
Item = TypeVar("Item")


def principles_first(items: Sequence[Item], principle_of: Callable[[Item], str]) -> list[Item]:
    """Moves important items to the front, because a time limit may cut off the rest.  These are the first item, and the
    first item of each principle.  A principle is a kind of input that reveals errors, such as an empty tensor."""
    first_indices = {principle_of(item): place for place, item in reversed([*enumerate(items)])}
    early_indices = {0, *(place for principle, place in first_indices.items() if principle)}
    return [items[place] for place in sorted(range(len(items)), key=lambda place: (place not in early_indices, place))]
