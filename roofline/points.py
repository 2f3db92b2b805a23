"""Selects and orders the points of a roofline figure, and computes its arrows and the positions of its numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import cos, pi, sin
from typing import Literal, get_args

from rooflab.roofline.model import Basis, CeilingKind, Ceilings

Role = Literal["naive", "library", "optimized", "peer", "benchmark"]
"""The role of a kernel.  `benchmark` is a kernel of another repository that names no other role."""
KIND_NAMES: Mapping[CeilingKind, str] = {
    "datasheet": "data sheet",
    "measured": "measured",
    "at_clock": "at the clock held",
}
Box = tuple[float, float, float, float]
"""A box by its corners: x0, y0, x1, y1."""
MAX_POINTS, MAX_NO_FLOP_POINTS = 15, 3
"""The most points of a readable figure, and how many of these may have no FLOPs.  A table holds the other points."""
_LABEL_RADII = (9, 13, 18, 24, 31, 39, 48, 60)
NEAR_RADIUS = 13
"""The largest distance between a number and its marker at which no line joins the two."""


@dataclass(frozen=True)
class Point:
    """One point of the figure: one kernel on one test case."""

    label: str
    """The kernel's name."""
    op: str
    case: str
    role: Role
    dtype: str | None
    """The operand dtype of the kernel's matrix products, which decides the roof; None means the fp32 vector roof."""
    flops: float
    """The FLOPs of the op's cost, even if the kernel does more work."""
    traffic_bytes: float
    """The bytes that the kernel moves through HBM."""
    traffic_basis: Basis
    bound_s: float
    """The least time that the op's cost allows."""
    seconds: float | None
    """The measured time; None if the kernel was not timed."""
    noisy: bool = False
    """Whether other work on the machine disturbed the measurement."""
    published: bool = False
    """Whether the time is a published time, measured by others on the same GPU model (`roofline/published.py`)."""
    device: str | None = None
    """The device whose roofs apply, for a figure of several devices."""

    def __post_init__(self) -> None:
        if not self.traffic_bytes > 0:
            raise ValueError(f"traffic_bytes: expected above 0 ({self.op}/{self.label}), got {self.traffic_bytes}")
        if self.seconds is not None and not self.seconds > 0:
            raise ValueError(f"seconds: expected above 0, or None ({self.op}/{self.label}), got {self.seconds}")

    @property
    def work(self) -> tuple[str, str, str | None]:
        """Returns the op, case and device. Only kernels with the same op, case and device are compared."""
        return self.op, self.case, self.device

    @property
    def intensity(self) -> float:
        """Returns the FLOPs per byte of HBM traffic; 0 for pure data movement."""
        return self.flops / self.traffic_bytes


def roof_flops_per_s(ceiling: Ceilings, dtype: str | None) -> float:
    """Returns the FLOP/s of the flat roof: matrix products of `dtype`, or vector arithmetic if `dtype` is None."""
    return ceiling.vector_flops_per_s if dtype is None else ceiling.matrix_rate(dtype)


def plotted_flops_per_s(point: Point, roof: Ceilings) -> float:
    """Returns the measured FLOP/s; for a point without a time, the FLOP/s of the roof at its intensity."""
    if point.seconds is not None:
        return point.flops / point.seconds
    return min(roof_flops_per_s(roof, point.dtype), point.intensity * roof.hbm_bytes_per_s)


def numbered(points: Sequence[Point]) -> list[tuple[int, Point]]:
    """Numbers the points from 1, sorted by op, case and device in order of appearance, then by role and name."""
    ops = list(dict.fromkeys(point.op for point in points))
    case_keys = list(dict.fromkeys(point.work for point in points))
    roles = get_args(Role)
    sorted_points = sorted(
        points, key=lambda p: (ops.index(p.op), case_keys.index(p.work), roles.index(p.role), p.label)
    )
    return list(enumerate(sorted_points, start=1))


