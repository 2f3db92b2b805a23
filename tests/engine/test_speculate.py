"""Speculation: the answers of an engine that drafts are those of one that does not."""

import math
from dataclasses import replace

import pytest
import torch
from speculating import LIBRARY, Known, exact, prefixes, speculating, watched
from tiny_model import break_off_behind_the_draw, poisoned, prompts, tiny_llm, with_graphs

from rooflab.engine.llm import LLM, SamplingParams
from rooflab.engine.model_files import fetch
from rooflab.engine.scheduler import Step
from rooflab.engine.sequence import Sequence
from rooflab.engine.speculate import rows
from rooflab.engine.speculate.lengths import Lengths
from rooflab.engine.speculate.ngram import NgramDrafter
from rooflab.engine.speculate.state import PAUSE
from rooflab.reference.sample_law import support

GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
ASKED = [
    GREEDY,
    SamplingParams(max_tokens=30, temperature=1.2, top_k=50, seed=1, logprobs=3),
    SamplingParams(max_tokens=30, temperature=0.9, top_p=0.8, min_p=0.02, seed=2, presence_penalty=1.5),
    SamplingParams(max_tokens=30, repetition_penalty=1.4, frequency_penalty=0.5, logprobs=0),
    SamplingParams(max_tokens=30, logit_bias={7: 3.0, 11: -5.0, 400: 4.0}, min_tokens=20, stop_token_ids=(400,)),
    SamplingParams(max_tokens=17, temperature=0.7, n=3, seed=5),
    replace(GREEDY, max_tokens=1),
    replace(GREEDY, max_tokens=2),
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


def shown(answers):
    """Tokens and ends."""
    return [[(one.token_ids, one.finish_reason) for one in several] for several in answers]


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
        outputs = [output.outputs for output in llm.generate(prompts(), ASKED)]
        assert shown(outputs) == shown(plain)
        assert llm.scheduler.blocks.num_free == llm.scheduler.blocks.num_blocks
    for several, others in zip(outputs, plain, strict=True):
        for one, other in zip(several, others, strict=True):
            assert (one.logprobs is None) == (other.logprobs is None)
            for found, wanted in zip(one.logprobs or (), other.logprobs or (), strict=True):
                assert found == pytest.approx(wanted, abs=1e-4)
    assert sum(drafted for drafted, _ in seen) > 60 and sum(accepted for _, accepted in seen) > 20
    whole = {tuple(prompt + one.token_ids) for prompt, several in zip(prompts(), plain, strict=True) for one in several}
    for prefix in published:
        assert any(tokens[: len(prefix)] == prefix for tokens in whole), "a rejected token can be found"


def test_steps_are_fewer_and_one_token_is_delivered_once(tmp_path, plain):
    llm = speculating(tmp_path, drafter=Known(0))
    llm.runner.drafter.right = 1.0
    llm.runner.drafter.answers = {0: plain[0][0].token_ids}
    number, got, steps = llm.add_request(prompts()[0], GREEDY), [], 0
    while llm.has_work:
        stepped = llm.step()
        assert all(one.request_id == number for one in stepped)
        got += stepped
        steps += 1
        exact(llm)
    assert len(got) == 40 and got[0].output_ids == plain[0][0].token_ids and steps < 25
    stream = [event.token_id for event in llm.stream(prompts()[0], GREEDY)]
    assert stream == plain[0][0].token_ids


@pytest.mark.sampled(2)
@pytest.mark.parametrize("asked", [
    {"temperature": 1.3}, {"temperature": 1.0, "top_k": 3}, {"temperature": 1.1, "top_p": 0.7},
    {"temperature": 1.0, "min_p": 0.4},
], ids=str)  # fmt: skip
@torch.inference_mode()
def test_sampled_tokens_follow_the_law_without_speculation(tmp_path, monkeypatch, asked):
    """200,000 tokens of a model whose logits depend on the last token alone, so that each law is known exactly; and the
    same count finds the fault of an engine that accepts a draft without asking."""
    V, count = 6, 200_000
    table = 1.5 * torch.randn(V, V, generator=torch.Generator().manual_seed(3))
    laws = torch.stack([_law(row, asked) for row in table])

    def distance(seed, draws):
        swap = {"gemm": "library", "sample": "naive"}  # which draws all rows at once
        llm = speculating(tmp_path, {"vocab_size": V}, num_kv_blocks=2000, seed=seed, swap=swap)
        llm.runner.model.forward = lambda step, *_: table[_last(step)]
        seen, pairs = watched(llm), torch.zeros(V, V)
        while pairs.sum() < draws:
            made = llm.generate([[n % V, n // V % V] for n in range(256)],
                                SamplingParams(max_tokens=60, ignore_eos=True, **asked))  # fmt: skip
            for output in made:
                ids = torch.tensor(output["token_ids"])
                pairs += torch.bincount(ids[:-1] * V + ids[1:], minlength=V * V).view(V, V)
        assert sum(one for one, _ in seen) > draws / 4, "few tokens were drafted"
        each = pairs.sum(1, keepdim=True)
        return float((pairs / each - laws).abs().sum(1).max()) / 2, float(each.min())

    found, least = distance(1, count)
    bound = 2 * math.sqrt(V / least)
    assert found < bound < 0.1
    monkeypatch.setattr("rooflab.engine.model_runner.accepted", _believing)
    assert distance(1, 20_000)[0] > 2 * bound


def _law(logits, asked):
    """The law (V,) of a token, in fp64."""
    temperature = asked["temperature"]
    kept = support(logits, temperature, asked.get("top_k", 0), asked.get("top_p", 1.0), asked.get("min_p", 0.0))
    scores = (logits.double() / temperature).masked_fill(~kept.kept, -math.inf)
    return scores.softmax(-1)


def _last(step):
    return step.token_ids if step.drawn is None else step.token_ids[step.drawn]


def _believing(sequences, drawn):
    found, row = [], 0
    for one in sequences:
        row += len(one.draft) + 1
        found.append([*one.draft, drawn[row - 1]])
    return found


@pytest.mark.parametrize("steps", range(1, 9))
def test_a_request_may_be_dropped_after_any_step(tmp_path, plain, steps):
    llm = poisoned(speculating(tmp_path, drafter=Known(steps), block_size=4, num_kv_blocks=20, prefill_chunk=9))
    llm.runner.drafter.answers = {0: plain[0][0].token_ids, 1: plain[0][0].token_ids}
    dropped, other = (llm.add_request(prompts()[0], GREEDY) for _ in range(2))
    got = []
    for number in range(60):
        if number == steps:
            assert llm.abort(dropped) and not llm.abort(dropped)
        before = len(got)
        got += [one.request_id for one in llm.step() if one.request_id == other]
        exact(llm)
        assert len(got) - before <= 5
    assert len(got) == 40 and llm.scheduler.blocks.num_free == 20 and not llm.has_work


def test_a_step_that_breaks_off_loses_no_token(tmp_path, plain):
    llm = speculating(tmp_path, drafter=Known(1), num_kv_blocks=64)
    llm.runner.drafter.answers = {0: plain[0][0].token_ids}
    stream = llm.stream(prompts()[0], GREEDY)
    seen = [next(stream).token_id for _ in range(9)]
    break_off_behind_the_draw(llm)
    assert seen + [event.token_id for event in stream] == plain[0][0].token_ids
    assert llm.scheduler.blocks.num_free == 64


def test_a_step_without_drafts_replays_a_graph(tmp_path, plain):
    llm = with_graphs(speculating(tmp_path, block_size=4, num_kv_blocks=60))
    replayed, graphs = [], llm.runner.graphs
    llm.runner.graphs = lambda step: replayed.append(1) or graphs(step)
    assert llm.generate([prompts()[0]], GREEDY)[0]["token_ids"] == plain[0][0].token_ids and replayed


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
    for _ in range(30):
        lengths.verified(one, 8, 8)
    assert lengths.of(one) == 8
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
    for _ in range(100):
        lengths.timed(1, 4, 0.018)
    lengths.begin(1)
    assert lengths.price == pytest.approx(0.2) and lengths.of(one) == 0, "a step without drafts is timed again"
    lengths.timed(1, 0, 0.010)
    lengths.begin(1)
    assert lengths.of(one) == 1
    lengths.begin(64)
    assert lengths.idle and lengths.of(one) == 0, "steps of 64 sequences have another price, which is not known"
    for _ in range(255):
        lengths.timed(64, 0, 0.010)
    lengths.timed(64, 64, 0.030)
    lengths.begin(64)
    assert lengths.idle, "a token costs twice its share of a step"
    for _ in range(256):
        lengths.timed(64, 0, 0.010)
    lengths.begin(64)
    assert not lengths.idle, "a step now and then may find another price"


def test_a_stop_token_within_a_draft_ends_tokens_and_log_probabilities(tmp_path, plain):
    answer = plain[0][0].token_ids
    stop = next(place for place in range(6, 40) if answer[place] not in answer[:place])
    llm = speculating(tmp_path, drafter=Known(2), num_speculative_tokens=16)
    llm.runner.drafter.right, llm.runner.drafter.answers = 1.0, {0: answer}
    params = replace(GREEDY, logprobs=1, stop_token_ids=(answer[stop],))
    found = llm.generate([prompts()[0]], params)[0].outputs[0]
    assert found.token_ids == answer[: stop + 1] and found.finish_reason == "stop"
    assert [next(iter(shown)) for shown in found.logprobs] == found.token_ids


def test_a_step_is_timed_for_its_price(tmp_path):
    llm = speculating(tmp_path)
    llm.core.lengths.adapts = True
    timed, noted = [], llm.core.lengths.timed
    llm.core.lengths.timed = lambda *of: timed.append(of) or noted(*of)
    llm.generate([[5, 6] * 20], replace(GREEDY, max_tokens=60))
    assert {bool(drafted) for _, drafted, _ in timed} == {False, True} and all(seconds > 0 for *_, seconds in timed)


def test_bad_options_are_refused_before_anything_is_read(tmp_path):
    for options, message in [
        ({"speculate": "best"}, "speculate: expected ngram.*, got 'best'"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens: expected 1 to 16, got 0"),
        ({"num_speculative_tokens": 17}, "num_speculative_tokens: expected 1 to 16, got 17"),
        ({"num_speculative_tokens": 2.0}, "num_speculative_tokens: expected an integer, got 2.0"),
        ({"kv_cache": False}, "speculate: expected a KV cache.*, got kv_cache=False"),
        ({"overlap": True}, "speculate: expected .* read at once, got overlap=True"),
    ]:
        with pytest.raises(ValueError, match=message):
            LLM(tmp_path / "none", device="cpu", **{"speculate": "ngram", **options})
    with pytest.raises(ValueError, match=r"expected at most 6, with a token before and one behind .* \(8\), got 7"):
        speculating(tmp_path, max_model_len=8, num_speculative_tokens=7)


def test_penalties_see_the_draft_before_a_token_and_none_after(tmp_path):
    """Each row of a draft is edited by the tokens before it."""
    one = Sequence(0, [1, 2], 1, SamplingParams(presence_penalty=1.0, logit_bias={4: 1.0}), 0, frozenset(), 99, 0.0)
    one.counts, one.draft = {2: 1}, [4, 2]
    from rooflab.engine.model_runner import SamplingTensors

    made = SamplingTensors([one], torch.device("cpu")).taken(torch.tensor([0, 0, 0]).numpy(), rows.ramp(
        torch.tensor([3]).numpy()))  # fmt: skip
    edits = made.edits()
    assert edits["edit_offsets"].tolist() == [0, 2, 4, 6] and edits["edit_ids"].tolist() == [4, 2] * 3
    assert edits["edit_counts"].tolist() == [-1, 1, 1, 1, 1, 2] and one.counts == {2: 1}


@pytest.mark.needs("weights")
def test_stop_texts_and_real_text_end_where_they_do_without_speculation():
    options = {"device": "cpu", "max_num_seqs": 4, "max_model_len": 512}
    chat = [{"role": "user", "content": "Count from one to ten: one, two, three, four, five. Again: one, two, three,"}]
    stops = ((), (" four, five",), ("e, f", "three, fo"), ("\n",))
    params = [SamplingParams(max_tokens=48, stop=stop) for stop in stops]
    outputs = []
    for more in ({}, {"speculate": "ngram", "num_speculative_tokens": 6}):
        llm = LLM(fetch(), **options, **more)
        if more:
            llm.core.lengths.adapts = False
            seen = watched(llm)
        outputs.append([(output["text"], output["token_ids"], output["finish_reason"])
                        for output in llm.generate([chat] * 4, params)])  # fmt: skip
    assert outputs[0] == outputs[1] and sum(accepted for _, accepted in seen) > 10
    assert {end for *_, end in outputs[0]} >= {"stop"}
