"""The engine reaches kernels only through this file: it chooses a kernel for each op in each bucket, once at load.

On a CPU the fastest of those that can run, timed on this machine (`settle.py`); on CUDA the choice of a committed
record of that card, or the library's kernel, because an optimized kernel is no default before a GPU has checked it.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from psutil import virtual_memory

from rooflab.engine.settle import COLD_BYTES, Settled, real, time_calls
from rooflab.kernels import registry
from rooflab.kernels.choices import Phase, all_buckets, bucket_of, chosen
from rooflab.kernels.registry import Kernel
from rooflab.reference.quantization import quantize_int8
from rooflab.roofline.architecture import Architecture

OPS = (
    "embedding",
    "rmsnorm",
    "fused_add_rmsnorm",
    "gemm",
    "rope_and_cache",
    "flash_attention_varlen",
    "paged_attention",
    "silu_and_mul",
    "sample",
)
TOLERATED = 1.05
"""A bucket's product may take as many times its best time before weights are kept in another form for it."""
PRODUCTS = ("gemm", "gemm_w8a16")
"""The ops that multiply with a weight; a model has one of them."""
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
    int8: bool = False
    """Whether the products' weights are int8 codes with a scale for each output."""

    @property
    def ops(self) -> tuple[str, ...]:
        """The ops that the model uses."""
        return tuple("gemm_w8a16" if op == "gemm" and self.int8 else op for op in OPS)


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
        self._ways: list[Callable[[torch.Tensor], Any] | None] = []
        for choice in self.choices:
            if choice.op in PRODUCTS:
                way = choice.kernel.prepare
                self._ways += [] if way in self._ways else [way]
                table[choice.bucket]["gemm"] = partial(_product, choice.kernel.fn, self._ways.index(way))
        self._steps = {bucket: SimpleNamespace(**functions) for bucket, functions in table.items()}

    def step(self, num_decodes: int, num_prompt_tokens: int = 0) -> SimpleNamespace:
        """The ops of a step, as functions by name."""
        decode = bucket_of("decode", max(num_decodes, 1))
        bucket = bucket_of("prefill", num_decodes + num_prompt_tokens) if num_prompt_tokens else decode
        attention = {"decode_attention": self._steps[decode].paged_attention}
        return SimpleNamespace(**{**vars(self._steps[bucket]), **attention})

    def prepare(self, weight: torch.Tensor) -> Any:
        """`weight` (out, in) as the `b` argument of this set's gemm: in each form that one of its buckets takes."""
        if any(choice.op == "gemm_w8a16" for choice in self.choices):
            codes, scale = quantize_int8(weight)
            return tuple((packed(way, codes.mT, scale=scale), scale) for way in self._ways)
        return tuple((packed(way, weight.mT),) for way in self._ways)

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
        if op not in limits.ops:
            raise ValueError(f"swap: the engine uses {', '.join(limits.ops)}, got {op!r}")
        registry.get_kernel(op, name)
    able: dict[tuple[str, str], list[Choice]] = {}
    timed_rows = {}
    for bucket, phase, upper in all_buckets():
        rows = _rows_in(bucket, phase, upper, limits)
        if not rows:
            continue
        timed_rows[bucket] = rows[-1] if upper < math.inf else rows[0]
        for op in limits.ops:
            if _PHASE_OF.get(op, phase) == phase:
                able[op, bucket] = _able(op, bucket, phase, rows, limits, swaps.get(op), interpret)
    if limits.device.type == "cpu":
        able = _settle(able, timed_rows, limits)
    return OpSet([choices[0] for choices in able.values()])


def _settle(
    able: Mapping[tuple[str, str], list[Choice]], rows: Mapping[str, int], limits: Limits
) -> dict[tuple[str, str], list[Choice]]:
    """The choices with the fastest first."""
    arch = limits.arch
    facts = {
        "layers": [arch.num_layers, arch.hidden_size, arch.intermediate_size, arch.vocab_size],
        "heads": [arch.num_heads, arch.num_kv_heads, arch.head_dim, arch.window],
        "dtype": "int8" if limits.int8 else str(limits.dtype).removeprefix("torch."),
        "block_size": limits.block_size,
        "max_model_len": limits.max_model_len,
        "max_rows": dict(limits.max_rows),  # these decide which kernels can run, and at how many rows they are timed
    }
    settled = Settled(arch.name, facts, (choice.kernel for choices in able.values() for choice in choices))
    fastest = {}
    for (op, bucket), choices in able.items():
        if len(choices) > 1:
            take = partial(_time, op, bucket, rows[bucket], [choice.kernel for choice in choices], limits)
            times = settled.of(op, bucket, take)
            choices = [replace(one, why=_reason(one, times)) for one in choices]
            choices.sort(key=lambda one: times[one.kernel.name])
        fastest[op, bucket] = choices
    settled.keep()
    (product,) = set(PRODUCTS) & set(limits.ops)
    products = {bucket: choices for (op, bucket), choices in fastest.items() if op == product}
    ways = _ways(products, settled.times.get(product, {}), limits)
    for bucket, choices in products.items():
        fastest[product, bucket] = [choice for choice in choices if choice.kernel.prepare in ways]
    return fastest


