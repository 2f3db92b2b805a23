"""Speculation: the answers of an engine that drafts are those of one that does not."""

from dataclasses import replace

import pytest
import torch
from speculating import LIBRARY, Known, exact, only_accepted, prefixes, speculating, watched
from tiny_model import poisoned, prompts, tiny_llm

from rooflab.engine.llm import LLM, SamplingParams
from rooflab.engine.model_files import fetch
from rooflab.engine.scheduler import Step
from rooflab.engine.sequence import Sequence
from rooflab.engine.speculate.lengths import Lengths
from rooflab.engine.speculate.ngram import NgramDrafter
from rooflab.engine.speculate.state import PAUSE

GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
ASKED = [
    GREEDY,
    SamplingParams(max_tokens=30, temperature=1.2, top_k=50, seed=1, logprobs=3),
    SamplingParams(max_tokens=30, temperature=0.9, top_p=0.8, min_p=0.02, seed=2, presence_penalty=1.5),
    SamplingParams(max_tokens=30, repetition_penalty=1.4, frequency_penalty=0.5, logprobs=0),
    SamplingParams(max_tokens=30, logit_bias={7: 3.0, 11: -5.0, 400: 4.0}, min_tokens=20, stop_token_ids=(400,)),
    SamplingParams(max_tokens=30, logit_bias={5: 9.0, 6: 8.0, 7: 7.0}, presence_penalty=1.0, frequency_penalty=0.7),
    SamplingParams(max_tokens=17, temperature=0.7, n=3, seed=5),
    replace(GREEDY, max_tokens=1),
]
"""Of all kinds, for the eight prompts of `tiny_model`."""
COVER = [
    {"num_speculative_tokens": 1},
    {},
    {"num_speculative_tokens": 8, "block_size": 1, "prefill_chunk": 3, "num_kv_blocks": 110},
    {"block_size": 4, "prefill_chunk": 5, "num_kv_blocks": 27},
    {"block_size": 3, "prefix_caching": False, "continuous_batching": False, "max_num_seqs": 3},
    {"block_size": 64, "max_num_seqs": 3, "max_num_batched_tokens": 9, "num_speculative_tokens": 16},
    {"block_size": 4, "chunked_prefill": False, "num_kv_blocks": 30},
]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The answers without speculation, a list for each prompt."""
    llm = tiny_llm(tmp_path_factory.mktemp("m"), **LIBRARY)
    return [output.outputs for output in llm.generate(prompts(), ASKED)]


def agree(outputs, plain):
    """Raises `AssertionError` unless tokens, ends and log-probabilities are those of `plain`."""
    for output, several in zip(outputs, plain, strict=True):
        for one, other in zip(output.outputs, several, strict=True):
            assert (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason)
            assert logprobs(one) == pytest.approx(logprobs(other), abs=1e-4)


def logprobs(answer):
    return [value for kept in answer.logprobs or () for pair in kept.items() for value in pair]


@pytest.mark.sampled(3, 2)
@pytest.mark.parametrize("options", COVER, ids=str)
@pytest.mark.parametrize("kind", ["ngram", "known"])
@torch.inference_mode()
def test_answers_are_those_without_speculation(tmp_path, plain, options, kind):
    """Greedy and sampled rows, with and without drafts, in a batch; chunks, preemption, prefixes, NaN in free pages."""
    drafter = Known(str(options)) if kind == "known" else None
    llm = poisoned(speculating(tmp_path, drafter=drafter, **options))
    seen, published = watched(llm), prefixes(llm)
    for again in range(2):  # the second time with prefixes that are there
        if drafter is not None:
            flat = [one.token_ids for several in plain for one in several]
            drafter.answers = dict(enumerate(flat, again * len(flat)))
        agree(llm.generate(prompts(), ASKED), plain)
        assert llm.scheduler.blocks.num_free == llm.scheduler.blocks.num_blocks
    assert sum(drafted for drafted, _ in seen) > 60 and sum(accepted for _, accepted in seen) > 20
    only_accepted(
        published, [prompt + one.token_ids for prompt, own in zip(prompts(), plain, strict=True) for one in own]
    )


def test_steps_are_fewer_and_one_token_is_delivered_once(tmp_path, plain):
    answer = plain[0][0].token_ids
    llm = speculating(tmp_path, drafter=Known(0))
    llm.runner.drafter.right, llm.runner.drafter.answers = 1.0, {0: answer, 1: answer}
    seen, number, got, steps = watched(llm), llm.add_request(prompts()[0], GREEDY), [], 0
    while llm.has_work:
        got += llm.step()
        steps += 1
        exact(llm)
    assert [one.request_id for one in got] == [number] * 40 and got[0].output_ids == answer
    assert steps + sum(accepted for _, accepted in seen) == 40, "a draft ends before the last token"
    assert steps < 25 and [event.token_id for event in llm.stream(prompts()[0], GREEDY)] == answer


def drafted_of(text, most=4):
    """What `ngram` drafts behind each token of `text`, which comes token by token."""
    one = Sequence(0, list(text[:1]), 1, GREEDY, 0, frozenset(), 99, 0.0)
    drafter, lengths, found = NgramDrafter(), Lengths(most, adapts=False), []
    for token in [*text[1:], None]:
        wanted = drafter.wants([one], lengths)
        drafter.draft(Step(1, [], [], wanted))
        found.append(one.draft if wanted else [])
        one.draft = []
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
        wanted = drafter.wants([one], Lengths(2, adapts=False))
    assert wanted == []


def test_a_draft_is_as_long_as_pays_and_stops_and_starts_again():
    lengths, one = Lengths(8), Sequence(0, [1] * 10, 10, GREEDY, 0, frozenset(), 999, 0.0)
    lengths.begin(1)
    assert lengths.of(one) == 0, "the time of a step without drafts is not known yet"
    for _ in range(3):
        lengths.timed(1, 0, 0.010)
        lengths.timed(1, 4, 0.016)
    lengths.begin(1)
    assert lengths.price == pytest.approx(0.15) and lengths.of(one) == 8
    for _ in range(60):  # every second token: 0.5 ** 2 > 0.15 > 0.5 ** 3
        lengths.verified(one, 8, 1)
    assert lengths.of(one) == 2
    for pause in (PAUSE, 2 * PAUSE, 4 * PAUSE):
        while lengths.of(one):
            lengths.verified(one, lengths.of(one), 0)
        for _ in range(pause - 1):
            one.append(1)
            assert lengths.of(one) == 0
        one.append(1)
        assert lengths.of(one) == 1, "it starts again"


def test_a_stop_token_within_a_draft_ends_tokens_and_log_probabilities(tmp_path, plain):
    answer = plain[0][0].token_ids
    stop = next(place for place in range(6, 40) if answer[place] not in answer[:place])
    llm = speculating(tmp_path, drafter=Known(2), num_speculative_tokens=16)
    llm.runner.drafter.right, llm.runner.drafter.answers = 1.0, {0: answer}
    params = replace(GREEDY, logprobs=1, stop_token_ids=(answer[stop],))
    found = llm.generate([prompts()[0]], params)[0].outputs[0]
    assert found.token_ids == answer[: stop + 1] and found.finish_reason == "stop"
    assert [next(iter(shown)) for shown in found.logprobs] == found.token_ids


@pytest.mark.parametrize("options, message", [
    ({"speculate": "best"}, "speculate: expected ngram"),
    ({"num_speculative_tokens": 0}, "num_speculative_tokens: expected 1 to 16"),
    ({"num_speculative_tokens": 17}, "num_speculative_tokens: expected 1 to 16"),
    ({"num_speculative_tokens": 2.0}, "num_speculative_tokens: expected an integer"),
    ({"kv_cache": False}, "speculate: expected a KV cache"),
    ({"overlap": True}, "speculate: expected .* read at once"),
])  # fmt: skip
def test_bad_options_are_refused_before_anything_is_read(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        LLM(tmp_path / "none", device="cpu", **{"speculate": "ngram", **options})


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
            llm.core.lengths.adapts = False
            seen = watched(llm)
        outputs.append([(output["text"], output["token_ids"], output["finish_reason"])
                        for output in llm.generate([chat] * 4, params)])  # fmt: skip
    assert outputs[0] == outputs[1] and sum(accepted for _, accepted in seen) > 5
    assert {end for *_, end in outputs[0]} >= {"stop"}
