"""Which sequences run in the next step."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from rooflab.engine.block_manager import BlockManager
from rooflab.engine.sequence import Sequence
from rooflab.kernels.choices import Phase


@dataclass(frozen=True, slots=True)
class Step:
    """The work of one step: whole prompts, or one token of every running sequence."""

    phase: Phase
    sequences: list[Sequence]
    preempted: list[Sequence] = field(default_factory=list)
    """Sequences that lost their pages in this step and wait again."""


class Scheduler:
    """First come, first served: prompts run as soon as they fit; otherwise every running sequence gets one token.

    If the pages run out, the newest sequence loses its pages, and its prompt and output are prefilled again later
    (recomputation, as in vLLM). `check` refuses a sequence that does not fit the whole pool, so the oldest always ends.
    """

    def __init__(self, blocks: BlockManager, max_num_seqs: int, max_num_batched_tokens: int):
        self.blocks = blocks
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

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
        self.waiting.append(sequence)

    def schedule(self) -> Step:
        """The next step; its sequences have all pages that the step writes.  Call it only while `has_work`."""
        admitted = self._admit()
        if admitted:
            return Step("prefill", admitted)
        preempted: list[Sequence] = []
        grow = self.blocks.grow
        block_size = self.blocks.block_size
        position = 0
        while position < len(self.running):
            sequence = self.running[position]
            # A cheap test, because it runs for up to 256 sequences a step, and most steps need no new page.
            if len(sequence.token_ids) > len(sequence.block_ids) * block_size:
                while not grow(sequence, len(sequence.token_ids)):
                    victim = self.running.pop()
                    self._preempt(victim)
                    preempted.append(victim)
                    if victim is sequence:
                        break
            position += 1
        return Step("decode", self.running, preempted)

    def requeue(self) -> None:
        """After a step that failed: frees all pages; the sequences that have not ended wait again, in order."""
        while self.running:
            sequence = self.running.pop()
            if sequence.finish_reason is None:
                self._preempt(sequence)
            else:
                self.blocks.release(sequence)

    def abort(self, sequence: Sequence) -> None:
        """Removes a sequence whose result is no longer needed, whether it waits or runs."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            self.finish([sequence])

    def _admit(self) -> list[Sequence]:
        admitted: list[Sequence] = []
        tokens = 0
        while self.waiting and len(self.running) < self.max_num_seqs:
            sequence = self.waiting[0]
            if admitted and tokens + len(sequence) > self.max_num_batched_tokens:
                break
            # One page more than the prompt needs, so that the next step does not preempt the sequence again.
            spare = 1 if self.running or admitted else 0
            if self.blocks.num_free < self.blocks.blocks_for(len(sequence)) + spare:
                break
            self.blocks.grow(sequence, len(sequence))
            self.running.append(self.waiting.popleft())
            admitted.append(sequence)
            tokens += len(sequence)
        return admitted

    def _preempt(self, sequence: Sequence) -> None:
        self.blocks.release(sequence)
        self.waiting.appendleft(sequence)

    def finish(self, sequences: list[Sequence]) -> None:
        """Removes ended sequences and frees their pages."""
        for sequence in sequences:
            self.blocks.release(sequence)
        ended = {id(sequence) for sequence in sequences}
        self.running = [sequence for sequence in self.running if id(sequence) not in ended]
