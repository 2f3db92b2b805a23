"""Tensor maps of q, k and v for the Triton kernels that load by TMA, and the tensors that these refuse."""

from __future__ import annotations

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from rooflab.kernels._attention_configs import padded
from rooflab.kernels._tma import ALIGNMENT, STRIDE_LIMIT, MapMaker, address_of, map_maker
from rooflab.reference.flash_attention import E4M3, keys_contiguous
from rooflab.reference.spec import Arguments


def tensor_map(x: torch.Tensor, rows: int) -> MapMaker:
    """The map of x (B, T, H, D) as (B, H, T, D), in boxes of `rows` rows of a head; zeros past a sequence's end."""
    B, T, H, D = x.shape
    strides = [x.stride(dim) if x.shape[dim] > 1 else ALIGNMENT for dim in (0, 2, 1)]
    return map_maker(TensorDescriptor, [B, H, T, D], [*strides, 1], [1, 1, rows, padded(D)])


def columns_map(x: torch.Tensor, keys: int) -> MapMaker:
    """The map of x (B, S, H, D), contiguous along keys, as (B, H, D, S), in boxes of `keys` keys of a head."""
    B, S, H, D = x.shape
    strides = [x.stride(dim) if x.shape[dim] > 1 else ALIGNMENT for dim in (0, 2, 3)]
    return map_maker(TensorDescriptor, [B, H, D, S], [*strides, 1], [1, 1, padded(D), keys])


def why_not_mapped(name: str, x: torch.Tensor, inner: int = 3, other: str = "masked_tiles") -> str | None:
    """Why a tensor map cannot describe x (B, T, H, D), or None.

    inner: the contiguous dimension; other: a kernel that takes x anyway.
    """
    size, strides, shape = x.element_size(), x.stride(), x.shape
    steps = [strides[dim] * size for dim in range(4) if dim != inner and shape[dim] > 1]
    aligned = address_of(x) % ALIGNMENT == 0
    for step in steps:
        aligned = aligned and step % ALIGNMENT == 0 and 0 < step < STRIDE_LIMIT
    if aligned or not x.numel():
        return None
    return (
        f"{name}: expected an address and strides of whole {ALIGNMENT} bytes for TMA, got address % {ALIGNMENT} = "
        f"{address_of(x) % ALIGNMENT} and strides of {', '.join(map(str, steps))} bytes; "
        f"flash_attention/{other} takes any"
    )


def _why_no_products(inputs: Arguments) -> str | None:
    q = inputs.q
    if q.dtype not in (torch.float16, torch.bfloat16):
        other = "fp8" if q.dtype == E4M3 else "masked_tiles"
        return (
            f"q: expected torch.float16 or torch.bfloat16, got {q.dtype}, whose products are not wgmma's of 16 bits; "
            f"flash_attention/{other} takes it"
        )
    if q.shape[-1] % 8 or not 16 <= q.shape[-1] <= 256:
        return f"q: expected a head_dim of whole 16 bytes from 16 to 256, got {q.shape[-1]}"
    return None


def _first_not_mapped(inputs: Arguments, names: str, other: str = "masked_tiles") -> str | None:
    reasons = (why_not_mapped(name, getattr(inputs, name), other=other) for name in names)
    return next(filter(None, reasons), None)


def why_not_loaded(inputs: Arguments) -> str | None:
    """Why a kernel that loads q, k and v by TMA cannot take them, or None."""
    return _why_no_products(inputs) or _first_not_mapped(inputs, "qkv")


def why_keys_not_loaded(inputs: Arguments) -> str | None:
    """Why a kernel that loads k and v by TMA, and q by pointers, cannot take them, or None."""
    return _why_no_products(inputs) or _first_not_mapped(inputs, "kv")


def why_not_loaded_in_fp8(inputs: Arguments) -> str | None:
    """Why a kernel that multiplies e4m3 cannot take q, k and v, or None; v is contiguous along its keys or head_dim."""
    q, v = inputs.q, inputs.v
    if q.dtype != E4M3:
        return f"q: expected {E4M3}, got {q.dtype}; flash_attention/persistent takes 16 bits"
    if q.shape[-1] % 16 or not 32 <= q.shape[-1] <= 256:
        wanted = "a head_dim of whole 16 bytes from 32 to 256"
        return f"q: expected {wanted}, got {q.shape[-1]}; flash_attention/naive takes any"
    inner = 1 if keys_contiguous(v) else 3
    return _first_not_mapped(inputs, "qk", "naive") or why_not_mapped("v", v, inner, "naive")


def nothing_seen(of: Arguments) -> None:
    """Writes the result without keys, for which no tensor map exists: 0, and the log-sum-exp of the sinks alone."""
    of.out.zero_()
    if of.lse is not None:
        of.lse.fill_(float("-inf")) if of.sinks is None else of.lse.copy_(of.sinks)
