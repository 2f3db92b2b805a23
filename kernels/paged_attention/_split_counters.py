"""The counters of `split_kv`: a launch takes zeros and leaves zeros, so nothing sets them before the next launch.

Launches that may run at once must not share counters.  Outside of a CUDA graph each stream has its own, because its
launches run one after another.  A graph may be replayed on any stream, so a captured launch has counters that belong to
the address of its parts: torch's memory pools never give one address to two launches that run at once, or each would
overwrite the parts of the other, too.

Zeros set in a capture would be set at each replay, for the price of a launch.  So captured launches take theirs from a
block that the first launch outside of a capture makes, and waits for.  Only without such a block, or when it is used
up, is each captured launch preceded by zeroing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

BLOCK = 2**18
"""Counters of a GPU for captured launches, 1 MiB: with 8 warps on each of 132 SMs for 248 addresses.  Layers of a graph
take turns at a few addresses, and so do graphs of one pool."""


@dataclass
class Block:
    """Zeros of which each address of parts gets its own."""

    zeros: torch.Tensor
    used: int = 0
    given: dict[int, torch.Tensor] = field(default_factory=dict)

    def of(self, address: int, count: int) -> torch.Tensor | None:
        """The counters of `address`, at least `count`; None if too few are left."""
        found = self.given.get(address)
        if found is None or found.numel() < count:
            if self.used + count > self.zeros.numel():
                return None
            found = self.given[address] = self.zeros[self.used : self.used + count]
            self.used += count
        return found


_of_streams: dict[tuple[int, int], torch.Tensor] = {}
_blocks: dict[int, Block] = {}


def counters(count: int, parts: torch.Tensor) -> torch.Tensor:
    """At least `count` int32 zeros for the next launch on the current stream of `parts`' device.

    New ones on a CPU, where an emulated launch may be broken off.
    """
    device = parts.device
    if device.type != "cuda":
        return _zeros(count, device)
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream()
        if torch.cuda.is_current_stream_capturing():
            block = _blocks.get(device.index)
            found = block.of(parts.data_ptr(), count) if block else None
            return _zeros(count, device) if found is None else found
        if device.index not in _blocks:
            block = Block(_zeros(BLOCK, device))
            stream.synchronize()  # graphs on other streams use it
            _blocks[device.index] = block
        key = device.index, stream.cuda_stream
        found = _of_streams.get(key)
        if found is None or found.numel() < count:
            found = _of_streams[key] = _zeros(count, device)
        return found


def _zeros(count: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int32, device=device)
