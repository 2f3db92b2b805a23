"""rope_and_cache: rotates the queries and keys of new tokens, and writes keys and values to the paged cache.

The op does `rope` and `kv_cache_write` in one pass, which saves launches and memory traffic. With `q_norm` and `k_norm`
each head of q and k is first normalised by its root mean square, as in Qwen3 (arXiv 2505.09388). Nothing is rounded
between the norm and the rotation. An e4m3 cache holds value / (scale of the head), rounded to nearest even and clamped
to +-448.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from rooflab.reference.contract import FLOATS, Argument, CallArguments, Contract, Dims
from rooflab.reference.domain import Domain, Sizes
from rooflab.reference.kv_cache_write import slots_exist
from rooflab.reference.pages import drawn_pages
from rooflab.reference.rmsnorm import normed
from rooflab.reference.rope import other_tables, positions_known, usual_tables
from rooflab.reference.rows import ACCUMULATION_FACTOR, FP8_MAX
from rooflab.reference.rules import check_dtype
from rooflab.reference.spec import FP32_ROUNDOFF, Arguments, Case, Inputs, OpSpec, Outputs, Scheme, nbytes, randn
from rooflab.roofline.model import Cost


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    q_out: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    interleaved: bool = False,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
) -> Outputs:
    """Returns the values that q_out, k_cache and v_cache must have after the op, in fp64.

    q, q_out: (T, H, D); k, v: (T, H_kv, D). cos, sin: (max_position, R/2) fp32. Only the first R <= D values of a head
    are rotated. positions: (T,) int64. k_cache, v_cache: (num_blocks, block_size, H_kv, D), of q's dtype, or e4m3 with
    k_scale, v_scale: (H_kv,) fp32. slot_mapping: (T,) int64; a slot is block * block_size + offset, and occurs at most
    once. A token with slot -1 is not written. q_norm, k_norm: (D,), the weights of the norms of q and k, or both
    None."""
    arguments = {
        "q": q, "k": k, "v": v, "cos": cos, "sin": sin, "positions": positions, "q_out": q_out, "k_cache": k_cache,
        "v_cache": v_cache, "slot_mapping": slot_mapping, "k_scale": k_scale, "v_scale": v_scale, "q_norm": q_norm,
        "k_norm": k_norm,
    }  # fmt: skip
    places_exist(arguments, CONTRACT.check(arguments))
    head_inputs = ((q, q_norm), (k, k_norm))
    rotated_q, rotated_k = (
        _turned(_normed(x, weight, norm_eps), cos, sin, positions, interleaved) for x, weight in head_inputs
    )
    caches = []
    for cache, rows_to_write, cache_scale in ((k_cache, rotated_k, k_scale), (v_cache, v.double(), v_scale)):
        if cache_scale is not None:
            rows_to_write = (rows_to_write / cache_scale.double()[:, None]).clamp(-FP8_MAX, FP8_MAX)
        slot_values = cache.double().flatten(0, 1)
        slot_mask = slot_mapping >= 0
        slot_values[slot_mapping[slot_mask]] = rows_to_write[slot_mask]
        caches.append(slot_values.view(cache.shape))
    return rotated_q, caches[0], caches[1]


def whole(arguments: CallArguments, dims: Dims) -> None:
    """Raises `ValueError` if only one of the two scales, or only one of the two norms, is given. Also raises if the
    tables rotate more than D columns, or if a cache has the wrong dtype."""
    for name, plural_name in (("scale", "scales"), ("norm", "norms")):
        first_name, second_name = ("k_scale", "v_scale") if name == "scale" else ("q_norm", "k_norm")
        if (arguments.get(first_name) is None) != (arguments.get(second_name) is None):
            missing_name = second_name if arguments.get(second_name) is None else first_name
            raise ValueError(f"{missing_name}: expected both {plural_name} or none, got one")
    if dims["rotary"] > dims["D"]:
        max_columns, table_columns = dims["D"] // 2, dims["rotary"] // 2
        raise ValueError(f"cos: expected at most {max_columns} columns, half of q's head_dim, got {table_columns}")
    cache_dtype = arguments["q"].dtype if arguments.get("k_scale") is None else torch.float8_e4m3fn
    for name in ("k_cache", "v_cache"):
        check_dtype(name, arguments[name], cache_dtype)


def places_exist(arguments: CallArguments, dims: Dims) -> None:
    """Raises `ValueError` if a position is outside the cos and sin tables, or a slot is outside the caches."""
    positions_known(arguments, dims)
    slots_exist(arguments, dims)


NEW_ARGUMENT, INDEX_ARG = Argument("T H_kv D", "q"), Argument("T", (torch.int64,))
TABLE_ARGUMENT = Argument("max_position rotary/2", (torch.float32,))
CACHE_ARGUMENT = Argument("num_blocks block_size H_kv D", (*FLOATS, torch.float8_e4m3fn), "contiguous")
SCALE_ARGUMENT, NORM = Argument("H_kv", (torch.float32,), optional=True), Argument("D", "q", optional=True)
CONTRACT = Contract(
    {
        "q": Argument("T H D", FLOATS),
        **{"k": NEW_ARGUMENT, "v": NEW_ARGUMENT, "cos": TABLE_ARGUMENT, "sin": TABLE_ARGUMENT, "positions": INDEX_ARG},
        "q_out": Argument("T H D", "q"),
        **{"k_cache": CACHE_ARGUMENT, "v_cache": CACHE_ARGUMENT, "slot_mapping": INDEX_ARG},
        **{"k_scale": SCALE_ARGUMENT, "v_scale": SCALE_ARGUMENT, "q_norm": NORM, "k_norm": NORM},
    },
    {},
    rules=whole,
    values=places_exist,
)


def _normed(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Returns the heads x (T, heads, D) in fp64. If `weight` is not None, applies RMSNorm to each head."""
    return x.double() if weight is None else normed(x.double(), weight, eps, 0.0, None)


