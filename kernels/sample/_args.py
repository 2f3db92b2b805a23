"""Checks of the arguments of all sample kernels, and the traffic of those that read the logits once."""

from __future__ import annotations

import torch

from rooflab.kernels._checks import check_contiguous, check_dtype, check_float, check_last_dim_contiguous, check_shape
from rooflab.kernels.registry import Arguments
from rooflab.roofline.model import Traffic


def check_args(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
) -> None:
    """Raises `ValueError` unless logits are (B, V) float and the six settings (B,) of their dtypes on the same device.

    Values are checked only on the CPU; on a GPU the check would wait for the device.
    """
    check_float("logits", logits)
    check_shape("logits", logits, None, None)
    check_last_dim_contiguous("logits", logits)
    B, V = logits.shape
    if not 0 < V <= 2**31 - 1:
        raise ValueError(f"logits: expected between 1 and 2**31 - 1 tokens, got {V}")
    wanted = (
        ("temperature", temperature, torch.float32),
        ("top_k", top_k, torch.int32),
        ("top_p", top_p, torch.float32),
        ("min_p", min_p, torch.float32),
        ("seed", seed, torch.int64),
        ("position", position, torch.int64),
    )
    for name, tensor, dtype in wanted:
        check_shape(name, tensor, B)
        check_dtype(name, tensor, dtype)
        check_contiguous(name, tensor)
        if tensor.device != logits.device:
            raise ValueError(f"{name}: expected a tensor on {logits.device}, got {tensor.device}")
    if logits.device.type == "cpu":
        for t, k, p, m in zip(temperature.tolist(), top_k.tolist(), top_p.tolist(), min_p.tolist(), strict=True):
            check_settings(t, k, p, m)


def check_settings(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    """Raises `ValueError` if a setting of one row is out of range or NaN."""
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature: expected a finite value >= 0, got {temperature}")
    if top_k < 0:
        raise ValueError(f"top_k: expected >= 0 (0 is off), got {top_k}")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p: expected a value in (0, 1], got {top_p}")
    if not 0 <= min_p <= 1:
        raise ValueError(f"min_p: expected a value in [0, 1], got {min_p}")


def traffic(inputs: Arguments) -> Traffic:
    """The logits once, because L2 or a core's cache keeps the rows in work; the settings, and a token id per row."""
    logits = inputs.logits
    B = logits.shape[0]
    return Traffic(logits.numel() * logits.element_size() + 32 * B, 8 * B)
