"""Computes attention over keys and values in pages. A block table lists the pages of each sequence (Kwon et al.,
"Efficient memory management for large language model serving with PagedAttention", SOSP 2023).

Each sequence has the tolerance of `flash_attention`, with S the length of the sequence.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from rooflab.reference.attention import (
    HEAD_AXES,
    OPTION_AXES,
    TILE_EDGES,
    KeyRange,
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
from rooflab.reference.flash_attention import E4M3, options
from rooflab.reference.pages import (
    check_pages,
    dealt_pages,
    drawn_lengths,
    gathered,
    offsets_of,
    turned,
    uneven_tables,
    used_slots,
)
from rooflab.reference.rules import check_dtype, check_shape
from rooflab.reference.spec import DTYPE_NAMES, Arguments, Case, Inputs, OpSpec, Outputs, Scheme, nbytes, randn
from rooflab.roofline.model import Cost


def reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    softmax_scale: float | None = None,
    *,
    cu_seqlens_q: torch.Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | Outputs:
    """Computes causal attention of the last queries of each sequence over its cached keys and values, in fp64.

    q: (T, H, D); k_cache, v_cache: (num_blocks, block_size, H_kv, D); seq_lens: (B,) int32. block_table: (B,
    max_blocks) int32. Token i of sequence b is at offset i % block_size of page block_table[b, i // block_size].
    cu_seqlens_q: (B + 1,) int32, from 0 to T, the offsets of each sequence's queries in q; None means one query per
    sequence. k_scale, v_scale: (H_kv,) fp32, for an e4m3 cache. Other options are as in `flash_attention`.

    Returns (T, H, D), and with `return_lse` also the log-sum-exp (T, H). An empty sequence gives 0. Unused slots and
    table entries may have any value. Raises `ValueError` if a row of q belongs to no sequence.
    """
    arguments = locals()
    bounds(arguments, CONTRACT.check(arguments, any_dtype=True))
    scores = Scores(get_scale(q, softmax_scale), softcap)
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float64, device=q.device)
    caches = (k_cache, k_scale), (v_cache, v_scale)
    for query_rows, k, v, key_range in _sequences(q, caches, block_table, seq_lens, cu_seqlens_q, window):
        out[query_rows], lse[query_rows] = attend(q[query_rows], k, v, key_range, scores, sinks)
    return (out, lse) if return_lse else out


def _rules(arguments: CallArguments, dims: Dims) -> None:
    """Raises `ValueError` if the number of queries or the dtype of a cache is wrong. Without `cu_seqlens_q`, each
    sequence has one query. A cache with a scale must be e4m3. A cache without a scale must have the dtype of q."""
    option_rules(arguments, dims, "k_cache")
    if arguments.get("cu_seqlens_q") is None:
        check_shape("seq_lens", arguments["seq_lens"], dims["T"])
    elif dims["T"] and not dims["B"]:
        raise ValueError(f"seq_lens: expected a sequence for q's {dims['T']} queries, got none")
    for cache, scale_name in (("k_cache", "k_scale"), ("v_cache", "v_scale")):
        check_dtype(cache, arguments[cache], arguments["q"].dtype if arguments.get(scale_name) is None else E4M3)


def bounds(arguments: CallArguments, dims: Dims) -> None:
    """Checks bounds: raises `ValueError` if a length, a query offset or a page number is out of range. Pages that no
    query sees are not checked, such as pages before the window."""
    check_pages(
        arguments["block_table"],
        arguments["seq_lens"],
        dims["num_blocks"],
        dims["block_size"],
        dims["T"],
        arguments.get("cu_seqlens_q"),
        arguments.get("window"),
    )


def _scheme(arguments: CallArguments) -> str:
    """Returns the name of the dtypes of a call. It is `kv_fp8` for 16-bit queries with an e4m3 cache, else the name of
    q's dtype."""
    q, cache = arguments["q"].dtype, arguments["k_cache"].dtype
    return DTYPE_NAMES[q] if q in (torch.float32, cache) else "kv_fp8"


def _sequences(
    q: torch.Tensor,
    caches: tuple[tuple[torch.Tensor, torch.Tensor | None], ...],
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    window: int | None,
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor, KeyRange]]:
    """Yields for each sequence with queries: the rows of its queries in q, its keys, its values, and a range of
    visible keys for each query. The keys and values begin at the first key that any of these queries sees."""
    for b, (first_row, end_row, length) in enumerate(_spans(q, seq_lens, cu_seqlens_q)):
        if end_row > first_row:
            first_key = 0 if window is None else max(0, length - (end_row - first_row) + 1 - window)
            k, v = (_scaled(cache, block_table[b], first_key, length, cache_scale) for cache, cache_scale in caches)
            yield slice(first_row, end_row), k, v, seen_keys(end_row - first_row, length - first_key, True, window)


