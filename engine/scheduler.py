"""Decides which sequences run in the next step, and how many tokens of each prompt the step computes."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from typing import NamedTuple

from rooflab.engine.block_manager import BlockManager
from rooflab.engine.sequence import Sequence


class Chunk(NamedTuple):
    """Describes the part of a prompt that one step computes: the tokens in `[start, end)`."""

    sequence: Sequence
    start: int
    end: int

    @property
    def last(self) -> bool:
        """Returns whether this chunk ends the prompt.  If so, the step also draws the next token."""
        return self.end == len(self.sequence)


def pairs_of(start: int, end: int) -> int:
    """Counts the query-key pairs of the tokens in `[start, end)`.  A token attends to itself and all earlier tokens."""
    return (end * (end + 1) - start * (start + 1)) // 2


@dataclass(frozen=True, slots=True)
class Step:
    """Describes the work of one step: one token of every decoding sequence, and chunks of prompts."""

    num_decodes: int
    chunks: list[Chunk]
    preempted: list[Sequence] = field(default_factory=list)
    """Sequences that lost their pages in this step and wait again."""

    @property
    def num_prompt_tokens(self) -> int:
        """Returns the number of tokens in all chunks."""
        return sum(chunk.end - chunk.start for chunk in self.chunks)

    @property
    def ending(self) -> list[Sequence]:
        """Returns the sequences of the chunks that end a prompt.  The step draws their next tokens."""
        return [chunk.sequence for chunk in self.chunks if chunk.last]


@dataclass(eq=False)
class Scheduler:
    """Plans the engine's steps.  A step gets one token of every decoding sequence, then prompt tokens up to a limit.

    Prompts start in the order of their arrival, when there are free pages for all their tokens.  If the pages run out,
    the sequence that arrived last loses its pages.  Its tokens are computed again later (recomputation, as in vLLM).

    `prefill_chunk` limits the prompt tokens of a step.  `chunked=False` computes each prompt in one step.
    `continuous=False` starts prompts only after all running sequences have ended (static batches)."""

    blocks: BlockManager
    max_num_seqs: int
    max_num_batched_tokens: int
    prefill_chunk: int = 2**31
    chunked: bool = True
    continuous: bool = True
    waiting: list[Sequence] = field(default_factory=list)
    """The sequences that wait, in the order of their arrival."""
    running: list[Sequence] = field(default_factory=list)
    """The sequences that run, in the order of their admission."""
    prefilling: list[Sequence] = field(default_factory=list)
    """The sequences of `running` whose prompt is not computed yet."""
    _too_large: tuple[Sequence, int] | None = None
    """The first waiting prompt that did not fit, and the number of releases then.  A later release allows a new try."""

    @property
    def has_work(self) -> bool:
        """Returns whether a sequence waits or runs."""
        return bool(self.waiting or self.running)

    def check(self, sequence: Sequence) -> None:
        """Raises `ValueError` if `sequence` does not fit even into an empty KV cache."""
        num_pages = self.blocks.blocks_for(sequence.max_length)
        if num_pages > self.blocks.num_blocks:
            raise ValueError(
                f"prompt: {sequence.num_prompt_tokens} tokens and up to "
                f"{sequence.max_length - sequence.num_prompt_tokens} new ones need {num_pages} pages of the KV cache, "
                f"which has {self.blocks.num_blocks}"
            )

    def submit(self, sequence: Sequence) -> None:
        """Queues a sequence that passed `check`."""
        insort(self.waiting, sequence, key=_order)

    def schedule(self) -> Step:
        """Returns the next step.  Allocates all pages that the step writes.  Requires that `has_work` is true."""
        preempted_sequences = self._grow()
        num_decodes = len(self.running) - len(self.prefilling)
        admits = self.continuous or not self.running
        chunks: list[Chunk] = []
        budget = min(self.prefill_chunk, self.max_num_batched_tokens - num_decodes)
        for sequence in self.prefilling:
            budget -= self._take(sequence, budget, chunks)
        while admits and self.waiting and len(self.running) < self.max_num_seqs and (budget > 0 or not self.continuous):
            sequence = self.waiting[0]
            if preempted_sequences or not self._admit(sequence):
                break
            num_tokens = self._take(sequence, budget, chunks)
            if not num_tokens and self.continuous:
                self._preempt(sequence)
                break
            budget -= num_tokens
        return Step(num_decodes, chunks, preempted_sequences)

    def computed(self, chunk: Chunk) -> None:
        """Marks `chunk` as computed.  Other sequences may then reuse the full pages of the chunk."""
        sequence = chunk.sequence
        sequence.num_computed = chunk.end
        self.blocks.publish(sequence, chunk.end)
        if chunk.last:
            self.prefilling.remove(sequence)

    def restart(self, sequences: list[Sequence]) -> None:
        """Frees all pages and queues only `sequences`.  Their tokens are computed again from the first token."""
        self.finish(self.running)
        self.waiting = sorted(sequences, key=_order)

    def abort(self, sequence: Sequence) -> None:
        """Removes a waiting or running sequence, because its result is no longer needed."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            self.finish([sequence])

    def finish(self, sequences: list[Sequence]) -> None:
        """Removes ended sequences and frees their pages."""
        for sequence in sequences:
            self.blocks.release(sequence)
        ended_ids = {id(sequence) for sequence in sequences}
        self.running = [sequence for sequence in self.running if id(sequence) not in ended_ids]
        self.prefilling = [sequence for sequence in self.prefilling if id(sequence) not in ended_ids]

    def _grow(self) -> list[Sequence]:
        """Gives running sequences KV cache pages for their next tokens. Returns the sequences that lost their pages."""
        preempted_sequences: list[Sequence] = []
        grow_blocks, block_size = self.blocks.grow, self.blocks.block_size
        seq_index = 0
        while seq_index < len(self.running):
            sequence = self.running[seq_index]
            # A cheap test, because it runs for up to 256 sequences a step, and most steps need no new page.
            if len(sequence.token_ids) + sequence.unread > len(sequence.block_ids) * block_size:
                while not grow_blocks(sequence, len(sequence)):
                    victim_sequence = max(self.running, key=_order)
                    seq_index -= self.running.index(victim_sequence) < seq_index
                    self._preempt(victim_sequence)
                    preempted_sequences.append(victim_sequence)
                    if victim_sequence is sequence:
                        seq_index -= 1
                        break
            seq_index += 1
        return preempted_sequences

    def _take(self, sequence: Sequence, room: int, chunks: list[Chunk]) -> int:
        """Adds the sequence's next chunk of at most `room` tokens to `chunks`.  Without chunked prefill, the first
        chunk may be longer.  Returns the size of the chunk, or 0 if none fits."""
        remaining_tokens = len(sequence) - sequence.num_computed
        if not self.chunked and chunks and remaining_tokens > room:
            return 0
        chunk_size = min(remaining_tokens, room) if self.chunked else remaining_tokens
        if chunk_size > 0:
            chunks.append(Chunk(sequence, sequence.num_computed, sequence.num_computed + chunk_size))
        return max(chunk_size, 0)

    def _admit(self, sequence: Sequence) -> bool:
        """Starts the first waiting `sequence` if free pages can hold all its tokens.  Returns True if it starts."""
        if self._too_large == (sequence, self.blocks.released):
            return False
        self.blocks.reuse(sequence)
        # One page more than the tokens need, so that the next step does not preempt the sequence again.
        spare_pages = 1 if self.running else 0
        missing_pages = self.blocks.blocks_for(len(sequence)) - len(sequence.block_ids)
        if self.blocks.num_free < missing_pages + spare_pages:
            self.blocks.release(sequence)
            self._too_large = (sequence, self.blocks.released)
            return False
        self.blocks.grow(sequence, len(sequence))
        self.waiting.pop(0)
        self.running.append(sequence)
        self.prefilling.append(sequence)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Takes all pages from a running sequence and puts the sequence back into the queue."""
        self.finish([sequence])
        self.submit(sequence)


def _order(sequence: Sequence) -> tuple[float, int]:
    return sequence.arrival_s, sequence.request_id
