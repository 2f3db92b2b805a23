"""Shows for each kernel in `kernels/` that it is what its docstring says: all are right on usual inputs, a WRONG one is
off on inputs of its own, and a RIGHT one is right on varied inputs.  Errors are in units of the rounding error of the
output's dtype at the largest value."""

import importlib
import importlib.util
import inspect
import math
import os
import sys
import warnings
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"

import torch  # noqa: E402

from rooflab.reference.spec import Case, get_scheme  # noqa: E402

HERE, CPU = Path(__file__).parent, torch.device("cpu")
RIGHT_WITHIN, WRONG_FROM = 30.0, 50.0
ROUNDING = {torch.int8: 1 / 254, torch.float8_e4m3fn: 2.0**-4}


def spec(op):
    return importlib.import_module(f"rooflab.reference.{op}").SPEC


def make(op, scheme=None, seed=1, **changes):
    """Inputs of the op's first smoke case with some values changed."""
    its = spec(op)
    case = its.check_case(Case(**{**its.cases["smoke"][0], **changes}))
    return its.make_inputs(case, get_scheme(scheme or its.schemes[0]), CPU, seed)


def edges(op, scheme=None, most=400_000):
    """Inputs of the op's edge cases that are not too large."""
    its = spec(op)
    found = [its.make_inputs(case, get_scheme(scheme or its.schemes[0]), CPU, 2) for case in its.cases["edge"]]
    return [inputs for inputs in found if sum(x.numel() for x in inputs.values() if torch.is_tensor(x)) < most]


def wide(x, more=3):
    """x as a slice of a wider tensor that holds NaN beside it."""
    bigger = torch.full((*x.shape[:-1], x.shape[-1] + more), math.nan).to(x.dtype)
    bigger[..., : x.shape[-1]] = x
    return bigger[..., : x.shape[-1]]


def error(op, fn, inputs, oracle=None):
    """The largest error of a call, or the exception's name."""
    its = spec(op)
    given = {name: x.clone() if name in its.mutates else x for name, x in inputs.items()}
    oracle = its.oracle(inputs) if oracle is None else oracle
    try:
        outs = fn(**given)
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as exception:
        return type(exception).__name__
    outs = [given[name] for name in its.mutates] if its.mutates else [outs] if torch.is_tensor(outs) else list(outs)
    return max((one(actual, right) for actual, right in zip(outs, oracle, strict=True)), default=0.0)


def one(actual, right):
    if actual.shape != right.shape:
        return math.inf
    if not right.numel():
        return 0.0
    if not right.is_floating_point():
        return 0.0 if torch.equal(actual, right) else math.inf
    rounding = ROUNDING.get(actual.dtype) or torch.finfo(actual.dtype).eps / 2
    a, r = actual.double(), right.double()
    both = (a == r) | (a.isnan() & r.isnan())
    size = r[r.isfinite()].abs().max().item() if bool(r.isfinite().any()) else 1.0
    return torch.where(both, 0.0, (a - r).abs()).nan_to_num(nan=math.inf).max().item() / (rounding * (size or 1e-30))


def again(inputs, change):
    """Own inputs of a kernel that keeps state: a call, a change of the inputs, and the call that is measured."""

    def measured(op, fn):
        given = inputs()
        fn(**given)
        change(given)
        return error(op, fn, given)

    return measured


def twice(inputs):
    """Own inputs of a kernel that changes them: the second of two equal calls is measured."""

    def measured(op, fn):
        given = inputs()
        oracle = spec(op).oracle(given)
        fn(**given)
        return error(op, fn, given, oracle)

    return measured


def put(inputs, name, where, value):
    inputs[name][where] = value
    return inputs


def of(inputs, **changes):
    return {**inputs, **{name: change(inputs[name]) for name, change in changes.items()}}


