"""merge_attention_states: combines attention over parts of the keys into attention over all keys.

The parts are splits of a KV cache, or a shared prefix and a request's own suffix. The merge needs only the output and
the natural log-sum-exp of each part (Ye et al., "FlashInfer", arXiv 2501.01005, section 2.2).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from rooflab.reference.contract import FLOATS, Argument, CallArguments, Contract, Dims, Result
from rooflab.reference.domain import Domain, Sizes
from rooflab.reference.spec import FP32_ROUNDOFF, Arguments, Case, Inputs, OpSpec, Outputs, Scheme, nbytes, randn
from rooflab.roofline.model import Cost

OPERATION_FACTOR = 4.0
"""The number of roundings for each part: an exponential, its sum and a product."""


def reference(outs: torch.Tensor, lses: torch.Tensor) -> Outputs:
    """Returns the merged output (T, H, D) and the merged log-sum-exp (T, H) in fp64.

    outs: (P, T, H, D) fp32, fp16 or bf16, the outputs of P parts of the keys; lses: (P, T, H) fp32. A part with a
    log-sum-exp of -inf, or +inf as in FlashAttention-2, has no visible keys and is ignored. If all parts are ignored,
    the result is 0 with the log-sum-exp -inf."""
    CONTRACT.check(locals(), any_dtype=True)
    weights, lse = _weights(lses)
    finite_outs = outs.double().masked_fill(lses.isinf()[..., None], 0.0)
    return (weights[..., None] * finite_outs).sum(0), lse


def _rules(arguments: CallArguments, dims: Dims) -> None:
    if dims["P"] == 0:
        raise ValueError("outs: expected at least one part, got none")


def _seen(lses: torch.Tensor) -> torch.Tensor:
    """Returns the log-sum-exps in fp64. A value of +inf marks a part without visible keys, and becomes -inf."""
    return lses.double().masked_fill(lses == math.inf, -math.inf)


def _weights(lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the weight of each part in the merged output (P, T, H), and the merged log-sum-exp (T, H). P is the
    number of parts."""
    lses = _seen(lses)
    lse = torch.logsumexp(lses, dim=0)
    return torch.exp(lses - lse).masked_fill((lse == -math.inf).expand(lses.shape), 0.0), lse


def tolerance(inputs: Inputs, oracle: Outputs, scheme: Scheme) -> Outputs:
    """Returns the tolerances of the output and of the log-sum-exp:

        sum_p c * u * (P + peak - lse_p + |peak|) * w_p * |out_p|  +  u_out * |ref|  +  half a subnormal
        c * u * (P + |lse|)

    P is the number of parts, and w_p is the weight of part p. peak is the largest log-sum-exp of all parts. u = 2**-24,
    c = 4, and u_out is the unit roundoff of the output. The exponent of a weight is a difference of two log-sum-exps,
    and its rounding adds to the error."""
    weights, _ = _weights(inputs["lses"])
    lses = _seen(inputs["lses"])
    part_count = lses.shape[0]
    max_lse = lses.amax(0)
    seen_mask = lses > -math.inf
    lse_gap = (max_lse - lses).masked_fill(~seen_mask, 0.0).clamp(max=200.0)
    operation_error = OPERATION_FACTOR * FP32_ROUNDOFF
    out_sizes = inputs["outs"].double().abs().masked_fill(~seen_mask[..., None], 0.0)
    output_error = (operation_error * (part_count + lse_gap + max_lse.abs().nan_to_num(posinf=0.0)) * weights)[
        ..., None
    ] * out_sizes
    half_subnormal = torch.finfo(scheme.output).smallest_normal * scheme.unit_roundoff
    out = output_error.sum(0) + scheme.unit_roundoff * oracle[0].abs() + half_subnormal
    return out, operation_error * (part_count + oracle[1].abs().nan_to_num(posinf=0.0))