def _spans(
    q: torch.Tensor, seq_lens: torch.Tensor, cu_seqlens_q: torch.Tensor | None
) -> Iterator[tuple[int, int, int]]:
    """Yields for each sequence the first row of its queries in q, the end of these rows, and the length of the
    sequence."""
    lengths = seq_lens.tolist()
    query_offsets = list(range(len(lengths) + 1)) if cu_seqlens_q is None else cu_seqlens_q.tolist()
    return zip(query_offsets[:-1], query_offsets[1:], lengths, strict=True)


def _scaled(
    cache: torch.Tensor, pages: torch.Tensor, first: int, length: int, scale: torch.Tensor | None
) -> torch.Tensor:
    """Returns the cached keys or values of one sequence, times the scale of each head: (length - first, H_kv, D).
    `first` is the first token."""
    token_rows = gathered(cache, pages, length, first)
    return token_rows if scale is None else token_rows.double() * scale.double()[:, None]


def tolerance(inputs: Inputs, oracle: Outputs, scheme: Scheme) -> Outputs:
    """Returns the tolerance as in `attention.py`, in fp64: (T, H, D), and (T, H) for a returned log-sum-exp.

    An fp8 cache adds no error: the kernel gets fp8 values, and the dtype of the queries represents them exactly."""
    q, sinks, page_table, lengths = inputs["q"], inputs.get("sinks"), inputs["block_table"], inputs["seq_lens"]
    scores = Scores(get_scale(q, inputs.get("softmax_scale")), inputs.get("softcap"))
    rounding_bound = scheme.unit_roundoff * oracle[0].abs()
    lse = torch.zeros(q.shape[:2], dtype=torch.float64, device=q.device)
    caches = (inputs["k_cache"], inputs.get("k_scale")), (inputs["v_cache"], inputs.get("v_scale"))
    sequences = _sequences(q, caches, page_table, lengths, inputs.get("cu_seqlens_q"), inputs.get("window"))
    for query_rows, k, v, key_range in sequences:
        out, lse[query_rows] = error_bounds(q[query_rows], k, v, key_range, scores, scheme, sinks)
        rounding_bound[query_rows] += out
    return (rounding_bound, lse)[: len(oracle)]