def far_cache():
    """A cache of more than 2^31 values, of which one page near the end is used."""
    cache = torch.empty(131_080, 16, 8, 128, dtype=torch.float16)
    page = 131_077
    cache[page] = torch.randn(16, 8, 128).half()
    cache[13] = 0.0
    table, lengths = torch.tensor([[page]], dtype=torch.int32), torch.tensor([16], dtype=torch.int32)
    q = torch.randn(1, 8, 128).half()
    return {"q": q, "k_cache": cache, "v_cache": cache, "block_table": table, "seq_lens": lengths}


def prefixes():
    inputs = make("flash_attention_varlen", B=2, T=9, S=20)
    cu = {"cu_seqlens_q": torch.tensor([0, 5, 14]).int(), "cu_seqlens_k": torch.tensor([0, 20, 29]).int()}
    q, k, v = torch.randn(14, 4, 64), torch.randn(29, 2, 64), torch.randn(29, 2, 64)
    return {**inputs, **cu, "q": q, "k": k, "v": v}


def empty_sequence():
    inputs = prefixes()
    cu = {"cu_seqlens_q": torch.tensor([0, 5, 5, 14]).int(), "cu_seqlens_k": torch.tensor([0, 12, 20, 29]).int()}
    return {**inputs, **cu, "max_seqlen_k": 12}


def one_key_sinks():
    return [make("paged_attention", context=50, sinks=True), make("paged_attention", context=300)]


def tied(rows=32, count=6):
    inputs = make("sample", B=rows, top_k=3, top_p=1.0, min_p=0.0)
    logits = torch.full_like(inputs["logits"], -2.0)
    logits[:, 5 : 5 + count] = 4.0
    return {**inputs, "logits": logits}