def that_matter(points: Sequence[Point], most: int = MAX_POINTS) -> list[Point]:
    """Chooses at most `most` points for a figure. If some points have FLOPs, takes only a few without FLOPs.

    The fastest kernels of each op, case and device come first. Then come the libraries' kernels, the naive kernels, and
    all others. Within each group, the cases furthest from their bound come first."""
    no_flop_points = [point for point in points if not point.flops]
    flop_points = [point for point in points if point.flops]
    chosen_point_ids = _foremost(no_flop_points, MAX_NO_FLOP_POINTS if flop_points else most)
    chosen_point_ids |= _foremost(flop_points, most - len(chosen_point_ids))
    return [point for point in points if id(point) in chosen_point_ids]


def _foremost(points: Sequence[Point], most: int) -> set[int]:
    points_by_work: dict[tuple[str, str, str | None], list[Point]] = {}
    for point in points:
        points_by_work.setdefault(point.work, []).append(point)
    rank_by_id: dict[int, tuple[int, float]] = {}
    for work_points in points_by_work.values():
        fastest_point = min(work_points, key=_speed)
        excess_s = (fastest_point.seconds or fastest_point.bound_s) - (
            fastest_point.bound_s if fastest_point.seconds else 0.0
        )
        for point in work_points:
            role_rank = {"library": 1, "naive": 2}.get(point.role, 3)
            rank_by_id[id(point)] = (0 if point is fastest_point else role_rank, -excess_s)
    return set(sorted(rank_by_id, key=lambda point: rank_by_id[point])[:most])


def _speed(point: Point) -> tuple[bool, float]:
    """Returns a sort key that puts the fastest point first. Points without a time come last, in order of their memory
    traffic."""
    return point.seconds is None, point.seconds or point.traffic_bytes


def arrows(points: Sequence[Point]) -> list[tuple[Point, Point]]:
    """Returns an arrow per case, from the naive kernel to the fastest optimized kernel. If no optimized kernel has a
    time, the arrow ends at the optimized kernel with the least traffic."""
    arrow_ends = []
    for case_key in dict.fromkeys(point.work for point in points):
        quiet_points = [point for point in points if point.work == case_key and not point.noisy]
        naive_points = [point for point in quiet_points if point.role == "naive"]
        optimized_points = [point for point in quiet_points if point.role == "optimized"]
        if naive_points and optimized_points:
            arrow_ends.append((naive_points[0], min(optimized_points, key=_speed)))
    return arrow_ends


def place_labels(
    spots: Sequence[tuple[float, float]], half_sizes: Sequence[tuple[float, float]], frame: Box, occupied: Sequence[Box]
) -> list[tuple[float, float]]:
    """Returns the offset of each label from its point, in typographic points.

    A label takes the nearest free position, the lower right first. A free position covers no marker, no other label and
    no box of `occupied`."""
    half_marker = 4.0
    taken_boxes = [*occupied, *((x - half_marker, y - half_marker, x + half_marker, y + half_marker) for x, y in spots)]
    label_offsets = []
    for (x, y), (half_width, half_height) in zip(spots, half_sizes, strict=True):
        label_offset = (_LABEL_RADII[0] * cos(-pi / 4), _LABEL_RADII[0] * sin(-pi / 4))
        for dx, dy in _offsets():
            box = (x + dx - half_width, y + dy - half_height, x + dx + half_width, y + dy + half_height)
            is_inside = frame[0] < box[0] and box[2] < frame[2] and frame[1] < box[1] and box[3] < frame[3]
            if is_inside and not any(overlap(box, taken_box) for taken_box in taken_boxes):
                label_offset = (dx, dy)
                taken_boxes.append(box)
                break
        label_offsets.append(label_offset)
    return label_offsets


def _offsets() -> list[tuple[float, float]]:
    angles = [-pi / 4 + (angle_index + 1) // 2 * (-1) ** angle_index * pi / 8 for angle_index in range(16)]
    return [(label_radius * cos(angle), label_radius * sin(angle)) for label_radius in _LABEL_RADII for angle in angles]


def overlap(a: Box, b: Box) -> bool:
    """Returns whether two boxes overlap."""
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