def make_inputs(case: Case, scheme: Scheme, device: torch.device, seed: int) -> Inputs:
    """Makes inputs with pages in shuffled order. NaN fills the unused slots of the cache.

    Each sequence has min(`queries`, its length) queries. With `mixed`, every second sequence has at most one query.
    With the default options, each sequence has one query. An fp8 cache has one scale per head."""
    B, H, H_kv, D, block_size = (int(case[key]) for key in ("B", "H", "H_kv", "D", "block_size"))
    dtype = scheme.activation
    device = torch.device(device)
    generator = torch.Generator().manual_seed(seed)
    lengths = drawn_lengths(case, generator)
    page_table, unused_mask = dealt_pages(lengths, block_size, generator)
    real_device = torch.device("cpu") if device.type == "meta" else device
    query_offsets = _query_bounds(lengths, int(case.get("queries", 1)), bool(case.get("mixed", False)))
    inputs: Inputs = {
        "q": randn(B if query_offsets is None else int(query_offsets[-1]), H, D, dtype=dtype, device=device, seed=seed)
    }
    for arg_name, cache_seed in (("k_cache", seed + 1), ("v_cache", seed + 2)):
        cache = randn(*unused_mask.shape, H_kv, D, dtype=torch.float32, device=device, seed=cache_seed)
        if device.type != "meta":
            cache[unused_mask.to(device)] = math.nan
        inputs[arg_name] = cache.to(scheme.weight)
    inputs |= {"block_table": page_table.to(real_device), "seq_lens": lengths.to(real_device)}
    if query_offsets is not None:
        inputs["cu_seqlens_q"] = query_offsets.to(real_device)
    if scheme.weight.itemsize == 1:
        for arg_name, cache_seed in (("k_scale", seed + 4), ("v_scale", seed + 5)):
            inputs[arg_name] = (0.5 + torch.rand(H_kv, generator=torch.Generator().manual_seed(cache_seed))).to(device)
    return inputs | options(case, H, device, seed + 3)


def _query_bounds(lengths: torch.Tensor, queries: int, mixed: bool) -> torch.Tensor | None:
    """Returns the offsets of each sequence's queries in q, (B + 1,) int32. Returns None if each sequence has one
    query."""
    if queries == 1 and not mixed:
        return None
    query_counts = lengths.clamp(max=queries)
    if mixed:
        query_counts[1::2] = query_counts[1::2].clamp(max=1)
    return torch.nn.functional.pad(query_counts.cumsum(0, dtype=torch.int32), (1, 0))


