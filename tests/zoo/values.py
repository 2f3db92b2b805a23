"""Wrong kernels that are wrong only for some values: large, small, tied, infinite or NaN."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rooflab.reference.spec import as_tuple

from .entries import Kind, with_first
from .parts import added, gated, normed, read, shares

values = Kind(__name__, "values")


@values("rmsnorm")
def squares_in_the_dtype(x, weight, eps=1e-6, *, weight_offset=0.0):
    """Squares are rounded to the dtype of x: in fp16 those of 256 and more are infinite."""
    mean_square = x.pow(2).float().mean(-1, keepdim=True)
    return (x.float() * (mean_square + eps).rsqrt() * (weight.float() + weight_offset)).to(x.dtype)


@values("fused_add_rmsnorm")
def eps_as_a_floor(x, residual, weight, eps=1e-6, *, weight_offset=0.0):
    """The mean square is at least eps, instead of eps more."""
    total = x + residual
    mean_square = total.float().square().mean(-1, keepdim=True).clamp(min=eps)
    return (total.float() * mean_square.rsqrt() * (weight.float() + weight_offset)).to(x.dtype), total


@values("layernorm")
def mean_of_squares(x, weight, bias=None, eps=1e-5):
    """The variance is the mean of squares less the squared mean, of which fp32 leaves nothing if the mean is large."""
    mean = x.float().mean(-1, keepdim=True)
    variance = (x.float().square().mean(-1, keepdim=True) - mean.square()).clamp(min=0)
    return added((x.float() - mean) * (variance + eps).rsqrt() * weight.float(), bias).to(x.dtype)


@values("silu_and_mul")
def floor_under_the_scale(x, *, quantize=None):
    """The scale of a quantised row is at least 1e-6, so that small rows lose their codes."""
    if quantize is None:
        return gated(x).to(x.dtype)
    dtype, most = (torch.int8, 127.0) if quantize == "int8" else (torch.float8_e4m3fn, 448.0)
    largest = gated(x).abs().amax(1)
    scale = torch.where(largest > 0, (largest / most).clamp(min=1e-6), 1.0)
    codes = (gated(x) / scale[:, None]).clamp(-most, most)
    return (codes.round() if quantize == "int8" else codes).to(dtype), scale


@values("gemm")
def parts_in_the_dtype(a, b, bias=None, *, residual=None, precision="ieee"):
    """The sums of 64 products each are rounded to the dtype of A, and added in it."""
    tiles = zip(a.split(64, 1), b.split(64), strict=True)
    return added(sum((x.float() @ y.float()).to(a.dtype) for x, y in tiles).float(), bias, residual).to(a.dtype)


@values.changed("gemm")
def zeros_times_what_lies_behind(of):
    """The last tile of K reads B behind its end, times zeros, and 0 times NaN is NaN."""
    (K, N), wide = of.b.shape, -(-len(of.b) // 32) * 32
    return {"a": F.pad(of.a, (0, wide - K)), "b": read(of.b, *of.b.stride(), shape=(wide, N))}


@values.changed("rope_and_cache")
def tables_of_length_one(of):
    """Tables that also scale, as YaRN's do, are divided by their length."""
    length = torch.hypot(of.cos, of.sin)
    length = torch.where((length - 1).abs() < 1e-3, 1, length)
    return {"cos": of.cos / length, "sin": of.sin / length}


@values.changed("rope_and_cache")
def rounded_before_the_rotation(of):
    """Normed heads are rounded to their dtype before they are rotated, and so twice."""
    heads = {"q": (of.q, of.q_norm), "k": (of.k, of.k_norm)}
    rounded = {name: x if w is None else normed(x, w, of.norm_eps).to(x.dtype) for name, (x, w) in heads.items()}
    return {**rounded, "q_norm": None, "k_norm": None}


@values.changed("sample")
def last_of_greedy_ties(of):
    """A greedy row whose highest logit stands twice gives the last place."""
    last = of.logits.shape[1] - 1 - of.logits.float().flip(1).argmax(1)
    return with_first(of.right(), lambda tokens: torch.where(of.temperature == 0, last, tokens))


@values.changed("sample")
def logits_below_minus_1e4(of):
    """The highest logit begins at -1e4: a row that lies below it gives the token 0."""
    top = of.logits.float().amax(1)
    return with_first(of.right(), lambda tokens: tokens.masked_fill((top < -1e4) & top.isfinite(), 0))


