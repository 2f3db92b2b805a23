"""The options of a request: several answers, penalties, biases, a least length, log-probabilities, stop texts."""

import itertools
import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_model import prompts, tiny_llm, tokens, write_model

from rooflab.engine.llm import LLM, SamplingParams
from rooflab.engine.sampling import SamplingTensors
from rooflab.engine.sequence import MODEL_SETTINGS, Sequence
from rooflab.engine.serve.requests import CompletionRequest
from rooflab.engine.stopping import StopText

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=6, temperature=1.0, seed=5)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    return tiny_llm(tmp_path_factory.mktemp("m"), swap={"gemm": "library"})


@pytest.fixture(scope="module")
def greedy(llm):
    return llm.generate(prompts(), GREEDY)


def test_several_answers_share_the_prompt_and_are_those_of_their_seeds(llm, monkeypatch):
    prompt, seen, schedule = [3] * 40, [], llm.scheduler.schedule
    monkeypatch.setattr(llm.scheduler, "schedule", lambda *drafting: seen.append(schedule(*drafting)) or seen[-1])
    (output,) = llm.generate([prompt], replace(DRAWN, n=3))
    found = [answer.token_ids for answer in output.outputs]
    computed = [(chunk.start, chunk.end) for step in seen for chunk in step.chunks]
    assert computed == [(0, 40), (32, 40), (32, 40)], "two full pages of the prompt are computed once"
    assert found == [llm.generate([prompt], replace(DRAWN, seed=5 + i))[0]["token_ids"] for i in range(3)]
    assert len({tuple(ids) for ids in found}) == 3
    for call in (llm.add_request, lambda *arguments: next(llm.stream(*arguments))):
        with pytest.raises(ValueError, match="n: expected 1 where one answer comes token by token, got 3"):
            call(prompt, replace(DRAWN, n=3))


def test_a_bias_decides_and_harms_no_batch_mate(llm, greedy):
    params = [GREEDY] * 8
    params[3] = replace(GREEDY, logit_bias={7: 1e4})
    found, wanted = tokens(llm.generate(prompts(), params)), tokens(greedy)
    assert found[3] == [7] * 12 and found[:3] + found[4:] == wanted[:3] + wanted[4:]
    for wrong in ({"logit_bias": {1024: 1.0}}, {"stop_token_ids": (-1,), "min_tokens": 2}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}: expected token ids below 1024"):
            llm.generate([[1]], replace(GREEDY, **wrong))


KEPT = {"eos_token_id": 3, "temperature": 0.5, "top_k": 20, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.5}


def test_a_generation_config_is_kept_as_transformers_does_or_refused_by_name(tmp_path):
    from transformers import AutoModelForCausalLM

    file, prompt = write_model(tmp_path) / "generation_config.json", [9, 8, 7, 6, 5]
    for name in (
        "begin_suppress_tokens",
        "suppress_tokens",
        "bad_words_ids",
        "min_new_tokens",
        "no_repeat_ngram_size",
        "sequence_bias",
        "num_beams",
    ):
        file.write_text(json.dumps({"temperature": 0.6, name: 5}))
        with pytest.raises(ValueError, match=f"model: generation_config.json: {name} 5 is not implemented"):
            LLM(tmp_path, device="cpu")
    file.unlink()
    free = LLM(tmp_path, device="cpu").generate([prompt], GREEDY)[0]["token_ids"]
    file.write_text(json.dumps(KEPT))
    llm = LLM(tmp_path, device="cpu")
    own = llm.generate([prompt], replace(GREEDY, ignore_eos=False))[0]["token_ids"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    theirs = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=12)[0].tolist()
    assert own == theirs[5:] != free
    (unsaid,) = llm.submit(prompt, CompletionRequest(model="m", prompt=prompt).params(9, None))
    assert [getattr(unsaid.params, name) for name in MODEL_SETTINGS] == [KEPT[name] for name in MODEL_SETTINGS]
    (said,) = llm.submit(prompt, SamplingParams(temperature=0.7, repetition_penalty=1.0))
    assert (said.params.temperature, said.params.top_k, said.params.repetition_penalty) == (0.7, 20, 1.0)


def test_no_end_before_the_least_length(llm, greedy):
    wanted = greedy[2]["token_ids"]
    params = replace(GREEDY, stop_token_ids=(wanted[0],))
    assert llm.generate([prompts()[2]], params)[0]["token_ids"] == wanted[:1]
    longer = llm.generate([prompts()[2]], replace(params, min_tokens=5))[0]["token_ids"]
    assert len(longer) >= 5 and wanted[0] not in longer[:5]


def test_a_top_p_of_0_keeps_the_likeliest_token(llm, greedy):
    assert tokens(llm.generate(prompts(), replace(GREEDY, temperature=2.0, top_p=0))) == tokens(greedy)


def test_a_penalty_counts_the_prompt_or_the_answer_alone(llm):
    own = lambda **asked: llm.generate([[5, 6, 7]], replace(GREEDY, **asked))[0]["token_ids"]
    assert own(logit_bias={5: 110.0, 8: 90.0})[0] == 5, "no penalty"
    assert own(logit_bias={5: 110.0, 8: 90.0}, repetition_penalty=1e6)[0] == 8, "the prompt counts"
    assert own(logit_bias={5: 110.0, 8: 90.0}, presence_penalty=2.0, frequency_penalty=2.0)[0] == 5, "it does not"
    often = own(logit_bias={8: 100.0, 9: 90.0}, frequency_penalty=2.0)
    assert set(often) == {8, 9} and often[:2] == [8, 8], "a token that came often gives way to the next"


