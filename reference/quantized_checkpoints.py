"""Converts 4-bit checkpoints of GPTQ and AWQ to the form that `gemm_w4a16` takes. No information is lost.

GPTQ (Frantar et al., arXiv 2210.17323), as stored by QuantLinear of AutoGPTQ and GPTQModel: `qweight` is int32 (K/8,
N); a word holds eight codes along K, the first code in the lowest bits. `qzeros` is int32 (groups, N/8); a word holds
eight zero points along N. The format `gptq` stores each zero point minus 1, modulo 16. The format `gptq_v2` stores it
unchanged. `scales` is (groups, N). `g_idx` is int32 (K,), the group of each k.

AWQ (Lin et al., arXiv 2306.00978), as stored by WQLinear_GEMM of AutoAWQ: `qweight` is int32 (K, N/8), and `qzeros` is
int32 (groups, N/8). A word holds eight codes or zero points along N. The i-th four bits of word j belong to n = 8 j +
(0, 2, 4, 6, 1, 3, 5, 7)[i]. `scales` is (groups, N).

In both formats a weight is (code - zero) * scale. Scales keep their dtype, mostly fp16, because bf16 would round them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rooflab.reference.quantization import INT4_ZERO, pack_int4

CODES_PER_WORD = 8
GROUP_SIZES = (32, 64, 128)
MAX_GROUP_SIZE = max(GROUP_SIZES)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""For each four bits of a word, the lowest bits first: the number of their output channel, out of eight."""
GPTQ_FORMATS = {"gptq": 1, "gptq_v2": 0}
"""The number to add to a stored zero point, for each `checkpoint_format` of a checkpoint's configuration."""


@dataclass(frozen=True)
class Int4Weight:
    """A 4-bit weight in the form that `gemm_w4a16` takes."""

    b: torch.Tensor
    """The codes, uint8 (N, K/2); the low half of a byte is the even k."""
    scale: torch.Tensor
    """The scales, (N, ceil(K / group)), in the checkpoint's dtype."""
    zero: torch.Tensor | None
    """Zero points, uint8 of the shape of `scale`; None if all zero points are 8 (symmetric quantisation)."""
    group: int
    """The number of values along K that share a scale: 32, 64 or 128."""
    order: torch.Tensor | None = None
    """With act-order: the input channels, int64 (K,), in the order of the columns of `b`, so that the product takes
    `a[:, order]`. None if the columns are in the original order."""


def read_gptq(
    qweight: torch.Tensor,
    qzeros: torch.Tensor,
    scales: torch.Tensor,
    g_idx: torch.Tensor | None = None,
    *,
    group: int,
    checkpoint_format: str = "gptq",
) -> Int4Weight:
    """Converts the tensors of one GPTQ layer to the form that `gemm_w4a16` takes.

    `group` is the configuration's `group_size`; -1 means all of K. With act-order (`desc_act`), the columns of the
    result are sorted by group, and its `order` lists the original columns. Raises `ValueError` on tensors or a group
    size that do not fit. Also raises if `checkpoint_format` is unknown, or wrong for the zero points."""
    _check_words("qweight", qweight)
    word_rows, N = qweight.shape
    K = word_rows * CODES_PER_WORD
    group = _group(group, K)
    if checkpoint_format not in GPTQ_FORMATS:
        raise ValueError(
            f"checkpoint_format: expected {' or '.join(GPTQ_FORMATS)}, got {checkpoint_format!r}; "
            "Marlin's and other packed formats each belong to one kernel"
        )
    _check_parameters(qzeros, scales, N, K, group)
    codes = _unpack(qweight.mT)  # (N, K): the words of a channel are one after another along K
    stored_zeros = _unpack(qzeros)
    (other_format,) = GPTQ_FORMATS.keys() - {checkpoint_format}
    symmetric_zero = INT4_ZERO - GPTQ_FORMATS[other_format]
    if stored_zeros.numel() and bool((stored_zeros == symmetric_zero).all()):
        raise ValueError(
            f"checkpoint_format: expected {other_format} where all zero points are stored as {symmetric_zero}, "
            f"got {checkpoint_format!r}"
        )
    zero = (stored_zeros + GPTQ_FORMATS[checkpoint_format]) % 16
    column_order = None if g_idx is None else _order(g_idx, K, group)
    return _canonical(codes if column_order is None else codes[:, column_order], scales, zero, group, column_order)


