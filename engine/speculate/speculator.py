"""Speculation in a step of the engine: tokens are proposed, verified beside the step's other rows, and accepted."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from rooflab.engine.block_manager import BlockManager
from rooflab.engine.scheduler import Scheduler, Step
from rooflab.engine.sequence import Sequence
from rooflab.engine.speculate.drafter import Speculated
from rooflab.engine.speculate.lengths import Lengths
from rooflab.engine.speculate.rows import accepted
from rooflab.engine.speculate.runner import SpeculativeRunner


class Speculator:
    """Gives the decoding sequences of a step more than one token.

    Drafts take what prompts leave of a step's tokens and pages, so that they delay no prompt and preempt nobody.
    """

    def __init__(self, runner: SpeculativeRunner, lengths: Lengths):
        self.runner = runner
        self.lengths = lengths
        self.last: Speculated | None = None
        """What the last step drafted; None if nothing."""
        self._drafting: list[tuple[Sequence, int]] = []
        self._began_s = self._drafted_s = self._verified_s = 0.0

    def propose(self, scheduler: Scheduler, step: Step) -> None:
        """Drafts for the sequences of the batch for which it pays."""
        self._began_s = time.perf_counter()
        runner, self.last = self.runner, None
        self.lengths.begin(len(runner.batch.rows))
        room = scheduler.max_num_batched_tokens - step.num_decodes - step.num_prompt_tokens
        wanted = runner.drafter.wants(runner.batch.rows, self.lengths)
        self._drafting = self._with_pages(wanted, scheduler.blocks, room)
        runner.drafts = runner.drafter.draft(self._drafting) if self._drafting else {}
        self._drafted_s = time.perf_counter()

    def _with_pages(
        self, wanted: Iterable[tuple[Sequence, int]], blocks: BlockManager, room: int
    ) -> list[tuple[Sequence, int]]:
        """Gives pages to the drafts that fit `room` tokens.  A draft ends before the sequence's last token."""
        found = []
        for sequence, length in wanted:
            if room <= 0:
                break
            now = len(sequence.token_ids)
            most = min(length, room, sequence.max_length - now - 1)
            held = len(sequence.block_ids) * blocks.block_size - now
            while most > held and not blocks.grow(sequence, now + most):
                most -= 1
            if most > 0:
                self.runner.batch.set_blocks(sequence)
                found.append((sequence, most))
                room -= most
        return found

    def verify(self, step: Step) -> dict[Sequence, list[int]]:
        """Runs the step; the tokens of each sequence that has some, which are those that it would get one by one."""
        draw = self.runner.run(step)
        tokens = {} if draw is None else accepted(draw.sequences, draw.tokens(), self.runner.drafts)
        self._verified_s = time.perf_counter()
        return tokens

    def accept(self, blocks: BlockManager, step: Step, tokens: Mapping[Sequence, list[int]]) -> list[Sequence]:
        """Gives each sequence its tokens up to its last one; those that go on join the batch.  Returns the sequences
        once for each token."""
        drafts = self.runner.drafts
        self.runner.accept(tokens)
        found = Speculated([0] * self.lengths.most)
        got: list[Sequence] = []
        for place, (sequence, own) in enumerate(tokens.items()):
            before = len(sequence.token_ids)
            for token in own:
                sequence.append(token)
                got.append(sequence)
                if sequence.finish_reason is not None:
                    break
            length = len(sequence.token_ids)
            if drafted := len(drafts.get(sequence, ())):
                kept = min(length - before, len(own) - 1)
                found.note(drafted, kept)
                self.lengths.verified(sequence, drafted, kept)
                del sequence.logprobs[length - sequence.num_prompt_tokens :]
            if (length - 1) // blocks.block_size > len(sequence.contents):
                blocks.publish(sequence, length - 1)  # the last token has no keys and values yet
            if sequence.finish_reason is None and sequence.row < 0:
                self.runner.join(sequence, place)
        for sequence, _ in self._drafting:
            if sequence.finish_reason is None:
                blocks.trim(sequence, len(sequence) - 1)
                self.runner.batch.set_blocks(sequence)
        self._note_times(step, found)
        return got

    def _note_times(self, step: Step, found: Speculated) -> None:
        ended_s = time.perf_counter()
        if self.runner.drafts:
            found.draft_s = self._drafted_s - self._began_s
            found.verify_s = self._verified_s - self._drafted_s
            found.accept_s = ended_s - self._verified_s
            self.last = found
        if not step.chunks:
            self.lengths.timed(step.num_decodes, found.drafted, ended_s - self._began_s)
