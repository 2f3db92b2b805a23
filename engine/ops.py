"""The engine reaches kernels only through this file: it chooses a kernel for each op in each bucket, once at load."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from rooflab.kernels import registry
from rooflab.kernels.choices import Phase, all_buckets, bucket_of, chosen
from rooflab.kernels.registry import Kernel
from rooflab.roofline.architecture import Architecture

OPS = (
    "embedding",
    "rmsnorm",
    "fused_add_rmsnorm",
    "gemm",
    "rope",
    "kv_cache_write",
    "flash_attention_varlen",
    "paged_attention",
    "silu_and_mul",
    "sample",
)
_PHASE_OF = {"flash_attention_varlen": "prefill"}


@dataclass(frozen=True)
class Choice:
    """The kernel of one op in one bucket, and the reason for this choice."""

    op: str
    bucket: str
    kernel: Kernel
    why: str


@dataclass(frozen=True)
class Limits:
    """The largest sizes of the model's inputs, which a kernel must take."""

    arch: Architecture
    device: torch.device
    dtype: torch.dtype
    block_size: int
    max_model_len: int
    max_rows: Mapping[Phase, int]


class OpSet:
    """The kernel of each op in each bucket.  `step` returns the functions of one step, without any choice.

    A step with prompts takes its kernels from the bucket of all its rows, and `decode_attention` from the bucket of its
    decoding rows: there `paged_attention` has one query per sequence, and in the prompts' buckets several.
    """

    def __init__(self, choices: Iterable[Choice]):
        self.choices = list(choices)
        table: dict[str, dict[str, Callable[..., Any]]] = {}
        for choice in self.choices:
            table.setdefault(choice.bucket, {})[choice.op] = choice.kernel.fn
        self._steps = {bucket: SimpleNamespace(**functions) for bucket, functions in table.items()}
        self._prepare = _common_prepare([choice.kernel for choice in self.choices if choice.op == "gemm"])

    def step(self, num_decodes: int, num_prompt_tokens: int = 0) -> SimpleNamespace:
        """The ops of a step, as functions by name."""
        decode = bucket_of("decode", max(num_decodes, 1))
        bucket = bucket_of("prefill", num_decodes + num_prompt_tokens) if num_prompt_tokens else decode
        attention = {"decode_attention": self._steps[decode].paged_attention}
        return SimpleNamespace(**{**vars(self._steps[bucket]), **attention})

    def prepare(self, weight: torch.Tensor) -> Any:
        """`weight` (out, in) as the `b` argument of this set's gemm: packed, or the transposed view."""
        return self._prepare(weight.mT) if self._prepare else weight.mT

    def describe(self) -> list[dict[str, str]]:
        """One row per op and kernel, with its buckets; printed with every run."""
        rows: dict[tuple[str, str, str], list[str]] = {}
        for choice in self.choices:
            rows.setdefault((choice.op, choice.kernel.name, choice.why), []).append(choice.bucket)
        return [
            {"op": op, "kernel": kernel, "buckets": " ".join(buckets), "why": why}
            for (op, kernel, why), buckets in rows.items()
        ]


def resolve(limits: Limits, swaps: Mapping[str, str] | None = None, interpret: bool = False) -> OpSet:
    """The kernels for a model, chosen for every shape of its inputs.

    `swaps` maps an op to the kernel it must use; `interpret` allows Triton kernels on the CPU.  If an op has no kernel
    for a bucket, or a swap cannot run here, raises `ValueError` with each kernel's reason.
    """
    swaps = dict(swaps or {})
    for op, name in swaps.items():
        if op not in OPS:
            raise ValueError(f"swap: the engine uses {', '.join(OPS)}, got {op!r}")
        registry.get_kernel(op, name)
    choices = []
    for bucket, phase, upper in all_buckets():
        rows = _rows_in(bucket, phase, upper, limits)
        if rows:
            ops = (op for op in OPS if _PHASE_OF.get(op, phase) == phase)
            choices += [_choose(op, bucket, phase, rows, limits, swaps.get(op), interpret) for op in ops]
    return OpSet(choices)


def _rows_in(bucket: str, phase: Phase, upper: float, limits: Limits) -> tuple[int, ...]:
    """The least and the largest number of rows of a step in this bucket; empty if no step can be in it."""
    most = int(min(upper, limits.max_rows[phase]))
    least = next((rows for rows in range(1, most + 1) if bucket_of(phase, rows) == bucket), None)
    return () if least is None else (least, most)


def _choose(
    op: str, bucket: str, phase: Phase, rows: tuple[int, ...], limits: Limits, swap: str | None, interpret: bool
) -> Choice:
    reasons: list[str] = []
    wanted = [(registry.get_kernel(op, swap), "asked for")] if swap else []
    # A kernel may serve decoding rows and not chunks of prompts: one that is asked for need not serve both.
    others = [] if swap and (op, phase) != ("paged_attention", "prefill") else candidates(op, bucket, limits.device)
    for kernel, why in [*wanted, *others]:
        reason = _why_not(kernel, phase, rows, limits, interpret)
        if reason is None:
            return Choice(op, bucket, kernel, "; ".join([why, *reasons]))
        reasons.append(f"{kernel.id}: {reason}")
    raise ValueError(f"swap: no kernel for {op} in {bucket}: {'; '.join(reasons)}")


