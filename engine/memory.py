"""How many pages the KV cache has."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import psutil
import torch

from rooflab.engine.probes import LargestSizes
from rooflab.reference.spec import DTYPE_NAMES
from rooflab.roofline.llm import kv_bytes_per_token

# The cache's share of the memory that is free after loading the weights. Activations and other programs need the rest.
CPU_FRACTION = 0.25
CUDA_FRACTION = 0.9


def free_bytes(device: torch.device) -> int:
    """Free memory of the device, in bytes."""
    if device.type == "cpu":
        return int(psutil.virtual_memory().available)
    torch.cuda.empty_cache()  # what torch keeps for itself does not count as free
    return int(torch.cuda.mem_get_info(device)[0])


def check_weights_fit(limits: LargestSizes) -> None:
    """Raises `ValueError` if the weights are larger than the free memory, before the system kills the process."""
    needed = limits.arch.parameters().total * limits.dtype.itemsize
    free = free_bytes(limits.device)
    if needed > free:
        raise ValueError(
            f"model: the weights of {limits.arch.name} take {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"
        )


def kv_cache_blocks(
    limits: LargestSizes, rehearsals: Sequence[Callable[[], object]] = (), wanted: int | None = None
) -> int:
    """`wanted` pages, or as many as fit the free memory and the largest batch of the longest sequences can use.

    On CUDA `rehearsals` run the largest steps, each of which keeps its memory, and as much is left free.  Raises
    `ValueError` if `wanted` pages do not fit, or not even one sequence of `max_model_len` tokens.
    """
    per_sequence = -(-limits.max_model_len // limits.block_size)
    block_bytes = limits.block_size * kv_bytes_per_token(limits.arch, DTYPE_NAMES[limits.dtype])
    if wanted is None:
        cpu = limits.device.type == "cpu"
        step_bytes = 0 if cpu else sum(peak_bytes(one, limits.device) for one in rehearsals)
        budget = (CPU_FRACTION if cpu else CUDA_FRACTION) * free_bytes(limits.device) - step_bytes
    else:
        if wanted * block_bytes > free_bytes(limits.device):
            raise ValueError(f"num_kv_blocks: {wanted} take {wanted * block_bytes / 1e9:.2f} GB, more than is free")
        return wanted
    blocks = min(int(budget // block_bytes), (limits.sequences or limits.max_rows["decode"]) * per_sequence)
    if blocks < per_sequence:
        raise ValueError(
            f"max_model_len: {limits.max_model_len} tokens need {per_sequence * block_bytes / 1e9:.2f} GB of KV cache, "
            f"and {max(budget, 0) / 1e9:.2f} GB are free for it; ask for fewer"
        )
    return blocks


def peak_bytes(function: Callable[[], object], device: torch.device) -> int:
    """The most bytes that `function` takes of the device's memory at a time, beyond what is taken when it begins."""
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    function()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
