"""Speculation: an engine with drafts gives the same answers as an engine without."""

import pytest
from speculating import LIBRARY, Always, Known, exact, speculating, watched
from tiny_model import prompts, tiny_llm

from rooflab.engine.llm import LLM, SamplingParams
from rooflab.engine.load.model_files import fetch
from rooflab.engine.sequence import Sequence
from rooflab.engine.speculate.lengths import PAUSE_TOKENS, Lengths
from rooflab.engine.speculate.ngram import NgramDrafter
from rooflab.engine.study import StudyOptions

GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def answer(tmp_path_factory):
    """The tokens behind the first prompt without speculation."""
    return tiny_llm(tmp_path_factory.mktemp("m"), **LIBRARY).generate(prompts()[:1], GREEDY)[0]["token_ids"]


def test_steps_are_fewer_and_one_token_is_delivered_once(tmp_path, answer):
    llm = speculating(tmp_path, drafter=Known(0))
    llm.runner.drafter.right, llm.runner.drafter.answers = 1.0, {0: answer, 1: answer}
    number, got, steps = llm.add_request(prompts()[0], GREEDY), [], 0
    while llm.has_work:
        got += llm.step()
        steps += 1
        exact(llm)
    assert [one.request_id for one in got] == [number] * 40 and got[0].output_ids == answer
    assert steps < 25 and [event.token_id for event in llm.stream(prompts()[0], GREEDY)] == answer


def drafted_of(text, most=4):
    """What `ngram` drafts behind each token of `text`, which comes token by token."""
    one = Sequence(0, list(text[:1]), 1, GREEDY, 0, frozenset(), 99, 0.0)
    drafter, lengths, found = NgramDrafter(), Always(most), []
    for token in [*text[1:], None]:
        found.append(drafter.draft(drafter.wants([one], lengths)).get(one, []))
        one.token_ids.append(token)
    return found


def test_ngram_copies_what_followed_the_same_two_tokens_last():
    assert drafted_of([1, 2, 3, 4, 1, 2]) == [[], [], [], [], [], [3, 4, 1, 2]]
    assert drafted_of([1, 2, 3, 1, 2, 4, 1, 2], 1)[-1] == [4], "the last time counts"
    assert drafted_of([9, 1, 2, 3, 8, 1, 2, 4, 9, 1, 2], 1)[-1] == [3], "of several the one with more before it"
    assert drafted_of([5, 5, 5]) == [[], [], [5, 5, 5, 5]], "where the copy ends, the draft goes on with itself"
    assert drafted_of([1, 2, 1, 2], 5)[-1] == [1, 2, 1, 2, 1]
    drafter, one = NgramDrafter(), Sequence(0, [1, 2, 3, 1, 2], 5, GREEDY, 0, frozenset(), 99, 0.0)
    for _ in range(2):  # after a step that broke off nothing is new
        wanted = drafter.wants([one], Always(2))
    assert wanted == []


def test_a_draft_is_as_long_as_pays_and_stops_and_starts_again():
    lengths, one = Lengths(8), Sequence(0, [1] * 10, 10, GREEDY, 0, frozenset(), 999, 0.0)
    lengths.begin(1)
    assert lengths.of(one) == 0, "the time of a step without drafts is not known yet"
    lengths.timed(1, 0, 0.010)
    lengths.begin(1)
    assert lengths.of(one) > 0, "then a draft finds its own"
    for _ in range(3):
        lengths.timed(1, 4, 0.016)
    lengths.begin(1)
    assert lengths.price == pytest.approx(0.15) and lengths.of(one) == 8
    for _ in range(60):  # every second token: 0.5 ** 2 > 0.15 > 0.5 ** 3
        lengths.verified(one, 8, 1)
    assert lengths.of(one) == 2
    for pause in (PAUSE_TOKENS, 2 * PAUSE_TOKENS, 4 * PAUSE_TOKENS):
        while lengths.of(one):
            lengths.verified(one, lengths.of(one), 0)
        for _ in range(pause - 1):
            one.append(1)
            assert lengths.of(one) == 0
        one.append(1)
        assert lengths.of(one) == 1, "it starts again"


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_speculative_tokens": 0}, "num_speculative_tokens: expected 1 to 16"),
        ({"num_speculative_tokens": 17}, "num_speculative_tokens: expected 1 to 16"),
        ({"study": StudyOptions(kv_cache=False)}, "speculate: expected a KV cache"),
        ({"overlap": True}, "speculate: expected .* read at once"),
    ],
)
def test_bad_options_are_refused_before_anything_is_read(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        LLM(tmp_path / "none", device="cpu", **{"speculate": "ngram", **options})


@pytest.mark.more
@pytest.mark.needs("weights")
def test_stop_texts_and_real_text_end_where_they_do_without_speculation():
    options = {"device": "cpu", "max_num_seqs": 4, "max_model_len": 512}
    chat = [{"role": "user", "content": "Count from one to ten: one, two, three, four, five. Again: one, two, three,"}]
    stops = ((), (" four, five",), ("e, f", "three, fo"), ("\n",))
    params = [SamplingParams(max_tokens=32, stop=stop) for stop in stops]
    outputs = []
    for more in ({}, {"speculate": "ngram", "num_speculative_tokens": 6}):
        llm = LLM(fetch(), **options, **more)
        if more:
            llm.core.speculator.lengths = Always(6)
            seen = watched(llm)
        outputs.append(
            [
                (output["text"], output["token_ids"], output["finish_reason"])
                for output in llm.generate([chat] * 4, params)
            ]
        )
    assert outputs[0] == outputs[1] and sum(accepted for _, accepted in seen) > 5
    assert {end for *_, end in outputs[0]} >= {"stop"}
