"""Computes attention over sequences of different lengths, packed one after another without padding.

Each sequence has the formula and the tolerance of `flash_attention`. `attention.py` describes the options. The layout
and the argument names are those of FlashAttention (Dao, "FlashAttention-2", 2023).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import torch

from rooflab.reference.attention import (
    HEAD_AXES,
    OPTION_AXES,
    SINKS_ARGUMENT,
    TILE_EDGES,
    Scores,
    attend,
    attention_cost,
    error_bounds,
    get_scale,
    listen,
    low_precision,
    option_rules,
    other_scores,
    seen_keys,
    shout,
    with_heads,
)
from rooflab.reference.contract import FLOATS, Argument, CallArguments, Contract, Dims, Result
from rooflab.reference.domain import Domain, Sizes
from rooflab.reference.flash_attention import options
from rooflab.reference.pages import offsets_of, turned
from rooflab.reference.rules import check_offsets
from rooflab.reference.spec import Arguments, Case, Inputs, OpSpec, Outputs, Scheme, nbytes, randn
from rooflab.roofline.model import Cost


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = False,
    softmax_scale: float | None = None,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | Outputs:
    """Returns `softmax(q k^T * softmax_scale) @ v` of each sequence in fp64. The options are those of
    `flash_attention`.

    q: (T, H, D); k, v: (S, H_kv, D). cu_seqlens_q, cu_seqlens_k: (B + 1,) int32, ascending offsets from 0 to T and from
    0 to S. The queries of sequence b are the rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1 of q. cu_seqlens_k gives
    its keys in the same way. A sequence may be empty. max_seqlen_q and max_seqlen_k are at least the longest lengths.

    Returns (T, H, D), and with `return_lse` also the log-sum-exp (T, H). Raises `ValueError` if a row belongs to no
    sequence."""
    arguments = locals()
    check_lengths(arguments, CONTRACT.check(arguments, any_dtype=True))
    scores = Scores(get_scale(q, softmax_scale), softcap)
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    lse = torch.zeros(q.shape[:2], dtype=torch.float64, device=q.device)
    for queries, keys in _spans(cu_seqlens_q, cu_seqlens_k):
        key_range = seen_keys(_length(queries), _length(keys), causal, window)
        out[queries], lse[queries] = attend(q[queries], k[keys], v[keys], key_range, scores, sinks)
    return (out, lse) if return_lse else out


def _rules(arguments: CallArguments, dims: Dims) -> None:
    option_rules(arguments, dims, "k")
    for arg_name in ("max_seqlen_q", "max_seqlen_k"):
        if arguments[arg_name] < 0:
            raise ValueError(f"{arg_name}: expected at least 0, got {arguments[arg_name]}")


def check_lengths(arguments: CallArguments, dims: Dims) -> None:
    """Raises `ValueError` unless offsets ascend from 0 to T or S, and each sequence is at most max_seqlen long."""
    for operand_name, row_count in (("q", dims["T"]), ("k", dims["S"])):
        row_offsets, given_max = arguments[f"cu_seqlens_{operand_name}"], arguments[f"max_seqlen_{operand_name}"]
        check_offsets(f"cu_seqlens_{operand_name}", row_offsets, row_count)
        max_length = max((end_row - start_row for start_row, end_row in pairwise(row_offsets.tolist())), default=0)
        if max_length > given_max:
            raise ValueError(f"max_seqlen_{operand_name}: expected at least {max_length}, the longest, got {given_max}")


def _spans(cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    """Yields two row ranges for each sequence: the range in q, and the range in k and v."""
    offset_lists = [cu_seqlens.tolist() for cu_seqlens in (cu_seqlens_q, cu_seqlens_k)]
    row_ranges = [[slice(*row_bounds) for row_bounds in pairwise(row_offsets)] for row_offsets in offset_lists]
    return zip(*row_ranges, strict=True)


def _length(span: slice) -> int:
    return int(span.stop - span.start)


def tolerance(inputs: Inputs, oracle: Outputs, scheme: Scheme) -> Outputs:
    """Returns the tolerance as in `attention.py`, in fp64: (T, H, D), and (T, H) for a returned log-sum-exp."""
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    scores = Scores(get_scale(q, inputs.get("softmax_scale")), inputs.get("softcap"))
    rounding_bound = scheme.unit_roundoff * oracle[0].abs()
    lse = torch.zeros(q.shape[:2], dtype=torch.float64, device=q.device)
    for queries, keys in _spans(inputs["cu_seqlens_q"], inputs["cu_seqlens_k"]):
        key_range = seen_keys(_length(queries), _length(keys), bool(inputs.get("causal")), inputs.get("window"))
        out, lse[queries] = error_bounds(q[queries], k[keys], v[keys], key_range, scores, scheme, inputs.get("sinks"))
        rounding_bound[queries] += out
    return (rounding_bound, lse)[: len(oracle)]


def make_inputs(case: Case, scheme: Scheme, device: torch.device, seed: int) -> Inputs:
    """Makes random normal q, k and v of `B` sequences, and the options of the test case.

    If `ragged` is false, each sequence has `T` queries and `S` keys. Otherwise, the lengths are log-normal, with a
    median of `T / 2` queries, and some sequences have no queries or no keys."""
    B, T, S = (int(case[key]) for key in ("B", "T", "S"))
    generator = torch.Generator().manual_seed(seed)
    queries = (torch.randn(B, generator=generator) * 0.8).exp().mul(T / 2).round().long().clamp(min(T, 1), T)
    queries[:1] = T
    has_ragged_lengths = case.get("ragged", True)
    if not has_ragged_lengths:
        queries[:] = T
    keys = (queries + S - T).clamp(0, S)
    if has_ragged_lengths and B >= 3:
        keys[B // 2] = 0
    if has_ragged_lengths and B >= 4:
        queries[-1] = 0
    return _inputs(case, queries, keys, scheme, device, seed)


def _inputs(
    case: Case, queries: torch.Tensor, keys: torch.Tensor, scheme: Scheme, device: torch.device, seed: int
) -> Inputs:
    """Makes random inputs. `queries` and `keys` hold the number of queries and the number of keys of each sequence."""
    H, H_kv, D = (int(case[key]) for key in ("H", "H_kv", "D"))
    dtype, real_device = scheme.activation, torch.device("cpu") if torch.device(device).type == "meta" else device
    q_row_count, k_row_count = int(queries.sum()), int(keys.sum())
    return {
        "q": randn(q_row_count, H, D, dtype=dtype, device=device, seed=seed),
        "k": randn(k_row_count, H_kv, D, dtype=dtype, device=device, seed=seed + 1),
        "v": randn(k_row_count, H_kv, D, dtype=dtype, device=device, seed=seed + 2),
        "cu_seqlens_q": offsets_of(queries).to(real_device),
        "cu_seqlens_k": offsets_of(keys).to(real_device),
        "max_seqlen_q": max(queries.tolist(), default=0),
        "max_seqlen_k": max(keys.tolist(), default=0),
        "causal": bool(case["causal"]),
        **options(case, H, device, seed + 3),
    }


def planted(case: Case, scheme: Scheme, device: torch.device, seed: int) -> Iterator[tuple[str, Inputs]]:
    """Yields adversarial inputs: one dominant key at each tile edge and at both ends of every sequence. Also yields
    inputs with large keys in every second sequence."""
    S = int(case["S"])
    for j in sorted({j for j in (*TILE_EDGES, S // 2, S - 1) if 0 <= j < S}):
        inputs = make_inputs(case, scheme, device, seed)
        listen(inputs["q"], inputs["k"])
        for _, keys in _spans(inputs["cu_seqlens_q"], inputs["cu_seqlens_k"]):
            if _length(keys):
                shout(inputs["k"], inputs["v"], (keys.start + min(j, _length(keys) - 1),))
        yield f"key {j} or the last of each sequence", inputs
    for parity_name in ("even", "odd"):
        # Large keys and values must not reach the other sequences. With NaN the large sequences could not be judged.
        inputs = make_inputs(case, scheme, device, seed)
        for sequence_index, (_, keys) in enumerate(_spans(inputs["cu_seqlens_q"], inputs["cu_seqlens_k"])):
            if sequence_index % 2 == (parity_name == "odd"):
                inputs["k"][keys] = 8.0
                inputs["v"][keys] = -100.0
        yield f"{parity_name} sequences of large keys and values", inputs
    inputs = make_inputs(case, scheme, device, seed)
    reversed_offsets = {input_name: turned(inputs[input_name]) for input_name in ("cu_seqlens_q", "cu_seqlens_k")}
    yield "sequences in the other order", {**inputs, **reversed_offsets}
    uneven_lengths = torch.tensor([[5, 0, 17, 1, 3, 40], [9, 4, 0, 33, 3, 2]])
    uneven_inputs = _inputs(case, uneven_lengths[0], uneven_lengths[1], scheme, device, seed)
    yield "uneven rows: queries, keys and what comes before", uneven_inputs
    # As many queries as keys and as sequences do not mean that the offsets are equal or can be left out.
    even_totals = torch.tensor([[2, 0, 1, 1, 0, 2], [2, 1, 0, 2, 0, 1]])
    even_inputs = _inputs(case, even_totals[0], even_totals[1], scheme, device, seed)
    yield "uneven rows: as many queries as keys and sequences", even_inputs
    yield "uneven rows: max_seqlen above the longest", {**uneven_inputs, "max_seqlen_q": 173, "max_seqlen_k": 291}
    first_mask = torch.arange(len(uneven_inputs["k"]), device=uneven_inputs["k"].device)[:, None, None] < int(
        uneven_lengths[1, 0]
    )
    nan_inputs = {input_name: uneven_inputs[input_name].masked_fill(first_mask, math.nan) for input_name in ("k", "v")}
    yield "values: NaN in the keys of one sequence", {**uneven_inputs, **nan_inputs}
    yield from low_precision(make_inputs(case, scheme, device, seed), "q", "k", "v")
    yield from other_scores(make_inputs(case, scheme, device, seed), "q", "k")


def cost(args: Arguments) -> Cost:
    """Returns the cost: two dot products and one exponential per visible (query, key) pair. Keys that no query sees,
    and queries that see no key, are not read."""
    T, H, D = args.q.shape
    pair_count, query_count, keys_read = 0, 0, 0
    for queries, keys in _spans(args.cu_seqlens_q, args.cu_seqlens_k):
        key_range = seen_keys(_length(queries), _length(keys), args.causal, args.window)
        pair_count += H * int(key_range.counts.sum())
        query_count += int((key_range.counts > 0).sum())
        if int(key_range.counts.sum()):
            keys_read += int(key_range.end.max() - key_range.first.min())
    slot_bytes = args.k.shape[1] * D * (args.k.element_size() + args.v.element_size())
    read_bytes = query_count * H * D * args.q.element_size() + keys_read * slot_bytes
    read_bytes += nbytes(args.cu_seqlens_q, args.cu_seqlens_k, args.sinks)
    return attention_cost(pair_count, D, args.q, read_bytes, lse_rows=T * H if args.return_lse else 0)


def _case(B: int, T: int, S: int, heads: tuple[int, int, int], causal: bool, **more: bool | int | float) -> Case:
    H, H_kv, D = heads
    return Case(B=B, T=T, S=S, H=H, H_kv=H_kv, D=D, causal=causal, **more)


def _model(*heads: int, long: int = 8) -> tuple[Case, ...]:
    return tuple(_case(B, T, T, (heads[0], heads[1], heads[2]), True) for B, T in ((4, 512), (long, 2048)))


OFFSETS_ARGUMENT = Argument("B+1", (torch.int32,), layout="contiguous")


def _a_key_too_few(of: Arguments) -> Inputs:
    """Imitates a faulty kernel that ignores the last key of each sequence. Returns the inputs without these keys."""
    last_key_rows = of.cu_seqlens_k[1:][of.cu_seqlens_k.diff() > 0] - 1
    mask = torch.ones(len(of.k), dtype=torch.bool).index_fill(0, last_key_rows.long(), False)
    return {"k": of.k[mask], "v": of.v[mask], "cu_seqlens_k": offsets_of((of.cu_seqlens_k.diff() - 1).clamp(min=0))}


CONTRACT = Contract(
    {
        "q": Argument("T H D", FLOATS),
        "k": Argument("S H_kv D", "q"),
        "v": Argument("S H_kv D", "q"),
        "cu_seqlens_q": OFFSETS_ARGUMENT,
        "cu_seqlens_k": OFFSETS_ARGUMENT,
        "sinks": SINKS_ARGUMENT,
    },
    {"out": Result("T H D", "q"), "lse": Result("T H", torch.float32, when="return_lse", layout="any")},
    _rules,
    bounds=check_lengths,
    case=lambda arguments: {"T": arguments["max_seqlen_q"], "S": arguments["max_seqlen_k"]},
)
SPEC = OpSpec(
    name="flash_attention_varlen",
    reference=reference,
    contract=CONTRACT,
    make_inputs=make_inputs,
    cost=cost,
    outputs=("out", "lse"),
    output_dtypes={"lse": torch.float32},
    optional={"ragged": True, "window": 0, "softcap": 0.0, "sinks": False, "lse": False},
    wrong={
        "a key too few": _a_key_too_few,
        "the window is a key wider": lambda of: {"window": of.window and of.window + 1},
        "the scale is 1% off": lambda of: {"softmax_scale": 1.01 * get_scale(of.q, of.softmax_scale)},
    },
    tolerance=tolerance,
    planted=planted,
    cases={
        "smoke": (_case(2, 40, 40, (4, 2, 64), True), _case(4, 33, 50, (3, 1, 64), False)),
        "edge": (
            _case(1, 1, 1, (1, 1, 64), True),
            _case(1, 0, 5, (2, 1, 64), True),
            _case(5, 65, 65, (3, 1, 64), True),
            _case(4, 17, 129, (8, 1, 64), True),
            _case(4, 70, 17, (7, 1, 64), True),
            _case(3, 64, 128, (4, 4, 128), False),
            _case(6, 33, 33, (2, 2, 64), True, lse=True),
            _case(4, 100, 100, (4, 2, 64), True, window=17),
            _case(4, 40, 60, (16, 1, 64), True, softcap=20.0, sinks=True, lse=True),
            _case(3, 20, 47, (2, 1, 80), True),
            _case(3, 20, 70, (2, 1, 256), True),
        ),
        "smollm2_135m": _model(9, 3, 64, long=2),  # two cores check 8 x 2048 in 50 s, and this suite is for CPUs
        "qwen3_0_6b": _model(16, 8, 128),
        "llama3_8b": _model(32, 8, 128),
    },
    domain=Domain(
        {
            "B": Sizes(1, 130, empty=True),
            "equal": (True, False),
            "T": Sizes(1, 1_500, empty=True),
            "S": Sizes(1, 1_500, empty=True),
            **HEAD_AXES,
            "causal": (True, False),
            "ragged": (True, False),
            **OPTION_AXES,
        },
        with_heads,
    ),
)
