"""Which pages of the KV cache belong to whom."""

from __future__ import annotations

from rooflab.engine.sequence import Sequence


class BlockManager:
    """Hands out the pages of a paged KV cache (Kwon et al., "PagedAttention", SOSP 2023).

    Every page is either free or in exactly one sequence's `block_ids`.
    """

    def __init__(self, num_blocks: int, block_size: int):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Pages that belong to nobody."""
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Pages that `num_tokens` tokens fill."""
        return -(-num_tokens // self.block_size)

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Gives `sequence` the pages it misses to hold `num_tokens`; False, with nothing given, if too few are free."""
        missing = -(-num_tokens // self.block_size) - len(sequence.block_ids)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            sequence.block_ids.append(self._free.pop())
        return True

    def release(self, sequence: Sequence) -> None:
        """Takes back all pages of `sequence`."""
        self._free.extend(reversed(sequence.block_ids))
        sequence.block_ids = []
