"""Faults planted in compiled kernels and between launches: the emulator must find each and name its rule."""

from __future__ import annotations

import copy
import re
import traceback
from pathlib import Path
from typing import Any

from rooflab.bench.emulator import Emulation, PtxLaunch
from rooflab.bench.emulator.loader import load
from rooflab.bench.emulator.machine.launch_order import Clock

BETWEEN = r"st\.shared[^;]*;(?:(?!st\.shared|bar\.sync).)*(bar\.sync[^;]*;)(?=(?:(?!st\.shared|bar\.sync).)*"
KINDS: dict[str, tuple[str, str, set[str]]] = {
    "barrier": (BETWEEN + r"(?:ld\.shared|ldmatrix|wgmma\.mma))", "", {"race"}),
    "barrier of half": (r"(bar\.sync\s+0;)", "bar.sync 0, 64;", {"barrier", "deadlock"}),
    "fence": (r"(fence\.proxy\.async[^;]*;)", "", {"missing-fence"}),
    "wait": (r"((?:@!?%p\d+ )?cp\.async\.wait_group[^;]*;)", "", {"race", "unwritten-read"}),
    "mask": (r"(@%p\d+ )ld\.global", "", {"out-of-bounds"}),
    "vector mask": (r"(@%p\d+ )ld\.global\.v4", "", {"out-of-bounds"}),
    "store mask": (r"(@%p\d+ )st\.global", "", {"out-of-bounds", "race"}),
    "address": (r"ld\.global[\w.]*\.v4[^;]*?(\+ 0) \];", "+ 4", {"misaligned", "out-of-bounds"}),
    "far store": (r"st\.global[^;]*?(\+ 0) \]", "+ 268435456", {"out-of-bounds"}),
    "shared store": (r"(@?%?p?\d* ?st\.shared[^;]*;)", "", {"unwritten-read"}),
    "wgmma wait": (r"(wgmma\.wait_group[^;]*;)", "", {"wgmma-registers", "race"}),
    "wgmma fence": (r"(wgmma\.fence[^;]*;)", "", {"missing-fence"}),
    "mbarrier init": (r"(@%p\d+ mbarrier\.init[^;]*;)", "", {"mbarrier-phase"}),
    "mbarrier wait": (r"mbarrier\.try_wait[^;]*;\s*(@!\w+ bra[^;]*;)", "", {"race", "mbarrier-phase"}),
    "fewer bytes": (r"mbarrier\.arrive\.expect_tx[^;]*?, (\d+);", "16", {"deadlock", "mbarrier-phase"}),
    "bulk wait": (r"((?:@!?%p\d+ )?cp\.async\.bulk\.wait_group[^;]*;)", "", {"race", "early-exit"}),
    "shorter loop": (
        r"(\$L__BB\d+_\d+):(?:(?!\1:).)*?bar\.sync\s+0;(?:(?!\1:).)*?(@(%p\d+) bra\s+\1;)",
        r"{ .reg .pred %go; .reg .u32 %t; mov.u32 %t, %tid.x; setp.gt.and.u32 %go, %t, 31, \3; @%go bra \1; }",
        {"barrier"},
    ),
    "phase": (r"mbarrier\.try_wait[^;]*;\s*(@!?\w+ bra[^;]*;(?:\s*bra[^;]*;)?)", "", {"mbarrier-phase"}),
    "parity": (r"mbarrier\.try_wait\.parity[^;,]*,[^;,]*, (%\w+);", "0", {"mbarrier-phase"}),
    "grid wait": (r"(griddepcontrol\.wait;)", "", {"dependent-launch"}),
    "event": ("", "", {"stream-order"}),
}
"""By kind: what the last group of the pattern's first match (behind `, last` or a number: of another one) becomes, and
the rules that are broken.  A `shorter loop` ends early for one warp; without `event` no default stream waits."""


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
    ("fla", "causal_conv1d", "vector mask"), ("flashinfer", "gemm", "wgmma wait"),
    ("flashinfer", "gemm", "wgmma fence"), ("flashinfer", "gemm", "fence"), ("flashinfer", "gemm", "far store"),
    ("flashinfer", "gemm_persistent", "wgmma wait"), ("flashinfer", "gemm_descriptor_persistent", "bulk wait, last"),
    ("flashinfer", "gemm_descriptor_persistent", "fewer bytes, last"),
    ("flashinfer", "gemm_descriptor_persistent", "mbarrier init, last"),
    ("flashinfer", "gemm_descriptor_persistent", "mbarrier wait, last"),
    ("flashinfer", "gemm_descriptor_persistent", "fence, last"),
    ("flashinfer", "gemm_descriptor_persistent", "wgmma fence, last"), ("vllm", "matmul_persistent", "wgmma fence"),
    ("vllm", "matmul_persistent", "wgmma wait"), ("vllm", "matmul_persistent", "shared store"),
    ("vllm", "scaled_mm", "wait"), ("vllm", "scaled_mm", "wgmma wait"), ("vllm", "scaled_mm", "barrier of half"),
    ("vllm", "scaled_mm", "wgmma fence"), ("vllm", "bmm", "wgmma fence"), ("vllm", "bmm", "store mask"),
    ("vllm", "awq_gemm", "shared store"), ("vllm", "rms_norm", "barrier of half"),
    ("sglang", "matmul_persistent", "wgmma wait"), ("sglang", "matmul_persistent", "wgmma fence"),
    ("sglang", "rms_norm", "shared store"), ("sglang", "fused_rmsnorm", "shared store"),
    ("sglang", "silu_and_mul", "far store"), ("liger", "rms_norm", "shared store"),
    ("liger", "softmax", "barrier of half"), ("liger", "swiglu", "far store"), ("liger", "geglu", "far store"),
    ("xformers", "rms_norm_add", "address"), ("unsloth", "rms_layernorm", "shared store"),
    ("unsloth", "cross_entropy", "barrier"), ("inductor", "softmax", "barrier"),
    ("inductor", "layer_norm", "shared store"), ("fla", "layer_norm", "shared store"), ("fla", "l2norm", "address"),
    ("lightllm", "silu_and_mul", "address"), ("helion", "rms_norm", "shared store"),
    ("vllm", "awq_gemm", "shorter loop"), ("sglang", "router on tensor cores", "shorter loop"),
    ("fla", "cumsum of vectors", "shorter loop"), ("rooflab", "gemm shared_tiles", "shorter loop"),
    ("rooflab", "gemm cooperative", "phase, 1"), ("rooflab", "gemm multicast", "phase"),
    ("rooflab", "gemm multicast", "parity, 1"), ("rooflab", "attention ping_pong", "phase, 4"),
    ("rooflab", "attention ping_pong", "phase, last"), ("rooflab", "gemm warp_specialized", "phase, last"),
    ("vllm", "gather_initial_states twice", "grid wait"),
    ("rooflab", "fused_add_rmsnorm of two layers", "grid wait"), ("rooflab", "silu_and_mul of two layers", "grid wait"),
    ("vllm", "bmm on two streams", "event"), ("vllm", "mean_dim on two streams", "event"),
    ("rooflab", "attention on two streams", "event"),
)  # fmt: skip
"""Project, entry and kind: where what is taken out is needed on the entry's shape.

So not the first mask of `causal_conv1d`, whose blocks of 16 channels fit 96, nor that of LightLLM's `flash_decoding`:
without it other rows of the table of tokens are read, and the loads of those tokens have masks of their own.
"""


