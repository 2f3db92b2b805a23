"""silu_and_mul: computes the gated activation of SwiGLU, silu(gate) * up.

Shazeer, "GLU Variants Improve Transformer", 2020.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rooflab.reference.contract import FLOATS, Argument, Contract
from rooflab.reference.domain import Domain, Sizes
from rooflab.reference.rows import (
    magnitudes,
    of_size,
    quantized_limits,
    quantized_rows,
    quantizing,
    row_results,
    row_rules,
    row_scheme,
)
from rooflab.reference.spec import FP32_ROUNDOFF, Arguments, Case, Inputs, OpSpec, Outputs, Scheme, nbytes, randn
from rooflab.roofline.model import Cost

# exp overflows fp32 above 88.7 and fp16 above 11.1; sigmoid rounds to 1 above about 17 in fp32.
PLANTED_GATES = (0.0, -12.0, 12.0, -20.0, 20.0, -60.0, 60.0, -100.0, 100.0, -1000.0, 1000.0)
SCHEMES = ("fp32", "fp16", "bf16", "out_fp8", "out_int8")


def silu_and_mul(x: torch.Tensor, *, quantize: str | None = None) -> Outputs:
    """Returns silu(gate) * up in fp64. `gate` is the first half of the last axis of x, and `up` is the second half.

    x: (T, 2 I); returns (T, I). If `quantize` is "int8" or "fp8_e4m3", returns codes (T, I) and their scales (T,)
    (`reference/rows.py`)."""
    gate, up = halves(x)
    return quantized_rows(gate / (1.0 + torch.exp(-gate)) * up, quantize)


def halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the two halves of the last axis of x, `gate` and `up`, in fp64."""
    half_width = x.shape[-1] // 2
    return x[..., :half_width].double(), x[..., half_width:].double()


def make_inputs(case: Case, scheme: Scheme, device: torch.device, seed: int) -> Inputs:
    """Makes normal values with standard deviation 2, so that gates lie on both sides of 0, where silu is curved."""
    T, I = int(case["T"]), int(case["I"])
    return {"x": randn(T, 2 * I, dtype=scheme.activation, device=device, seed=seed, scale=2.0), **quantizing(scheme)}


def cost(args: Arguments) -> Cost:
    """Returns the cost: two reads, a write, an exp, a reciprocal and four FLOPs per output element."""
    T, input_width = args.x.shape
    output_count = T * input_width // 2
    written_bytes = output_count * args.x.element_size() if args.quantize is None else output_count + 4 * T
    return Cost(nbytes(args.x), written_bytes, vector_flops=4.0 * output_count, sfu_ops=2.0 * output_count)


def tolerance(inputs: Inputs, oracle: Outputs, scheme: Scheme) -> Outputs:
    """Returns the tolerance:

        (8 + 2 * |gate|) * u_32 * |ref|  +  2 * u_out * |ref|  +  2**-126 * |gate * up|  +  subnormals of the output

    u_32 and u_out are the unit roundoffs of fp32 and of the output. exp2(gate log2(e)) rounds its argument and log2(e),
    which costs a relative error of 2 |gate| u_32. The other operations add one to two u_32 each. A sigmoid below
    2**-126 may become 0. Two roundings to the dtype are allowed, because library calls round silu(gate) first."""
    gate, up = (operand.abs() for operand in halves(inputs["x"]))
    relative_error = (8.0 + 2.0 * gate) * FP32_ROUNDOFF
    return limits(inputs, oracle, scheme, relative_error, 2.0**-126 * gate * up)


def limits(inputs: Inputs, oracle: Outputs, scheme: Scheme, relative: torch.Tensor, absolute: torch.Tensor) -> Outputs:
    """Returns the allowed errors of a gated activation with the fp32 errors `relative` and `absolute`, both (T, I).

    A 16-bit result may be rounded twice. The subnormal error of the first rounding is multiplied by `up`. A quantised
    result is not rounded to 16 bits first."""
    quant_format, dtype_info = inputs.get("quantize"), torch.finfo(scheme.activation)
    if quant_format is not None:
        unscaled_out = oracle[0] * oracle[1][:, None]
        return quantized_limits(oracle, relative * unscaled_out.abs() + absolute, quant_format)
    _, up = halves(inputs["x"])
    subnormal_error = dtype_info.smallest_normal * dtype_info.eps / 2 * (1.0 + up.abs())
    return ((relative + dtype_info.eps) * oracle[0].abs() + absolute + subnormal_error,)


def planted(case: Case, scheme: Scheme, device: torch.device, seed: int) -> Iterator[tuple[str, Inputs]]:
    """Yields adversarial inputs: in the first and last column, gates for which a simple exp(-gate) overflows."""
    half_width = int(case["I"])
    for gate in PLANTED_GATES:
        inputs = make_inputs(case, scheme, device, seed)
        inputs["x"][:, 0] = gate
        inputs["x"][:, half_width - 1] = gate
        yield f"gate={gate:g}", inputs
    for magnitude_label, magnitude in magnitudes(scheme.activation, 1):
        yield magnitude_label, {**inputs, "x": of_size(inputs["x"], magnitude**0.5)}


def cases(*shapes: tuple[int, int]) -> tuple[Case, ...]:
    """Makes one test case for each (T, I) in `shapes`."""
    return tuple(Case(T=T, I=I) for T, I in shapes)


EDGE_CASES = cases((1, 1), (1, 1536), (3, 33), (5, 1025), (17, 128), (0, 64), (3, 111), (2, 65537))
DOMAIN = Domain(
    {"T": Sizes(1, 131_000, empty=True), "I": Sizes(1, 70_000, model="intermediate expert_intermediate")}, Case
)

CONTRACT = Contract({"x": Argument("T 2I", FLOATS)}, row_results("T I"), row_rules, scheme=row_scheme)
SPEC = OpSpec(
    name="silu_and_mul",
    reference=silu_and_mul,
    contract=CONTRACT,
    make_inputs=make_inputs,
    cost=cost,
    outputs=("out", "scale"),
    cases={
        "smoke": cases((8, 64)),
        "edge": EDGE_CASES,
        "smollm2_135m": cases((1, 1536), (16, 1536), (512, 1536)),
        "qwen3_0_6b": cases((1, 3072), (16, 3072), (512, 3072)),
        "llama3_8b": cases((1, 14336), (16, 14336), (2048, 14336)),
    },
    wrong={
        "up is the first half": lambda of: {"x": of.x.roll(of.x.shape[1] // 2, 1)},
        "the sigmoid is that of up": lambda of: quantized_rows(
            halves(of.x)[0] * halves(of.x)[1].sigmoid() * halves(of.x)[1], of.quantize
        ),
    },
    tolerance=tolerance,
    planted=planted,
    output_dtypes={"scale": torch.float32},
    schemes=SCHEMES,
    domain=DOMAIN,
)
