"""What a request may ask for: several answers, penalties, biases, a least length, log-probabilities, stop texts."""

import json
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_model import break_off_behind_the_draw, prompts, tiny_llm, write_model

from rooflab.engine.llm import LLM, SamplingParams
from rooflab.engine.model_runner import SamplingTensors
from rooflab.engine.sequence import OF_MODEL, Sequence
from rooflab.engine.serve.requests import CompletionRequest
from rooflab.engine.stopping import StopText
from rooflab.kernels.sample._args import edited
from rooflab.reference.sample_rules import Edits

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=6, temperature=1.0, seed=5)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    return tiny_llm(tmp_path_factory.mktemp("m"), swap={"gemm": "library"})


@pytest.fixture(scope="module")
def greedy(llm):
    return llm.generate(prompts(), GREEDY)


def test_several_answers_share_the_prompt_and_are_those_of_their_seeds(llm, monkeypatch):
    prompt = [3] * 40
    seen = []
    schedule = llm.scheduler.schedule
    monkeypatch.setattr(llm.scheduler, "schedule", lambda *drafting: seen.append(schedule(*drafting)) or seen[-1])
    (output,) = llm.generate([prompt], replace(DRAWN, n=3))
    found = [answer.token_ids for answer in output.outputs]
    assert len(found) == 3 and len({tuple(ids) for ids in found}) == 3
    computed = [(chunk.start, chunk.end) for step in seen for chunk in step.chunks]
    assert computed == [(0, 40), (32, 40), (32, 40)], "two full pages of the prompt are computed once"
    alone = [llm.generate([prompt], replace(DRAWN, seed=5 + i))[0]["token_ids"] for i in range(3)]
    assert found == alone
    for call in (llm.add_request, lambda *arguments: next(llm.stream(*arguments))):
        with pytest.raises(ValueError, match="n: expected 1 where one answer comes token by token, got 3"):
            call(prompt, replace(DRAWN, n=3))


def test_a_bias_decides_and_harms_no_batch_mate(llm, greedy):
    params = [GREEDY] * 8
    params[3] = replace(GREEDY, logit_bias={7: 1e4})
    outputs = llm.generate(prompts(), params)
    assert outputs[3]["token_ids"] == [7] * 12
    others = [i for i in range(8) if i != 3]
    assert [outputs[i]["token_ids"] for i in others] == [greedy[i]["token_ids"] for i in others]
    with pytest.raises(ValueError, match="logit_bias: expected token ids below 1024, got 1024"):
        llm.generate([[1]], replace(GREEDY, logit_bias={1024: 1.0}))
    with pytest.raises(ValueError, match="stop_token_ids: expected token ids below 1024, got -1"):
        llm.generate([[1]], replace(GREEDY, stop_token_ids=(-1,), min_tokens=2))


def test_numbers_that_fp32_lacks_end_no_step(llm, greedy):
    """A request with a top_p or a penalty that rounds to 0 once ended the engine's process, and all other requests."""
    alone = llm.generate(prompts(), replace(DRAWN, max_tokens=12, ignore_eos=True, top_p=5e-324))
    assert [one["token_ids"] for one in alone] == [one["token_ids"] for one in greedy]
    for change, wanted in (
        ({"repetition_penalty": 5e-324}, r"repetition_penalty: expected a number in \[1e-06, 1000000.0\], got 5e-324"),
        ({"temperature": 1e39}, "temperature: expected a number in"),
        ({"logit_bias": {7: -1e39}}, "logit_bias: expected finite numbers by token id"),
    ):
        with pytest.raises(ValueError, match=wanted):
            replace(GREEDY, **change)


