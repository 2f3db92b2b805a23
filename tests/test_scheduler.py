"""Pages, rows and queues: invariants under random work."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rooflab.engine.batch import DecodeBatch
from rooflab.engine.block_manager import BlockManager
from rooflab.engine.scheduler import Scheduler
from rooflab.engine.sequence import SamplingParams, Sequence

BLOCKS, BLOCK_SIZE, MAX_SEQS, MAX_LENGTH = 12, 4, 5, 40


def make(request_id, prompt, new):
    params = SamplingParams(max_tokens=new)
    return Sequence(request_id, [1] * prompt, prompt, params, 0, frozenset(), prompt + new, 0.0)


class Engine(RuleBasedStateMachine):
    """Requests come, steps run, and nothing is lost: the scheduler and the decode batch as the engine drives them."""

    def __init__(self):
        super().__init__()
        self.scheduler = Scheduler(BlockManager(BLOCKS, BLOCK_SIZE), MAX_SEQS, 32)
        self.batch = DecodeBatch(MAX_SEQS, MAX_LENGTH // BLOCK_SIZE + 1, BLOCK_SIZE)
        self.all = []

    @rule(prompt=st.integers(1, 24), new=st.integers(1, 16))
    def submit(self, prompt, new):
        sequence = make(len(self.all), prompt, new)
        self.scheduler.check(sequence)
        self.scheduler.submit(sequence)
        self.all.append(sequence)

    @precondition(lambda self: self.scheduler.has_work)
    @rule()
    def step(self):
        step = self.scheduler.schedule()
        for sequence in step.preempted:
            if sequence.row >= 0:
                self.batch.remove(sequence)
        rows = list(step.sequences) if step.phase == "prefill" else list(self.batch.rows)
        assert rows, "a step that does nothing would go on for ever"
        if step.phase == "decode":
            assert sorted(s.request_id for s in rows) == sorted(s.request_id for s in step.sequences)
            self.check_tensors(rows)
            self.batch.advance(np.full(len(rows), 9))
        ended = []
        for sequence in rows:
            assert len(sequence.block_ids) * BLOCK_SIZE >= len(sequence), "a token has no page"
            sequence.append(9)
            if sequence.finish_reason:
                ended.append(sequence)
            elif sequence.row < 0:
                self.batch.add(sequence)
        for sequence in ended:
            if sequence.row >= 0:
                self.batch.remove(sequence)
        self.scheduler.finish(ended)

    def check_tensors(self, rows):
        batch = self.batch
        batch.prepare()
        for row, sequence in enumerate(rows):
            position = len(sequence) - 1
            page = sequence.block_ids[position // BLOCK_SIZE]
            assert sequence.row == row
            assert batch.token_ids[row] == sequence.token_ids[-1] and batch.positions[row] == position
            assert batch.seq_lens[row] == len(sequence)
            assert batch.slot_mapping[row] == page * BLOCK_SIZE + position % BLOCK_SIZE
            assert batch.block_table[row, : len(sequence.block_ids)].tolist() == sequence.block_ids

    @invariant()
    def every_page_has_one_owner(self):
        held = [block for sequence in self.all for block in sequence.block_ids]
        assert sorted(held + self.scheduler.blocks._free) == list(range(BLOCKS))

    @invariant()
    def every_request_is_in_one_place(self):
        waiting, running = list(self.scheduler.waiting), self.scheduler.running
        places = sorted(sequence.request_id for sequence in (*waiting, *running))
        assert places == [sequence.request_id for sequence in self.all if sequence.finish_reason is None]
        assert len(running) <= MAX_SEQS

    def teardown(self):
        for _ in range(5000):
            if not self.scheduler.has_work:
                break
            self.step()
        assert all(sequence.finish_reason == "length" for sequence in self.all)
        assert all(len(sequence) == sequence.max_length for sequence in self.all)
        assert self.scheduler.blocks.num_free == BLOCKS


TestEngine = Engine.TestCase
TestEngine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_what_could_never_fit_is_refused():
    scheduler = Scheduler(BlockManager(4, 4), 2, 32)
    scheduler.check(make(0, 10, 6))
    with pytest.raises(ValueError, match="10 tokens and up to 7 new ones need 5 pages of the KV cache, which has 4"):
        scheduler.check(make(0, 10, 7))


def test_a_prompt_may_take_the_last_page():
    scheduler = Scheduler(BlockManager(4, 4), 2, 1000)
    scheduler.submit(make(0, 15, 1))
    assert len(scheduler.schedule().sequences) == 1 and scheduler.blocks.num_free == 0


def test_first_come_first_served():
    scheduler = Scheduler(BlockManager(100, 4), 2, 1000)
    sequences = [make(i, 4, 4) for i in range(4)]
    for sequence in sequences:
        scheduler.submit(sequence)
    assert scheduler.schedule().sequences == sequences[:2]
    assert scheduler.schedule().phase == "decode"
    scheduler.finish(sequences[:1])
    assert scheduler.schedule().sequences == sequences[2:3]


def test_a_batch_of_prompts_keeps_to_the_token_budget():
    scheduler = Scheduler(BlockManager(100, 4), 8, 10)
    for i, prompt in enumerate((12, 4, 5, 3)):
        scheduler.submit(make(i, prompt, 1))
    # A prompt beyond the budget runs alone: nothing else would ever let it run.
    assert [[s.request_id for s in scheduler.schedule().sequences] for _ in range(3)] == [[0], [1, 2], [3]]