def candidates(op: str, bucket: str, device: torch.device) -> list[tuple[Kernel, str]]:
    """Kernels in the order in which they are tried, each with the reason for it.

    First the choice of a committed record of this device. Then on the CPU the torch kernels, highest rung first; on
    CUDA the library's kernel, because an optimized kernel is no default before a GPU has checked it.
    """
    kernels = registry.kernels(op)
    key = "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)
    name = chosen(op, key, bucket)
    first = [(kernels[name], "by record")] if name in kernels else []
    rest = [kernel for kernel in kernels.values() if kernel.backend == "torch"]
    if device.type == "cpu":
        order = {"optimized": 0, "library": 1, "naive": 2, "peer": 3}
        rest.sort(key=lambda kernel: order[kernel.role])
        return first + [(kernel, "highest torch rung that can run") for kernel in rest if kernel.name != name]
    rest = [kernel for kernel in rest if kernel.role in ("library", "naive")]
    rest.sort(key=lambda kernel: kernel.role != "library")
    return first + [(kernel, f"no record for {key} that can run") for kernel in rest if kernel.name != name]


def _why_not(kernel: Kernel, phase: Phase, rows: tuple[int, ...], limits: Limits, interpret: bool) -> str | None:
    if kernel.backend == "triton" and limits.device.type == "cpu" and not interpret:
        return "UNSUPPORTED: needs a CUDA device (--interpret runs it on the CPU, without times)"
    refusal = kernel.why_not_here(limits.device)
    if refusal:
        return str(refusal)
    for M in rows:
        for inputs in probes(kernel.op, phase, M, limits):
            refusal = kernel.why_not_args(inputs)
            if refusal:
                return str(refusal)
    return None


def probes(op: str, phase: Phase, M: int, limits: Limits) -> list[dict[str, Any]]:
    """The arguments that the model passes to `op` in a step of `M` rows, as meta tensors."""
    arch, block_size = limits.arch, limits.block_size

    def empty(*shape: int, dtype: torch.dtype = limits.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    H, D, heads, kv_heads = arch.hidden_size, arch.head_dim, arch.num_heads, arch.num_kv_heads
    sequences = min(M, limits.max_rows["decode"])  # rows that are sampled: in prefill one per prompt
    max_blocks = -(-limits.max_model_len // block_size)
    cache = empty(max_blocks, block_size, kv_heads, D)
    q, k = empty(M, heads, D), empty(M, kv_heads, D)
    ids = empty(M, dtype=torch.int64)
    options = {"softmax_scale": None} | ({} if arch.window is None else {"window": arch.window})
    bounds = torch.tensor([0, M], dtype=torch.int32)  # of one chunk
    lengths = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": M, "max_seqlen_k": M}
    several = M if phase == "decode" else 1
    table = empty(limits.max_model_len, D // 2, dtype=torch.float32)

    def gemm(rows: int, out_features: int, in_features: int, bias: bool = False) -> dict[str, Any]:
        weight = empty(out_features, in_features)
        return {"a": empty(rows, in_features), "b": weight.mT, "bias": empty(out_features) if bias else None}

    if op == "gemm":
        return [
            gemm(M, (heads + 2 * kv_heads) * D, H, arch.attention_bias),
            gemm(M, H, heads * D),
            gemm(M, 2 * arch.intermediate_size, H),
            gemm(M, H, arch.intermediate_size),
            gemm(sequences, arch.vocab_size, H),
        ]
    per_row = {"dtype": torch.float32}
    arguments: dict[str, dict[str, Any]] = {
        "embedding": {"token_ids": ids, "weight": empty(arch.vocab_size, H)},
        "rmsnorm": {"x": empty(M, H), "weight": empty(H), "eps": arch.rms_norm_eps},
        "fused_add_rmsnorm": {"x": empty(M, H), "residual": empty(M, H), "weight": empty(H), "eps": arch.rms_norm_eps},
        "rope": {"q": q, "k": k, "cos": table, "sin": table, "positions": ids, "interleaved": False},
        "kv_cache_write": {"k": k, "v": k, "k_cache": cache, "v_cache": cache, "slot_mapping": ids},
        "flash_attention_varlen": {"q": q, "k": k, "v": k, **lengths, "causal": True, **options},
        "paged_attention": {
            "q": q,
            "k_cache": cache,
            "v_cache": cache,
            "block_table": torch.zeros(several, max_blocks, dtype=torch.int32),
            "seq_lens": torch.ones(several, dtype=torch.int32),
            **({} if phase == "decode" else {"cu_seqlens_q": bounds}),
            **options,
        },
        "silu_and_mul": {"x": empty(M, 2 * arch.intermediate_size)},
        "sample": {
            "logits": empty(sequences, arch.vocab_size),
            "temperature": empty(sequences, **per_row),
            "top_k": empty(sequences, dtype=torch.int32),
            "top_p": empty(sequences, **per_row),
            "min_p": empty(sequences, **per_row),
            "seed": empty(sequences, dtype=torch.int64),
            "position": empty(sequences, dtype=torch.int64),
        },
    }
    return [arguments[op]]


def _common_prepare(kernels: list[Kernel]) -> Callable[[torch.Tensor], Any] | None:
    """The `prepare` that all these kernels share, because the engine keeps only one form of a weight."""
    ways = {kernel.prepare for kernel in kernels}
    if len(ways) > 1:
        names = sorted({kernel.id for kernel in kernels})
        raise ValueError(f"gemm: the kernels chosen for different buckets pack weights differently: {', '.join(names)}")
    return ways.pop() if ways else None