def only_token(token):
    inputs = make("sample", top_k=0, top_p=1.0, min_p=0.0, allowed=True)
    inputs["allowed"].zero_()
    inputs["allowed"][:, token // 32] = torch.tensor(1 << token % 32).int()
    return inputs


def padded_drafts():
    inputs = make("speculative_verify")
    behind = torch.arange(3) >= inputs["num_drafts"][:, None]
    return put(inputs, "draft_tokens", behind, -1)


def removed_draft():
    inputs = make("speculative_verify")
    inputs["num_drafts"].fill_(3)
    for name in ("target_probs", "draft_probs"):
        inputs[name][:, 0].scatter_(1, inputs["draft_tokens"][:, :1], 0.0)
    return inputs


def scaled_copy():
    inputs = make("speculative_verify")
    inputs["num_drafts"].fill_(3)
    inputs["target_probs"][:, :3] = 0.25 * inputs["draft_probs"]
    return inputs


def loud_gate():
    inputs = make("gemm_silu_and_mul", "fp16")
    inputs["a"][:, 0] = 300.0
    inputs["b"][0, :48] = 300.0
    inputs["b"][:, 48:] *= 0.001
    return inputs


def refill(name):
    return lambda given: given[name].copy_(given[name].flip(0))


def plain_lse(inputs):
    return of(inputs, lses=lambda x: x.mT.contiguous().mT)


def poison(inputs, rows=0, columns=0):
    """b of `gemm` as the first rows of a buffer that holds NaN behind them."""
    b = inputs["b"]
    bigger = torch.full((b.shape[0] + 40, b.shape[1]), math.nan, dtype=b.dtype)
    bigger[: len(b)] = b
    return {**inputs, "b": bigger[: len(b)]}


def wide_rope(op, *names, **changes):
    inputs = make(op, **changes)
    return of(inputs, **dict.fromkeys(names, wide))


def calls(op, *kinds, **options):
    """Edge cases in some dtypes, more inputs, and the first smoke case."""
    return [inputs for scheme in kinds for inputs in edges(op, scheme, **options)]


def unread(inputs):
    """`embedding`: rows that no token asks for hold NaN."""
    others = torch.ones(len(inputs["weight"]), dtype=torch.bool)
    others[inputs["token_ids"]] = False
    return put(inputs, "weight", others, math.nan)


def halves_dead(inputs):
    return put(inputs, "x", (slice(None), slice(0, 200)), -math.inf)


ROWS = {"T": 5, "H": 576}
HEADS = {"B": 1, "T": 48, "S": 48, "H": 4, "H_kv": 2, "D": 64, "causal": True}
BLOCKS = {"M": 20, "N": 40, "K": 256, "scales": "block", "bias": True, "fast_accum": False}
W4 = {"M": 5, "N": 24, "K": 256}
LATENT = {"B": 2, "H": 3, "latent": 128}

WRONG = {
    "rmsnorm__packed_rows": (lambda: make("rmsnorm", **ROWS), lambda: of(make("rmsnorm", **ROWS), x=wide)),
    "rmsnorm__half_squares": (
        lambda: make("rmsnorm", "fp16"),
        lambda: put(make("rmsnorm", "fp16"), "x", (slice(None), 3), 300.0),
    ),
    "layernorm__equal_chunks": (lambda: make("layernorm", **ROWS), lambda: make("layernorm", T=5, H=100)),
    "layernorm__padded_variance": (lambda: make("layernorm", T=5, H=512), lambda: make("layernorm", **ROWS)),
    "fused_add_rmsnorm__float_alias": (
        lambda: make("fused_add_rmsnorm", "fp16"),
        twice(lambda: make("fused_add_rmsnorm")),
    ),
    "fused_add_rmsnorm__capped_block": (
        lambda: make("fused_add_rmsnorm", **ROWS),
        lambda: make("fused_add_rmsnorm", T=2, H=16384),
    ),
    "softmax__zero_fill": (
        lambda: make("softmax", **ROWS),
        lambda: of(make("softmax", **ROWS), x=lambda x: x - 1000.0),
    ),
    "softmax__masked_start": (lambda: make("softmax", **ROWS), lambda: halves_dead(make("softmax", **ROWS))),
    "silu_and_mul__growing_exp": (
        lambda: make("silu_and_mul"),
        lambda: put(make("silu_and_mul"), "x", (slice(None), 3), 120.0),
    ),
    "silu_and_mul__half_of_stride": (
        lambda: make("silu_and_mul", I=300),
        lambda: of(make("silu_and_mul", I=300), x=lambda x: wide(x, 64)),
    ),
    "silu_and_mul__empty_row_scale": (
        lambda: make("silu_and_mul", "out_int8"),
        lambda: put(make("silu_and_mul", "out_int8"), "x", 2, 0.0),
    ),
    "gelu_and_mul__tanh_by_exp": (
        lambda: make("gelu_and_mul"),
        lambda: put(make("gelu_and_mul"), "x", (slice(None), 3), 20.0),
    ),
    "gelu_and_mul__decode_parts": (
        lambda: [make("gelu_and_mul", T=1, I=64), make("gelu_and_mul", T=3, I=101)],
        lambda: make("gelu_and_mul", T=1, I=101),
    ),
    "embedding__one_hot": (lambda: make("embedding"), lambda: unread(make("embedding"))),
    "embedding__flat_view": (lambda: make("embedding"), lambda: of(make("embedding"), weight=wide)),
    "rope__kept_by_pointer": (lambda: make("rope"), again(lambda: make("rope", T=9), refill("positions"))),
    "rope__own_angles": (
        lambda: make("rope"),
        lambda: of(make("rope"), cos=lambda x: x.flip(1).clone(), sin=lambda x: x.flip(1).clone()),
    ),
    "rope__whole_blocks_of_pairs": (lambda: make("rope", D=128), lambda: make("rope", D=80)),
    "kv_cache_write__shift_and_mask": (lambda: make("kv_cache_write"), lambda: make("kv_cache_write", block_size=24)),
    "kv_cache_write__as_words": (lambda: make("kv_cache_write", "fp16"), lambda: make("kv_cache_write", "fp16", D=33)),
    "kv_cache_write__one_stride": (
        lambda: make("kv_cache_write"),
        lambda: of(make("kv_cache_write"), v=lambda v: wide(v.flatten(1), 128).unflatten(1, v.shape[1:])),
    ),
    "merge_attention_states__minus_inf_only": (
        lambda: make("merge_attention_states", P=5, empty=True),
        lambda: of(make("merge_attention_states", P=5, empty=True), lses=lambda x: x.nan_to_num(neginf=math.inf)),
    ),
    "merge_attention_states__heads_inside": (
        lambda: make("merge_attention_states", P=5, empty=True),
        lambda: plain_lse(make("merge_attention_states", P=5, empty=True)),
    ),
    "rope_and_cache__padding_at_end": (
        lambda: [make("rope_and_cache", kind, skipped=0) for kind in ("fp32", "kv_fp8")],
        lambda: make("rope_and_cache", T=9, skipped=3),
    ),
    "rope_and_cache__raw_tail": (
        lambda: [make("rope_and_cache", norm_eps=1e-6), make("rope_and_cache", rotary=32)],
        lambda: make("rope_and_cache", rotary=32, norm_eps=1e-6),
    ),
    "rope_and_cache__mean_of_block": (
        lambda: [make("rope_and_cache", norm_eps=1e-6), make("rope_and_cache", D=80, interleaved=True)],
        lambda: make("rope_and_cache", D=80, rotary=80, norm_eps=1e-6),
    ),
    "paged_attention__int32_cells": (lambda: make("paged_attention"), far_cache),
    "paged_attention__window_of_the_last": (
        lambda: [make("paged_attention", context=90, window=33), make("paged_attention", context=90, queries=17)],
        lambda: make("paged_attention", context=90, window=33, queries=17),
    ),
    "paged_attention__sink_in_each_split": (one_key_sinks, lambda: make("paged_attention", context=300, sinks=True)),
    "mla_decode__four_parts": (
        lambda: make("mla_decode", context=64, **LATENT),
        lambda: make("mla_decode", context=11, **LATENT),
    ),
    "mla_decode__tile_in_one_page": (
        lambda: [make("mla_decode", context=70, **LATENT), make("mla_decode", block_size=16, context=40, **LATENT)],
        lambda: make("mla_decode", block_size=8, context=70, **LATENT),
    ),
    "mla_decode__floor_of_the_sum": (
        lambda: make("mla_decode", context=70, lse=True, **LATENT),
        lambda: make("mla_decode", context=70, lse=True, ragged=True, H=3, latent=128, B=3),
    ),
    "flash_attention__or_default": (
        lambda: make("flash_attention"),
        lambda: {**make("flash_attention"), "softmax_scale": 0.0},
    ),
    "flash_attention__tanh_by_exp": (
        lambda: make("flash_attention", softcap=20.0, sinks=True, lse=True),
        lambda: of(make("flash_attention", softcap=20.0), q=lambda x: 30 * x, k=lambda x: 30 * x),
    ),
    "flash_attention__window_of_the_tile": (
        lambda: [make("flash_attention", **HEADS), make("flash_attention", window=100, **HEADS)],
        lambda: make("flash_attention", window=17, **HEADS),
    ),
    "flash_attention_varlen__shared_diagonal": (
        lambda: [make("flash_attention_varlen", T=20, S=33, lse=True), make("flash_attention_varlen", causal=False)],
        prefixes,
    ),
    "flash_attention_varlen__marked_starts": (
        lambda: [make("flash_attention_varlen", T=20, S=33, lse=True), prefixes()],
        empty_sequence,
    ),
    "gemm__bias_by_shape": (
        lambda: make("gemm", bias=True, residual=True),
        lambda: make("gemm", M=24, N=24, bias=True),
    ),
    "gemm__one_mask": (lambda: make("gemm", layout="NN", bias=True), lambda: poison(make("gemm", layout="NN", K=50))),
    "gemm__short_last_group": (
        lambda: [make("gemm", M=40, K=33), make("gemm", M=64, layout="TN")],
        lambda: make("gemm", M=80),
    ),
    "gemm_fp8__scales_by_column": (
        lambda: make("gemm_fp8", **BLOCKS),
        lambda: of(make("gemm_fp8", **BLOCKS), a_scale=lambda x: x.contiguous() * torch.linspace(0.2, 2, 20)[:, None]),
    ),
    "gemm_fp8__one_scale": (
        lambda: [make("gemm_fp8", **BLOCKS), make("gemm_fp8", fast_accum=False)],
        lambda: make("gemm_fp8", **{**BLOCKS, "M": 1, "N": 200, "K": 128}),
    ),
    "gemm_w8a16__sign_and_size": (
        lambda: make("gemm_w8a16", M=4, bias=True),
        lambda: put(make("gemm_w8a16", M=4), "b", (slice(0, 8), slice(None)), -128),
    ),
    "gemm_w8a16__fp16_activations": (
        lambda: make("gemm_w8a16", M=4, bias=True),
        lambda: put(make("gemm_w8a16", M=4), "a", (slice(None), 7), 1e5),
    ),
    "gemm_w4a16__kept_weight": (
        lambda: [make("gemm_w4a16", **W4), make("gemm_w4a16", zeros=True, bias=True, **W4)],
        again(lambda: make("gemm_w4a16", **W4), refill("b")),
    ),
    "gemm_w4a16__group_by_division": (
        lambda: [make("gemm_w4a16", zeros=True, bias=True, **W4), make("gemm_w4a16", "w4a16_g32", **W4)],
        lambda: make("gemm_w4a16", M=5, N=24, K=160),
    ),
    "gemm_silu_and_mul__up_after_tiles": (
        lambda: make("gemm_silu_and_mul", I=64),
        lambda: make("gemm_silu_and_mul", I=24),
    ),
    "gemm_silu_and_mul__product_in_half": (lambda: make("gemm_silu_and_mul", "fp16"), loud_gate),
    "gemm_grouped__experts_with_rows": (
        lambda: make("gemm_grouped"),
        lambda: make("gemm_grouped", T=6, top_k=1, E=9, N=33, K=17),
    ),
    "gemm_grouped__twice_the_mean": (
        lambda: make("gemm_grouped"),
        lambda: make("gemm_grouped", T=80, top_k=1, skew=100.0),
    ),
    "sample__ties_stay": (lambda: make("sample", B=16), tied),
    "sample__small_temperature": (
        lambda: [make("sample", B=16), make("sample", B=16, temperature=0.0)],
        lambda: of(make("sample", B=16, temperature=0.0), logits=lambda x: (x / 4).round()),
    ),
    "sample__sign_bit": (lambda: [make("sample", B=16), only_token(40)], lambda: only_token(63)),
    "speculative_verify__padded_drafts": (
        lambda: [make("speculative_verify"), make("speculative_verify", ngram=True)],
        padded_drafts,
    ),
    "speculative_verify__accepts_zero": (
        lambda: [make("speculative_verify"), make("speculative_verify", ngram=True)],
        removed_draft,
    ),
    "speculative_verify__nothing_left": (
        lambda: [make("speculative_verify"), make("speculative_verify", ngram=True)],
        scaled_copy,
    ),
}


def norm_inputs(op):
    more = [of(make(op, **ROWS), x=wide), make(op, "fp16", **ROWS), put(make(op, "fp16"), "x", (0, 3), 6e4)]
    return [*calls(op, "fp32", "fp16"), *more]


def gated_inputs(op, *kinds):
    loud = put(make(op, I=101), "x", (slice(None), slice(3, 5)), 1000.0)
    return [*calls(op, *kinds), of(make(op, I=101), x=wide), loud, put(make(op, I=101), "x", 1, 0.0)]


def attention_inputs():
    odd = {**make("flash_attention", **HEADS), "softmax_scale": 0.0}
    large = of(make("flash_attention", "fp16", softcap=20.0), q=lambda x: 30 * x, k=lambda x: 30 * x)
    sliced = of(make("flash_attention", window=9, **HEADS), q=wide, k=wide, v=lambda x: wide(x, 5))
    return [*calls("flash_attention", "fp32", "fp16", most=60_000), odd, large, sliced]


RIGHT = {
    "rmsnorm__two_grids": lambda: norm_inputs("rmsnorm"),
    "layernorm__column_stream": lambda: [
        *calls("layernorm", "fp32", "bf16", most=20_000),
        of(make("layernorm"), x=lambda x: wide(x + 1000)),
    ],
    "fused_add_rmsnorm__columns_first": lambda: [
        *calls("fused_add_rmsnorm", "fp32", "fp16"),
        of(make("fused_add_rmsnorm", **ROWS), x=wide, residual=lambda x: wide(x, 9)),
    ],
    "softmax__folded_halves": lambda: [
        *calls("softmax", "fp32", "bf16"),
        halves_dead(make("softmax", **ROWS)),
        of(make("softmax"), x=lambda x: wide(x - 6e4)),
    ],
    "silu_and_mul__strided_columns": lambda: gated_inputs("silu_and_mul", "fp32", "fp16"),
    "gelu_and_mul__by_logarithms": lambda: gated_inputs("gelu_and_mul", "fp32", "bf16", "out_int8", "out_fp8"),
    "embedding__sorted_tokens": lambda: [
        *calls("embedding", "fp32", "fp16"),
        unread(make("embedding")),
        of(make("embedding"), weight=wide, token_ids=lambda x: x.fill_(99)),
    ],
    "rope__complex_numbers": lambda: [
        *calls("rope", "fp32", "bf16"),
        of(make("rope", interleaved=True, D=6), q=wide, k=lambda x: wide(x, 5), cos=wide, positions=lambda x: x * 0),
    ],
    "kv_cache_write__page_by_page": lambda: [
        *calls("kv_cache_write", "fp32", "bf16", most=2_000_000),
        of(make("kv_cache_write", skipped=8), k=wide),
        of(make("kv_cache_write", block_size=24, D=33), v=wide),
    ],
    "merge_attention_states__running": lambda: [
        *calls("merge_attention_states", "fp32", "fp16"),
        of(make("merge_attention_states", P=5, empty=True), outs=wide, lses=lambda x: x.nan_to_num(neginf=math.inf)),
        plain_lse(of(make("merge_attention_states", P=7), lses=lambda x: x - 20_000)),
    ],
    "rope_and_cache__head_by_head": lambda: [
        *calls("rope_and_cache", "fp32", "bf16", "kv_fp8"),
        of(make("rope_and_cache", D=33, rotary=10, skipped=5), q=wide, v=wide),
        of(make("rope_and_cache", "kv_fp8", norm_eps=1e-6), v=lambda v: v * 1000.0),
    ],
    "paged_attention__last_page_first": lambda: [
        *calls("paged_attention", "fp32", "bf16", "kv_fp8"),
        of(make("paged_attention", window=9, queries=3, sinks=True), q=wide, k_cache=wide),
    ],
    "mla_decode__columns_in_strips": lambda: [
        *calls("mla_decode", "fp16", "bf16"),
        of(make("mla_decode", block_size=24, B=3, ragged=True, latent=128), q=wide, kv_cache=wide),
    ],
    "flash_attention__newest_keys_first": attention_inputs,
    "flash_attention_varlen__longest_first": lambda: [
        *calls("flash_attention_varlen", "fp32", "bf16"),
        empty_sequence(),
        of(prefixes(), q=wide, k=wide, v=lambda x: wide(x, 5)),
    ],
    "gemm__uneven_thirds": lambda: [
        *calls("gemm", "fp32", "fp16", most=60_000),
        poison(make("gemm", layout="NN", K=50)),
        of(make("gemm", M=33, N=33, K=1, bias=True, residual=True), residual=wide),
    ],
    "gemm_fp8__whole_numbers": lambda: [
        *calls("gemm_fp8", "fp8_e4m3", most=100_000),
        of(make("gemm_fp8", **BLOCKS), a_scale=lambda x: x.contiguous()),
        of(make("gemm_fp8"), a_scale=lambda x: x.reshape(1)),
    ],
    "gemm_w8a16__bit_planes": lambda: [
        *calls("gemm_w8a16", "w8a16"),
        put(make("gemm_w8a16", M=4), "b", (slice(0, 8), slice(None)), -128),
        put(make("gemm_w8a16", M=4), "a", (slice(None), 7), 1e5),
    ],
    "gemm_w4a16__sixteen_bins": lambda: [
        *calls("gemm_w4a16", "w4a16_g128", "w4a16_g64", "w4a16_g32"),
        of(make("gemm_w4a16", zeros=True, **W4), a=wide, scale=lambda x: wide(x.half())),
    ],
    "gemm_silu_and_mul__transposed_sevens": lambda: [*calls("gemm_silu_and_mul", "fp32", "bf16"), loud_gate()],
    "gemm_grouped__row_by_row": lambda: [
        *calls("gemm_grouped", "fp32", "fp16", most=60_000),
        make("gemm_grouped", T=80, skew=100.0),
        of(make("gemm_grouped", T=6, top_k=1, E=9, N=33, K=17), a=wide),
    ],
    "sample__heap": lambda: [*calls("sample", "fp32", "bf16"), tied(), tied(8, 1), make("sample", B=9, sigma=1.0)],
    "speculative_verify__backwards": lambda: [
        *calls("speculative_verify", "fp32"),
        padded_drafts(),
        removed_draft(),
        scaled_copy(),
    ],
}


def load(name):
    op = name.split("__")[0]
    found = importlib.util.spec_from_file_location(name, HERE / "kernels" / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return op, getattr(module, op), module.__doc__.split(".")[0]


def worst(op, fn, inputs):
    """The largest error over all inputs that have no option which the kernel lacks, and their number."""
    inputs = inputs if isinstance(inputs, list) else [inputs]
    takes = inspect.signature(fn).parameters
    errors = [error(op, fn, each) for each in inputs if all(name in takes for name in each)]
    return next((each for each in errors if isinstance(each, str)), max(errors, key=lambda x: x, default=0.0)), len(
        errors
    )


def text(found):
    return found if isinstance(found, str) else "NaN or inf" if found == math.inf else f"{found:.3g}"


def main():
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    names = sorted(path.stem for path in (HERE / "kernels").glob("*.py"))
    assert set(names) == set(WRONG) | set(RIGHT), set(names) ^ (set(WRONG) | set(RIGHT))
    chosen = [name for name in names if not sys.argv[1:] or any(word in name for word in sys.argv[1:])]
    print(f"{'kernel':48}{'kind':7}{'usual error':>14}{'own error':>22}  shown")
    failed = 0
    for name in chosen:
        op, fn, kind = load(name)
        assert kind == ("WRONG" if name in WRONG else "RIGHT"), name
        torch.manual_seed(0)
        usual, count = worst(op, fn, WRONG[name][0]() if kind == "WRONG" else make(op))
        if kind == "WRONG":
            own = WRONG[name][1]
            off = own(op, fn) if "fn" in inspect.signature(own).parameters else error(op, fn, own())
            shown = isinstance(off, str) or off >= WRONG_FROM
        else:
            off, count = worst(op, fn, RIGHT[name]())
            shown = not isinstance(off, str) and off <= RIGHT_WITHIN and count >= 6
        shown = shown and count > 0 and not isinstance(usual, str) and usual <= RIGHT_WITHIN
        failed += not shown
        more = f" ({count} inputs)" if kind == "RIGHT" else ""
        print(f"{name:48}{kind:7}{text(usual):>14}{text(off) + more:>22}  {'ok' if shown else 'NOT SHOWN'}", flush=True)
    print(f"{len(chosen)} kernels, {failed} not shown")


if __name__ == "__main__":
    main()
