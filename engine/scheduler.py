"""Decides which sequences run in the next step, and how many tokens of each prompt."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from typing import NamedTuple

from rooflab.engine.block_manager import BlockManager
from rooflab.engine.sequence import Sequence


class Chunk(NamedTuple):
    """The tokens of a prompt that one step computes."""

    sequence: Sequence
    start: int
    end: int

    @property
    def last(self) -> bool:
        """Whether this chunk ends the prompt, so that the step draws the next token."""
        return self.end == len(self.sequence)


def pairs_of(start: int, end: int) -> int:
    """Counts the query-key pairs of the tokens in [start, end).  A token attends to itself and all tokens before it."""
    return (end * (end + 1) - start * (start + 1)) // 2


@dataclass(frozen=True, slots=True)
class Step:
    """The work of one step: one token of every decoding sequence, and chunks of prompts."""

    num_decodes: int
    chunks: list[Chunk]
    preempted: list[Sequence] = field(default_factory=list)
    """Sequences that lost their pages in this step and wait again."""

    @property
    def num_prompt_tokens(self) -> int:
        """The number of tokens of all chunks."""
        return sum(chunk.end - chunk.start for chunk in self.chunks)

    @property
    def ending(self) -> list[Sequence]:
        """The sequences whose prompt ends in this step.  The step draws their next tokens."""
        return [chunk.sequence for chunk in self.chunks if chunk.last]


@dataclass(eq=False)
class Scheduler:
    """Plans steps with a budget of tokens: first one token of every decoding sequence, then chunks of prompts that fit.

    Prompts are admitted in the order of their arrival, each when there are free pages for all its tokens.  If the pages
    run out, the sequence that arrived last loses its pages.  Its prompt and output are computed again later
    (recomputation, as in vLLM).  `check` refuses a sequence that does not fit the whole pool, so the first sequence
    always ends.

    `prefill_chunk` limits the prompt tokens of a step.  Without `chunked` each prompt runs whole.  A prompt that is
    longer than the rest of the budget then runs as the only prompt.  Without `continuous` no prompt is admitted before
    all running sequences have ended (static batches)."""

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
        """Whether a sequence waits or runs."""
        return bool(self.waiting or self.running)

    def check(self, sequence: Sequence) -> None:
        """Raises `ValueError` if `sequence` cannot fit even an empty KV cache."""
        needed = self.blocks.blocks_for(sequence.max_length)
        if needed > self.blocks.num_blocks:
            raise ValueError(
                f"prompt: {sequence.num_prompt_tokens} tokens and up to "
                f"{sequence.max_length - sequence.num_prompt_tokens} new ones need {needed} pages of the KV cache, "
                f"which has {self.blocks.num_blocks}"
            )

    def submit(self, sequence: Sequence) -> None:
        """Queues a sequence that passed `check`."""
        insort(self.waiting, sequence, key=_order)

    def schedule(self) -> Step:
        """Returns the next step, and gives its sequences all pages that the step writes.  Requires `has_work`."""
        preempted = self._grow()
        num_decodes = len(self.running) - len(self.prefilling)
        admits = self.continuous or not self.running
        chunks: list[Chunk] = []
        room = min(self.prefill_chunk, self.max_num_batched_tokens - num_decodes)
        for sequence in self.prefilling:
            room -= self._take(sequence, room, chunks)
        while admits and self.waiting and len(self.running) < self.max_num_seqs and (room > 0 or not self.continuous):
            sequence = self.waiting[0]
            if preempted or not self._admit(sequence):
                break
            taken = self._take(sequence, room, chunks)
            if not taken and self.continuous:
                self._preempt(sequence)
                break
            room -= taken
        return Step(num_decodes, chunks, preempted)

    def computed(self, chunk: Chunk) -> None:
        """Notes that a step has computed `chunk`.  The chunk's full pages may then serve other sequences."""
        sequence = chunk.sequence
        sequence.num_computed = chunk.end
        self.blocks.publish(sequence, chunk.end)
        if chunk.last:
            self.prefilling.remove(sequence)

    def restart(self, sequences: list[Sequence]) -> None:
        """Frees all pages.  Then only `sequences` wait, and their tokens are computed again from the first."""
        self.finish(self.running)
        self.waiting = sorted(sequences, key=_order)

    def abort(self, sequence: Sequence) -> None:
        """Removes a sequence whose result is no longer needed, whether it waits or runs."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            self.finish([sequence])

    def finish(self, sequences: list[Sequence]) -> None:
        """Removes ended sequences and frees their pages."""
        for sequence in sequences:
            self.blocks.release(sequence)
        ended = {id(sequence) for sequence in sequences}
        self.running = [sequence for sequence in self.running if id(sequence) not in ended]
        self.prefilling = [sequence for sequence in self.prefilling if id(sequence) not in ended]

    def _grow(self) -> list[Sequence]:
        """Gives every running sequence the page of its next token.  Returns the sequences that lost their pages."""
        preempted: list[Sequence] = []
        grow, block_size = self.blocks.grow, self.blocks.block_size
        position = 0
        while position < len(self.running):
            sequence = self.running[position]
            # A cheap test, because it runs for up to 256 sequences a step, and most steps need no new page.
            if len(sequence.token_ids) + sequence.unread > len(sequence.block_ids) * block_size:
                while not grow(sequence, len(sequence)):
                    victim = max(self.running, key=_order)
                    position -= self.running.index(victim) < position
                    self._preempt(victim)
                    preempted.append(victim)
                    if victim is sequence:
                        position -= 1
                        break
            position += 1
        return preempted

    def _take(self, sequence: Sequence, room: int, chunks: list[Chunk]) -> int:
        """Adds a chunk of at most `room` tokens to `chunks`.  Returns its number of tokens, which is 0 if none fits."""
        left = len(sequence) - sequence.num_computed
        if not self.chunked and chunks and left > room:
            return 0
        taken = min(left, room) if self.chunked else left
        if taken > 0:
            chunks.append(Chunk(sequence, sequence.num_computed, sequence.num_computed + taken))
        return max(taken, 0)

    def _admit(self, sequence: Sequence) -> bool:
        """Moves the first waiting sequence to the running sequences, if there are free pages for all its tokens."""
        if self._too_large == (sequence, self.blocks.released):
            return False
        self.blocks.reuse(sequence)
        # One page more than the tokens need, so that the next step does not preempt the sequence again.
        spare = 1 if self.running else 0
        missing = self.blocks.blocks_for(len(sequence)) - len(sequence.block_ids)
        if self.blocks.num_free < missing + spare:
            self.blocks.release(sequence)
            self._too_large = (sequence, self.blocks.released)
            return False
        self.blocks.grow(sequence, len(sequence))
        self.waiting.pop(0)
        self.running.append(sequence)
        self.prefilling.append(sequence)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Takes the pages from a sequence and lets it wait again."""
        self.finish([sequence])
        self.submit(sequence)


def _order(sequence: Sequence) -> tuple[float, int]:
    return sequence.arrival_s, sequence.request_id
