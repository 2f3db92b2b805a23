"""rope: rotary position embedding of queries and keys (Su et al., "RoFormer", 2021).

Half-split models pair column i of a head with i + D/2 (GPT-NeoX, Hugging Face). Interleaved models pair 2i with 2i + 1
(RoFormer, Meta's Llama). The caller passes tables of cosines and sines, with any scaling of the frequencies.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rooflab.reference.attention import with_heads
from rooflab.reference.contract import FLOATS, Argument, CallArguments, Contract, Dims, Result
from rooflab.reference.domain import Domain, Sizes
from rooflab.reference.rules import check_values
from rooflab.reference.spec import FP32_ROUNDOFF, Arguments, Case, Inputs, OpSpec, Outputs, Scheme, nbytes, randn
from rooflab.roofline.model import Cost

ROPE_THETA = 10000.0


def rope(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns q and k in fp64, with each pair of columns of a head rotated by the angle for its position.

    q: (T, H, D); k: (T, H_kv, D); cos, sin: (max_position, D/2) fp32; positions: (T,) int64; returns q, k."""
    arguments = {"q": q, "k": k, "cos": cos, "sin": sin, "positions": positions}
    positions_known(arguments, CONTRACT.check(arguments))
    token_cos = cos.double()[positions].unsqueeze(1)  # (T, 1, D/2)
    token_sin = sin.double()[positions].unsqueeze(1)
    new_qk = []
    for x in (q.double(), k.double()):
        half_width = x.shape[-1] // 2
        x1, x2 = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half_width], x[..., half_width:])
        rotated_pair = (x1 * token_cos - x2 * token_sin, x2 * token_cos + x1 * token_sin)
        new_qk.append(torch.stack(rotated_pair, dim=-1).flatten(-2) if interleaved else torch.cat(rotated_pair, dim=-1))
    return new_qk[0], new_qk[1]


def even(arguments: CallArguments, dims: Dims) -> None:
    """Raises `ValueError` unless the head size D is even, because the rotation takes pairs of columns."""
    if dims["D"] % 2:
        raise ValueError(f"q: expected an even head_dim, got {dims['D']}")


def positions_known(arguments: CallArguments, dims: Dims) -> None:
    """Raises `ValueError` if a position is outside the tables of cosines and sines."""
    check_values("positions", arguments["positions"], 0, dims["max_position"] - 1)


TABLE_ARGUMENT, POSITION_ARGUMENT = Argument("max_position D/2", (torch.float32,)), Argument("T", (torch.int64,))
CONTRACT = Contract(
    {
        "q": Argument("T H D", FLOATS),
        "k": Argument("T H_kv D", "q"),
        "cos": TABLE_ARGUMENT,
        "sin": TABLE_ARGUMENT,
        "positions": POSITION_ARGUMENT,
    },
    {"q_out": Result("T H D", "q"), "k_out": Result("T H_kv D", "q")},
    rules=even,
    values=positions_known,
)


def make_inputs(case: Case, scheme: Scheme, device: torch.device, seed: int) -> Inputs:
    """Makes normal q and k, the usual angles, and random positions. On `meta` the positions are a CPU tensor."""
    T, H, H_kv, D = (int(case[key]) for key in ("T", "H", "H_kv", "D"))
    max_position = int(case["max_position"])
    positions = torch.randint(max_position, (T,), generator=torch.Generator().manual_seed(seed))
    cos, sin = usual_tables(max_position, D, device)
    q = randn(T, H, D, dtype=scheme.activation, device=device, seed=seed + 1)
    return {
        "q": q,
        "k": randn(T, H_kv, D, dtype=scheme.activation, device=device, seed=seed + 2),
        "cos": cos,
        "sin": sin,
        "positions": positions if q.is_meta else positions.to(device),
        "interleaved": bool(case["interleaved"]),
    }


