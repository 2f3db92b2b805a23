"""Which sequence holds which pages of the KV cache."""

from __future__ import annotations

from rooflab.engine.sequence import Sequence


class BlockManager:
    """Allocates the pages of a paged KV cache (Kwon et al., "PagedAttention", SOSP 2023).

    Every page is either free or in exactly one sequence's `block_ids`.
    """

    def __init__(self, num_blocks: int, block_size: int):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """How many pages no sequence holds."""
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """How many pages hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Gives `sequence` enough pages for `num_tokens` tokens; if too few are free, gives none and returns False."""
        missing = -(-num_tokens // self.block_size) - len(sequence.block_ids)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            sequence.block_ids.append(self._free.pop())
        return True

    def release(self, sequence: Sequence) -> None:
        """Frees all pages of `sequence`."""
        self._free.extend(reversed(sequence.block_ids))
        sequence.block_ids = []