class Fault:
    """A fault in the first launch whose code has a place for it, and in later ones of the same kernel."""

    def __init__(self, kind: str) -> None:
        kind, _, place = kind.partition(", ")
        self.pattern, self.instead, self.rules = KINDS[kind]
        self._place = -1 if place == "last" else int(place or 0)
        self.planted = ""
        """The kernel and what was taken out; empty where no kernel has a place for it."""
        self.line = ""
        """File and line of the changed instruction."""
        self._name = ""

    def plant_in(self, run: Emulation) -> None:
        """Makes a run launch faulty code, or forget the waits of its default stream."""
        emulated, order, wait = run.emulated, run.fresh.order, run.fresh.order.wait

        def faulty(compiled: Any, *rest: Any) -> Any:
            is_cuda = isinstance(compiled, PtxLaunch)
            text, name = (compiled.ptx, compiled.name) if is_cuda else (compiled.asm["ptx"], compiled.metadata.name)
            places = [*re.compile(self.pattern, re.DOTALL).finditer(text)]
            if places and self._name in ("", name):
                self._name, place = name, places[self._place]
                group = place.lastindex or 0
                changed = text[: place.start(group)] + place.expand(self.instead) + text[place.end(group) :]
                self.planted, self.line = f"{name}: without `{place[group].strip()}`", _changed(text, changed, name)
                compiled = copy.copy(compiled)
                vars(compiled).update({"ptx": changed} if is_cuda else {"asm": {**compiled.asm, "ptx": changed}})
            return emulated(compiled, *rest)

        def waits(stream: int | None, clock: Clock) -> None:
            if stream != 0:
                wait(stream, clock)
            else:
                stack, between = traceback.extract_stack(), ("launch_streams.py", "faults.py")
                frame = [each for each in stack if not each.filename.endswith(between)][-1]
                self.planted = f"{frame.name}: without `{frame.line}`"
                self.line = f"{Path(frame.filename).name}:{frame.lineno}"

        if self.pattern:
            run.emulated = faulty  # type: ignore[method-assign, assignment]
        else:
            order.wait = waits  # type: ignore[method-assign]


def _changed(before: str, after: str, name: str) -> str:
    texts = (load(text, name).kernel.instructions for text in (before, after))
    changed = next(old for old, new in zip(*texts, strict=False) if old.text.split() != new.text.split())
    file, line = changed.source_line
    return f"{Path(file).name}:{line}"