def _ways(products: Mapping[str, list[Choice]], times: Mapping[str, Mapping[str, float]], limits: Limits) -> set[Any]:
    """The fewest ways to pack a weight with which gemm loses at most `TOLERATED` in every bucket; each way keeps a copy
    of all weights.  Only one, with the least geometric mean of the losses, if two copies do not fit."""
    known = list(dict.fromkeys(one.kernel.prepare for choices in products.values() for one in choices))
    fit = 2 * limits.arch.parameters().total * limits.dtype.itemsize < virtual_memory().available / 2
    sets = [set(some) for count in ((1, 2) if fit else (1,)) for some in itertools.combinations(known, count)]

    def losses(ways: set[Any]) -> list[float]:
        """The least time of each bucket with these ways, over its least of all."""
        found = []
        for bucket, choices in products.items():
            of_all = times.get(bucket) or {one.kernel.name: 1.0 for one in choices}
            own = (of_all[one.kernel.name] for one in choices if one.kernel.prepare in ways)
            found.append(min(own, default=math.inf) / min(of_all.values()))
        return found

    good = [ways for ways in sets if max(losses(ways)) <= TOLERATED]
    fewest = [ways for ways in good if len(ways) == len(good[0])] or sets
    return min(fewest, key=lambda ways: math.prod(losses(ways)))


def _reason(choice: Choice, times: Mapping[str, float]) -> str:
    others = ", ".join(f"{name} {us:.0f}" for name, us in times.items() if name != choice.kernel.name)
    return f"{times[choice.kernel.name]:.0f} us here, against {others}"


def _time(op: str, bucket: str, rows: int, kernels: list[Kernel], limits: Limits) -> dict[str, float]:
    """Microseconds by kernel; of products for all of a step."""
    phase: Phase = "decode" if bucket.startswith("decode") else "prefill"
    inputs = [real(each, limits.block_size) for each in probes(op, phase, rows, limits)]
    if op not in PRODUCTS:
        (only,) = inputs
        taken = {kernel: {name: value for name, value in only.items() if name in kernel.accepted} for kernel in kernels}
        return time_calls({kernel.name: [partial(kernel.fn, **own)] for kernel, own in taken.items()})
    *layer, head = inputs
    times = time_calls({kernel.name: _products(kernel, layer) for kernel in kernels})
    heads = {}
    if rows <= 16:  # with more rows the head's product takes longest of all and is like the others
        heads = time_calls({kernel.name: _products(kernel, [head]) for kernel in kernels})
    return {name: limits.arch.num_layers * us + heads.get(name, 0.0) for name, us in times.items()}


