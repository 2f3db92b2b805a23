"""Kernels of Unsloth, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from packaging.version import Version
from torch.nn import functional as F

from compatibility.entries import Entry, Project, rotated
from compatibility.sources import Source

STUBS = (
    "unsloth_zoo",
    "unsloth.device_type",
    "unsloth.bnb_availability",
    "bitsandbytes",
    "unsloth.kernels.fp8",
    "unsloth.kernels.nvfp4",
    "unsloth.models",
)
GIVEN = {
    "unsloth.device_type.DEVICE_TYPE": "cuda",
    "unsloth.device_type.DEVICE_TYPE_TORCH": "cuda",
    "unsloth.device_type.DEVICE_COUNT": 1,
    "unsloth_zoo.utils.Version": lambda text: Version(str(text)),
    "bitsandbytes.__version__": "0.50.2",
}
SOURCE = Source("Unsloth", "unsloth==2026.10.9", "unsloth/", STUBS, GIVEN)
Tensor = torch.Tensor
_kernels = SOURCE.below("unsloth.kernels")


def _glu(name: str) -> Any:
    """The gradients of `f(e) * g` by `e` and `g`, which the kernel writes over its arguments."""
    return lambda d, e, g: getattr(_kernels(name.split(":", maxsplit=1)[0]), name.split(":")[1])(d, e, g)


def _backward(act: Any) -> Any:
    def reference(d: Tensor, e: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            x = e.detach().requires_grad_()
            (slope,) = torch.autograd.grad(act(x).sum(), x)
        return act(e) * g, d * act(e), d * g * slope

    return reference


def _both(t: Tensor) -> Tensor:
    return torch.cat([t, t], -1)


ENTRIES = (
    Entry("rms_layernorm", "x=2x7x96,w=96",
          lambda x, w: _kernels("rms_layernorm").Fast_RMS_Layernorm.apply(x, w, 1e-6, False),
          lambda x, w: F.rms_norm(x, (96,), w, 1e-6), "x"),
    Entry("rms_layernorm of Gemma", "x=2x7x96,w=96",
          lambda x, w: _kernels("rms_layernorm").Fast_RMS_Layernorm.apply(x, w, 1e-6, True),
          lambda x, w: F.rms_norm(x, (96,), w + 1, 1e-6), "x"),
    Entry("layernorm", "x=2x7x96,w=96,b=96", lambda *x: _kernels("layernorm").Fast_Layernorm.apply(*x, 1e-6),
          lambda x, w, b: F.layer_norm(x, (96,), w, b, 1e-6), "x"),
    Entry("swiglu", "e=2x7x96,g=2x7x96", lambda e, g: _kernels("swiglu").swiglu_fg_kernel(e, g),
          lambda e, g: F.silu(e) * g),
    Entry("swiglu backward", "d=14x96,e=14x96,g=14x96", _glu("swiglu:swiglu_DWf_DW_dfg_kernel"), _backward(F.silu)),
    Entry("geglu", "e=2x7x96,g=2x7x96", lambda e, g: _kernels("geglu").geglu_exact_forward_kernel(e, g),
          lambda e, g: F.gelu(e) * g),
    Entry("geglu backward", "d=14x96,e=14x96,g=14x96", _glu("geglu:geglu_exact_backward_kernel"), _backward(F.gelu)),
    Entry("geglu by tanh", "e=2x7x96,g=2x7x96", lambda e, g: _kernels("geglu").geglu_approx_forward_kernel(e, g),
          lambda e, g: F.gelu(e, approximate="tanh") * g),
    Entry("geglu by tanh backward", "d=14x96,e=14x96,g=14x96", _glu("geglu:geglu_approx_backward_kernel"),
          _backward(lambda x: F.gelu(x, approximate="tanh"))),
    Entry("cross_entropy", "x=2x7x99,y=2x7:i64<99",
          lambda x, y: _kernels("cross_entropy_loss").fast_cross_entropy_loss(x, y),
          lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten()), "x"),
    Entry("cross_entropy in chunks", "x=1x3x70001,y=1x3:i64<70001",
          lambda x, y: _kernels("cross_entropy_loss").fast_cross_entropy_loss(x, y),
          lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten()), "x"),
    Entry("rope", "x=2x19x3x32,t=19x16",
          lambda x, t: _kernels("rope_embedding").Fast_RoPE_Embedding.apply(x, _both(t).cos(), _both(t).sin()), rotated,
          "x"),
)  # fmt: skip
PROJECT = Project(SOURCE, ENTRIES)
