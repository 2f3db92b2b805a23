"""Timed kernels get values that they have not seen, and what they left of the last ones is judged."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import torch

from rooflab.bench.core.call import Rotation
from rooflab.bench.core.cheats import alike, kept_names
from rooflab.bench.core.check_data import CheckData
from rooflab.bench.core.poison import same_bits
from rooflab.reference.spec import Case, Inputs, OpSpec, Scheme


class Unseen:
    """Renews the float inputs on which kernels are timed; weights, tables, lengths and changed arguments stay.

    At first it writes values of a seed of its own.  A call, before each round of samples, changes one row of each
    input, so that no answer that a kernel kept is right any more: neither by address, nor by shape, nor by some of the
    values.  The last rounds have the same values.  Inputs whose shapes depend on the seed stay as they are, and so do
    those that are not finite everywhere: NaN in unused pages belongs to the table.
    """

    def __init__(
        self, spec: OpSpec, case: Case, scheme: Scheme, device: torch.device, copies: Sequence[Inputs], seed: int
    ):
        self._copies = copies
        self._random = random.Random()
        fresh = spec.make_inputs(case, scheme, device, self._random.randrange(2**31))
        stay = kept_names(spec, fresh) | set(spec.mutates)
        same = alike(copies[0], fresh)
        values = {name: value for name, value in fresh.items() if same and name not in stay and _finite(value)}
        del fresh  # before another set is made: its weights may take a large part of the memory
        original = spec.make_inputs(case, scheme, device, seed)
        self._values = {name: value for name, value in values.items() if _finite(original[name])}
        own = {name: value.clone() for name, value in self._values.items()}
        self._expected = CheckData(spec, {**original, **own}, scheme)
        for inputs in copies:
            for name, value in own.items():
                inputs[name].data.copy_(value)

    def __call__(self) -> None:
        for name, values in self._values.items():
            values = values.view(torch.uint8) if values.dtype.itemsize == 1 else values  # torch cannot roll fp8
            row = tuple(self._random.randrange(size or 1) for size in values.shape[:-1])
            source = tuple(self._random.randrange(size or 1) for size in values.shape[:-1])
            if values.numel() > 1:
                rolled = values[source].roll(self._random.randrange(1, values.shape[-1] + 1))
                for inputs in (*self._copies, self._expected.inputs):
                    inputs[name].data.view(values.dtype)[row] = rolled

    def wrong(self, timed: Mapping[str, Rotation]) -> dict[str, str]:
        """For each wrong kernel, the fault of the outputs that its last timed calls left."""
        found = {}
        for kernel, rotation in timed.items():
            for _, outputs in rotation.outputs():
                if bad := self._expected.faults(outputs, rotation.own_stream):
                    found[kernel] = bad + (": an input was changed while it was timed" if self._damaged() else "")
        return found

    def _damaged(self) -> bool:
        return any(
            not same_bits(inputs[name], self._expected.inputs[name]) for inputs in self._copies for name in self._values
        )


def _finite(value: object) -> bool:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return False
    return bool(torch.isfinite(value.float()).all())