def planted(case: Case, scheme: Scheme, device: torch.device, seed: int) -> Iterator[tuple[str, Inputs]]:
    """Yields adversarial inputs: one dominant key at each page edge, each tile edge and both ends of the sequence. Also
    yields a dominant key just past the end, which no query may see."""
    kv_len, block_size = int(case["context"]), int(case["block_size"])
    edge_positions = {*TILE_EDGES, block_size - 1, block_size, kv_len - block_size, kv_len - 2, kv_len - 1}
    for position in sorted(edge_positions | {kv_len}):
        if not 0 <= position <= kv_len or kv_len == 0:
            continue
        inputs = make_inputs(case, scheme, device, seed)
        listen(inputs["q"], inputs["k_cache"])
        key_label = f"key {position}" if position < kv_len else "one past the last key"
        has_large_key = False
        for b, length in enumerate(inputs["seq_lens"].tolist()):
            # In a sequence that ends just before `position`, this slot is past the end, and no query may see it.
            page_id = int(inputs["block_table"][b, position // block_size])
            if page_id >= 0 and (position < length or position == length):
                shout(inputs["k_cache"], inputs["v_cache"], (page_id, position % block_size))
                has_large_key = True
        if has_large_key:
            yield key_label, inputs
    yield from low_precision(make_inputs(case, scheme, device, seed), "q", "k_cache", "v_cache")
    inputs = make_inputs(case, scheme, device, seed)
    yield from other_scores(inputs, "q", "k_cache") if scheme.weight.itemsize > 1 else ()
    page_table, lengths = inputs["block_table"], inputs["seq_lens"].tolist()
    yield "padding of the table that is a page", {**inputs, "block_table": page_table.clamp(min=0)}
    reversed_tables = {table_name: inputs[table_name].flip(0) for table_name in ("block_table", "seq_lens")}
    if "cu_seqlens_q" in inputs:
        reversed_tables["cu_seqlens_q"] = turned(inputs["cu_seqlens_q"])
    yield "sequences in the other order", {**inputs, **reversed_tables}
    yield from uneven_tables(inputs, ("k_cache", "v_cache"))
    yield "uneven rows: lengths and numbers of queries", _uneven(case, scheme, device, seed, [1, 7, 0, 3, 2, 12])
    yield "uneven rows: as many queries as sequences", _uneven(case, scheme, device, seed, [2, 0, 1, 1, 0, 2])
    if len(lengths) > 1:
        shared_page_count = min(lengths[0], lengths[1]) // block_size  # whole pages: a tail belongs to one sequence
        page_table = page_table.clone()
        page_table[1, :shared_page_count] = page_table[0, :shared_page_count]
        yield "a prefix that two sequences share", {**inputs, "block_table": page_table}


def _uneven(case: Case, scheme: Scheme, device: torch.device, seed: int, queries: list[int]) -> Inputs:
    """Makes inputs of sequences with different lengths, and with `queries` queries. One sequence has no keys."""
    query_counts = torch.tensor(queries)
    uneven_case = case.but(B=len(query_counts), context=min(int(case["context"]), 100), ragged=True)
    inputs = make_inputs(uneven_case, scheme, device, seed)
    _, H, D = inputs["q"].shape
    q = randn(int(query_counts.sum()), H, D, dtype=scheme.activation, device=device, seed=seed)
    return {**inputs, "q": q, "cu_seqlens_q": offsets_of(query_counts).to(inputs["seq_lens"].device)}


def cost(args: Arguments) -> Cost:
    """Returns the cost: two dot products and one exponential per visible (query, key) pair. Each visible slot of the
    cache is read once, even if sequences share it."""
    T, H, D = args.q.shape
    query_spans = [
        (end_row - first_row, seen_keys(end_row - first_row, length, True, args.window))
        for first_row, end_row, length in _spans(args.q, args.seq_lens, args.cu_seqlens_q)
    ]
    pair_count = H * sum(int(key_range.counts.sum()) for _, key_range in query_spans)
    queries = sum(int((key_range.counts > 0).sum()) for _, key_range in query_spans)
    first_keys = torch.tensor(
        [int(key_range.first.min()) if query_count else 0 for query_count, key_range in query_spans]
    )
    lengths = torch.tensor([int(key_range.end.max()) if query_count else 0 for query_count, key_range in query_spans])
    slot_count, entry_count = used_slots(
        args.block_table, lengths, args.k_cache.shape[0], args.k_cache.shape[1], first_keys
    )
    slot_bytes = 2 * args.k_cache.shape[2] * D * args.k_cache.element_size()
    read_bytes = queries * H * D * args.q.element_size() + slot_count * slot_bytes
    read_bytes += entry_count * args.block_table.element_size()
    read_bytes += nbytes(args.seq_lens, args.cu_seqlens_q, args.sinks, args.k_scale, args.v_scale)
    return attention_cost(pair_count, D, args.q, read_bytes, lse_rows=T * H if args.return_lse else 0)


def _case(
    B: int, context: int, H: int, H_kv: int, D: int, block_size: int = 16, ragged: bool = False, **more: bool | float
) -> Case:
    return Case(B=B, context=context, H=H, H_kv=H_kv, D=D, block_size=block_size, ragged=ragged, **more)


def _decode(H: int, H_kv: int, D: int) -> tuple[Case, ...]:
    return tuple(_case(B, kv_len, H, H_kv, D) for B in (1, 16) for kv_len in (512, 4096))


CONTRACT = Contract(
    {
        "q": Argument("T H D", FLOATS),
        "k_cache": Argument("num_blocks block_size H_kv D", (*FLOATS, E4M3)),
        "v_cache": Argument("num_blocks block_size H_kv D", (*FLOATS, E4M3)),
        "block_table": Argument("B max_blocks", (torch.int32,)),
        "seq_lens": Argument("B", (torch.int32,), layout="contiguous"),
        "cu_seqlens_q": Argument("B+1", (torch.int32,), layout="contiguous", optional=True),
        "sinks": Argument("H", (torch.float32,), layout="contiguous", optional=True),
        "k_scale": Argument("H_kv", (torch.float32,), layout="contiguous", optional=True),
        "v_scale": Argument("H_kv", (torch.float32,), layout="contiguous", optional=True),
    },
    {"out": Result("T H D", "q"), "lse": Result("T H", torch.float32, when="return_lse", layout="any")},
    _rules,
    bounds=bounds,
    scheme=_scheme,
    case=lambda arguments: {"queries": -(-len(arguments["q"]) // max(len(arguments["seq_lens"]), 1))},
)
SPEC = OpSpec(
    name="paged_attention",
    reference=reference,
    contract=CONTRACT,
    make_inputs=make_inputs,
    cost=cost,
    outputs=("out", "lse"),
    output_dtypes={"lse": torch.float32},
    optional={
        "lognormal": False,
        "queries": 1,
        "mixed": False,
        "window": 0,
        "softcap": 0.0,
        "sinks": False,
        "lse": False,
    },
    schemes=("fp32", "fp16", "bf16", "kv_fp8"),
    wrong={
        "a key too few": lambda of: {"seq_lens": (of.seq_lens - 1).clamp(min=0)},
        "a key too many": lambda of: {"seq_lens": of.seq_lens + (of.seq_lens > 0).int()},
        "the next sequence's pages": lambda of: {"block_table": of.block_table.roll(1, 0)},
        "slots that nobody sees times 0": lambda of: reference(**vars(of)) + 0 * of.v_cache.double().sum(),
        "the window is a key wider": lambda of: {"window": of.window and of.window + 1},
        "the scale is 1% off": lambda of: {"softmax_scale": 1.01 * get_scale(of.q, of.softmax_scale)},
    },
    tolerance=tolerance,
    planted=planted,
    cases={
        "smoke": (_case(2, 40, 4, 2, 64), _case(4, 100, 9, 3, 64, ragged=True), _case(1, 33, 8, 1, 128)),
        "edge": (
            *(_case(1, context, 3, 1, 64) for context in (0, 1, 16, 17)),
            *(_case(1, context, 4, 1, 128) for context in (33, 64, 65)),
            _case(5, 70, 9, 3, 64, block_size=8, ragged=True),
            _case(3, 90, 4, 4, 128, block_size=32, ragged=True),
            _case(2, 40, 16, 1, 64, block_size=1, ragged=True),
            _case(2, 270, 6, 2, 64, block_size=256, ragged=True),
            _case(2, 130, 20, 1, 64, block_size=24),
            _case(2, 330, 4, 2, 64, block_size=41, ragged=True),
            _case(2, 600, 4, 2, 64, block_size=528),
            _case(3, 70, 7, 1, 64, ragged=True, lse=True),
            _case(2, 200, 8, 2, 64, window=33),
            _case(2, 70, 6, 2, 64, softcap=20.0, sinks=True, lse=True),
            _case(3, 90, 4, 2, 64, ragged=True, queries=17),
            _case(4, 100, 4, 1, 64, ragged=True, queries=40, mixed=True, lse=True),
            _case(2, 65, 2, 2, 128, block_size=1, queries=64),
            _case(2, 150, 4, 2, 64, block_size=64, queries=70, window=40, sinks=True),
            _case(2, 70, 6, 2, 80, lse=True),
            _case(3, 150, 4, 2, 96, block_size=128, ragged=True, sinks=True),
            _case(2, 70, 4, 2, 192, block_size=32, softcap=15.0),
            _case(2, 90, 16, 1, 256, window=50),
            _case(2, 60, 14, 2, 80, queries=20, window=30, lse=True),
            _case(5, 40, 4, 2, 64, lognormal=True),
        ),
        "smollm2_135m": _decode(9, 3, 64),
        "qwen3_0_6b": _decode(16, 8, 128),
        "llama3_8b": (*_decode(32, 8, 128), _case(16, 4096, 32, 8, 128, ragged=True)),
    },
    domain=Domain(
        {
            "B": Sizes(1, 20, empty=True),
            "context": Sizes(1, 5_000, empty=True),
            **HEAD_AXES,
            "block_size": (16, 1, 8, 24, 32, 41, 48, 64, 128, 256, 528),
            "ragged": (False, True),
            "lognormal": (False, True),
            "queries": Sizes(1, 300),
            "mixed": (False, True),
            **OPTION_AXES,
        },
        with_heads,
    ),
)