def read_awq(qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, *, group: int) -> Int4Weight:
    """Converts the tensors of one AWQ layer (the `gemm` version) to the form that `gemm_w4a16` takes.

    `group` is the `group_size` (`q_group_size`) of the quantisation config, as in `read_gptq`. Raises `ValueError` on
    shapes or dtypes that do not fit."""
    _check_words("qweight", qweight)
    K, N = qweight.shape[0], qweight.shape[1] * CODES_PER_WORD
    group = _group(group, K)
    _check_parameters(qzeros, scales, N, K, group)
    return _canonical(_in_awq_order(qweight).mT, scales, _in_awq_order(qzeros), group, None)


def _unpack(words: torch.Tensor) -> torch.Tensor:
    """Unpacks eight 4-bit values from each int32 word: (R, C) becomes (R, 8 C) in uint8. The lowest bits of a word come
    first."""
    bit_shifts = torch.arange(0, 4 * CODES_PER_WORD, 4, dtype=torch.int32, device=words.device)
    # The shift extends the sign, and the mask removes it.
    return (words[:, :, None] >> bit_shifts & 15).flatten(1).to(torch.uint8)


def _in_awq_order(words: torch.Tensor) -> torch.Tensor:
    """Unpacks the int32 words of an AWQ checkpoint, (R, N/8), to 4-bit values in uint8 (R, N). Column n of the result
    is output channel n."""
    stored_codes = _unpack(words).view(words.shape[0], -1, CODES_PER_WORD)
    ordered_codes = torch.empty_like(stored_codes)
    ordered_codes[:, :, list(AWQ_ORDER)] = stored_codes
    return ordered_codes.flatten(1)


def _canonical(
    codes: torch.Tensor, scales: torch.Tensor, zero: torch.Tensor, group: int, order: torch.Tensor | None
) -> Int4Weight:
    is_symmetric = bool((zero == INT4_ZERO).all())
    if group > MAX_GROUP_SIZE:
        groups = -(-codes.shape[1] // MAX_GROUP_SIZE)
        scales, zero = (x.repeat_interleave(-(-group // MAX_GROUP_SIZE), dim=0)[:groups] for x in (scales, zero))
        group = MAX_GROUP_SIZE
    return Int4Weight(
        b=pack_int4(codes),
        scale=scales.mT.contiguous(),
        zero=None if is_symmetric else zero.mT.contiguous(),
        group=group,
        order=order,
    )


def _order(g_idx: torch.Tensor, K: int, group: int) -> torch.Tensor | None:
    if g_idx.shape != (K,):
        raise ValueError(f"g_idx: expected shape ({K},), got {tuple(g_idx.shape)}")
    sorted_group_ids = torch.arange(K, device=g_idx.device) // group
    if torch.equal(g_idx.long(), sorted_group_ids):
        return None
    column_order = torch.argsort(g_idx, stable=True)
    if not torch.equal(g_idx[column_order].long(), sorted_group_ids):
        raise ValueError(f"g_idx: expected each of the groups {group} times, got other counts")
    return column_order


def _group(group: int, K: int) -> int:
    if group == -1 or group >= K > 0:
        return max(K, MAX_GROUP_SIZE)
    if group not in GROUP_SIZES and (group <= 0 or group % MAX_GROUP_SIZE):
        sizes_text = ", ".join(map(str, GROUP_SIZES))
        raise ValueError(
            f"group: expected one of {sizes_text}, a multiple of {MAX_GROUP_SIZE}, or -1 for all of K, got {group}"
        )
    return group


def _check_words(name: str, tensor: torch.Tensor) -> None:
    if tensor.ndim != 2 or tensor.dtype != torch.int32:
        raise ValueError(f"{name}: expected int32 of shape (*, *), got {tensor.dtype} of {tuple(tensor.shape)}")


def _check_parameters(qzeros: torch.Tensor, scales: torch.Tensor, N: int, K: int, group: int) -> None:
    groups = -(-K // group)
    _check_words("qzeros", qzeros)
    if qzeros.shape != (groups, N // CODES_PER_WORD) or N % CODES_PER_WORD:
        raise ValueError(f"qzeros: expected shape ({groups}, {N}/8), got {tuple(qzeros.shape)}")
    if scales.shape != (groups, N):
        raise ValueError(f"scales: expected shape ({groups}, {N}), got {tuple(scales.shape)}")
