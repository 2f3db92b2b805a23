"""What a check says of a kernel, whoever makes it; and what is said where the device takes no more work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from rooflab.bench.records.record import CheckedBy, Status
from rooflab.kernels.registry import Kernel
from rooflab.reference.compare import ErrorStats
from rooflab.reference.spec import Case, OpSpec, Scheme

BROKEN = "the CUDA context was already broken"
"""Begins the reason of a kernel that could not run because an earlier one had faulted: it is no fault of its own."""


class CheckOutcome(Protocol):
    """What a check says of one kernel on one case."""

    @property
    def status(self) -> Status:
        """OK, or why not."""

    @property
    def checked_by(self) -> CheckedBy:
        """What ran the kernel."""

    @property
    def errors(self) -> Sequence[ErrorStats]:
        """One for each output."""

    @property
    def weak(self) -> Sequence[str]:
        """Wrong answers that the case would let pass."""

    @property
    def reason(self) -> str:
        """Why the status is not OK."""


Check = Callable[[Kernel, OpSpec, Case, Scheme, torch.device, int], CheckOutcome]


def already_broken(device: torch.device) -> str:
    """Why nothing can run on `device` any more in this process, as after an illegal access; empty where it can.

    Waits for the device.
    """
    if device.type != "cuda":
        return ""
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        return str(error).strip().partition("\n")[0]
    return ""
