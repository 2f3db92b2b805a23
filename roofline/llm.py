"""Computes whether a model fits on a GPU, how many sequences fit beside its weights, and the least TTFT and ITL.

TTFT is the time to first token, ITL the inter-token latency. All results are bounds from published figures.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from rooflab.roofline.architecture import Architecture
from rooflab.roofline.device import Device
from rooflab.roofline.numbers import three_digits
from rooflab.roofline.step_times import StepTime, step_time
from rooflab.roofline.steps import (
    ITEM_BYTES,
    Link,
    StepBound,
    StepKind,
    activation_dtype,
    all_reduce_s,
    check_arguments,
    gpu_counts,
    link,
    step_bound,
    step_ops,
)

PREFILL_CHUNK_TOKENS = 8192
"""The most tokens of a prompt that the memory for activations holds.  A longer prompt is prefilled in chunks."""


def weight_bytes(arch: Architecture, dtype: str = "bf16", gpus: int = 1) -> int:
    """Returns the bytes of the parameters on each of `gpus` GPUs. Each GPU holds all norms and a share of the rest.

    In an 8-bit model only the projections have 8 bits."""
    sizes, item_bytes, activation_item_bytes = arch.parameters(), ITEM_BYTES[dtype], ITEM_BYTES[activation_dtype(dtype)]
    attention_size = sizes.attention
    if gpus > arch.num_kv_heads:  # each GPU holds a whole key and value head
        copied_heads = gpus - arch.num_kv_heads
        attention_size += copied_heads * arch.num_layers * 2 * arch.head_dim * (arch.hidden_size + arch.attention_bias)
    split_bytes = (attention_size + sizes.mlp) * item_bytes + (sizes.embedding + sizes.lm_head) * activation_item_bytes
    return ceil(split_bytes / gpus) + sizes.norms * activation_item_bytes


def kv_bytes_per_token(arch: Architecture, dtype: str = "bf16", gpus: int = 1) -> int:
    """Returns the bytes of one token's keys and values in all layers, on each of `gpus` GPUs."""
    return 2 * arch.num_layers * max(1, arch.num_kv_heads // gpus) * arch.head_dim * ITEM_BYTES[dtype]


def activation_bytes(arch: Architecture, tokens: int, sequences: int, dtype: str = "bf16", gpus: int = 1) -> int:
    """Returns the bytes that activations need on each of `gpus` GPUs.

    One layer needs the residual and the normed input of `tokens` tokens, and the larger of two sets: (q, k, v,
    attention output) or (gate, up, gate * up). The fp32 logits of `sequences` rows are added."""
    q_width, kv_width = arch.num_heads // gpus * arch.head_dim, max(1, arch.num_kv_heads // gpus) * arch.head_dim
    values_per_token = 2 * arch.hidden_size + max(2 * q_width + 2 * kv_width, 3 * ceil(arch.intermediate_size / gpus))
    return (
        tokens * values_per_token * ITEM_BYTES[activation_dtype(dtype)] + sequences * ceil(arch.vocab_size / gpus) * 4
    )


@dataclass(frozen=True)
class Estimate:
    """The memory and least times of `batch` sequences of `context` tokens. `dataclasses.asdict` gives the JSON form."""

    model: str
    gpu: str
    gpu_name: str
    weight_dtype: str
    kv_dtype: str
    batch: int
    context: int
    prompt: int
    """The number of tokens of the prompt in `prefill`."""
    parameters: int
    weight_bytes: int
    """Bytes of the weights of the whole model."""
    kv_bytes_per_token: int
    kv_bytes: int
    """Bytes of the KV cache of the whole batch at this context."""
    memory_fraction: float
    usable_bytes_per_gpu: float
    gpus_for_weights: int | None
    """The least number of GPUs that hold weights and one sequence's activations; None if a node is too small."""
    gpus_needed: int | None
    """The least number of GPUs of a node that also hold the cache of the whole batch; None if a node is too small."""
    tensor_parallel: int
    """The number of GPUs for all fields below: the caller's number, else `gpus_needed`, else all GPUs of a node."""
    weight_bytes_per_gpu: int
    kv_bytes_per_gpu: int
    activation_bytes_per_gpu: int
    fits: bool
    max_sequences: int
    """The number of sequences of this context that fit; 0 if not even one sequence fits."""
    link: str | None
    link_bytes_per_s: float | None
    """Bytes per second of the link between the GPUs, in one direction."""
    prefill: StepBound
    """The bound of the prefill of one prompt alone.  The bound's `least_ms` is the least TTFT."""
    decode: StepBound
    """The bound of one decode step of the whole batch.  The bound's `least_ms` is the least ITL."""
    least_ttft_ms: float
    least_itl_ms: float
    most_tokens_per_s: float
    """The most tokens per second: `batch` divided by the least ITL."""
    published_prefill: StepTime | None
    """The time of the same prefill from published kernel times; None if nobody published times for this GPU."""
    published_decode: StepTime | None
    """The time of the same decode step from published kernel times."""

    def rows(self) -> list[tuple[str, str]]:
        """Returns the label and the value of each line of the printed table; GB = 1e9 bytes."""
        gpu_count = self.tensor_parallel
        per_gpu_text = f", {_gb(self.weight_bytes_per_gpu)} on each of {gpu_count}" if gpu_count > 1 else ""
        used_bytes = self.weight_bytes_per_gpu + self.kv_bytes_per_gpu + self.activation_bytes_per_gpu
        table_rows = [
            ("model", f"{self.model}, {self.parameters / 1e9:.3g} billion parameters in {self.weight_dtype}"),
            ("GPU", f"{gpu_count} x {self.gpu_name} ({self.gpu}), data sheet figures"),
            ("weights", _gb(self.weight_bytes) + per_gpu_text),
            ("KV cache per token", f"{self.kv_bytes_per_token / 1e3:.1f} kB in {self.kv_dtype}"),
            (f"KV cache, {self.batch} x {self.context} tokens", _gb(self.kv_bytes)),
            ("activations allowed", f"{_gb(self.activation_bytes_per_gpu)} a GPU"),
            (
                "fits",
                f"{'yes' if self.fits else 'no'}: {_gb(used_bytes)} of {_gb(self.usable_bytes_per_gpu)} usable a GPU "
                f"({self.memory_fraction:.0%} of its memory)",
            ),
            (f"sequences of {self.context} tokens that fit", str(self.max_sequences)),
            ("GPUs needed for the weights", _count(self.gpus_for_weights)),
            ("GPUs needed for this batch", _count(self.gpus_needed)),
        ]
        if self.link is not None and self.link_bytes_per_s is not None:
            link_text = f"{self.link}, {self.link_bytes_per_s / 1e9:.0f} GB/s one way, two all-reduces a layer"
            reduce_text = f"{_ms(self.prefill.all_reduce_ms)} a prefill, {_ms(self.decode.all_reduce_ms)} a decode step"
            table_rows.append(("all-reduce", f"{reduce_text} ({link_text})"))
        table_rows += [
            (f"least TTFT, {self.prompt} tokens", f"{_ms(self.least_ttft_ms)}, mostly {self.prefill.limiter}"),
            (f"least ITL, batch {self.batch}", f"{_ms(self.least_itl_ms)}, mostly {self.decode.limiter}"),
            ("most output tokens/s", f"{self.most_tokens_per_s:,.0f}"),
            ("how these are made", "each op alone at its roof, one launch each, one after another; not measured"),
        ]
        for name, step in (
            (f"TTFT of published kernels, {self.prompt} tokens", self.published_prefill),
            (f"ITL of published kernels, batch {self.batch}", self.published_decode),
        ):
            if step is not None:
                table_rows.append((name, f"{_ms(step.ms)}, {step.published_share:.0%} of it published: {_parts(step)}"))
        return table_rows + self._published_sources()

    def _published_sources(self) -> list[tuple[str, str]]:
        """Returns rows of a table: the sources of the published kernel times, the ops without a published time, and the
        method."""
        ops = [op for step in (self.published_prefill, self.published_decode) if step is not None for op in step.ops]
        if not ops:
            return []
        source_names = dict.fromkeys(f"{op.source.split(', as ')[0]}" for op in ops if op.basis != "bound" and op.ms)
        uncovered_ops = dict.fromkeys(f"{op.site}: {op.source}" for op in ops if op.basis == "bound" and op.source)
        source_rows = [("whose kernels", "; ".join(source_names) or "none")]
        if uncovered_ops:
            source_rows.append(("outside of the tables", "; ".join(uncovered_ops)))
        return [
            *source_rows,
            ("how these are made", "published times of each op on its own, interpolated; the rest at its roof"),
        ]


class _Need(NamedTuple):
    """Computes the bytes that each GPU needs for a model and `batch` sequences of `context` tokens."""

    arch: Architecture
    weight_dtype: str
    kv_dtype: str
    batch: int
    context: int
    tokens: int
    """The number of tokens of a step; the memory for activations is for this number."""

    def without_cache(self, gpus: int, batch: int | None = None) -> int:
        batch = self.batch if batch is None else batch
        needed_activation_bytes = activation_bytes(self.arch, max(batch, self.tokens), batch, self.weight_dtype, gpus)
        return weight_bytes(self.arch, self.weight_dtype, gpus) + needed_activation_bytes

    def cache(self, gpus: int) -> int:
        return self.batch * self.context * kv_bytes_per_token(self.arch, self.kv_dtype, gpus)

    def whole(self, gpus: int) -> int:
        return self.without_cache(gpus) + self.cache(gpus)

    def most_sequences(self, gpus: int, usable: float) -> int:
        batch_cache_bytes = self.cache(gpus)
        return bisect_right(
            range(1, 1 << 40), usable, key=lambda n: self.without_cache(gpus, n) + n * batch_cache_bytes // self.batch
        )


def estimate(
    architecture: Architecture,
    device: Device,
    batch: int,
    context: int,
    weight_dtype: str = "bf16",
    kv_dtype: str = "bf16",
    prompt: int | None = None,
    tensor_parallel: int | None = None,
    memory_fraction: float = 0.9,
) -> Estimate:
    """Returns the memory and the least TTFT and ITL of `batch` sequences of `context` tokens on one node of `device`.

    TTFT (time to first token) is the prefill time of one sequence of `prompt` tokens (default: `context`). ITL
    (inter-token latency) is the time of a decode step at `context`. The default of `tensor_parallel` is the smallest
    number of GPUs with enough memory. Raises `ValueError` on a length, number of GPUs or dtype that is not possible."""
    prompt = context if prompt is None else prompt
    requested_gpus = 1 if tensor_parallel is None else tensor_parallel
    check_arguments(architecture, weight_dtype, kv_dtype, requested_gpus, batch=batch, context=context, prompt=prompt)
    if not 0 < memory_fraction <= 1:
        raise ValueError(f"memory_fraction: expected above 0 and at most 1, got {memory_fraction:g}")
    usable_bytes = device.hbm_bytes * memory_fraction
    need = _Need(architecture, weight_dtype, kv_dtype, batch, context, min(max(prompt, context), PREFILL_CHUNK_TOKENS))
    gpu_choices = gpu_counts(architecture)
    min_gpus = next((n for n in gpu_choices if need.whole(n) <= usable_bytes), None)
    gpus = tensor_parallel or min_gpus or gpu_choices[-1]
    gpu_link, dtype_pair = link(device, gpus), (weight_dtype, kv_dtype)

    def least(kind: StepKind, batch: int, context: int, rows: int) -> StepBound:
        reduce_s = _all_reduce_total_s(architecture, rows, weight_dtype, gpus, gpu_link)
        return step_bound(step_ops(architecture, kind, batch, context, *dtype_pair, gpus), device.ceilings(), reduce_s)

    prefill, decode = least("prefill", 1, prompt, prompt), least("decode", batch, context, batch)
    return Estimate(
        model=architecture.name,
        gpu=device.name,
        gpu_name=device.full_name,
        weight_dtype=weight_dtype,
        kv_dtype=kv_dtype,
        batch=batch,
        context=context,
        prompt=prompt,
        parameters=architecture.parameters().total,
        weight_bytes=weight_bytes(architecture, weight_dtype),
        kv_bytes_per_token=kv_bytes_per_token(architecture, kv_dtype),
        kv_bytes=need.cache(1),
        memory_fraction=memory_fraction,
        usable_bytes_per_gpu=usable_bytes,
        gpus_for_weights=next((n for n in gpu_choices if need.without_cache(n, 1) <= usable_bytes), None),
        gpus_needed=min_gpus,
        tensor_parallel=gpus,
        weight_bytes_per_gpu=weight_bytes(architecture, weight_dtype, gpus),
        kv_bytes_per_gpu=need.cache(gpus),
        activation_bytes_per_gpu=need.without_cache(gpus) - weight_bytes(architecture, weight_dtype, gpus),
        fits=need.whole(gpus) <= usable_bytes,
        max_sequences=need.most_sequences(gpus, usable_bytes),
        link=gpu_link.name if gpus > 1 else None,
        link_bytes_per_s=gpu_link.bytes_per_s if gpus > 1 else None,
        prefill=prefill,
        decode=decode,
        least_ttft_ms=prefill.least_ms,
        least_itl_ms=decode.least_ms,
        most_tokens_per_s=batch / decode.least_ms * 1e3,
        published_prefill=step_time(architecture, device, "prefill", 1, prompt, *dtype_pair, gpus),
        published_decode=step_time(architecture, device, "decode", batch, context, *dtype_pair, gpus),
    )


def _all_reduce_total_s(arch: Architecture, rows: int, weight_dtype: str, gpus: int, link: Link) -> float:
    row_bytes = arch.hidden_size * ITEM_BYTES[activation_dtype(weight_dtype)]
    return 2 * arch.num_layers * all_reduce_s(rows * row_bytes, gpus, link)


def _parts(step: StepTime) -> str:
    """Formats the times of the parts of a step, such as `products 36 ms, attention 2.8 ms, the rest at least 3.6
    ms`."""
    part_times = step.parts_ms()
    rest_ms = part_times.pop("rest", 0.0)
    return ", ".join([*(f"{part} {_ms(ms)}" for part, ms in part_times.items()), f"the rest at least {_ms(rest_ms)}"])


def _gb(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count < 99.95e9 else f"{count / 1e9:.1f} GB"


def _ms(value: float) -> str:
    return f"{three_digits(value)} ms"


def _count(gpus: int | None) -> str:
    return "more than one node has" if gpus is None else str(gpus)
