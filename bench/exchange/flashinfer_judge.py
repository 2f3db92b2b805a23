"""One workload of one definition: what our op, a kernel or the oracle, gives for it, against its own reference's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from rooflab.bench.check.poison import poisoned_allocations
from rooflab.bench.check.trial import Data, Failed, prepare, run
from rooflab.bench.exchange.flashinfer_draws import same_law
from rooflab.bench.exchange.flashinfer_files import Definition
from rooflab.bench.exchange.flashinfer_forms import Family
from rooflab.bench.records.record import CheckedBy
from rooflab.kernels.registry import Kernel, interpreting
from rooflab.reference.compare import ErrorStats, elementwise
from rooflab.reference.spec import Inputs, OpSpec, Outputs, Scheme

ORACLE = "(oracle)"
"""Stands for our op itself in the place of a kernel's name."""
TWICE = 2.0
"""A kernel and the reference may each be off by the op's tolerance."""
INTERPRETED_FLOPS, INTERPRETED_BYTES, INTERPRETED_ROWS = 1e9, 2e7, 512
"""Work beyond which Triton's interpreter takes minutes."""
INTERPRETER_BF16 = "Triton's interpreter computes bf16 dot and sort wrongly"
TOO_MUCH = "Triton's interpreter would take minutes for it; a GPU can check it"


@dataclass(frozen=True)
class Judge:
    """What a workload asks for, and what must come of it."""

    definition: Definition
    family: Family
    spec: OpSpec
    scheme: Scheme
    calls: Sequence[Inputs]
    expected: Mapping[str, torch.Tensor]
    """The reference's outputs by name, on the CPU."""

    @cached_property
    def oracles(self) -> list[Outputs]:
        """The fp64 oracle's outputs of each call."""
        return [self.spec.oracle(inputs) for inputs in self.calls]

    @cached_property
    def limits(self) -> Outputs:
        """Twice the op's tolerance, for each output of the definition that is compared."""
        assert self.spec.tolerance is not None, "ops whose outputs are not drawn have one"
        pairs = zip(self.calls, self.oracles, strict=True)
        joined = self.family.join([self.spec.tolerance(inputs, oracle, self.scheme) for inputs, oracle in pairs])
        return tuple(TWICE * limit.detach().cpu().double() for limit in joined)

    @property
    def names(self) -> tuple[str, ...]:
        """The definition's outputs that are compared."""
        return tuple(self.definition.outputs)[: self.family.outputs]

    def errors(self, made: Sequence[Outputs]) -> list[ErrorStats]:
        """One verdict per output that is compared."""
        outputs = self.family.join(list(made))
        if self.family.drawn:
            probs = self.calls[0]["logits"].exp()
            pairs = zip(self.names, outputs, strict=True)
            return [same_law(name, output, self.expected[name].reshape(-1), probs) for name, output in pairs]
        found = []
        for name, output, limit in zip(self.names, outputs, self.limits, strict=False):  # ours may give more
            wanted = self.expected[name].double()
            slack = self.family.slack * self.scheme.unit_roundoff * wanted.abs()
            found.append(elementwise(name, output, wanted, limit + slack))
        return found

    @cached_property
    def weak(self) -> tuple[str, ...]:
        """Outputs for which zeros would have passed."""
        if self.family.drawn:
            return ()
        zeros = [tuple(torch.zeros_like(output) for output in oracle) for oracle in self.oracles]
        return tuple(f"{error.output}: zeros" for error in self.errors(zeros) if error.passed and error.total)

    def outputs(self, kernel: Kernel, device: torch.device) -> tuple[list[Outputs], CheckedBy]:
        """What a kernel gives for each call, and what ran it.  Raises `Failed` where it cannot run or does wrong."""
        refusal = kernel.why_not_here(device)
        if refusal:
            status, _, reason = refusal.partition(": ")
            raise Failed("UNAVAILABLE" if status == "UNAVAILABLE" else "UNSUPPORTED", reason)
        if self.scheme.name not in self.spec.schemes:
            raise Failed("UNSUPPORTED", f"{self.spec.name} has the schemes {', '.join(self.spec.schemes)}")
        interpreted = kernel.backend in ("triton", "gluon") and interpreting()
        if interpreted:
            self._refuse_interpreter()
        found = []
        for inputs, oracle in zip(self.calls, self.oracles, strict=True):
            unfit = kernel.why_not_args(inputs, self.spec)
            if unfit:
                raise Failed("UNSUPPORTED", unfit.removeprefix("UNSUPPORTED: "))
            data = Data(inputs, oracle) if kernel.prepare is None else prepare(kernel, self.spec, inputs)
            with poisoned_allocations():
                found.append(run(kernel, self.spec, data, self.scheme, device).read)
        return found, "interpreter" if interpreted else "gpu" if device.type == "cuda" else "torch"

    def _refuse_interpreter(self) -> None:
        if self.scheme.name == "bf16":
            raise Failed("UNSUPPORTED", INTERPRETER_BF16)
        costs = [self.spec.cost(**inputs) for inputs in self.calls]
        rows = max((value.shape[:-1].numel() for call in self.calls for value in _activations(call)), default=0)
        work = sum(cost.flops for cost in costs), sum(cost.bytes for cost in costs)
        if work[0] > INTERPRETED_FLOPS or work[1] > INTERPRETED_BYTES or rows > INTERPRETED_ROWS:
            raise Failed("UNSUPPORTED", TOO_MUCH)


def _activations(inputs: Inputs) -> list[torch.Tensor]:
    """The first tensor: the one whose rows a kernel works through."""
    return [value for value in inputs.values() if isinstance(value, torch.Tensor)][:1]
