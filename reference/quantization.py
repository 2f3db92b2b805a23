"""Quantises weights (N, K) to 8 and 4 bits, dequantises them exactly, and computes the quantisation error.

Row n is an output channel. In eight bits, a channel has one scale, and codes are -127 to 127. In four bits, codes are 0
to 15, and each `group` of values along K has one scale. Code 8 then means zero. With `zeros`, each group has its own
integer zero point instead. A byte holds two 4-bit codes along K, the even k in the low half.

Values are rounded to the nearest step (Gersho and Gray, Vector Quantization and Signal Compression, 1992, chapter 5). A
uniform quantiser of step s has a mean squared error of s**2 / 12 (Bennett, Spectra of Quantized Signals, 1948). This
holds if no value is clipped and the step is small.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

INT8_MAX = 127
INT4_MAX = 15
INT4_ZERO = 8
"""The stored four-bit code of the value zero, where there are no zero points."""
SYMMETRIC_INT4_MAX = 7


@dataclass(frozen=True)
class QuantizationError:
    """Describes the size of the difference between dequantised values and the original weight."""

    relative: float
    """The Frobenius norm of the difference, divided by the Frobenius norm of the weight."""
    mean_squared: float
    sqnr_db: float
    """The signal-to-noise ratio in dB, 10 log10(mean(w**2) / mean_squared); infinite if there is no error."""


def quantize_int8(weight: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns codes (N, K) int8 and scales (N,) of `dtype`, such that codes * scales is about `weight`.

    weight: (N, K), any float dtype. The largest magnitude of a row becomes 127. A row of zeros has the scale 1. Scales
    are rounded up to `dtype`, so no value is clipped. Raises `ValueError` if weight is not a matrix."""
    _check_matrix(weight)
    values = weight.float()
    channel_max = values.abs().amax(dim=1) if values.shape[1] else values.new_zeros(values.shape[0])
    scale = _scale(channel_max / INT8_MAX, dtype)
    codes = (values / scale.float()[:, None]).round().clamp(-INT8_MAX, INT8_MAX)
    return codes.to(torch.int8), scale


