"""Faults planted in the compiled code of outside kernels: the emulator must find each."""

from __future__ import annotations

import copy
import re
from typing import Any

from rooflab.bench.emulator import Emulation

KINDS = {
    "barrier": r"st\.shared[^;]*;(?:(?!st\.shared|bar\.sync).)*(bar\.sync[^;]*;)"
    r"(?=(?:(?!st\.shared|bar\.sync).)*(?:ld\.shared|ldmatrix|wgmma\.mma))",
    "fence": r"(fence\.proxy\.async[^;]*;)",
    "wait": r"(cp\.async\.wait_group[^;]*;)",
    "mask": r"(@%p\d+ )ld\.global",
    "vector mask": r"(@%p\d+ )ld\.global\.v4",
    "store mask": r"(@%p\d+ )st\.global",
}
"""By kind: what is taken out, the first group of the first match; a barrier is one between a store and a load."""
FAULTS = (
    ("liger", "rms_norm", "barrier"), ("liger", "softmax", "barrier"), ("liger", "group_norm", "barrier"),
    ("liger", "cross_entropy", "barrier"), ("liger", "sparsemax", "barrier"), ("liger", "layer_norm", "mask"),
    ("liger", "fused_add_rms_norm", "mask"), ("liger", "swiglu", "store mask"), ("liger", "rope", "store mask"),
    ("lightllm", "rmsnorm", "mask"), ("lightllm", "matmul int8", "barrier"), ("fla", "layer_norm", "barrier"),
    ("fla", "matmul", "wait"), ("fla", "chunk_linear_attn", "wait"), ("fla", "cross_entropy in Gluon", "barrier"),
    ("fla", "fused_chunk_linear_attn", "barrier"), ("sglang", "merge_state", "mask"),
    ("sglang", "log_softmax", "barrier"), ("sglang", "awq_gemm", "barrier"), ("vllm", "bmm", "barrier"),
    ("unsloth", "layernorm", "barrier"), ("unsloth", "swiglu", "mask"), ("xformers", "rms_norm", "mask"),
    ("flashinfer", "rms_norm", "barrier"), ("cut_cross_entropy", "linear_cross_entropy", "wait"),
    ("vllm", "bmm", "fence"), ("lightllm", "matmul int8", "fence"), ("fla", "matmul", "fence"),
    ("sglang", "extend_attention", "fence"), ("sglang", "extend_attention", "barrier"),
    ("fla", "causal_conv1d", "vector mask"),
)  # fmt: skip
"""Project, entry and kind: where what is taken out is needed on the entry's shape.

So not the first mask of `causal_conv1d`, whose blocks of 16 channels fit 96, nor that of LightLLM's `flash_decoding`:
without it other rows of the table of tokens are read, and the loads of those tokens have masks of their own.
"""


class Fault:
    """A fault in the first launch whose code has a place for it, and in later ones of the same kernel."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.planted = ""
        """The kernel and what was taken out; empty where no kernel has a place for it."""
        self._name = ""

    def plant_in(self, run: Emulation) -> None:
        """Makes a run launch faulty code."""
        emulated = run.emulated

        def faulty(compiled: Any, *rest: Any) -> Any:
            text, pattern = compiled.asm["ptx"], re.compile(KINDS[self.kind], re.DOTALL)
            place = pattern.search(text)
            if place is not None and self._name in ("", compiled.metadata.name):
                self._name = compiled.metadata.name
                self.planted = f"{self._name}: without `{place[1].strip()}`"
                compiled = copy.copy(compiled)
                compiled.asm = {**compiled.asm, "ptx": text[: place.start(1)] + text[place.end(1) :]}
            return emulated(compiled, *rest)

        run.emulated = faulty  # type: ignore[method-assign, assignment]