HARMLESS = frozenset(
    "max_length max_new_tokens max_time num_return_sequences do_sample"  # a request says them
    " early_stopping length_penalty"  # of beams, which are refused
    " remove_invalid_values renormalize_logits pad_token_id bos_token_id decoder_start_token_id"
    " use_mtp is_assistant num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold"
    " prompt_lookup_num_tokens max_matching_ngram_size assistant_early_exit assistant_lookbehind target_lookbehind"
    " assistant_ensemble_weight speculation_type use_cache cache_implementation cache_config max_cache_len"
    " compile_config disable_compile continuous_batching_config low_memory prefill_chunk_size"
    " output_attentions output_hidden_states output_scores output_logits return_dict_in_generate"
    " _from_model_config transformers_version".split()
)
KEPT = {"eos_token_id": 3, "suppress_tokens": [5, 2000], "bad_words_ids": [[3], [7]], "temperature": 0.5,
        "top_k": 20, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.5}  # fmt: skip


def test_each_field_of_a_generation_config_is_kept_as_transformers_does_or_refused_by_name(tmp_path):
    from transformers import AutoModelForCausalLM, GenerationConfig

    file, prompt = write_model(tmp_path) / "generation_config.json", [9, 8, 7, 6, 5]
    fields = GenerationConfig().to_dict().keys() - KEPT.keys() - HARMLESS
    for name in sorted(fields):
        file.write_text(json.dumps({"temperature": 0.6, name: 5}))
        with pytest.raises(ValueError, match=f"model: generation_config.json: {name} 5 is not implemented"):
            LLM(tmp_path, device="cpu")
    assert {"begin_suppress_tokens", "min_new_tokens", "no_repeat_ngram_size", "sequence_bias"} <= fields
    file.unlink()
    free = LLM(tmp_path, device="cpu").generate([prompt], GREEDY)[0]["token_ids"]
    kept = {**KEPT, "suppress_tokens": free[:1], "bad_words_ids": [[3], free[1:2]]}
    file.write_text(json.dumps(kept))
    llm = LLM(tmp_path, device="cpu")
    own = llm.generate([prompt], replace(GREEDY, ignore_eos=False))[0]["token_ids"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    theirs = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=12)[0].tolist()
    assert own == theirs[5:] != free and not {*own} & {*free[:2]}
    said = llm.add_request(prompt, SamplingParams(temperature=0.7, repetition_penalty=1.0))
    unsaid = llm.submit(prompt, CompletionRequest(model="m", prompt=prompt).params(9, None))[0].params
    assert [getattr(unsaid, name) for name in OF_MODEL] == [kept[name] for name in OF_MODEL]
    (there,) = [one.params for one in llm.core.unfinished() if one.request_id == said]
    assert (there.temperature, there.top_k, there.repetition_penalty) == (0.7, 20, 1.0)


def test_no_end_before_the_least_length(llm, greedy):
    wanted = greedy[2]["token_ids"]
    params = replace(GREEDY, stop_token_ids=(wanted[0],))
    assert llm.generate([prompts()[2]], params)[0]["token_ids"] == wanted[:1]
    longer = llm.generate([prompts()[2]], replace(params, min_tokens=5))[0]["token_ids"]
    assert len(longer) >= 5 and wanted[0] not in longer[:5]