def _turned(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    """Applies the rotary embedding to the first R values of each head. `x` and the result are (T, heads, D) in fp64."""
    R = 2 * cos.shape[1]
    c, s = cos.double()[positions].unsqueeze(1), sin.double()[positions].unsqueeze(1)
    first_values, second_values = _pairs(x[..., :R], interleaved)
    rotated_pair = (first_values * c - second_values * s, second_values * c + first_values * s)
    rotated_values = torch.stack(rotated_pair, dim=-1).flatten(-2) if interleaved else torch.cat(rotated_pair, dim=-1)
    return torch.cat((rotated_values, x[..., R:]), dim=-1)


def _pairs(x: torch.Tensor, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    half_width = x.shape[-1] // 2
    return (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half_width], x[..., half_width:])


def tolerance(inputs: Inputs, oracle: Outputs, scheme: Scheme) -> Outputs:
    """Returns the tolerance of q and of the caches. It is error + rounding. The error of a value in a rotated pair
    (first, second), and of any other value x, is:

        (4 + n) * u_32 * (|first| + |second|)
        (2 + n) * u_32 * |x|

    4 u_32 is for the rotation, as in `rope`. 2 u_32 is for the division by the cache's scale. n is 2 sqrt(D) + 4 if q
    and k are normalised first, else 0. D is the head size.

        rounding = u_out * (|ref| + error) + half a subnormal

    u_32 and u_out are the unit roundoffs of fp32 and of the result. A value that is only copied must be equal."""
    R = 2 * inputs["cos"].shape[1]
    slot_ids = inputs["slot_mapping"]
    slot_mask = slot_ids >= 0
    q_norm, k_norm, eps = inputs.get("q_norm"), inputs.get("k_norm"), inputs.get("norm_eps", 1e-6)
    norm_error = 0.0 if q_norm is None else ACCUMULATION_FACTOR / 2 * inputs["q"].shape[-1] ** 0.5 + 4.0
    limits = [_limit(_normed(inputs["q"], q_norm, eps), oracle[0], R, inputs["interleaved"], scheme.output, norm_error)]
    for input_name, out, weight, error in (("k", oracle[1], k_norm, norm_error), ("v", oracle[2], None, 0.0)):
        cache_scale, dtype = inputs.get(f"{input_name}_scale"), inputs[f"{input_name}_cache"].dtype
        x = _normed(inputs[input_name], weight, eps)
        scaled_x = x if cache_scale is None else x / cache_scale.double()[:, None]
        rows = out.flatten(0, 1)
        cache_limit = torch.zeros_like(rows)
        rotary_R = R if input_name == "k" else 0
        written_limits = _limit(
            scaled_x[slot_mask], rows[slot_ids[slot_mask]], rotary_R, inputs["interleaved"], dtype, error
        )
        if cache_scale is None and not error:
            written_limits[..., rotary_R:] = 0.0
        cache_limit[slot_ids[slot_mask]] = written_limits
        limits.append(cache_limit.view(out.shape))
    return tuple(limits)


def _limit(
    x: torch.Tensor, out: torch.Tensor, R: int, interleaved: bool, dtype: torch.dtype, more: float
) -> torch.Tensor:
    """Returns the allowed error of each value of `out` `[n, heads, D]`, which a kernel rounds to `dtype`. `x` holds the
    values before the rotation of the first R values of each head. `more` is the relative error of `x`, in unit
    roundoffs of fp32."""
    dtype_info = torch.finfo(dtype)
    first_values, second_values = _pairs(x[..., :R].abs(), interleaved)
    pair_magnitude = first_values + second_values
    column_magnitude = pair_magnitude.repeat_interleave(2, dim=-1) if interleaved else pair_magnitude.repeat(1, 1, 2)
    error = torch.cat(((4.0 + more) * column_magnitude, (2.0 + more) * x[..., R:].abs()), dim=-1) * FP32_ROUNDOFF
    # The error may move a value across a tie, to the other neighbour: this costs a unit roundoff of the error too.
    rounding_error = dtype_info.eps / 2 * (out.abs() + error) + dtype_info.smallest_normal * dtype_info.eps / 2
    unrotated_mask = torch.arange(out.shape[-1]) >= R
    if dtype.itemsize > 1 and not more:
        rounding_error = rounding_error.masked_fill(unrotated_mask.to(out.device), 0.0)
        error = error.masked_fill(unrotated_mask.to(out.device), 0.0)
    return error + rounding_error


def make_inputs(case: Case, scheme: Scheme, device: torch.device, seed: int) -> Inputs:
    """Makes random normal q, k and v, cos and sin tables, random positions, filled caches, and distinct random slots.

    `skipped` is the number of tokens with the slot -1. Raises `ValueError` if the cache has too few slots, or if
    `rotary` is odd or more than D.
    """
    T, H, H_kv, D, R = (int(case[key]) for key in ("T", "H", "H_kv", "D", "rotary"))
    num_blocks, block_size, skipped_tokens = (int(case[key]) for key in ("num_blocks", "block_size", "skipped"))
    max_position = int(case["max_position"])
    if T > num_blocks * block_size or skipped_tokens > T:
        raise ValueError(f"case: expected skipped <= T <= num_blocks * block_size, got {case.id}")
    if R % 2 or R > D:
        raise ValueError(f"case: expected an even rotary <= D, got {case.id}")
    generator = torch.Generator().manual_seed(seed)
    positions = torch.randint(max_position, (T,), generator=generator)
    slots = torch.randperm(num_blocks * block_size, generator=generator)[:T].clone()
    # Skipped tokens are spread over the batch, so that a kernel that stops at the first -1 fails.
    slots[torch.arange(skipped_tokens) * max(T // max(skipped_tokens, 1), 1)] = -1
    cos, sin = usual_tables(max_position, R, device)
    dtype, cache = scheme.activation, (num_blocks, block_size, H_kv, D)
    q = randn(T, H, D, dtype=dtype, device=device, seed=seed + 1)
    inputs = {
        "q": q,
        "k": randn(T, H_kv, D, dtype=dtype, device=device, seed=seed + 2),
        "v": randn(T, H_kv, D, dtype=dtype, device=device, seed=seed + 3),
        "cos": cos,
        "sin": sin,
        "positions": positions if q.is_meta else positions.to(device),
        "q_out": randn(T, H, D, dtype=dtype, device=device, seed=seed + 6),
        "k_cache": randn(*cache, dtype=scheme.weight, device=device, seed=seed + 4),
        "v_cache": randn(*cache, dtype=scheme.weight, device=device, seed=seed + 5),
        "slot_mapping": slots if q.is_meta else slots.to(device),
        "interleaved": bool(case["interleaved"]),
    }
    if scheme.weight.itemsize == 1:
        for input_name in ("k_scale", "v_scale"):
            inputs[input_name] = (0.01 + torch.rand(H_kv, generator=generator)).to(device)
    if case.get("norm_eps"):
        for i, input_name in enumerate(("q_norm", "k_norm")):
            inputs[input_name] = randn(D, dtype=dtype, device=device, seed=seed + 7 + i, scale=0.5, mean=1.0)
        inputs["norm_eps"] = float(case["norm_eps"])
    return inputs


def planted(case: Case, scheme: Scheme, device: torch.device, seed: int) -> Iterator[tuple[str, Inputs]]:
    """Yields adversarial inputs: the first and the last token get the first and the last slot of the cache. Also yields
    positions at the ends of the tables, and tokens that all have the slot -1."""
    T, last_slot = int(case["T"]), int(case["num_blocks"]) * int(case["block_size"]) - 1
    for slot in sorted({0, last_slot}):
        for token_index in sorted({0, T - 1}) if T else ():
            inputs = make_inputs(case, scheme, device, seed)
            slots = inputs["slot_mapping"]
            slots[slots == slot] = -1  # each slot at most once
            slots[token_index] = slot
            yield f"token {token_index} to slot {slot}", inputs
    for position in sorted({0, int(case["max_position"]) - 1}):
        inputs = make_inputs(case, scheme, device, seed)
        inputs["positions"].fill_(position)
        yield f"position={position}", inputs
    for table_label, new_tables in other_tables(inputs["cos"], seed):
        yield table_label, make_inputs(case, scheme, device, seed) | new_tables
    for column in sorted({0, int(case["rotary"]) // 2, int(case["rotary"]) - 1, int(case["D"]) - 1} - {-1}):
        inputs = make_inputs(case, scheme, device, seed)
        for input_name in ("q", "k", "v"):
            inputs[input_name][..., column] = 1000.0
        yield f"column={column}", inputs
    inputs = make_inputs(case, scheme, device, seed)
    inputs["slot_mapping"].fill_(-1)
    yield "all skipped", inputs
    if case.get("norm_eps"):
        inputs = make_inputs(case, scheme, device, seed)
        for input_name in ("q", "k"):
            inputs[input_name] *= inputs["norm_eps"] ** 0.5
        yield "mean square near eps", inputs


def cost(args: Arguments) -> Cost:
    """Returns the bytes and FLOPs of the op. Tokens without a slot cost nothing for keys and values. Each distinct
    position reads one row of cos and sin. A rotated value needs three FLOPs. A norm adds four FLOPs per value and one
    rsqrt per head."""
    written_tokens = int((args.slot_mapping >= 0).sum())
    token_values = args.k.shape[1] * args.k.shape[2]
    tables = len(set(args.positions.tolist())) * args.cos.shape[1] * (args.cos.element_size() + args.sin.element_size())
    vector_bytes = nbytes(args.positions, args.slot_mapping, args.k_scale, args.v_scale, args.q_norm, args.k_norm)
    rotated_values = args.q.numel() + written_tokens * token_values
    return Cost(
        read_bytes=nbytes(args.q) + vector_bytes + 2 * written_tokens * token_values * args.k.element_size() + tables,
        write_bytes=nbytes(args.q) + 2 * written_tokens * token_values * args.k_cache.element_size(),
        vector_flops=(3.0 if args.q_norm is None else 7.0) * rotated_values,
        sfu_ops=0.0 if args.q_norm is None else rotated_values / args.q.shape[-1],
    )


def _case(T: int, heads: tuple[int, int, int], **changes: bool | float) -> Case:
    H, H_kv, D = heads
    base_case = {"rotary": D, "max_position": 64, "num_blocks": 4, "block_size": 16, "skipped": 0, "interleaved": False}
    return Case(T=T, H=H, H_kv=H_kv, D=D, **{**base_case, **changes})


def _model(heads: tuple[int, int, int], max_position: int, *T_values: int, **changes: float) -> tuple[Case, ...]:
    return tuple(_case(T, heads, max_position=max_position, num_blocks=512, **changes) for T in T_values)


def _drawn(H_kv: int, group: int, D: int, rotary: str, norm_eps: float, **values: Any) -> Case:
    if norm_eps:
        values["norm_eps"] = norm_eps
    rotary_dim = {"all": D // 2 * 2, "half": D // 4 * 2, "none": 0}[rotary]
    return drawn_pages(H_kv=H_kv, H=group * H_kv, D=D, rotary=rotary_dim, **values)


SPEC = OpSpec(
    name="rope_and_cache",
    reference=reference,
    contract=CONTRACT,
    make_inputs=make_inputs,
    cost=cost,
    outputs=("q_out", "k_cache", "v_cache"),
    cases={
        "smoke": (_case(5, (4, 2, 64), skipped=1), _case(5, (4, 2, 64), skipped=1, interleaved=True)),
        "edge": (
            _case(1, (1, 1, 2), max_position=9, num_blocks=1, block_size=1),
            _case(1, (9, 3, 64), num_blocks=2),
            _case(7, (3, 3, 80), rotary=32, num_blocks=5, block_size=3, skipped=2),
            _case(7, (3, 1, 80), rotary=32, num_blocks=5, block_size=3, skipped=3, interleaved=True),
            _case(13, (16, 2, 96), num_blocks=13, block_size=1, skipped=3, interleaved=True),
            _case(6, (5, 1, 33), rotary=10, skipped=2),
            _case(3, (2, 2, 128), rotary=0, skipped=1),
            _case(9, (3, 1, 80), rotary=32, skipped=2, norm_eps=1e-6),
            _case(70, (2, 1, 33), rotary=32, num_blocks=5, norm_eps=0.01, interleaved=True),
            _case(8, (2, 1, 5), rotary=2, max_position=1_500_000),
        ),
        "smollm2_135m": _model((9, 3, 64), 8192, 1, 16, 512),
        "qwen3_0_6b": _model((16, 8, 128), 40960, 1, 16, 512, norm_eps=1e-6),
        "llama3_8b": _model((32, 8, 128), 131072, 1, 16, 4096),
    },
    schemes=("fp32", "fp16", "bf16", "kv_fp8"),
    wrong={
        "the other pairing": lambda of: {"interleaved": not of.interleaved},
        "the other direction": lambda of: {"sin": -of.sin},
        "the next position": lambda of: {"positions": (of.positions + 1) % len(of.cos)},
        "keys and values in each other's cache": lambda of: {"k": of.v, "v": of.k},
        "values lie one slot further": lambda of: {"v": of.v.roll(1, 0)},
    },
    tolerance=tolerance,
    planted=planted,
    mutates=("q_out", "k_cache", "v_cache"),
    slots=("slot_mapping", "k_cache", "v_cache"),
    no_library="no rotary embedding and no paged cache",
    optional={"norm_eps": 0.0},
    domain=Domain(
        {
            "T": Sizes(1, 2_000, empty=True),
            "H_kv": Sizes(1, 16, model="kv_heads"),
            "group": Sizes(1, 130, model="group"),
            "D": Sizes(2, 300, model="head_dim"),
            "rotary": ("all", "half", "none"),
            "max_position": Sizes(1, 1_500_000),
            "block_size": Sizes(1, 300),
            "spare": (0, 1, 5_000),
            "skipped": ("none", "some", "all"),
            "interleaved": (False, True),
            # The norm is mostly off: a kernel without it refuses a case with it.
            "norm_eps": (*[0.0] * 4, 1e-6, 0.01),
        },
        _drawn,
    ),
)
