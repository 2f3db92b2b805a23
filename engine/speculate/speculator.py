"""Adds speculation to a step: drafts tokens, verifies them together with the step's other rows, and accepts them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rooflab.engine.block_manager import BlockManager
from rooflab.engine.scheduler import Scheduler, Step
from rooflab.engine.sequence import Sequence
from rooflab.engine.speculate.drafter import Speculated
from rooflab.engine.speculate.lengths import Lengths
from rooflab.engine.speculate.rows import accepted
from rooflab.engine.speculate.runner import SpeculativeRunner


@dataclass(eq=False)
class Speculator:
    """Runs steps in which a decoding sequence may get several tokens.

    Drafts use only tokens and pages that prompts do not need.  So drafts delay no prompt and preempt no sequence."""

    runner: SpeculativeRunner
    lengths: Lengths
    last: Speculated | None = None
    """The counts of the last step's drafts; None if that step had no drafts."""

    def step(self, scheduler: Scheduler, step: Step, computed: Callable[[Step], None]) -> list[Sequence]:
        """Makes drafts, runs the step, and gives each sequence its tokens.  The tokens are the same as without drafts.
        Returns the sequences, with one entry per new token.

        Calls `computed(step)` after the run, before a sequence gets a token, to mark the prompt chunks as computed."""
        runner, self.last = self.runner, None
        step_begin_s = time.perf_counter()
        draft_plan = self._planned(scheduler, step)
        runner.drafts = runner.drafter.draft(draft_plan) if draft_plan else {}
        draft_end_s = time.perf_counter()
        token_draw = runner.run(step)
        tokens = {} if token_draw is None else accepted(token_draw.sequences, token_draw.tokens(), runner.drafts)
        verify_end_s = time.perf_counter()
        computed(step)
        draft_counts = Speculated([0] * self.lengths.most)
        sequences = self._give(scheduler.blocks, tokens, draft_counts)
        for sequence, _ in draft_plan:
            if sequence.finish_reason is None:
                scheduler.blocks.trim(sequence, len(sequence) - 1)
                runner.batch.set_blocks(sequence)
        step_end_s = time.perf_counter()
        if runner.drafts:
            draft_counts.draft_s, draft_counts.verify_s = draft_end_s - step_begin_s, verify_end_s - draft_end_s
            draft_counts.accept_s = step_end_s - verify_end_s
            self.last = draft_counts
        if not step.chunks:
            self.lengths.timed(step.num_decodes, draft_counts.drafted, step_end_s - step_begin_s)
        return sequences

    def _planned(self, scheduler: Scheduler, step: Step) -> list[tuple[Sequence, int]]:
        """Returns the sequences to draft for, each with its draft length.  The KV cache has pages for these drafts.

        A draft never fills its sequence to the maximum length."""
        batch, blocks = self.runner.batch, scheduler.blocks
        draft_plan: list[tuple[Sequence, int]] = []
        self.lengths.begin(len(batch.rows))
        room = scheduler.max_num_batched_tokens - step.num_decodes - step.num_prompt_tokens
        for sequence, max_draft_length in self.runner.drafter.wants(batch.rows, self.lengths):
            if room <= 0:
                break
            num_tokens = len(sequence.token_ids)
            draft_length = min(max_draft_length, room, sequence.max_length - num_tokens - 1)
            free_slots = len(sequence.block_ids) * blocks.block_size - num_tokens
            while draft_length > free_slots and not blocks.grow(sequence, num_tokens + draft_length):
                draft_length -= 1
            if draft_length > 0:
                batch.set_blocks(sequence)
                draft_plan.append((sequence, draft_length))
                room -= draft_length
        return draft_plan

    def _give(self, blocks: BlockManager, tokens: Mapping[Sequence, list[int]], counts: Speculated) -> list[Sequence]:
        """Appends the new tokens to each sequence, up to the token that ends the sequence. An unfinished sequence joins
        the decode batch, if it is not there yet. Returns a list of sequences, with one entry per new token."""
        self.runner.accept(tokens)
        sequences: list[Sequence] = []
        for row_index, (sequence, new_tokens) in enumerate(tokens.items()):
            old_length = len(sequence.token_ids)
            for token in new_tokens:
                sequence.append(token)
                sequences.append(sequence)
                if sequence.finish_reason is not None:
                    break
            new_length = len(sequence.token_ids)
            if num_drafted := len(self.runner.drafts.get(sequence, ())):
                num_accepted = min(new_length - old_length, len(new_tokens) - 1)
                counts.note(num_drafted, num_accepted)
                self.lengths.verified(sequence, num_drafted, num_accepted)
                del sequence.logprobs[new_length - sequence.num_prompt_tokens :]
            if (new_length - 1) // blocks.block_size > len(sequence.contents):
                blocks.publish(sequence, new_length - 1)  # the last token has no keys and values yet
            if sequence.finish_reason is None and sequence.row < 0:
                self.runner.join(sequence, row_index)
        return sequences
