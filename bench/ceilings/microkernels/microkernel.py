"""What every microkernel offers: launches of as much work as asked for, and a check of what the last one left."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch

from rooflab.reference.spec import Scalar

Unit = Literal["byte", "flop", "op", "launch"]
HERE = Path(__file__).parent


class Launchable(Protocol):
    """A loaded kernel, as `rooflab.kernels._cuda.load` gives it."""

    def __call__(self, grid: Sequence[int], block: Sequence[int], *arguments: Any, shared_bytes: int = 0) -> None:
        """Launches on the current stream."""


class Load(Protocol):
    """How a source becomes a kernel."""

    def __call__(self, source: str, name: str, *, options: tuple[str, ...] = ()) -> Launchable:
        """The kernel `name` of `source`."""


@dataclass(frozen=True)
class Card:
    """What the microkernels need to know of a GPU."""

    device: torch.device
    sm: int
    """Compute capability, 90 for Hopper."""
    sms: int
    l2_bytes: int
    free_bytes: float
    """Memory that may be taken."""


@dataclass(frozen=True)
class Microkernel:
    """One microkernel in one launch shape."""

    limit: str
    """What it finds out: `hbm_read`, `l2_copy`, `fma`, `ex2`, `bf16 wgmma`..."""
    config: Mapping[str, Scalar]
    """The launch shape, and where operands come from."""
    unit: Unit
    work: float
    """Units of work in one repeat of one launch."""
    launch: Callable[[int], None]
    """`launch(repeats)` enqueues one launch."""
    wrong: Callable[[int], str]
    """`wrong(repeats)` launches once more, into poisoned outputs, and says what is wrong with them, or nothing."""
    clock_hz: Callable[[], float | None] = lambda: None
    """The SM clock that the last launch held, where the kernel reads it."""
    dtype: str | None = None
    """Operand dtype of matrix products."""
    cold: bool = False
    """Whether L2 is to be emptied before a launch."""
    fixed_repeats: int | None = None
    """Repeats of a launch where the data's size sets how long it takes; else as many as the timer wants."""


@dataclass(frozen=True)
class Group:
    """Microkernels that find out one limit, of which the fastest counts."""

    limit: str
    kernels: Sequence[Microkernel]


Groups = Iterator[Group]


@cache
def source(name: str, prelude: str = "") -> str:
    """The text of `<name>.cu` behind what all have in common and `prelude`."""
    return f"{(HERE / 'common.cu').read_text()}\n{prelude}\n{(HERE / f'{name}.cu').read_text()}"


def defines(**values: int) -> tuple[str, ...]:
    """`-DTHREADS=256` and so on."""
    return tuple(f"-D{name}={value}" for name, value in values.items())


@dataclass(frozen=True)
class Clocks:
    """A buffer in which every block leaves how many cycles and nanoseconds it worked."""

    counts: torch.Tensor = field(repr=False)
    """(blocks, 2), int64."""

    @classmethod
    def of(cls, blocks: int, device: torch.device) -> Clocks:
        """A buffer for a launch of `blocks`."""
        return cls(torch.zeros(blocks, 2, dtype=torch.int64, device=device))

    def hz(self) -> float | None:
        """The median over the blocks of the last launch; None where the timer did not move."""
        counts = self.counts.cpu().numpy().astype(np.float64)
        ran = counts[counts[:, 1] > 0]
        return float(np.median(ran[:, 0] / ran[:, 1]) * 1e9) if len(ran) else None


def disagreement(found: torch.Tensor, expected: torch.Tensor, tolerance: float, what: str) -> str:
    """What is wrong with `found`, or nothing: it may differ from `expected` by `tolerance` of its root mean square."""
    found, expected = found.double(), expected.double()
    allowed = tolerance * float(expected.square().mean().sqrt())
    worst = float((found - expected).abs().max())
    if worst <= allowed:  # not the other way round, so that NaN fails
        return ""
    return f"{what}: differ by up to {worst:.3g} from what arithmetic says, allowed are {allowed:.3g}"