def test_penalties_are_those_of_their_definitions(llm):
    prompt = [5, 6, 7]
    plain = llm.generate([prompt], replace(GREEDY, max_tokens=1, logprobs=20))[0].outputs[0].logprobs[0]
    best, second = list(plain)[:2]
    # A token that was there loses against the next best; the repetition penalty counts the prompt too.
    penalised = llm.generate([[*prompt, best]], replace(GREEDY, repetition_penalty=1e6))[0]
    assert penalised["token_ids"][0] not in (*prompt, best)
    forced = replace(GREEDY, logit_bias={9: 100.0}, max_tokens=4)
    assert llm.generate([prompt], forced)[0]["token_ids"] == [9] * 4
    logits = []
    run = llm.runner.ops.step

    def watched(*arguments):
        ops = run(*arguments)
        sample = ops.sample

        def noting(values, *rest, **edits):
            logits.append(edited(values, Edits(**edits)))
            return sample(values, *rest, **edits)

        ops.sample = noting
        return ops

    llm.runner.ops.step = watched
    try:
        llm.generate([prompt], replace(forced, presence_penalty=1.0, frequency_penalty=0.5))
        penalised = [float(values[0, 9]) for values in logits]
        logits.clear()
        llm.generate([prompt], forced)
    finally:
        del llm.runner.ops.step
    free = [float(values[0, 9]) for values in logits]
    assert [round(b - a, 3) for a, b in zip(penalised, free, strict=True)] == [0.0, 1.5, 2.0, 2.5]
    assert second != best


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
    (answer,) = first.outputs
    assert len(answer.logprobs) == 12 and all(list(kept)[0] == 7 and len(kept) == 4 for kept in answer.logprobs)
    best = [max(kept, key=lambda token: kept[token]) for kept in answer.logprobs]
    assert best[0] == greedy[0]["token_ids"][0], "what would have been drawn without the bias"
    for output, plain in zip(others, greedy[1:], strict=True):
        assert output["token_ids"] == plain["token_ids"] and plain.outputs[0].logprobs is None
        assert all(len(kept) == 1 and 0 > next(iter(kept.values())) > -20 for kept in output.outputs[0].logprobs)


def test_a_step_that_broke_off_after_the_draw_leaves_one_logprob_a_token(llm):
    number = llm.add_request(prompts()[2], replace(GREEDY, max_tokens=4, logprobs=1))
    break_off_behind_the_draw(llm)
    while llm.scheduler.has_work:
        (sequence,) = llm.step()
    assert sequence.request_id == number and len(sequence.logprobs) == len(sequence.output_ids) == 4
    assert [next(iter(kept)) for kept in sequence.logprobs] == sequence.output_ids


class Pieces:
    """Stands for a text stream: token `i` completes the `i`-th piece."""

    def __init__(self, pieces):
        self.pieces = pieces

    def push(self, token):
        return self.pieces[token]

    def flush(self):
        return ""


TEXTS = st.text("ab", max_size=24)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)


@given(text=TEXTS, stops=STOPS, cuts=st.lists(st.integers(0, 24), max_size=8))
def test_trap_33_stop_texts_do_not_depend_on_where_tokens_cut_the_text(text, stops, cuts):
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in zip(places, places[1:], strict=False)]
    found = StopText(stops, Pieces(pieces))
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
    found = StopText(["b"], Pieces("abcb"), min_tokens=2)
    assert [found.push(token) for token in range(4)] == [False, False, False, True] and found.text == "abc"


def test_a_special_token_is_a_stop_text_by_its_name(tmp_path):
    special = replace(GREEDY, stop=("<|end|>",), ignore_eos=True, logit_bias={258: 100.0})
    answer = LLM(write_model(tmp_path), device="cpu").generate([[5]], special)[0]
    assert (answer["token_ids"], answer["text"], answer["finish_reason"]) == ([258], "", "stop")


def test_bad_requests_are_one_sentence(llm):
    for name, values in {
        **{"max_tokens": [0], "min_tokens": [-1, 13, 0.5], "n": [0, 2, 2.5], "logprobs": [-1, 21, 1.5]},
        **{"temperature": [-0.1, math.nan, "x"], "top_k": [-1, 2**31], "top_p": [0.0, 1.1], "min_p": [-0.5]},
        **{"stop": ["word", ("",), (1,)], "stop_token_ids": [5, (1.5,)], "seed": [-1, 1.5]},
        **{"repetition_penalty": [0.0, math.inf], "presence_penalty": [2.1], "frequency_penalty": [math.nan]},
        "logit_bias": [{1: math.nan}, {"a": 1}, [1]],
    }.items():
        for value in values:
            with pytest.raises(ValueError, match=f"^{name}: expected"):
                replace(GREEDY, **{name: value})
    with pytest.raises(ValueError, match="stop: dummy weights come without a tokenizer; pass stop_token_ids"):
        llm.generate([[1]], replace(GREEDY, stop=("x",)))
    assert not llm.scheduler.has_work
