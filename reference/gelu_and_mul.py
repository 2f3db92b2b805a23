"""gelu_and_mul: computes the gated activation of GeGLU, `gelu(gate) * up`, with the tanh form of gelu as in Gemma.

Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016; Shazeer, "GLU Variants Improve Transformer", 2020.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from rooflab.reference import silu_and_mul
from rooflab.reference.rows import quantized_rows
from rooflab.reference.silu_and_mul import (
    CONTRACT,
    DOMAIN,
    EDGE_CASES,
    SCHEMES,
    cases,
    halves,
    limits,
    make_inputs,
    planted,
)
from rooflab.reference.spec import FP32_ROUNDOFF, Arguments, Inputs, OpSpec, Outputs, Scheme
from rooflab.roofline.model import Cost


def gelu_and_mul(x: torch.Tensor, *, quantize: str | None = None) -> Outputs:
    """Returns `gate / 2 * (1 + tanh(sqrt(2 / pi) * (gate + 0.044715 gate^3))) * up` in fp64.

    x: (T, 2 I), first the I columns of `gate`, then the I columns of `up`. Returns (T, I). With `quantize` ("int8" or
    "fp8_e4m3"), returns codes (T, I) and scales (T,)."""
    gate, up = halves(x)
    # gelu(g) = g sigmoid(2 u) has the value of g / 2 (1 + tanh(u)) without its cancellation.
    return quantized_rows(gate * torch.sigmoid(2.0 * _argument(gate)) * up, quantize)


def _argument(gate: torch.Tensor) -> torch.Tensor:
    return math.sqrt(2.0 / math.pi) * (gate + 0.044715 * gate**3)


def cost(args: Arguments) -> Cost:
    """Returns the cost. An output element needs two reads, one write, one exp, one reciprocal and eight FLOPs."""
    silu = silu_and_mul.cost(args)
    return Cost(silu.read_bytes, silu.write_bytes, vector_flops=2.0 * silu.vector_flops, sfu_ops=silu.sfu_ops)


def tolerance(inputs: Inputs, oracle: Outputs, scheme: Scheme) -> Outputs:
    """Returns the tolerance of each output value:

        (8 + 4 * |2 u|) * u_32 * |ref|  +  2 * u_out * |ref|  +  (4 * u_32 + 2**-126) * |gate * up|  +  subnormals

    u is the argument of tanh. u_32 and u_out are the unit roundoffs of fp32 and of the output. The terms are as in
    `silu_and_mul`, because gelu(gate) = gate * sigmoid(2 u). 2 u has a relative error of 4 u_32. For a negative gate,
    the sum 1 + tanh(u) has an error of one u_32. For this error, the third term has the part 4 * u_32."""
    gate, up = halves(inputs["x"])
    sigmoid_argument = (2.0 * _argument(gate)).abs()
    relative_error = (8.0 + 4.0 * sigmoid_argument) * FP32_ROUNDOFF
    return limits(inputs, oracle, scheme, relative_error, (4.0 * FP32_ROUNDOFF + 2.0**-126) * (gate * up).abs())


def _with(gelu: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Arguments], Outputs]:
    return lambda of: quantized_rows(gelu(halves(of.x)[0]) * halves(of.x)[1], of.quantize)


SPEC = OpSpec(
    name="gelu_and_mul",
    reference=gelu_and_mul,
    contract=CONTRACT,
    make_inputs=make_inputs,
    cost=cost,
    outputs=("out", "scale"),
    cases={
        "smoke": cases((8, 64)),
        "edge": EDGE_CASES,
        "smollm2_135m": cases((1, 1536), (512, 1536)),
        "qwen3_0_6b": cases((1, 3072), (512, 3072)),
        "llama3_8b": cases((1, 14336), (2048, 14336)),
        "gemma_2b": cases((1, 16384), (16, 16384), (2048, 16384)),
    },
    wrong={
        "up is the first half": lambda of: {"x": of.x.roll(of.x.shape[1] // 2, 1)},
        "gelu is the exact one": _with(torch.nn.functional.gelu),
        "gelu is gate sigmoid(1.702 gate)": _with(lambda gate: gate * torch.sigmoid(1.702 * gate)),
    },
    tolerance=tolerance,
    planted=planted,
    output_dtypes={"scale": torch.float32},
    schemes=SCHEMES,
    domain=DOMAIN,
)