def usual_tables(max_position: int, R: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns cos and sin of the usual rotary angles, (max_position, R/2) fp32. On `meta` they have no values."""
    if torch.device(device).type == "meta":
        empty_table = torch.empty(max_position, R // 2, dtype=torch.float32, device=device)
        return empty_table, empty_table.clone()
    pair_frequencies = ROPE_THETA ** (-torch.arange(R // 2, dtype=torch.float64, device=device) * 2 / max(R, 1))
    angles = torch.arange(max_position, dtype=torch.float64, device=device)[:, None] * pair_frequencies
    return angles.cos().float(), angles.sin().float()


def cost(args: Arguments) -> Cost:
    """Returns the cost: q and k are read and written. Each distinct position needs one row of each table. A value needs
    three FLOPs."""
    table_rows = len(set(args.positions.tolist()))
    table_bytes = table_rows * args.cos.shape[1] * (args.cos.element_size() + args.sin.element_size())
    return Cost(
        read_bytes=nbytes(args.q, args.k, args.positions) + table_bytes,
        write_bytes=nbytes(args.q, args.k),
        vector_flops=3.0 * (args.q.numel() + args.k.numel()),
    )


def tolerance(inputs: Inputs, oracle: Outputs, scheme: Scheme) -> Outputs:
    """Returns the tolerance of the two rotated values of a pair (first, second):

        4 * u_32 * (|first| + |second|)  +  u_out * |ref|  +  half a subnormal

    u_32 and u_out are the unit roundoffs of fp32 and of the output. Two products and a sum in fp32 have an error of at
    most 3 u_32 (|first cos| + |second sin|). The output is rounded once."""
    subnormal_error = torch.finfo(scheme.output).smallest_normal * scheme.unit_roundoff
    error_limits = []
    for x, out in zip((inputs["q"], inputs["k"]), oracle, strict=True):
        abs_x = x.double().abs()
        half_width = x.shape[-1] // 2
        if inputs["interleaved"]:
            pair_magnitude = (abs_x[..., 0::2] + abs_x[..., 1::2]).repeat_interleave(2, dim=-1)
        else:
            pair_magnitude = (abs_x[..., :half_width] + abs_x[..., half_width:]).repeat(1, 1, 2)
        error_limits.append(4.0 * FP32_ROUNDOFF * pair_magnitude + scheme.unit_roundoff * out.abs() + subnormal_error)
    return tuple(error_limits)


def other_tables(cos: torch.Tensor, seed: int) -> Iterator[tuple[str, Inputs]]:
    """Yields two adversarial tables of cos and sin. The first has random angles. The second has frequencies with the
    large base (theta) 2e6, and its values are multiplied by 1.2 as in YaRN (arXiv 2309.00071)."""
    angles = randn(*cos.shape, dtype=torch.float32, device=cos.device, seed=seed, scale=3.0)
    yield "tables of random angles", {"cos": angles.cos(), "sin": angles.sin()}
    rows, pair_count = cos.shape
    angles = torch.arange(rows)[:, None] * 2e6 ** (-torch.arange(pair_count, dtype=torch.float64) / max(pair_count, 1))
    yarn_tables = {"cos": (1.2 * angles.cos()).float(), "sin": (1.2 * angles.sin()).float()}
    yield "tables of a large theta, longer than 1", {name: table.to(cos.device) for name, table in yarn_tables.items()}


def planted(case: Case, scheme: Scheme, device: torch.device, seed: int) -> Iterator[tuple[str, Inputs]]:
    """Yields adversarial inputs: the first and last position, unusual tables, and one column with large values."""
    D, last_position = int(case["D"]), int(case["max_position"]) - 1
    for edge_position in sorted({0, last_position}):
        inputs = make_inputs(case, scheme, device, seed)
        inputs["positions"].fill_(edge_position)
        yield f"position={edge_position}", inputs
    for table_label, new_tables in other_tables(inputs["cos"], seed):
        yield table_label, make_inputs(case, scheme, device, seed) | new_tables
    for column in sorted({0, D // 2 - 1, D // 2, D - 1}):
        inputs = make_inputs(case, scheme, device, seed)
        for input_name in ("q", "k"):
            inputs[input_name][..., column] = 1000.0
        yield f"column={column}", inputs


def _cases(heads: tuple[int, int, int], max_position: int, *T_values: int) -> tuple[Case, ...]:
    H, H_kv, D = heads
    return tuple(Case(T=T, H=H, H_kv=H_kv, D=D, max_position=max_position, interleaved=False) for T in T_values)


SPEC = OpSpec(
    name="rope",
    reference=rope,
    contract=CONTRACT,
    make_inputs=make_inputs,
    cost=cost,
    outputs=("q", "k"),
    cases={
        "smoke": (
            Case(T=4, H=4, H_kv=2, D=64, max_position=32, interleaved=False),
            Case(T=4, H=4, H_kv=2, D=64, max_position=32, interleaved=True),
        ),
        "edge": (
            Case(T=1, H=1, H_kv=1, D=2, max_position=1, interleaved=False),
            Case(T=1, H=1, H_kv=1, D=2, max_position=1, interleaved=True),
            Case(T=5, H=9, H_kv=3, D=64, max_position=100, interleaved=False),
            Case(T=3, H=5, H_kv=1, D=80, max_position=7, interleaved=False),
            Case(T=3, H=3, H_kv=3, D=96, max_position=1000, interleaved=True),
            Case(T=8, H=2, H_kv=1, D=2, max_position=1_500_000, interleaved=False),
        ),
        "smollm2_135m": _cases((9, 3, 64), 8192, 1, 16, 512),
        "qwen3_0_6b": _cases((16, 8, 128), 40960, 1, 16, 512),
        "llama3_8b": _cases((32, 8, 128), 131072, 1, 16, 2048),
    },
    in_place={"q": "q", "k": "k"},
    wrong={
        "the other pairing": lambda of: {"interleaved": not of.interleaved},
        "the other direction": lambda of: {"sin": -of.sin},
        "the next position": lambda of: {"positions": (of.positions + 1) % len(of.cos)},
    },
    tolerance=tolerance,
    planted=planted,
    no_library="no rotary embedding",
    domain=Domain(
        {
            "T": Sizes(1, 5_000, empty=True),
            "H_kv": Sizes(1, 16, model="kv_heads"),
            "group": Sizes(1, 130, model="group"),
            "D": Sizes(2, 300, 2, model="head_dim"),
            "max_position": Sizes(1, 1_500_000),
            "interleaved": (False, True),
        },
        with_heads,
    ),
)
