"""The peers that name a backend of torch's scaled_dot_product_attention: what they refuse, before torch is called."""

from __future__ import annotations

import pytest
import torch

from rooflab.kernels.registry import get_kernel

Q = torch.ones(1, 4, 2, 64).half()


@pytest.mark.parametrize("name", ["sdpa_flash", "sdpa_cudnn", "sdpa_efficient"])
@pytest.mark.parametrize(
    ("q", "k", "causal", "message"),
    [
        (Q.float(), Q.float(), False, "q: takes fp16 and bf16, got fp32"),
        (Q[0], Q[0], False, r"q: expected .* got \(4, 2, 64\)"),
        (Q, Q[0], False, r"k: expected .* got \(4, 2, 64\)"),
        (Q, Q.bfloat16(), False, "k: expected torch.float16, got torch.bfloat16"),
        (Q, Q[:, :3], True, "q: is causal at the upper left, got 4 queries and 3 keys"),
    ],
)
def test_bad_input_is_refused_by_name(name: str, q: torch.Tensor, k: torch.Tensor, causal: bool, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_kernel("flash_attention", name).fn(q, k, k, causal)


def test_the_efficient_backend_groups_no_heads() -> None:
    with pytest.raises(ValueError, match="k: expected q's 2 heads, as this backend groups none, got 1"):
        get_kernel("flash_attention", "sdpa_efficient").fn(Q, Q[:, :, :1], Q[:, :, :1])
