"""Drafts by models: answers stay the same, all drafts of an equal model are accepted, and bad drafters are refused."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from speculating import speculating, watched
from tiny_model import CONFIG, poisoned, prompts, tiny_llm, write_config, write_model

from rooflab.engine.llm import LLM, SamplingParams
from rooflab.engine.load.weights import dummy_tensors
from rooflab.roofline.architecture import Architecture

GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def eagle(folder, fc=(192, 384), **changes):
    """A head of random weights, with other sizes of attention and MLP than the model's, and the folder it is in."""
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 3, "num_key_value_heads": 1, "intermediate_size": 96}
    write_config(folder, **{**sizes, **changes})
    arch = Architecture.from_config(folder)
    made = {name.removeprefix("model."): tensor for name, tensor in dummy_tensors(arch) if ".layers.0" in name}
    del made["layers.0.input_layernorm.weight"]
    made |= {"fc.weight": torch.randn(fc) / 20, "fc.bias": torch.randn(fc[0]) / 20}
    save_file(made | {"embed_tokens.weight": torch.randn(9, 9)}, folder / "model.safetensors")
    return folder


KINDS = {
    "other model": lambda folder: {"speculate": "draft", "draft": write_config(folder / "draft", **SMALL).parent},
    "eagle": lambda folder: {"speculate": "eagle", "draft": eagle(folder / "eagle")},
}


@torch.inference_mode()
def test_a_draft_equal_to_the_model_is_accepted_whole(tmp_path):
    """Also of sampled requests, whose drafts are drawn with the noise of the draw that verifies them; and also behind a
    draft that was accepted whole, whose last token the drafter had not computed (trap 31)."""
    same = write_config(tmp_path / "same").parent
    llm = poisoned(speculating(tmp_path, speculate="draft", draft=same, block_size=4))
    seen = watched(llm)
    params = [GREEDY, replace(GREEDY, temperature=1.3, seed=3), replace(GREEDY, temperature=0.8, top_k=9, seed=4)]
    llm.generate(prompts()[2:5], params)
    assert all(drafted == accepted for drafted, accepted in seen)
    given = sum(accepted for _, accepted in seen) + 3 * (len(seen) + 1)
    assert given == 3 * 40 and len(seen) <= 9, "a draft ends before the last token"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_drafts_do_not_depend_on_chunks_pages_or_batch_mates(tmp_path, kind):
    """What a drafter keeps is the same however the tokens before came: in one step, in chunks, alone, or accepted."""
    torch.manual_seed(0)
    options, found = KINDS[kind](tmp_path), []
    for more in ({}, {"num_kv_blocks": 17, "block_size": 4, "prefill_chunk": 7}):
        llm = poisoned(speculating(tmp_path, **options, **more, prefix_caching=False))
        drafts, draft = {}, llm.runner.drafter.draft

        def drafting(asked, draft=draft, drafts=drafts):
            made = draft(asked)
            for one, own in made.items():
                drafts.setdefault((one.request_id, len(one.token_ids)), []).append(own)
            return made

        llm.runner.drafter.draft = drafting
        llm.generate(prompts()[:6], GREEDY)
        found.append({place: max(several, key=len) for place, several in drafts.items()})
    both = found[0].keys() & found[1].keys()
    same = [all(a == b for a, b in zip(found[0][one], found[1][one], strict=False)) for one in both]
    assert len(both) > 60 and sum(same) >= 0.98 * len(same), "all but near ties"
    assert len({tuple(one) for one in found[0].values()}) > 20, "drafts that are all one show nothing"


@pytest.fixture
def unread(monkeypatch):
    """A test that fails where an engine reads weights."""
    monkeypatch.setattr("rooflab.engine.llm.load_weights", lambda *_: pytest.fail("weights were read"))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"num_hidden_layers": 2}, "draft: expected num_layers 1, got 2"),
        ({"vocab_size": 1000}, "draft: expected vocab_size 1024, got 1000"),
        ({"max_position_embeddings": 99}, "draft: expected a model for 256 tokens, .* got one for 99"),
        ({"fc": (192, 200)}, r"draft: expected fc.weight of shape \(192, 384\), got \(192, 200\)"),
        ({}, r"draft: expected layers.0.self_attn.q_proj.bias of shape \(192,\), got none"),
    ],
)
def test_bad_heads_are_refused_before_weights_are_read(tmp_path, unread, change, message):
    head = eagle(tmp_path / "head", **change)
    if not change:  # a head of another architecture, which has biases
        config = json.loads((head / "config.json").read_text())
        (head / "config.json").write_text(json.dumps({**config, "model_type": "qwen2"}))
    with pytest.raises(ValueError, match=message):
        tiny_llm(tmp_path / "m", speculate="eagle", draft=head)
    with pytest.raises(ValueError, match=r"draft: expected a folder with \*.safetensors, got "):
        tiny_llm(tmp_path / "m", speculate="eagle", draft=tmp_path / "m")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"vocab_size": 1000}, "draft: expected vocab_size 1024, got 1000"),
        ({"max_position_embeddings": 128}, "draft: expected a model for 256 tokens, .* got one for 128"),
        ({"draft": None}, "draft: expected a model with speculate=draft, got None"),
        ({"draft": "3"}, "draft: expected a model with speculate=draft, got '3'"),
        ({"speculate": "ngram"}, "draft: expected nothing with speculate=ngram"),
        ({"speculate": None}, "draft: expected speculate with it"),
        ({"speculate": "eagle", "draft": None}, "draft: expected a folder of a head"),
        ({"speculate": "medusa"}, "speculate: expected ngram, draft, eagle, got 'medusa'"),
    ],
)
def test_bad_drafts_are_refused_before_weights_are_read(tmp_path, unread, options, message):
    config = {name: options.pop(name) for name in [*options] if name in CONFIG}
    asked = {"speculate": "draft", "draft": write_config(tmp_path / "d", **config).parent, **options}
    with pytest.raises(ValueError, match=message):
        tiny_llm(tmp_path / "m", **asked)


def test_a_draft_of_another_tokenizer_is_refused(tmp_path):
    """Of the same size with two tokens exchanged, or with one that the model lacks."""
    model, draft = write_model(tmp_path / "m"), write_model(tmp_path / "d")
    LLM(model, device="cpu", speculate="draft", draft=draft, max_model_len=64)
    file = draft / "tokenizer.json"
    whole = json.loads(file.read_text())
    whole["model"]["merges"].pop()  # what makes `abc`
    for changed, token in (({"ab": 257, "abc": 256}, "'abc?' is token 25[67]"), ({"abd": 257}, "'abc' is token None")):
        vocabulary = {word: n for word, n in whole["model"]["vocab"].items() if n not in changed.values()} | changed
        file.write_text(json.dumps({**whole, "model": {**whole["model"], "vocab": vocabulary}}))
        with pytest.raises(ValueError, match=f"draft: expected the model's vocabulary, got one in which {token}"):
            LLM(model, device="cpu", speculate="draft", draft=draft)
