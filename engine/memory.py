"""Computes the number of KV cache pages that fit into the free memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import suppress

import psutil
import torch

from rooflab.engine.choose.model_shapes import LargestSizes
from rooflab.reference.spec import DTYPE_NAMES
from rooflab.roofline.architecture import Architecture
from rooflab.roofline.llm import kv_bytes_per_token

# The cache's share of the memory that is free after loading the weights. Activations and other programs need the rest.
CPU_FRACTION = 0.25
CUDA_FRACTION = 0.9

CODE_BYTES = {"int4": 0.625, "int8": 1.0625, "keep": 0.5625}
"""Bytes of a weight with its share of scales and minimums.  With `keep`, of the smallest format (Q4_0)."""


def free_bytes(device: torch.device) -> int:
    """Returns the free memory of the device in bytes."""
    if device.type == "cpu":
        return int(psutil.virtual_memory().available)
    torch.cuda.empty_cache()  # what torch keeps for itself does not count as free
    return int(torch.cuda.mem_get_info(device)[0])


def trim() -> None:
    """Gives freed memory back to the operating system.  glibc keeps it: 150 MB after kernels were timed."""
    with suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def check_weights_fit(limits: LargestSizes, beside: Architecture | None = None) -> None:
    """Raises `ValueError` if the weights do not fit into the free memory.  With a second model `beside`, counts the
    weights of both models.  Without this check the operating system would kill the process."""
    item_bytes = CODE_BYTES.get(limits.codes, limits.dtype.itemsize)
    size = sum(arch.parameters().total for arch in (limits.arch, beside) if arch) * item_bytes
    if limits.codes:  # and the embedding table
        size += limits.arch.vocab_size * limits.arch.hidden_size * limits.dtype.itemsize
    free_size = free_bytes(limits.device)
    if size > free_size:
        raise ValueError(
            f"model: the weights of {limits.arch.name} take {size / 1e9:.1f} GB, and {free_size / 1e9:.1f} GB are free"
        )


def kv_cache_blocks(
    limits: LargestSizes,
    rehearsals: Sequence[Callable[[], object]] = (),
    wanted: int | None = None,
    beside: Architecture | None = None,
) -> int:
    """Returns the number of KV cache pages to allocate: `wanted`, or by default the number that fits.

    The default is at most the need of the largest batch.  On CUDA, first runs `rehearsals`, the largest steps, to
    measure their memory.  Raises `ValueError` if the pages, or one sequence of `max_model_len` tokens, do not fit."""
    max_pages = -(-limits.max_model_len // limits.block_size)
    model_archs = (limits.arch, beside) if beside else (limits.arch,)  # pages of both have the same numbers
    block_bytes = limits.block_size * sum(kv_bytes_per_token(arch, DTYPE_NAMES[limits.dtype]) for arch in model_archs)
    if wanted is not None:
        if wanted * block_bytes > free_bytes(limits.device):
            raise ValueError(f"num_kv_blocks: {wanted} take {wanted * block_bytes / 1e9:.2f} GB, more than is free")
        return wanted
    on_cpu = limits.device.type == "cpu"
    step_bytes = 0 if on_cpu else sum(peak_bytes(trial_step, limits.device) for trial_step in rehearsals)
    budget_bytes = (CPU_FRACTION if on_cpu else CUDA_FRACTION) * free_bytes(limits.device) - step_bytes
    num_blocks = min(int(budget_bytes // block_bytes), limits.sequences * max_pages)
    if num_blocks < max_pages:
        raise ValueError(
            f"max_model_len: {limits.max_model_len} tokens need {max_pages * block_bytes / 1e9:.2f} GB of KV cache, "
            f"and {max(budget_bytes, 0) / 1e9:.2f} GB are free for it; ask for fewer"
        )
    return num_blocks


def peak_bytes(function: Callable[[], object], device: torch.device) -> int:
    """Runs `function` and returns the peak of its device memory in bytes, without the memory in use before the call."""
    torch.cuda.reset_peak_memory_stats(device)
    bytes_before = torch.cuda.memory_allocated(device)
    function()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - bytes_before
