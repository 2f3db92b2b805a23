"""What one call of an op returns: names and dtypes.

Asked here and not of the op's definition, because an A/B gives this bench the definitions of older trees.
"""

from __future__ import annotations

import torch

from rooflab.reference.spec import OpSpec, Outputs, Scheme


def names(spec: OpSpec, oracle: Outputs) -> tuple[str, ...]:
    """The names of the outputs of one call, of which the oracle has as many: the last may have to be asked for."""
    return spec.outputs[: len(oracle)]


def dtypes(spec: OpSpec, oracle: Outputs, scheme: Scheme) -> list[torch.dtype]:
    """An oracle of floats stands for the scheme's output, unless the op says otherwise; one of integers is what it
    is."""
    own = getattr(spec, "output_dtypes", {})
    named = zip(names(spec, oracle), oracle, strict=True)
    return [own.get(name, scheme.output) if out.dtype.is_floating_point else out.dtype for name, out in named]
