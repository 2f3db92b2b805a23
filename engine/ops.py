"""Chooses a kernel for each op and each bucket (range of row counts), once at load.

The engine calls kernels only through this file.  On a CPU it chooses the fastest kernel by timing.  On CUDA it tries
the stored record for this GPU, then the list `FIRST_ON_CUDA`, then torch's kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from rooflab.engine.choose.choose_kernels import Choice, choose_kernels
from rooflab.engine.choose.model_shapes import (
    DECODE_OP,
    FUSED_OP,
    MATMUL_OPS,
    LargestSizes,
    model_inputs,
    packed,
    registered,
)
from rooflab.engine.load.coded import CodedWeight, Weight
from rooflab.kernels import registry
from rooflab.kernels.registry import Kernel
from rooflab.kernels.tuning import BUCKET_ROWS, bucket_of, recorded_choice

FIRST_ON_CUDA = {
    "paged_attention": ("split_kv", "chunked"),
    "rope_and_cache": ("fused",),
    "sample": ("cluster", "bisect"),
}
"""Kernels that come before torch's on CUDA, if no record says which kernel is best.  Torch's kernels of these ops
gather pages, wait for the device, or sort the vocabulary."""
RefusalFn = Callable[[Kernel], str | None]
"""A function that says why a kernel cannot serve a bucket.  It returns None if the kernel can."""


class OpSet:
    """Holds the kernel of each op in each bucket (range of row counts).  `step` returns the kernels of one step.

    The number of rows of a step selects the bucket.  For `decode_attention` (see `DECODE_OP`) decoding rows count."""

    def __init__(self, choices: Iterable[Choice]):
        self.choices = list(choices)
        kernel_table: dict[str, dict[str, Callable[..., Any]]] = {}
        products: dict[tuple[str, str], list[tuple[Callable[..., torch.Tensor], int]]] = {}
        for choice in self.choices:
            kernel_table.setdefault(choice.bucket, {})[choice.op] = choice.kernel.fn
        self._ways: list[tuple[str, Callable[..., Any] | None]] = []
        """The op and the packing function of each layout that a chosen kernel needs."""
        for choice in self.choices:
            if choice.op in (*MATMUL_OPS, FUSED_OP):
                way = "gemm_gguf" if choice.op == "gemm_gguf" else "gemm", choice.kernel.prepare
                self._ways += [] if way in self._ways else [way]
                name = FUSED_OP if choice.op == FUSED_OP else "gemm"
                product = choice.kernel.fn, self._ways.index(way)
                products.setdefault((choice.bucket, name), []).append(product)
        for (bucket, name), by_layout in products.items():
            kernel_table[bucket][name] = partial(_product, by_layout)
        self._steps = {bucket: SimpleNamespace(**op_functions) for bucket, op_functions in kernel_table.items()}
        self._by_rows: dict[tuple[int, int], SimpleNamespace] = {}

    def step(self, num_decodes: int, num_prompt_tokens: int = 0, num_drafted: int = 0) -> SimpleNamespace:
        """Returns the kernels for a step with the given row counts, as a namespace with one function for each op."""
        rows_key = num_decodes + num_drafted + num_prompt_tokens, num_decodes
        if rows_key not in self._by_rows:
            step_ops, decode_ops = (self._steps[bucket_of(max(num_rows, 1))] for num_rows in rows_key)
            self._by_rows[rows_key] = SimpleNamespace(**{**vars(step_ops), DECODE_OP: decode_ops.decode_attention})
        return self._by_rows[rows_key]

    def prepare(self, weight: Weight) -> tuple[tuple[Any, ...] | None, ...]:
        """Packs `weight` `[out, in]` in each layout that a chosen matmul kernel needs.  Returns the weight arguments of
        each layout, or None for a layout of the other kind of weight (floats or codes)."""
        op, b, beside = "gemm", weight.mT if isinstance(weight, torch.Tensor) else weight.codes, {}
        if isinstance(weight, CodedWeight):
            op, beside = "gemm_gguf", {"scale": weight.scale, "minimum": weight.minimum}

        def layout(pack_function: Callable[..., Any] | None) -> tuple[Any, ...]:
            if pack_function is None:
                return b, *beside.values()
            # A packed weight holds its scales.  The kernel gets their shapes only, without memory for a second copy.
            shapes = (None if x is None else x[:1, :1].clone().expand(x.shape) for x in beside.values())
            return packed(pack_function, b, **beside), *shapes

        return tuple(layout(pack_function) if way_op == op else None for way_op, pack_function in self._ways)

    def matmul_op(self, weight: Sequence[tuple[Any, ...] | None]) -> str:
        """Returns the op that multiplies by a weight from `prepare`."""
        return next(op for (op, _), layout in zip(self._ways, weight, strict=True) if layout is not None)

    def describe(self) -> list[dict[str, str]]:
        """Returns the rows of a table that every run prints: op, kernel, buckets and reason for the choice."""
        table_rows: dict[tuple[str, str, str], list[str]] = {}
        for choice in self.choices:
            table_rows.setdefault((choice.op, choice.kernel.name, choice.why), []).append(choice.bucket)
        return [
            {"op": op, "kernel": kernel, "buckets": " ".join(buckets), "why": choice_reason}
            for (op, kernel, choice_reason), buckets in table_rows.items()
        ]


def resolve(
    limits: LargestSizes, swaps: Mapping[str, str] | None = None, interpret: bool = False, replays: bool = False
) -> OpSet:
    """Chooses a kernel for each op of a model and each bucket (range of row counts).

    `swaps` maps an op to the kernel that the op must use.  `interpret` allows Triton kernels on the CPU.  `replays`
    says that the engine can record a decode step on a CPU and replay it.  Recorded steps need C++ kernels.

    Raises `ValueError`, with reasons, if an op has no usable kernel, or if a kernel in `swaps` is unusable."""
    swaps = dict(swaps or {})
    for op, name in swaps.items():
        if op not in (engine_ops := [op for op in (*limits.ops, *limits.fused) if op != DECODE_OP]):
            raise ValueError(f"swap: the engine uses {', '.join(engine_ops)}, got {op!r}")
        registry.get_kernel(op, name)
    usable_choices: dict[tuple[str, str], list[Choice]] = {}
    timed_rows: dict[tuple[str, str], int] = {}
    for lower_rows, upper_rows in zip((0, *BUCKET_ROWS), BUCKET_ROWS, strict=False):
        bucket = bucket_of(upper_rows)
        for op in (*limits.ops, *limits.fused):
            rows = (int(lower_rows) + 1, int(min(upper_rows, limits.sequences if op == DECODE_OP else limits.max_rows)))
            if rows[0] > rows[1]:
                continue
            timed_rows[op, bucket] = rows[-1] if upper_rows < math.inf else rows[0]
            refusal_fn = partial(_why_not, op=op, rows=rows, limits=limits, interpret=interpret)
            swap_name = swaps.get(registered(op))
            if op in limits.ops:
                usable_choices[op, bucket] = _able(op, bucket, limits.device, swap_name, refusal_fn)
            elif preferred_choice := _preferred(op, bucket, limits.device, swap_name, refusal_fn):
                usable_choices[op, bucket] = [preferred_choice]
    if limits.device.type == "cpu":
        usable_choices = choose_kernels(usable_choices, timed_rows, limits, replays)
    return OpSet([op_choices[0] for op_choices in usable_choices.values()])


def _able(op: str, bucket: str, device: torch.device, swap: str | None, why_not: RefusalFn) -> list[Choice]:
    """Returns the kernels that can run `op` in a bucket of rows, the preferred one first.  Raises
    `ValueError` if none can."""
    refused_kernels: list[str] = []
    if swap:
        kernel = registry.get_kernel(registered(op), swap)
        refusal = why_not(kernel)
        if refusal is None:
            return [Choice(op, bucket, kernel, "asked for")]
        refused_kernels.append(f"{kernel.id}: {refusal}")
    op_choices = []
    # A kernel may serve decoding rows and not chunks of prompts: one that is asked for need not serve both.
    if not swap or op == "paged_attention":
        for kernel, choice_reason in candidates(op, bucket, device):
            refusal = why_not(kernel)
            if refusal is None:
                op_choices.append(Choice(op, bucket, kernel, "; ".join([choice_reason, *refused_kernels])))
            else:
                refused_kernels.append(f"{kernel.id}: {refusal}")
    if not op_choices:
        raise ValueError(f"swap: no kernel for {op} in {bucket}: {'; '.join(refused_kernels)}")
    return [choice for choice in op_choices if choice.kernel.role != "naive"] or op_choices


def _preferred(op: str, bucket: str, device: torch.device, swap: str | None, why_not: RefusalFn) -> Choice | None:
    """Returns the kernel for an optional fused op, or None. The user can name this kernel in `swap`. Otherwise, takes
    the kernel that `choices.json` names for the GPU. That kernel must be an optimized kernel that can run."""
    if swap:
        return _able(op, bucket, device, swap, why_not)[0]
    choice_record = recorded_choice(op, torch.cuda.get_device_name(device), bucket) if device.type == "cuda" else {}
    if choice_record:
        kernel = registry.get_kernel(op, choice_record["kernel"])
        if kernel.role == "optimized" and why_not(kernel) is None:
            return Choice(op, bucket, kernel, "by record")
    return None


def candidates(op: str, bucket: str, device: torch.device) -> list[tuple[Kernel, str]]:
    """Returns the kernels of `op` in the order in which to try them, each with the reason for its choice."""
    kernels = list(registry.kernels(registered(op)).values())
    if device.type == "cpu":
        roles = ("optimized", "library", "naive")
        kernels = [kernel for kernel in kernels if kernel.backend in registry.CPU_BACKENDS and kernel.role in roles]
        kernels.sort(key=lambda kernel: (kernel.backend != "cpp", roles.index(kernel.role)))
        return [(kernel, "the only one that can run") for kernel in kernels]
    gpu = torch.cuda.get_device_name(device)
    # No record has several queries of a sequence of `paged_attention`.
    name = None if op == "paged_attention" else recorded_choice(registered(op), gpu, bucket).get("kernel")
    matches = [(kernel, "by record") for kernel in kernels if kernel.name == name]
    fallbacks = [registry.get_kernel(registered(op), preferred) for preferred in FIRST_ON_CUDA.get(registered(op), ())]
    for kernel_role in ("library", "naive"):
        fallbacks += [kernel for kernel in kernels if kernel.backend == "torch" and kernel.role == kernel_role]
    return matches + [(kernel, f"no record for {gpu} that can run") for kernel in fallbacks if kernel.name != name]


def _why_not(kernel: Kernel, op: str, rows: tuple[int, ...], limits: LargestSizes, interpret: bool) -> str | None:
    if kernel.backend == "triton" and limits.device.type == "cpu" and not interpret:
        return "UNSUPPORTED: needs a CUDA device (--interpret runs it on the CPU, without times)"
    if reason := kernel.why_not_served(limits.device):
        return f"UNSUPPORTED: {reason}"
    kernel_refusal = kernel.why_not_here(limits.device)
    if kernel_refusal:
        return str(kernel_refusal)
    for M in rows:
        for inputs in model_inputs(op, M, limits):
            kernel_refusal = kernel.why_not_args(inputs)
            if kernel_refusal:
                return str(kernel_refusal)
    return None


def _product(
    products: Sequence[tuple[Callable[..., torch.Tensor], int]],
    a: torch.Tensor,
    b: Sequence[tuple[Any, ...] | None],
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes `a @ b + bias` with the first kernel in `products` whose layout the weight has.  `b` holds the weight in
    several layouts (None if it lacks one).  `products` holds kernels, each with the index of its layout in `b`."""
    for kernel, layout_index in products:
        if (layout := b[layout_index]) is not None:
            return kernel(a, *layout, bias)
    raise AssertionError("a weight has a layout of each op that multiplies by it")
