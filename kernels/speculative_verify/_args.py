"""Checks of the arguments, and the outputs, of all speculative_verify kernels."""

from __future__ import annotations

import torch

from rooflab.kernels._checks import check_contiguous, check_dtype, check_shape, output

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
    are contiguous and on one device.  Values are checked only on the CPU."""
    check_shape("draft_tokens", draft_tokens, None, None)
    B, K = draft_tokens.shape
    check_shape("target_probs", target_probs, B, K + 1, None)
    V = target_probs.shape[2]
    if not V:
        raise ValueError("target_probs: expected at least one token, got 0")
    check_shape("num_drafts", num_drafts, B)
    check_shape("seed", seed, B)
    check_shape("position", position, B)
    tensors = {"draft_tokens": draft_tokens, "target_probs": target_probs, "num_drafts": num_drafts}
    tensors |= {"seed": seed, "position": position}
    if draft_probs is not None:
        check_shape("draft_probs", draft_probs, B, K, V)
        tensors["draft_probs"] = draft_probs
    dtypes = {"target_probs": torch.float32, "draft_probs": torch.float32, "num_drafts": torch.int32}
    for name, tensor in tensors.items():
        check_dtype(name, tensor, dtypes.get(name, torch.int64))
        check_contiguous(name, tensor)
        if tensor.device != draft_tokens.device:
            raise ValueError(f"{name}: expected a tensor on {draft_tokens.device}, got {tensor.device}")
    if draft_tokens.device.type == "cpu":
        _check_values(draft_tokens, target_probs, num_drafts, draft_probs)


def _check_values(
    draft_tokens: torch.Tensor, target_probs: torch.Tensor, num_drafts: torch.Tensor, draft_probs: torch.Tensor | None
) -> None:
    K, V = draft_tokens.shape[1], target_probs.shape[2]
    used = torch.arange(K) < num_drafts[:, None]
    wrong = {
        "num_drafts": ((num_drafts < 0) | (num_drafts > K), f"0 to {K}"),
        "draft_tokens": ((used & ((draft_tokens < 0) | (draft_tokens >= V))).any(-1), f"0 to {V - 1}"),
        "target_probs": (~_is_law(target_probs).all(-1), "finite values >= 0, and one > 0"),
    }
    if draft_probs is not None:
        wrong["draft_probs"] = ((used & ~_is_law(draft_probs)).any(-1), "finite values >= 0, and one > 0")
    for name, (rows, wanted) in wrong.items():
        if bool(rows.any()):
            raise ValueError(f"{name}: expected {wanted}, got another value in row {int(rows.int().argmax())}")


def _is_law(probs: torch.Tensor) -> torch.Tensor:
    low, high = probs.aminmax(dim=-1)  # both are NaN if there is one
    return (low >= 0) & (high > 0) & high.isfinite()


def outputs(out: Verified | None, draft_tokens: torch.Tensor) -> Verified:
    """`out`, or new tensors: tokens (B, K + 1) int64 and num_accepted (B,) int32."""
    B, K = draft_tokens.shape
    tokens, accepted = out or (None, None)
    return output(tokens, (B, K + 1), draft_tokens), output(accepted, (B,), draft_tokens, torch.int32)