def make_inputs(case: Case, scheme: Scheme, device: torch.device, seed: int) -> Inputs:
    """Makes normal random outputs and log-sum-exps. With `empty`, a quarter of the parts saw no key and hold NaN."""
    P, T, H, D = (int(case[size_name]) for size_name in ("P", "T", "H", "D"))
    outs = randn(P, T, H, D, dtype=scheme.activation, device=device, seed=seed)
    lses = randn(P, T, H, dtype=torch.float32, device=device, seed=seed + 1, scale=3.0)
    if case["empty"] and not lses.is_meta:
        unseen_mask = torch.rand(P, T, H, generator=torch.Generator().manual_seed(seed + 2)) < 0.25
        if T > 1:
            unseen_mask[:, T // 2] = True
        lses[unseen_mask.to(device)] = -math.inf
        outs[unseen_mask.to(device)] = math.nan
    return {"outs": outs, "lses": lses}


def planted(case: Case, scheme: Scheme, device: torch.device, seed: int) -> Iterator[tuple[str, Inputs]]:
    """Yields adversarial inputs. In some, one part of the keys outweighs all other parts. In others, some parts contain
    no keys, or all log-sum-exps are far from 0."""
    for part_index in sorted({0, int(case["P"]) - 1}):
        inputs = make_inputs(case, scheme, device, seed)
        inputs["lses"][part_index] = 40.0
        inputs["outs"][part_index] = torch.linspace(-8, 8, int(case["D"])).to(inputs["outs"])
        yield f"part {part_index}", inputs
    inputs = make_inputs(case, scheme, device, seed)
    residues = torch.arange(inputs["lses"].numel(), device=inputs["lses"].device).view(inputs["lses"].shape) % 5
    lses = inputs["lses"].masked_fill(residues == 1, -math.inf).masked_fill(residues == 3, math.inf)
    outs = inputs["outs"].masked_fill((residues % 2 == 1)[..., None], math.nan)
    yield "values: parts without keys of -inf and of +inf", {"outs": outs, "lses": lses}
    for lse_shift in (300.0, -300.0, -20_000.0):
        inputs = make_inputs(case, scheme, device, seed)
        inputs["lses"] += lse_shift
        yield f"log-sum-exps about {lse_shift:g}", inputs


def cost(args: Arguments) -> Cost:
    """Returns the cost: each part is read once, and the result is written once. Each part, token and head needs one
    exponential."""
    _, T, H, D = args.outs.shape
    return Cost(
        read_bytes=nbytes(args.outs, args.lses),
        write_bytes=T * H * (D * args.outs.element_size() + 4),
        vector_flops=2.0 * args.outs.numel(),
        sfu_ops=float(args.lses.numel()),
    )


def _case(P: int, T: int, H: int, D: int, empty: bool = False) -> Case:
    return Case(P=P, T=T, H=H, D=D, empty=empty)


def _model(H: int, D: int) -> tuple[Case, ...]:
    return _case(2, 64, H, D), _case(16, 1, H, D), _case(8, 64, H, D)


CONTRACT = Contract(
    {"outs": Argument("P T H D", FLOATS), "lses": Argument("P T H", (torch.float32,), layout="any")},
    {"out": Result("T H D", "outs"), "lse": Result("T H", torch.float32, layout="any")},
    _rules,
)


def _mean(of: Arguments) -> Outputs:
    """Imitates a faulty kernel that takes the unweighted mean of the parts. A part without visible keys does not
    count."""
    seen_mask = ~of.lses.isinf()
    finite_outs = of.outs.double().masked_fill(~seen_mask[..., None], 0.0)
    return finite_outs.sum(0) / seen_mask.sum(0).clamp(min=1)[..., None], _weights(of.lses)[1]


SPEC = OpSpec(
    name="merge_attention_states",
    reference=reference,
    contract=CONTRACT,
    make_inputs=make_inputs,
    cost=cost,
    outputs=("out", "lse"),
    output_dtypes={"lse": torch.float32},
    wrong={
        "the parts have equal weights": _mean,
        "log-sum-exps in base 2": lambda of: {"lses": of.lses * math.log(2)},
        "the last part is left out": lambda of: {
            "lses": of.lses.index_fill(0, torch.tensor(len(of.lses) - 1), -math.inf)
        },
    },
    tolerance=tolerance,
    planted=planted,
    cases={
        "smoke": (_case(2, 3, 4, 64), _case(5, 4, 3, 128, empty=True)),
        "edge": (
            _case(1, 1, 1, 64),
            _case(1, 3, 2, 64, empty=True),
            _case(2, 1, 1, 1),
            _case(3, 7, 5, 80, empty=True),
            _case(33, 2, 3, 64, empty=True),
            _case(128, 1, 2, 192),
            _case(2, 5, 1, 512, empty=True),
            _case(4, 0, 2, 64),
        ),
        "smollm2_135m": _model(9, 64),
        "qwen3_0_6b": _model(16, 128),
        "llama3_8b": _model(32, 128),
    },
    no_library="no merge of attention states",
    domain=Domain(
        {
            **{"P": Sizes(1, 300), "T": Sizes(1, 2_000, empty=True), "H": Sizes(1, 130, model="heads")},
            **{"D": Sizes(1, 600, model="head_dim"), "empty": (False, True)},
        },
        Case,
    ),
)
