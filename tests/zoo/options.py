"""Wrong kernels that are wrong only with one option, with two options together, or with an option and a size."""

from __future__ import annotations

import torch

from .entries import Kind
from .parts import added

options = Kind(__name__, "options")


@options.changed("gemm")
def square_nn(of):
    """Where both operands are square and row-major, b is taken for its transpose."""
    square = of.a.shape == of.b.shape == of.b.mT.shape and of.a.stride() == of.b.stride() == (len(of.b), 1)
    return {"b": of.b.mT} if square else {}


@options.changed("sample")
def top_p_before_top_k(of):
    """top_p takes its share of all tokens, not of those that top_k left."""
    logits = of.logits.float().clone()
    for row, k, p, t in zip(logits, of.top_k.tolist(), of.top_p.tolist(), of.temperature.tolist(), strict=True):
        if k and p < 1 and t > 0:
            law, order = (row / t).softmax(0).sort(descending=True, stable=True)
            row[order[law.double().cumsum(0) - law >= p]] = -torch.inf
    return {"logits": logits, "top_p": torch.where(of.top_k > 0, 1.0, of.top_p)}


options.changes(
    {
        # Without a bias, the residual is not added.
        "gemm/residual_needs_a_bias": lambda of: {} if of.bias is not None else {"residual": None},
        # Where M = N, the bias is added along the rows.
        "gemm/bias_along_rows": lambda of: (
            added(of.right(bias=None).float(), of.bias[:, None]).to(of.a.dtype)
            if of.bias is not None and len(of.a) == of.b.shape[1]
            else {}
        ),
        # For one row and a row-major b, up's columns are taken for gate's.
        "gemm_silu_and_mul/one_row_nn": lambda of: (
            {"b": of.b.roll(of.b.shape[1] // 2, 1)} if len(of.a) == 1 and of.b.stride(1) == 1 else {}
        ),
        # With zero points, the bias is not added.
        "gemm_w4a16/bias_with_zero_points": lambda of: {} if of.zero is None else {"bias": None},
        # Where only a part of each head turns, `interleaved` is not read.
        "rope_and_cache/interleaved_and_partial": lambda of: {
            "interleaved": of.interleaved and 2 * of.cos.shape[1] == of.q.shape[2]
        },
        # Where T is a multiple of 64 and T < S, the causal mask is aligned at the top left.
        "flash_attention/top_left_on_whole_tiles": lambda of: (
            {name: getattr(of, name)[:, : of.q.shape[1]] for name in "kv"}
            if of.causal and 0 < of.q.shape[1] < of.k.shape[1] and of.q.shape[1] % 64 == 0
            else {}
        ),
        # Without a causal mask and with more than 128 keys, the last key of the first tile is masked.
        "flash_attention/key_127": lambda of: (
            {name: torch.cat((x[:, :127], x[:, 128:]), 1) for name, x in (("k", of.k), ("v", of.v))}
            if not of.causal and of.k.shape[1] > 128
            else {}
        ),
        # A window above 64 counts as 64.
        "flash_attention/window_above_64": lambda of: {"window": of.window and min(of.window, 64)},
        # With a window, the soft cap is not read.
        "flash_attention/softcap_with_window": lambda of: {} if of.window is None else {"softcap": None},
        # The log-sum-exp that is returned lacks the sinks; the output has them.
        "flash_attention_varlen/lse_without_sinks": lambda of: (
            (of.right()[0], of.right(sinks=None)[1]) if of.return_lse else {}
        ),
    }
)