def dequantize_int8(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Returns codes * scales in fp64, exactly. codes: (N, K) int8; scale: (N,); returns (N, K)."""
    return codes.double() * scale.double()[:, None]


def quantize_int4(
    weight: torch.Tensor, group: int, *, zeros: bool = False, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Returns packed codes (N, K/2) uint8, scales (N, ceil(K / group)) of `dtype`, and uint8 zero points or None.

    weight: (N, K), any float dtype, K even; the last group may be shorter. Without `zeros`, the codes are 1 to 15, and
    a group's largest magnitude is 7 steps. With `zeros`, a group's range is 15 steps and includes 0; the zero point is
    the code of 0. Scales are first rounded up to `dtype`. Raises `ValueError` on another shape, or if `group` is not
    positive.
    """
    _check_matrix(weight)
    N, K = weight.shape
    if K % 2:
        raise ValueError(f"weight: expected an even K, two codes a byte, got {K}")
    if group <= 0:
        raise ValueError(f"group: expected a positive number, got {group}")
    group_count = -(-K // group)
    # A short group is padded with zeros, because every range contains 0.
    values = torch.nn.functional.pad(weight.float(), (0, group_count * group - K)).view(N, group_count, group)
    if zeros:
        low_values, high_values = values.amin(dim=2).clamp(max=0), values.amax(dim=2).clamp(min=0)
        scale = _scale((high_values - low_values) / INT4_MAX, dtype)
        zero = (-low_values / scale.float()).round().clamp(0, INT4_MAX)
    else:
        scale = _scale(values.abs().amax(dim=2) / SYMMETRIC_INT4_MAX, dtype)
        zero = torch.full_like(scale, INT4_ZERO, dtype=torch.float32)
    min_code = 0 if zeros else INT4_ZERO - SYMMETRIC_INT4_MAX
    step_counts = (values / scale.float()[:, :, None]).round() + zero[:, :, None]
    codes = step_counts.clamp(min_code, INT4_MAX).view(N, group_count * group)[:, :K].to(torch.uint8)
    return pack_int4(codes), scale, zero.to(torch.uint8) if zeros else None


def quantize_groups(
    weight: torch.Tensor, group: int, bits: int, *, minimums: bool = False, dtype: torch.dtype = torch.float16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Returns codes, scales (N, K / group) of `dtype`, and minimums of this shape or None, as `gemm_gguf` takes them.

    weight: (N, K), any float dtype, K a multiple of `group`. Codes are int8 (N, K) with 8 `bits`, and packed uint8
    (N, K/2) with 4. With `minimums`, a group's smallest value has the smallest code and its largest value the largest
    code, as in GGUF's Q4_1. Without, its largest magnitude is 7 or 127 steps. Raises `ValueError` on another shape."""
    _check_matrix(weight)
    N, K = weight.shape
    if K % group:
        raise ValueError(f"weight: expected rows of a multiple of {group} values, got {K}")
    min_code, max_code = (0, INT4_MAX) if bits == 4 else (-INT8_MAX - 1, INT8_MAX)
    values = weight.float().view(N, K // group, group)
    group_mins, group_maxes = values.amin(dim=2), values.amax(dim=2)
    if minimums:
        scale = _scale((group_maxes - group_mins) / (max_code - min_code), dtype)
        minimum = (min_code * scale.float() - group_mins).to(dtype)
        steps = (values + minimum.float()[:, :, None]) / scale.float()[:, :, None]
    else:
        zero = INT4_ZERO if bits == 4 else 0
        scale, minimum = _scale(values.abs().amax(dim=2) / (max_code - zero), dtype), None
        steps = values / scale.float()[:, :, None] + zero
    codes = steps.round().clamp(min_code, max_code).view(N, K)
    return pack_int4(codes) if bits == 4 else codes.to(torch.int8), scale, minimum


def dequantize_groups(codes: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor | None) -> torch.Tensor:
    """Returns `scale * code - minimum`, (N, K) in fp64, exactly. Without `minimum`, a 4-bit code of 8 means 0.

    codes: (N, K) int8, or packed (N, K/2) uint8; scale, minimum: (N, groups)."""
    values = (unpack_int4(codes) if codes.dtype == torch.uint8 else codes).double()
    K, groups = values.shape[1], scale.shape[1]
    group = K // max(groups, 1)
    if minimum is not None:
        return values * spread(scale.double(), group, K) - spread(minimum.double(), group, K)
    return (values - (INT4_ZERO if codes.dtype == torch.uint8 else 0)) * spread(scale.double(), group, K)


def pack_int4(codes: torch.Tensor) -> torch.Tensor:
    """Packs 4-bit codes (N, K), K even, into bytes (N, K/2). Byte k // 2 holds the code of an even k in the low half,
    and the code of k + 1 in the high half."""
    _check_matrix(codes)
    if codes.shape[1] % 2:
        raise ValueError(f"codes: expected an even K, two codes a byte, got {codes.shape[1]}")
    codes = codes.to(torch.uint8)
    return codes[:, ::2] | codes[:, 1::2] << 4


def unpack_int4(packed: torch.Tensor) -> torch.Tensor:
    """Unpacks bytes (N, K/2) to codes (N, K) uint8, each from 0 to 15."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)


def dequantize_int4(
    packed: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None = None, *, group: int
) -> torch.Tensor:
    """Returns (code - zero) * scale in fp64, exactly. If `zero` is None, the zero point is 8.

    packed: (N, K/2) uint8; scale, zero: (N, ceil(K / group)); returns (N, K)."""
    codes = unpack_int4(packed).double()
    K = codes.shape[1]
    if zero is None:
        return (codes - INT4_ZERO) * spread(scale.double(), group, K)
    return (codes - spread(zero.double(), group, K)) * spread(scale.double(), group, K)


def spread(of_groups: torch.Tensor, group: int, K: int) -> torch.Tensor:
    """Expands one value per group, (N, groups), to one value per k, (N, K): repeats each value `group` times."""
    return of_groups.repeat_interleave(group, dim=1)[:, :K]


def quantization_error(weight: torch.Tensor, dequantized: torch.Tensor) -> QuantizationError:
    """Returns the quantisation error over all values. Both arguments are (N, K). The error of two zero tensors is 0."""
    signal_power = weight.double().square().mean().item() if weight.numel() else 0.0
    error_power = (weight.double() - dequantized.double()).square().mean().item() if weight.numel() else 0.0
    if error_power == 0:
        return QuantizationError(0.0, 0.0, math.inf)
    signal_to_noise = signal_power / error_power
    return QuantizationError(
        relative=signal_to_noise**-0.5 if signal_to_noise else math.inf,
        mean_squared=error_power,
        sqnr_db=10 * math.log10(signal_to_noise) if signal_to_noise else -math.inf,
    )


def expected_mean_squared(scale: torch.Tensor) -> float:
    """Returns Bennett's mean squared error for uniform quantisers with the steps `scale`: mean(scale**2) / 12."""
    return scale.double().square().mean().item() / 12


def _scale(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rounds the positive scales `exact` up to values of `dtype`. A scale of 0 becomes 1."""
    exact = torch.where(exact > 0, exact, 1.0)
    rounded_scale = exact.to(dtype)
    next_scale = torch.nextafter(rounded_scale.cpu(), torch.tensor(math.inf, dtype=dtype)).to(rounded_scale.device)
    return torch.where(rounded_scale.double() < exact.double(), next_scale, rounded_scale)


def _check_matrix(tensor: torch.Tensor) -> None:
    if tensor.ndim != 2:
        raise ValueError(f"weight: expected shape (*, *), got {tuple(tensor.shape)}")
