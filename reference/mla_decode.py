"""Computes decode attention over a paged cache of latents: multi-head latent attention with absorbed up-projections
(DeepSeek-AI, "DeepSeek-V2", arXiv 2405.04434, section 2.1). All heads share one key per token. The first part of this
key is also the value. Each sequence has the tolerance of `attention.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from rooflab.reference.attention import (
    TILE_EDGES,
    Scores,
    attend,
    attention_cost,
    error_bounds,
    listen,
    low_precision,
    seen_keys,
    shout,
    together,
)
from rooflab.reference.contract import Argument, CallArguments, Contract, Dims, Result
from rooflab.reference.domain import Domain, Sizes
from rooflab.reference.pages import check_pages, dealt_pages, drawn_lengths, gathered, uneven_tables, used_slots
from rooflab.reference.spec import Arguments, Case, Inputs, OpSpec, Outputs, Scheme, nbytes, randn
from rooflab.roofline.model import Cost

SOFTMAX_SCALE = 192.0**-0.5
"""DeepSeek-V2's softmax scale: a head's query has 128 + 64 dimensions before absorption."""


def reference(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    latent_dim: int,
    softmax_scale: float,
    *,
    return_lse: bool = False,
) -> torch.Tensor | Outputs:
    """Computes attention in fp64: one query per sequence and head, over all cached latents of the sequence.

    q: (B, H, D); D is latent_dim plus the rotary width. kv_cache: (num_blocks, block_size, D); its first latent_dim
    columns are also the values. block_table: (B, max_blocks) int32. seq_lens: (B,) int32. Returns (B, H, latent_dim),
    and with `return_lse` the log-sum-exp (B, H). An empty sequence gives 0 and the log-sum-exp -inf."""
    arguments = locals()
    bounds(arguments, CONTRACT.check(arguments, any_dtype=True))
    sequence_results = []
    for b, length in enumerate(seq_lens.tolist()):
        kv = gathered(kv_cache, block_table[b], length)[:, None]
        key_range = seen_keys(1, length, True)
        sequence_results.append(attend(q[b : b + 1], kv, kv[..., :latent_dim], key_range, Scores(softmax_scale)))
    out, lse = together(sequence_results, q, latent_dim)
    return (out, lse) if return_lse else out


def _rules(arguments: CallArguments, dims: Dims) -> None:
    if not 1 <= arguments["latent_dim"] <= dims["D"]:
        raise ValueError(f"latent_dim: expected 1 to {dims['D']}, q's last dimension, got {arguments['latent_dim']}")


def bounds(arguments: CallArguments, dims: Dims) -> None:
    """Raises `ValueError` if a length exceeds its row of the block table, or if a page number is not in the cache."""
    check_pages(arguments["block_table"], arguments["seq_lens"], dims["num_blocks"], dims["block_size"], dims["B"])


def tolerance(inputs: Inputs, oracle: Outputs, scheme: Scheme) -> Outputs:
    """Returns the tolerance as in `attention.py`: (B, H, latent_dim), and (B, H) for a returned log-sum-exp."""
    sequence_bounds = []
    for b, length in enumerate(inputs["seq_lens"].tolist()):
        kv = gathered(inputs["kv_cache"], inputs["block_table"][b], length)[:, None]
        latent_values, key_range = kv[..., : inputs["latent_dim"]], seen_keys(1, length, True)
        scores = Scores(inputs["softmax_scale"])
        sequence_bounds.append(error_bounds(inputs["q"][b : b + 1], kv, latent_values, key_range, scores, scheme))
    out, lse = together(sequence_bounds, inputs["q"], inputs["latent_dim"])
    return (out + scheme.unit_roundoff * oracle[0].abs(), lse)[: len(oracle)]


def make_inputs(case: Case, scheme: Scheme, device: torch.device, seed: int) -> Inputs:
    """Makes inputs with pages in shuffled order. NaN fills unused pages and the unused end of each last page.

    `pages.drawn_lengths` draws the lengths of the sequences.
    """
    B, H, latent_dim, rotary_dim, block_size = (int(case[key]) for key in ("B", "H", "latent", "rotary", "block_size"))
    device = torch.device(device)
    generator = torch.Generator().manual_seed(seed)
    lengths = drawn_lengths(case, generator)
    page_table, unused_mask = dealt_pages(lengths, block_size, generator)
    kv_cache = randn(*unused_mask.shape, latent_dim + rotary_dim, dtype=scheme.activation, device=device, seed=seed + 1)
    if device.type != "meta":
        kv_cache[unused_mask.to(device)] = math.nan
    real_device = torch.device("cpu") if device.type == "meta" else device
    inputs = {
        "q": randn(B, H, latent_dim + rotary_dim, dtype=scheme.activation, device=device, seed=seed),
        "kv_cache": kv_cache,
        "block_table": page_table.to(real_device),
        "seq_lens": lengths.to(real_device),
        "latent_dim": latent_dim,
        "softmax_scale": SOFTMAX_SCALE,
    }
    return inputs | ({"return_lse": True} if case.get("lse") else {})


def planted(case: Case, scheme: Scheme, device: torch.device, seed: int) -> Iterator[tuple[str, Inputs]]:
    """Yields adversarial inputs: one dominant key at each page edge, each tile edge and both ends of the sequence. Also
    yields a dominant key just past the end, which no query may see."""
    key_count, block_size = int(case["context"]), int(case["block_size"])
    edge_positions = {*TILE_EDGES, block_size - 1, block_size, key_count // 2, key_count - 2, key_count - 1, key_count}
    for position in sorted(edge_key for edge_key in edge_positions if 0 <= edge_key <= key_count and key_count):
        inputs = make_inputs(case, scheme, device, seed)
        kv_cache = inputs["kv_cache"][:, :, None]
        listen(inputs["q"], kv_cache)
        has_large_key = False
        for b, length in enumerate(inputs["seq_lens"].tolist()):
            # In a sequence that ends just before `position`, this slot is past the end, and no query may see it.
            page_id = int(inputs["block_table"][b, position // block_size])
            if page_id >= 0 and position <= length:
                changed_cache = torch.empty_like(kv_cache)
                shout(kv_cache, changed_cache, (page_id, position % block_size))
                kv_cache[page_id, position % block_size, :, 1:] = changed_cache[page_id, position % block_size, :, 1:]
                has_large_key = True
        if has_large_key:
            yield f"key {position}" if position < key_count else "one past the last key", inputs
    inputs = make_inputs(case, scheme, device, seed)
    yield "a softmax_scale of its own", {**inputs, "softmax_scale": 2.3 * SOFTMAX_SCALE}
    yield "padding of the table that is a page", {**inputs, "block_table": inputs["block_table"].clamp(min=0)}
    yield from uneven_tables(inputs, ("kv_cache",))
    reversed_tables = {table_name: inputs[table_name].flip(0) for table_name in ("block_table", "seq_lens")}
    yield "sequences in the other order", {**inputs, **reversed_tables}
    for label, new_inputs in low_precision({**inputs, "k": inputs["kv_cache"], "v": inputs["kv_cache"]}, "q", "k", "v"):
        kv_cache = new_inputs["v"] if "one sign" in label else new_inputs["k"]
        yield label, {**inputs, "q": new_inputs["q"], "kv_cache": kv_cache}


def cost(args: Arguments) -> Cost:
    """Returns the cost: two dot products and one exponential per (query, latent) pair. Each latent is read once."""
    B, H, D = args.q.shape
    slot_count, table_entries = used_slots(args.block_table, args.seq_lens, *args.kv_cache.shape[:2])
    queries = int((args.seq_lens > 0).sum())
    read_bytes = queries * H * D * args.q.element_size() + slot_count * D * args.kv_cache.element_size()
    read_bytes += table_entries * args.block_table.element_size() + nbytes(args.seq_lens)
    return attention_cost(
        H * int(args.seq_lens.sum()),
        D,
        args.q,
        read_bytes,
        value_dim=args.latent_dim,
        lse_rows=B * H if args.return_lse else 0,
    )


def _case(B: int, context: int, H: int, block_size: int = 64, ragged: bool = False, **more: bool | int) -> Case:
    part_widths = {"latent": more.pop("latent", 512), "rotary": more.pop("rotary", 64)}
    return Case(B=B, context=context, H=H, **part_widths, block_size=block_size, ragged=ragged, **more)


DEEPSEEK_CASES = (_case(1, 4096, 128), _case(64, 4096, 128), _case(64, 4096, 128, ragged=True), _case(32, 4096, 16))
"""DeepSeek-V2's cases: all 128 heads on one GPU; then the 16 heads of one GPU out of eight."""