def test_the_edits_of_a_step_are_one_list_of_what_its_rows_change():
    """A bias, end tokens that may not come yet, and the tokens of answer and, with the repetition penalty, prompt."""
    every = [
        GREEDY,
        replace(GREEDY, logit_bias={7: 2.0, 5: -1.0}, repetition_penalty=1.5),
        replace(GREEDY, min_tokens=3, presence_penalty=0.5),
        replace(GREEDY, logprobs=2),
    ]
    sequences = [Sequence(n, [5, 6], 2, params, n, frozenset({9}), 99, 0.0) for n, params in enumerate(every)]
    for sequence in sequences:
        for token in (8, 5, 8):
            sequence.append(token)
    sequences[2].token_ids.pop()  # two tokens of three
    found = SamplingTensors(sequences, torch.device("cpu")).edits()
    assert found["edit_offsets"].tolist() == [0, 0, 4, 7, 7]
    assert found["edit_ids"].tolist() == [7, 5, 6, 8, 9, 8, 5]
    assert found["edit_counts"].tolist() == [-1, 1, 0, 2, -1, 2, 1]
    assert found["edit_bias"].tolist() == [2.0, -1.0, 0.0, 0.0, -math.inf, 0.0, 0.0]
    assert found["repetition_penalty"].tolist() == [1.0, 1.5, 1.0, 1.0]
    assert found["presence_penalty"].tolist() == [0.0, 0.0, 0.5, 0.0]
    assert SamplingTensors(sequences[::3], torch.device("cpu")).edits() == {}


def test_logprobs_are_of_the_raw_logits_with_the_drawn_token_first(llm, greedy):
    params = [replace(GREEDY, logprobs=3, logit_bias={7: 1e4}), *[replace(GREEDY, logprobs=0)] * 7]
    first, *others = llm.generate(prompts(), params)
    kept = first.outputs[0].logprobs
    assert len(kept) == 12 and all(next(iter(one)) == 7 and len(one) == 4 for one in kept)
    assert max(kept[0], key=kept[0].get) == greedy[0]["token_ids"][0], "what would have been drawn without the bias"
    for output, plain in zip(others, greedy[1:], strict=True):
        assert [[*one] for one in output.outputs[0].logprobs] == [[token] for token in plain["token_ids"]]
        assert all(0 > value > -20 for one in output.outputs[0].logprobs for value in one.values())
    assert greedy[0].outputs[0].logprobs is None


def stream_of(pieces):
    """Stands for a text stream: token `i` completes the `i`-th piece."""
    return SimpleNamespace(push=pieces.__getitem__, flush=str)


TEXTS = st.text("ab", max_size=24)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)


@given(text=TEXTS, stops=STOPS, cuts=st.lists(st.integers(0, 24), max_size=8))
def test_trap_33_stop_texts_do_not_depend_on_where_tokens_cut_the_text(text, stops, cuts):
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    found = StopText(stops, stream_of(pieces))
    shown = ""
    for number in range(len(pieces)):
        ended = found.push(number)
        shown += found.take(ended)
        assert text.startswith(shown)
        if ended:
            break
    found.end()
    shown += found.take(True)
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    assert found.text == shown == (text[: min(ends)[1]] if ends else text) and found.stopped == bool(ends)


def test_no_stop_text_counts_within_the_least_length():
    found = StopText(["b"], stream_of("abcb"), min_tokens=2)
    assert [found.push(token) for token in range(4)] == [False, False, False, True] and found.text == "abc"


def test_a_special_token_is_a_stop_text_by_its_name(tmp_path):
    special = replace(GREEDY, stop=("<|end|>",), ignore_eos=True, logit_bias={258: 100.0})
    answer = LLM(write_model(tmp_path), device="cpu").generate([[5]], special)[0]
    assert (answer["token_ids"], answer["text"], answer["finish_reason"]) == ([258], "", "stop")


@pytest.mark.parametrize("name, values", [
    ("max_tokens", [0]), ("min_tokens", [-1, 13, 0.5]), ("n", [0, 2, 2.5]), ("logprobs", [-1, 21, 1.5]),
    ("temperature", [-0.1, math.nan, "x", 1e39]), ("top_k", [-1, 2**31]), ("top_p", [-0.1, 1.1]), ("min_p", [-0.5]),
    ("stop", ["word", ("",), (1,)]), ("stop_token_ids", [5, (1.5,)]), ("seed", [-1, 1.5]),
    ("repetition_penalty", [0.0, math.inf, 5e-324]), ("presence_penalty", [2.1]), ("frequency_penalty", [math.nan]),
    ("logit_bias", [{1: math.nan}, {7: -1e39}, {"a": 1}, [1]]),
])  # fmt: skip
def test_a_wrong_field_is_named(name, values):
    for value in values:
        with pytest.raises(ValueError, match=f"^{name}: expected"):
            replace(GREEDY, **{name: value})