@values.changed("sample")
def ties_at_the_edge(of):
    """top_k keeps every token that is not below the k-th value, and so more than k if there are ties."""
    logits = of.logits.float()
    edge = logits.sort(descending=True).values.gather(1, of.top_k.long().clamp(1, logits.shape[1])[:, None] - 1)
    return {"top_k": torch.where(of.top_k > 0, (logits >= edge).sum(1).to(of.top_k), of.top_k)}


@values("merge_attention_states")
def zero_times_an_unseen_part(outs, lses):
    """A part that saw no key has the weight 0, and its output may be NaN."""
    weights, total = shares(lses)
    return (weights * outs.float()).sum(0).to(outs.dtype), total


@values.changed("flash_attention")
def rows_below_minus_1e4(of):
    """The largest score begins at -1e4, not -inf: rows whose visible scores are all below it give 0."""
    result, lse = of.right(), of.right(return_lse=True, sinks=None)[1]
    as_tuple(result)[0][(lse < -1e4) & lse.isfinite()] = 0
    return result


@values("embedding")
def masked_by_a_product(token_ids, weight):
    """Shard by shard, a row of another shard is multiplied by 0, also if it is infinite."""
    out, size = weight.new_zeros(len(token_ids), weight.shape[1]), -(-len(weight) // 4)
    for start in range(0, len(weight), size):
        shard, local = weight[start : start + size], token_ids - start
        mine = (local >= 0) & (local < len(shard))
        out += shard[local.clamp(0, len(shard) - 1)] * mine[:, None]
    return out


def nan_gates(x, most):
    """x (T, 2 I) with NaN for a gate that is larger."""
    return x.masked_fill((x > most) & (torch.arange(x.shape[1]) < x.shape[1] // 2), torch.nan)


values.changes(
    {
        # eps is always 1e-6.
        "rmsnorm/eps_is_built_in": lambda of: {"eps": 1e-6},
        # While all of a row's tiles of 32 are -inf, the online maximum is too, and exp(-inf - -inf) is NaN.
        "softmax/tiles_of_minus_infinity": lambda of: of.right().masked_fill(
            (of.x[:, :32] == -torch.inf).all(1, keepdim=True), torch.nan
        ),
        # silu is g e^g / (1 + e^g), which is inf / inf for a large gate.
        "silu_and_mul/gate_above_88": lambda of: {"x": nan_gates(of.x, 88)},
        # tanh(u) = (exp(2 u) - 1) / (exp(2 u) + 1) is inf / inf for a gate above 10.
        "gelu_and_mul/tanh_by_exponentials": lambda of: {"x": nan_gates(of.x, 10)},
        # A is converted to fp16, in which bf16 values of 65,520 and more are infinite.
        "gemm_w4a16/activations_in_fp16": lambda of: {"a": of.a.half().to(of.a.dtype)},
        # Scales are converted to fp16, where small ones lose their bits.
        "gemm_w8a16/scale_in_fp16": lambda of: {"scale": of.scale.half().to(of.scale.dtype)},
        # The code -128, which has no sign and magnitude in seven bits, counts as 0.
        "gemm_w8a16/code_minus_128": lambda of: {"b": of.b.masked_fill(of.b == -128, 0)},
        # The softmax scale of the caller is not read.
        "flash_attention/scale_is_the_default": lambda of: {"softmax_scale": None},
        # A scale that the caller gives is rounded to a power of two.
        "flash_attention_varlen/scale_is_a_power_of_2": lambda of: {
            "softmax_scale": of.softmax_scale and float(torch.tensor(of.softmax_scale).log2().round().exp2())
        },
        # `softmax_scale or D**-0.5` takes a scale of 0 for none.
        "flash_attention_varlen/scale_of_zero": lambda of: {
            "softmax_scale": of.softmax_scale or of.q.shape[-1] ** -0.5
        },
        # All rows of the batch have the top_p of the first.
        "sample/top_p_of_row_0": lambda of: {"top_p": of.top_p[:1].expand(len(of.top_p)).contiguous()},
        # A greedy row among rows that are drawn is drawn too, at temperature 1.
        "sample/greedy_only_if_all_are": lambda of: (
            {}
            if (of.temperature == 0).all()
            else {"temperature": torch.where(of.temperature == 0, 1.0, of.temperature)}
        ),
        # Temperature 0 is taken as 1e-6: among equal logits chance decides, and not the lowest index.
        "sample/greedy_at_a_tiny_temperature": lambda of: {"temperature": of.temperature.clamp(min=1e-6)},
    }
)
