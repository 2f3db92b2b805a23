"""Manages the pages of the KV cache: which sequence holds a page, and which pages another sequence can use again."""

from __future__ import annotations

from collections import OrderedDict

from rooflab.engine.sequence import Sequence

Key = tuple[int, tuple[int, ...]]
"""The key of a full page: the number of the content before the page, and all tokens of the page."""


class BlockManager:
    """Allocates the pages of a paged KV cache (Kwon et al., "PagedAttention", SOSP 2023), with prefix caching.

    A page is free, held by sequences, or cached.  A cached page has no holder, but its content may be used again.  If
    no page is free, the least recently used cached page is given away.

    Each full page has a key: its tokens, and a number that stands for all tokens before the page.  So one lookup per
    page finds the longest reusable prefix.  Whole keys are compared, not hashes, so two prefixes are never confused."""

    def __init__(self, num_blocks: int, block_size: int, prefix_caching: bool = True):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.released = 0
        """The number of releases.  A sequence that did not fit cannot fit before the next release."""
        self.evicted = 0
        """The number of cached pages that were given away with their content."""
        self.num_shared = 0
        """The number of pages that more than one sequence holds."""
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._holders = [0] * num_blocks
        self._published: dict[Key, tuple[int, int]] = {}
        """For each key, the number of the published content and the page that holds the content."""
        self._key_of: dict[int, Key] = {}
        self._contents = 0

    @property
    def num_free(self) -> int:
        """Returns the number of pages that no sequence holds."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Returns the number of cached pages: no sequence holds them, and their content may be used again."""
        return len(self._cached)

    def blocks_for(self, num_tokens: int) -> int:
        """Returns the number of pages that `num_tokens` tokens need."""
        return -(-num_tokens // self.block_size)

    def reuse(self, sequence: Sequence) -> None:
        """Gives `sequence`, which has no pages, the reusable pages before its last token, which a step must compute."""
        if not self.prefix_caching:
            return
        page_size, content_id = self.block_size, 0
        for start in range(0, (len(sequence) - 1) // page_size * page_size, page_size):
            cached_page = self._published.get((content_id, tuple(sequence.token_ids[start : start + page_size])))
            if cached_page is None:
                break
            content_id, block = cached_page
            self._cached.pop(block, None)
            self._holders[block] += 1
            self.num_shared += self._holders[block] == 2
            sequence.block_ids.append(block)
            sequence.contents.append(content_id)
        sequence.num_computed = len(sequence.block_ids) * page_size

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Gives `sequence` enough pages for `num_tokens` tokens.  If too few are free, gives none and returns False."""
        missing_pages = -(-num_tokens // self.block_size) - len(sequence.block_ids)
        if missing_pages > self.num_free:
            return False
        for _ in range(missing_pages):
            if self._free:
                new_block = self._free.pop()
            else:
                new_block, _ = self._cached.popitem(last=False)
                del self._published[self._key_of.pop(new_block)]
                self.evicted += 1
            self._holders[new_block] = 1
            sequence.block_ids.append(new_block)
        return True

    def publish(self, sequence: Sequence, num_computed: int) -> None:
        """Lets other sequences use the full pages among the first `num_computed` tokens.  The keys and values of these
        tokens are written already.  If two pages have the same content, only the first page stays published."""
        if not self.prefix_caching:
            return
        page_size, content_ids = self.block_size, sequence.contents
        for page_index in range(len(content_ids), num_computed // page_size):
            tokens = tuple(sequence.token_ids[page_index * page_size : (page_index + 1) * page_size])
            page_key = (content_ids[-1] if content_ids else 0, tokens)
            page_entry = self._published.get(page_key)
            if page_entry is None:
                self._contents += 1
                page_entry = self._published[page_key] = (self._contents, sequence.block_ids[page_index])
                self._key_of[page_entry[1]] = page_key
            content_ids.append(page_entry[0])

    def trim(self, sequence: Sequence, num_tokens: int) -> None:
        """Frees the pages of `sequence` after its first `num_tokens` tokens. A draft took these pages, so no other
        sequence uses them. They make no new room for waiting sequences, so the counter `released` stays the same."""
        first_index = self.blocks_for(num_tokens)
        for block in reversed(sequence.block_ids[first_index:]):
            self._holders[block] = 0
            self._free.append(block)
        del sequence.block_ids[first_index:]

    def release(self, sequence: Sequence) -> None:
        """Takes all pages from `sequence`.  A page that no other sequence holds becomes cached or free."""
        for block in reversed(sequence.block_ids):
            self._holders[block] -= 1
            self.num_shared -= self._holders[block] == 1
            if self._holders[block]:
                continue
            if block in self._key_of:
                self._cached[block] = None
            else:
                self._free.append(block)
        sequence.block_ids, sequence.contents, sequence.num_computed = [], [], 0
        self.released += 1
