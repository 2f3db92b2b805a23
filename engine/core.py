"""Runs the steps of the engine: schedules a step, runs the model, and gives the drawn tokens to the sequences."""

from __future__ import annotations

from dataclasses import dataclass

from rooflab.engine.model_runner import Draw, ModelRunner
from rooflab.engine.scheduler import Scheduler, Step
from rooflab.engine.sequence import Sequence
from rooflab.engine.speculate.speculator import Speculator


@dataclass(eq=False)
class Core:
    """Runs steps until every submitted sequence has ended.

    With `overlap`, a step is launched before the tokens of the previous step are read.  So the device never waits for
    the host.  If a stop token ends a sequence, one more token has already been drawn, and is dropped.  Tokens are read
    at once if the next draw depends on them (penalties, log-probabilities), or with a `speculator`."""

    scheduler: Scheduler
    runner: ModelRunner
    overlap: bool = False
    speculator: Speculator | None = None
    last: Step | None = None
    """The step that the last call of `step` ran; None if that call only read tokens."""
    _unread: Draw | None = None

    @property
    def has_work(self) -> bool:
        """Returns whether any sequence waits, runs, or has a token that was not read yet."""
        return self.scheduler.has_work or any(sequence.finish_reason is None for sequence in self._expected)

    @property
    def _expected(self) -> list[Sequence]:
        return self._unread.sequences if self._unread else []

    def unfinished(self) -> list[Sequence]:
        """Returns the unfinished sequences: they wait, they run, or their last token was not read yet."""
        sequences = dict.fromkeys([*self.scheduler.waiting, *self.scheduler.running, *self._expected])
        return [sequence for sequence in sequences if sequence.finish_reason is None]

    def step(self) -> list[Sequence]:
        """Runs a step.  Returns the sequences that got a token in this call, one entry per token.

        The list is empty if there is no work, the step only computes part of a prompt, or its tokens are read later."""
        try:
            return self._step()
        except BaseException:
            # An error or an interrupt may leave pages and rows half written, so every sequence is prefilled again.
            self.forget()
            raise

    def _step(self) -> list[Sequence]:
        scheduler = self.scheduler
        token_draw = self.last = None
        if scheduler.has_work:
            step = self.last = scheduler.schedule()
            for sequence in step.preempted:
                self.runner.leave(sequence)
            if self.speculator is not None:
                sequences = self.speculator.step(scheduler, step, self._computed)
                if ended := [sequence for sequence in dict.fromkeys(sequences) if sequence.finish_reason is not None]:
                    self._remove(ended)
                return sequences
            token_draw = self.runner.run(step)
        sequences = self._read()
        if self.last is not None:
            self._computed(self.last)
        if token_draw is not None:
            self._unread = token_draw
            self._expect(token_draw.sequences)
            if token_draw.read_at_once or not self.overlap:
                sequences += self._read()
        return sequences

    def _computed(self, step: Step) -> None:
        for chunk in step.chunks:
            self.scheduler.computed(chunk)
            if chunk.last:
                for other_answer in chunk.sequence.siblings:
                    self.scheduler.submit(other_answer)
                chunk.sequence.siblings = []

    def _expect(self, sequences: list[Sequence]) -> None:
        """Marks that the device has drawn a token of each sequence, but the host has not read it yet.  Adds new
        sequences to the next step's batch.  Removes each sequence that reaches its maximum length with this token."""
        blocks = self.scheduler.blocks
        page_size, full_sequences = blocks.block_size, []
        for row_index, sequence in enumerate(sequences):
            if sequence.finish_reason is not None:
                continue  # the token before, which has just been read, was its last
            sequence.unread = 1
            next_length = len(sequence.token_ids) + 1
            if next_length % page_size == 1 % page_size:
                blocks.publish(sequence, next_length - 1)
            if next_length >= sequence.max_length:
                full_sequences.append(sequence)
            elif sequence.row < 0:
                self.runner.join(sequence, row_index)
        if full_sequences:
            self._remove(full_sequences)

    def _read(self) -> list[Sequence]:
        """Waits for the last draw's tokens and appends each to its sequence. Returns the sequences that got a token."""
        if self._unread is None:
            return []
        sequences: list[Sequence] = []
        ended_sequences: list[Sequence] = []
        for sequence, token in zip(self._unread.sequences, self._unread.tokens(), strict=True):
            if sequence.finish_reason is not None:
                continue
            sequence.append(token)
            sequences.append(sequence)
            if sequence.finish_reason is None or len(sequence.token_ids) >= sequence.max_length:
                continue  # it goes on, or has left already
            if sequence.row < 0:  # it lost its pages since, and waits
                self.scheduler.abort(sequence)
            else:
                ended_sequences.append(sequence)
        if ended_sequences:
            self._remove(ended_sequences)
        self._unread = None
        return sequences

    def _remove(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            self.runner.leave(sequence)
        self.scheduler.finish(sequences)

    def abort(self, sequences: list[Sequence]) -> None:
        """Removes the sequences in `sequences` that have not ended, whether they wait or run."""
        for sequence in sequences:
            if sequence.finish_reason is None:
                self.runner.leave(sequence)
                self.scheduler.abort(sequence)
                sequence.finish_reason = "abort"

    def forget(self) -> None:
        """Makes every unfinished sequence wait again.  Its tokens are then computed again from the first token."""
        for sequence in list(self.runner.batch.rows):  # also those that a broken step preempted
            self.runner.leave(sequence)
        unfinished_sequences = self.unfinished()
        for sequence in unfinished_sequences:
            sequence.unread = 0
            del sequence.logprobs[len(sequence.token_ids) - sequence.num_prompt_tokens :]
        self._unread = None
        self.scheduler.restart(unfinished_sequences)
