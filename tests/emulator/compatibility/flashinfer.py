"""Kernels of FlashInfer that are written in Triton."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from compatibility.entries import Entry, Project, into, rms
from compatibility.sources import Source

SOURCE = Source(
    "FlashInfer",
    "flashinfer-python==0.7.2.post1",
    "flashinfer/",
    ("flashinfer.utils", "flashinfer.api_logging", "flashinfer.jit", "flashinfer.trace"),
    {"flashinfer.utils.get_compute_capability": lambda device: (9, 0)},
)
Tensor = torch.Tensor
_triton = SOURCE.below("flashinfer.triton")


def _merged(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Parts along the second dimension; their sums' logarithms are to the base 2."""
    p = (s * torch.log(torch.tensor(2.0))).softmax(1)
    return (v * p[..., None]).sum(1), torch.logsumexp(s * torch.log(torch.tensor(2.0, dtype=s.dtype)), 1) / torch.log(
        torch.tensor(2.0, dtype=s.dtype)
    )


ENTRIES = (
    Entry("merge_state", "v=5x3x32,s=5x3,u=5x3x32,t=5x3", lambda *x: _triton("cascade").merge_state(*x),
          lambda v, s, u, t: _merged(torch.stack([v, u], 1), torch.stack([s, t], 1))),
    Entry("merge_state_in_place", "v=5x3x32,s=5x3,u=5x3x32,t=5x3",
          lambda v, s, u, t: (_triton("cascade").merge_state_in_place(v, s, u, t), v, s)[1:],
          lambda v, s, u, t: _merged(torch.stack([v, u], 1), torch.stack([s, t], 1))),
    Entry("merge_states", "v=5x4x3x32,s=5x4x3", lambda v, s: _triton("cascade").merge_states(v, s), _merged),
    Entry("variable_length_merge_states", "v=9x3x32,s=9x3",
          lambda v, s: _triton("cascade").variable_length_merge_states(
              v, s, torch.tensor([0, 4, 9], dtype=torch.int32)),
          lambda v, s: tuple(torch.cat(part) for part in zip(
              *(_merged(v[None, a:b], s[None, a:b]) for a, b in ((0, 4), (4, 9))), strict=True))),
    Entry("rms_norm", "x=7x96:bf16,w=96:bf16",
          lambda x, w: into(lambda out: _triton("norm").rms_norm(x, w, out, 1e-6), torch.empty_like(x)), rms),
    Entry("rms_norm_add_residual", "x=7x96,r=7x96,w=96",
          lambda x, r, w: (_triton("norm").rms_norm_add_residual(x, r, w, 1e-6), x, r)[1:],
          lambda x, r, w: (rms(x + r, w), x + r)),
    Entry("silu_and_mul", "x=7x96:bf16", lambda x: _triton("activation").silu_and_mul(x),
          lambda x: F.silu(x[:, :48]) * x[:, 48:]),
    Entry("gemm_persistent", "a=37x70:bf16,b=70x50:bf16",
          lambda a, b: _triton("sm_constraint_gemm").gemm_persistent(
              a, b, torch.zeros(37, 50).bfloat16(), num_sms=4), lambda a, b: a @ b),
    Entry("gemm", "a=37x70:bf16,b=70x50:bf16", lambda a, b: _triton("sm_constraint_gemm").gemm(
              a, b, torch.zeros(37, 50).bfloat16()), lambda a, b: a @ b),
    Entry("gemm without c", "a=37x70:bf16,b=70x50:bf16", lambda a, b: _triton("sm_constraint_gemm").gemm(a, b),
          lambda a, b: a @ b),
    Entry("gemm_descriptor_persistent", "a=37x72:bf16,b=56x72:bf16",
          lambda a, b: _triton("sm_constraint_gemm").gemm_descriptor_persistent(
              a, b, torch.zeros(37, 56).bfloat16(), num_sms=4),
          lambda a, b: a @ b.T),
)  # fmt: skip
PROJECT = Project(SOURCE, ENTRIES)
