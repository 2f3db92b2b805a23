"""Pages, prefixes, rows and queues: invariants under random work, and each rule of the scheduler by itself."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tiny_model import check_pages

from rooflab.engine.block_manager import BlockManager
from rooflab.engine.scheduler import Scheduler, pairs_of
from rooflab.engine.sequence import SamplingParams, Sequence

BLOCKS, BLOCK_SIZE, MAX_SEQS, BUDGET = 12, 4, 5, 32


def make(request_id, prompt, new, arrival_s=0.0):
    """A request; `prompt` is its tokens, or how many of them, which are then 1."""
    ids = [1] * prompt if isinstance(prompt, int) else list(prompt)
    params = SamplingParams(max_tokens=new)
    return Sequence(request_id, ids, len(ids), params, 0, frozenset(), len(ids) + new, arrival_s)


class Memory:
    """What each page holds: the tokens up to each of its slots, or None where nothing was written."""

    def __init__(self):
        self.slots = {}

    def write(self, sequence, start, end):
        for position in range(start, end):
            page = sequence.block_ids[position // BLOCK_SIZE]
            self.slots[page, position % BLOCK_SIZE] = tuple(sequence.token_ids[: position + 1])

    def holds(self, sequence, end):
        def at(position):
            return self.slots.get((sequence.block_ids[position // BLOCK_SIZE], position % BLOCK_SIZE))

        return all(at(position) == tuple(sequence.token_ids[: position + 1]) for position in range(end))


def drawn(scheduler, step):
    """The sequences that have a token of the step."""
    decoding = [one for one in scheduler.running if one not in scheduler.prefilling]
    return decoding + [chunk.sequence for chunk in step.chunks if chunk.last]


def end(scheduler, step):
    """What the engine does when a step was computed: each token is a 1."""
    sequences = drawn(scheduler, step)
    for chunk in step.chunks:
        scheduler.computed(chunk)
    for sequence in sequences:
        sequence.append(1)
        scheduler.blocks.publish(sequence, len(sequence) - 1)
    scheduler.finish([sequence for sequence in sequences if sequence.finish_reason])


class Engine(RuleBasedStateMachine):
    """Requests come and go, steps run, and nothing is lost: the scheduler as the engine drives it.

    `Memory` stands for the cache: what a step reads must be what the sequence's own tokens have written.
    """

    all = ()

    @initialize(
        chunk=st.sampled_from([BUDGET, 1, 3, 7]), caching=st.booleans(), chunked=st.booleans(), continuous=st.booleans()
    )
    def start(self, chunk, caching, chunked, continuous):
        blocks = BlockManager(BLOCKS, BLOCK_SIZE, caching)
        self.scheduler = Scheduler(blocks, MAX_SEQS, BUDGET, chunk, chunked, continuous)
        self.memory, self.all, self.aborted = Memory(), [], set()

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=24), new=st.integers(1, 16), arrival_s=st.integers(0, 2)
    )
    def submit(self, prompt, new, arrival_s):
        sequence = make(len(self.all), prompt, new, arrival_s)
        self.scheduler.check(sequence)
        self.scheduler.submit(sequence)
        self.all.append(sequence)

    @rule(data=st.data())
    def abort(self, data):
        left = [one for one in self.all if one.finish_reason is None and one.request_id not in self.aborted]
        if left:
            sequence = data.draw(st.sampled_from(left))
            self.aborted.add(sequence.request_id)
            self.scheduler.abort(sequence)

    @precondition(lambda self: self.all and self.scheduler.has_work)
    @rule()
    def step(self):
        scheduler = self.scheduler
        step = scheduler.schedule()
        rows = [one for one in scheduler.running if one not in scheduler.prefilling]
        assert len(rows) == step.num_decodes and (rows or step.chunks), "a step that does nothing goes on for ever"
        asked = len(rows) + sum(chunk.end - chunk.start for chunk in step.chunks)
        assert asked <= BUDGET or (not scheduler.chunked and len(step.chunks) == 1)
        for sequence in rows:
            assert self.memory.holds(sequence, len(sequence) - 1), "a key that the sequence reads is another's"
            self.memory.write(sequence, len(sequence) - 1, len(sequence))
        for chunk in step.chunks:
            assert self.memory.holds(chunk.sequence, chunk.start) and chunk.start < chunk.end <= len(chunk.sequence)
            self.memory.write(*chunk)
        for sequence in drawn(scheduler, step):
            assert len(sequence.block_ids) * BLOCK_SIZE >= len(sequence), "a token has no page"
        end(scheduler, step)

    @invariant()
    def every_page_and_every_request_is_in_one_place(self):
        if self.all:
            waiting, running = self.scheduler.waiting, self.scheduler.running
            check_pages(self.scheduler.blocks, self.all)
            left = [one.request_id for one in self.all if one.finish_reason is None]
            places = sorted(sequence.request_id for sequence in (*waiting, *running))
            assert places == [number for number in left if number not in self.aborted]
            assert len(running) <= MAX_SEQS and set(self.scheduler.prefilling) <= set(running)

    def teardown(self):
        for _ in range(5000):
            if not self.all or not self.scheduler.has_work:
                break
            self.step()
        for sequence in self.all:
            assert sequence.finish_reason == "length" or sequence.request_id in self.aborted
        assert not self.all or self.scheduler.blocks.num_free == BLOCKS


TestTraps5And6 = Engine.TestCase
TestTraps5And6.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def chunks_of(step):
    return [(chunk.sequence.request_id, chunk.start, chunk.end) for chunk in step.chunks]


def run(scheduler):
    """A step as the engine runs it; returns its chunks."""
    step = scheduler.schedule()
    end(scheduler, step)
    return chunks_of(step)


def scheduler_of(*sequences, blocks=100, seqs=8, budget=1000, **options):
    caching = options.pop("prefix_caching", True)
    scheduler = Scheduler(BlockManager(blocks, BLOCK_SIZE, caching), seqs, budget, **options)
    for sequence in sequences:
        scheduler.submit(sequence)
    return scheduler


def test_trap_37_what_could_never_fit_is_refused_and_a_prompt_may_take_the_last_page():
    scheduler = scheduler_of(make(0, 15, 1), blocks=4)
    scheduler.check(make(0, 10, 6))
    with pytest.raises(ValueError, match="need 5 pages of the KV cache, which has 4"):
        scheduler.check(make(0, 10, 7))
    assert chunks_of(scheduler.schedule()) == [(0, 0, 15)] and scheduler.blocks.num_free == 0
    beside = scheduler_of(make(0, 4, 4), make(1, 12, 1), blocks=4, prefix_caching=False)
    assert chunks_of(beside.schedule()) == [(0, 0, 4)], "beside another it would be preempted in the next step"


def test_first_come_first_served():
    requests = [make(number, 3, 1, arrival_s) for number, arrival_s in enumerate((2.0, 1.0, 2.0, 0.5))]
    assert [one.request_id for one in scheduler_of(*requests).waiting] == [3, 1, 0, 2]


def test_decodes_come_first_and_prompts_share_what_the_budget_leaves():
    prompts = [make(i, [i] * length, 9) for i, length in enumerate((12, 4, 20))]
    scheduler = scheduler_of(*prompts, budget=10)
    assert [run(scheduler) for _ in range(3)] == [[(0, 0, 10)], [(0, 10, 12), (1, 0, 4), (2, 0, 4)], [(2, 4, 12)]]
    small = scheduler_of(make(0, 12, 9), prefill_chunk=5)
    assert [run(small) for _ in range(4)] == [[(0, 0, 5)], [(0, 5, 10)], [(0, 10, 12)], []]


def test_without_chunks_a_prompt_runs_whole_and_one_beyond_the_budget_as_the_only_prompt():
    prompts = [make(i, [i] * length, 9) for i, length in enumerate((12, 4, 5, 3))]
    scheduler = scheduler_of(*prompts, budget=10, chunked=False)
    # Decoding sequences take tokens of the budget too.
    assert [run(scheduler) for _ in range(3)] == [[(0, 0, 12)], [(1, 0, 4), (2, 0, 5)], [(3, 0, 3)]]


def test_trap_3_a_prompt_that_is_there_whole_still_computes_its_last_token():
    first, again, longer = make(0, 8, 1), make(1, 8, 1), make(2, 9, 1)
    scheduler = scheduler_of(first)
    run(scheduler)
    scheduler.submit(again)
    scheduler.submit(longer)
    assert run(scheduler) == [(1, 4, 8), (2, 8, 9)]


class Same(int):
    """A token whose hash is that of every other."""

    def __hash__(self):
        return 7


def test_traps_1_and_2_only_the_whole_prefix_counts_and_equal_hashes_do_not():
    scheduler = scheduler_of()
    firsts = (1, 1, 1, 1), (3, 3, 3, 3), (1, 1, 1, 3), (1, 1, 1, 1)
    for number, first in enumerate(firsts):
        scheduler.submit(make(number, map(Same, (*first, 2, 2, 2, 2, 0)), 1))
        assert run(scheduler) == [(number, 8 if number == 3 else 0, 9)]


def test_the_least_recently_used_prefix_goes_first_and_loses_its_last_page_first():
    scheduler = scheduler_of(blocks=6)
    for number, ids in enumerate(([1] * 8, [2] * 8)):
        scheduler.submit(make(number, [*ids, 0], 1))
        run(scheduler)
    scheduler.submit(make(2, [3] * 12, 1))  # takes the two free pages, and one of four that hold prefixes
    run(scheduler)
    for number, ids, start in ((3, [1] * 8, 4), (4, [2] * 8, 0)):
        scheduler.submit(make(number, [*ids, 0], 1))
        assert run(scheduler) == [(number, start, 9)]


def test_a_prompt_that_does_not_fit_is_not_looked_up_in_every_step(monkeypatch):
    scheduler = scheduler_of(make(0, 30, 10), make(1, 30, 9), blocks=11)
    looked = []
    reuse = scheduler.blocks.reuse
    monkeypatch.setattr(scheduler.blocks, "reuse", lambda sequence: looked.append(sequence) or reuse(sequence))
    for _ in range(6):
        run(scheduler)
    assert len(looked) == 2, "once for each: nothing was released in between"


def test_trap_35_the_last_sequence_is_preempted_and_computes_prompt_and_output_again():
    one, two = make(0, [1] * 4, 12), make(1, [2] * 4, 12)
    scheduler = scheduler_of(one, two, blocks=5, prefix_caching=False)
    chunks = [chunk for _ in range(40) if scheduler.has_work for chunk in run(scheduler)]
    assert [number for number, *_ in chunks] == [0, 1, 1] and chunks[2][1:] > (0, 4)
    assert (len(one), len(two), one.finish_reason, two.finish_reason) == (16, 16, "length", "length")


def test_a_token_is_paired_with_itself_and_all_before_it():
    assert [pairs_of(start, start + 2) for start in (0, 3)] == [1 + 2, 4 + 5]
