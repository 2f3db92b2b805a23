"""Checks of the arguments, and the outputs, of all speculative_verify kernels."""

from __future__ import annotations

import torch

from rooflab.kernels._checks import check_contiguous, checks_bounds, output
from rooflab.reference import speculative_verify as reference
from rooflab.reference.rules import check_dtype

Verified = tuple[torch.Tensor, torch.Tensor]


def check_args(
    draft_tokens: torch.Tensor,
    target_probs: torch.Tensor,
    num_drafts: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    draft_probs: torch.Tensor | None,
) -> None:
    """Raises `ValueError` unless the tensors have the shapes and dtypes of `reference.speculative_verify.reference`,
    are contiguous and on one device.  Values are checked on the CPU, and with `CHECK_VALUES`."""
    tensors = {"draft_tokens": draft_tokens, "target_probs": target_probs, "num_drafts": num_drafts}
    tensors |= {"seed": seed, "position": position}
    if draft_probs is not None:
        tensors["draft_probs"] = draft_probs
    dtypes = {"target_probs": torch.float32, "draft_probs": torch.float32, "num_drafts": torch.int32}
    for name, tensor in tensors.items():
        check_dtype(name, tensor, dtypes.get(name, torch.int64))
        check_contiguous(name, tensor)
        if tensor.device != draft_tokens.device:
            raise ValueError(f"{name}: expected a tensor on {draft_tokens.device}, got {tensor.device}")
    values = checks_bounds(draft_tokens)
    reference.check_args(draft_tokens, target_probs, num_drafts, seed, position, draft_probs, values)


def outputs(out: Verified | None, draft_tokens: torch.Tensor) -> Verified:
    """`out`, or new tensors: tokens (B, K + 1) int64 and num_accepted (B,) int32."""
    B, K = draft_tokens.shape
    tokens, accepted = out or (None, None)
    return output(tokens, (B, K + 1), draft_tokens), output(accepted, (B,), draft_tokens, torch.int32)