def _products(kernel: Kernel, inputs: list[dict[str, Any]]) -> list[Callable[[], None]]:
    """One function for each copy of the weights; it makes all products.  With few rows the copies outgrow a cache."""
    weight_bytes = sum(each["b"].nbytes for each in inputs)
    copies = max(1, min(8, COLD_BYTES // weight_bytes)) if len(inputs[0]["a"]) <= 16 else 1

    def prepared() -> list[dict[str, Any]]:
        beside = ({"scale": each["scale"]} if "scale" in each else {} for each in inputs)
        weights = (each["b"].mT.clone().mT for each in inputs)
        return [
            {**each, "b": packed(kernel.prepare, weight, **more)}
            for each, weight, more in zip(inputs, weights, beside, strict=True)
        ]

    def run(arguments: list[dict[str, Any]]) -> None:
        for each in arguments:
            kernel.fn(**each)

    return [partial(run, prepared()) for _ in range(copies)]


def _rows_in(bucket: str, phase: Phase, upper: float, limits: Limits) -> tuple[int, ...]:
    """The least and the largest number of rows of a step in this bucket; empty if no step can be in it."""
    most = int(min(upper, limits.max_rows[phase]))
    least = next((rows for rows in range(1, most + 1) if bucket_of(phase, rows) == bucket), None)
    return () if least is None else (least, most)


def _able(
    op: str, bucket: str, phase: Phase, rows: tuple[int, ...], limits: Limits, swap: str | None, interpret: bool
) -> list[Choice]:
    """The kernels that can serve a bucket, in the order in which they are preferred."""
    reasons: list[str] = []
    if swap:
        kernel = registry.get_kernel(op, swap)
        reason = _why_not(kernel, phase, rows, limits, interpret)
        if reason is None:
            return [Choice(op, bucket, kernel, "asked for")]
        reasons.append(f"{kernel.id}: {reason}")
    found = []
    # A kernel may serve decoding rows and not chunks of prompts: one that is asked for need not serve both.
    if not swap or (op, phase) == ("paged_attention", "prefill"):
        for kernel, why in candidates(op, bucket, limits.device):
            reason = _why_not(kernel, phase, rows, limits, interpret)
            if reason is None:
                found.append(Choice(op, bucket, kernel, "; ".join([why, *reasons])))
            else:
                reasons.append(f"{kernel.id}: {reason}")
    if not found:
        raise ValueError(f"swap: no kernel for {op} in {bucket}: {'; '.join(reasons)}")
    return [choice for choice in found if choice.kernel.role != "naive"] or found


def candidates(op: str, bucket: str, device: torch.device) -> list[tuple[Kernel, str]]:
    """Kernels in the order in which they are tried, each with the reason for it."""
    kernels = list(registry.kernels(op).values())
    if device.type == "cpu":
        roles = ("optimized", "library", "naive")
        kernels = [kernel for kernel in kernels if kernel.backend in registry.CPU_BACKENDS and kernel.role in roles]
        kernels.sort(key=lambda kernel: (kernel.backend != "cpp", roles.index(kernel.role)))
        return [(kernel, "the only one that can run") for kernel in kernels]
    key = torch.cuda.get_device_name(device)
    name = chosen(op, key, bucket)
    first = [(kernel, "by record") for kernel in kernels if kernel.name == name]
    rest = [kernel for kernel in kernels if kernel.backend == "torch" and kernel.role in ("library", "naive")]
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
    if op in PRODUCTS:
        return _product_probes(M, limits)
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

    per_row = {"dtype": torch.float32}
    arguments: dict[str, dict[str, Any]] = {
        "embedding": {"token_ids": ids, "weight": empty(arch.vocab_size, H)},
        "rmsnorm": {"x": empty(M, H), "weight": empty(H), "eps": arch.rms_norm_eps},
        "fused_add_rmsnorm": {"x": empty(M, H), "residual": empty(M, H), "weight": empty(H), "eps": arch.rms_norm_eps},
        "rope_and_cache": {
            **{"q": q, "k": k, "v": k, "q_out": q, "k_cache": cache, "v_cache": cache},
            **{"cos": table, "sin": table, "positions": ids, "slot_mapping": ids},
        },
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


def _product_probes(M: int, limits: Limits) -> list[dict[str, Any]]:
    """The arguments of a layer's four products, and of the head's."""
    arch = limits.arch
    H, D, intermediate = arch.hidden_size, arch.head_dim, arch.intermediate_size
    sequences = min(M, limits.max_rows["decode"])
    qkv = (arch.num_heads + 2 * arch.num_kv_heads) * D
    shapes = ((M, qkv, H), (M, H, arch.num_heads * D), (M, 2 * intermediate, H), (M, H, intermediate))

    def empty(*shape: int, dtype: torch.dtype = limits.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    stored = torch.int8 if limits.int8 else limits.dtype
    inputs: list[dict[str, Any]] = [
        {"a": empty(rows, K), "b": empty(N, K, dtype=stored).mT, "bias": None}
        | ({"scale": empty(N)} if limits.int8 else {})
        for rows, N, K in (*shapes, (sequences, arch.vocab_size, H))
    ]
    inputs[0]["bias"] = empty(qkv) if arch.attention_bias else None
    return inputs


def _product(
    gemm: Callable[..., torch.Tensor],
    form: int,
    a: torch.Tensor,
    b: Sequence[tuple[Any, ...]],
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """`gemm` with that form of the weight, and what is beside it, which its bucket takes."""
    return gemm(a, *b[form], bias)


def packed(way: Callable[..., Any] | None, b: torch.Tensor, **beside: torch.Tensor) -> Any:
    """`b` as a kernel's `prepare` packs it, which may take tensors `beside` it; None is as it is."""
    if way is None:
        return b
    return way(b, *(beside[name] for name in list(inspect.signature(way).parameters)[1:]))