def _values_from_the_end(of: Arguments) -> Inputs:
    """Imitates a faulty kernel that takes the last columns of the cached latents as values. The first columns are
    correct."""
    rotary_dim = of.q.shape[-1] - of.latent_dim
    return {input_name: getattr(of, input_name).roll(rotary_dim, -1) for input_name in ("q", "kv_cache")}


CONTRACT = Contract(
    {
        "q": Argument("B H D", (torch.float16, torch.bfloat16)),
        "kv_cache": Argument("num_blocks block_size D", "q"),
        "block_table": Argument("B max_blocks", (torch.int32,)),
        "seq_lens": Argument("B", (torch.int32,), layout="contiguous"),
    },
    {"out": Result("B H latent_dim", "q"), "lse": Result("B H", torch.float32, when="return_lse", layout="any")},
    _rules,
    bounds=bounds,
    case=lambda arguments: {
        "latent": arguments["latent_dim"],
        "rotary": arguments["q"].shape[-1] - arguments["latent_dim"],
    },
)
SPEC = OpSpec(
    name="mla_decode",
    reference=reference,
    contract=CONTRACT,
    make_inputs=make_inputs,
    cost=cost,
    outputs=("out", "lse"),
    output_dtypes={"lse": torch.float32},
    optional={"lse": False},
    schemes=("fp16", "bf16"),
    wrong={
        "a key too few": lambda of: {"seq_lens": (of.seq_lens - 1).clamp(min=0)},
        "a key too many": lambda of: {"seq_lens": of.seq_lens + (of.seq_lens > 0).int()},
        "the next sequence's pages": lambda of: {"block_table": of.block_table.roll(1, 0)},
        "the values are the last columns": _values_from_the_end,
        "the scale is that of the latents": lambda of: {"softmax_scale": of.q.shape[-1] ** -0.5},
    },
    tolerance=tolerance,
    planted=planted,
    cases={
        "smoke": (_case(2, 100, 16, latent=128, rotary=64), _case(1, 70, 20)),
        "edge": (
            _case(1, 0, 16, latent=128),
            _case(1, 1, 1, block_size=1, latent=128),
            _case(2, 65, 17, block_size=16, latent=128, lse=True),
            _case(4, 200, 16, block_size=32, ragged=True, latent=128, lse=True),
            _case(1, 700, 16, ragged=False, latent=128, lse=True),
            _case(3, 130, 64, ragged=True, latent=256, rotary=32),
            _case(1, 129, 128),
        ),
        # No model of these suites has latents, so all of them use DeepSeek-V2's shapes.
        "smollm2_135m": (_case(1, 512, 16),),
        "qwen3_0_6b": (_case(8, 1024, 16),),
        "llama3_8b": DEEPSEEK_CASES,
    },
    domain=Domain(
        {
            "B": Sizes(1, 20, empty=True),
            "context": Sizes(1, 5_000, empty=True),
            "H": Sizes(1, 130, model="heads"),
            "latent": (128, 256, 512),
            "rotary": (64, 32),
            "block_size": (64, 1, 16, 32, 128, 24),
            "ragged": (False, True),
            "lse": (False, True),
        },
        Case,
    ),
)
