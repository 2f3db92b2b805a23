"""The engine against transformers on the same weights: logits and tokens, alone and in a batch, of small models with
random weights, and in `make test-full` of the default model.

Each step gets transformers' own greedy tokens (teacher forcing), and EOS is ignored, so that one near-tie does not end
the comparison.  A token counts only if transformers' two best logits differ clearly.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_model import CONFIG, STRETCHED, tiny_llm, with_graphs

from rooflab.bench.engine.runs import PROMPT_SET, chat
from rooflab.engine.llm import LLM, SamplingParams
from rooflab.engine.load import models
from rooflab.engine.load.model_files import fetch
from rooflab.engine.load.weights import dummy_tensors
from rooflab.engine.study import StudyOptions
from rooflab.reference import llama
from rooflab.roofline.architecture import Architecture

ROOT = Path(__file__).parents[2]
NEW_TOKENS = 64
# Around the block size of 16, and long enough for many pages.
LENGTHS = (1, 15, 16, 17, 31, 32, 33, 128, 600)


def load_transformers(path, dtype=torch.float32):
    from transformers import AutoModelForCausalLM, GgufConfig

    # Without this transformers keeps the weights quantised and multiplies with them as they are.
    plain = GgufConfig(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=dtype, quantization_config=plain
    ).eval()


def real_prompts(tokenizer):
    """Chat questions through the template, and the licence's first so many tokens."""
    text = tokenizer.encode((ROOT / "LICENSE").read_text())
    return [tokenizer.encode(chat(question)) for question in PROMPT_SET[:3]] + [text[:length] for length in LENGTHS]


@torch.inference_mode()
def continuations_and_logits(model, prompts, new_tokens=NEW_TOKENS):
    """Per prompt, transformers' greedy tokens (EOS ignored) and the logits that they were taken from."""
    results = []
    for prompt in prompts:
        cache, inputs, tokens, logits = None, torch.tensor([prompt]), [], []
        for _ in range(new_tokens):
            out = model(inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, last = out.past_key_values, out.logits[0, -1]
            tokens.append(int(last.argmax()))
            logits.append(last)
            inputs = torch.tensor([tokens[-1:]])
        results.append((tokens, torch.stack(logits)))
    return results


@torch.inference_mode()
def teacher_forced(llm: LLM, prompts, continuations):
    """The engine's logits (new_tokens, V) per prompt when every drawn token is replaced by the given one.

    The engine runs as it always does; only `sample` is another function, which tells requests apart by their seed.
    """
    lengths = [len(prompt) for prompt in prompts]
    seen = [{} for _ in prompts]

    def forced(logits, temperature, top_k, top_p, min_p, seed, position):
        tokens = []
        for row, (request, where) in enumerate(zip(seed.tolist(), position.tolist(), strict=True)):
            index = where - lengths[request]
            assert index not in seen[request], "a position was computed twice"
            seen[request][index] = logits[row].clone()
            tokens.append(continuations[request][index])
        return torch.tensor(tokens)

    step = llm.ops.step
    llm.ops.step = lambda *sizes: SimpleNamespace(**{**vars(step(*sizes)), "sample": forced})
    try:
        count = len(continuations[0])
        params = [SamplingParams(max_tokens=count, ignore_eos=True, seed=i) for i in range(len(prompts))]
        outputs = llm.generate([list(prompt) for prompt in prompts], params)
    finally:
        llm.ops.step = step
    assert [out["token_ids"] for out in outputs] == [list(tokens) for tokens in continuations]
    return [torch.stack([logits[i] for i in range(count)]) for logits in seen]


def compare(prompts, expected, logits, tolerance=1e-3):
    counted = total = 0
    for prompt, (tokens, theirs), ours in zip(prompts, expected, logits, strict=True):
        assert ours.shape == theirs.shape and len(ours) == len(tokens)
        error = float((ours - theirs).abs().max())
        assert error <= tolerance, f"prompt of {len(prompt)} tokens: logits differ by {error}"
        best = theirs.topk(2).values
        clear = best[:, 0] - best[:, 1] > 2 * tolerance
        agree = ours.argmax(-1) == torch.tensor(tokens)
        assert bool(agree[clear].all()), f"prompt of {len(prompt)} tokens: another token"
        counted, total = counted + int(clear.sum()), total + len(clear)
    assert counted >= 0.95 * total, f"only {counted} of {total} positions count"


def with_norms(arch, seed=0):
    """Random weights, of norms too."""
    drawn = torch.Generator().manual_seed(seed)
    for name, tensor in dummy_tensors(arch, seed):
        more = torch.rand(tensor.shape, generator=drawn).sub(0.5) if name.endswith("norm.weight") else 0
        yield name, tensor + more


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": STRETCHED},
        {"tie_word_embeddings": False},
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0},
        {"num_key_value_heads": 3, "rms_norm_eps": 0.01, "num_hidden_layers": 3},
        {"model_type": "qwen3", "head_dim": 64},
        {"model_type": "mistral", "sliding_window": 20, "tie_word_embeddings": False},
        {"model_type": "gemma", "head_dim": 64, "hidden_act": "gelu_pytorch_tanh"},
        {"rope_scaling": {"rope_type": "linear", "factor": 3.0}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    ],
    ids=str,
)
def test_traps_13_16_and_17_small_models_equal_transformers(tmp_path, monkeypatch, changes):
    """Prompts around the pages of 16, of which several end while they are answered."""
    from transformers import AutoConfig, AutoModelForCausalLM

    weights = dict(with_norms(Architecture.from_config({**CONFIG, **changes}, name="tiny")))
    monkeypatch.setattr(models, "dummy_tensors", lambda arch, seed, device: weights.items())
    llm = tiny_llm(tmp_path, changes)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**CONFIG, **changes}), dtype=torch.float32).eval()
    missing, unknown = model.load_state_dict(weights, strict=False)
    assert not unknown and set(missing) <= {"lm_head.weight"} and (not missing or "tie_word_embeddings" not in changes)
    model.tie_weights()
    prompts = [[(7 * i + 13 * j) % 1024 for j in range(length)] for i, length in enumerate((1, 15, 16, 17, 31, 100))]
    answers = continuations_and_logits(model, prompts, 6)
    whole = [[*prompt, *tokens[:-1]] for prompt, (tokens, _) in zip(prompts, answers, strict=True)]
    compare(prompts, answers, [llama.logits(llm.arch, weights, ids)[-6:] for ids in whole], 1e-4)
    assert llama.generate(llm.arch, weights, prompts[1], 6) == answers[1][0]
    tokens = [tokens for tokens, _ in answers]
    assert float(answers[0][1].std()) > 0.1
    compare(prompts, answers, teacher_forced(llm, prompts, tokens), 1e-4)
    compare(prompts[1:2], answers[1:2], teacher_forced(llm, prompts[1:2], tokens[1:2]), 1e-4)


@pytest.fixture(scope="module")
def llm():
    return LLM(fetch(), dtype="float32", device="cpu", max_num_seqs=16)


@pytest.fixture(scope="module")
def answered(llm):
    """Real prompts and transformers' greedy answers to them."""
    prompts = real_prompts(llm.tokenizer)
    assert len(prompts) >= 8 and {1, 15, 16, 17, 600} <= {len(prompt) for prompt in prompts}
    return prompts, continuations_and_logits(load_transformers(fetch()), prompts)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.needs("weights")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_seqs": 1},
        {"block_size": 1, "prefill_chunk": 7, "num_kv_blocks": 1400},
        {"overlap": True},
        {"block_size": 256, "study": StudyOptions(continuous_batching=False), "max_num_seqs": 8},
        {"study": StudyOptions(contiguous_kv=True)},
        {"chunked_prefill": False, "prefix_caching": False},
        {"graphs": True},
    ],
    ids=str,
)
def test_the_default_model(answered, options):
    prompts, answers = answered
    given = {"max_num_seqs": 16, "max_model_len": 700, **options}
    graphs = given.pop("graphs", False)
    llm = LLM(fetch(), dtype="float32", device="cpu", **given)
    if graphs:
        with_graphs(llm)
    compare(prompts, answers, teacher_forced(llm, prompts, [tokens for tokens, _ in answers]))
    assert llm.scheduler.blocks.num_free == llm.scheduler.blocks.num_blocks


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "dtype, same, nats", [("bfloat16", 0.97, 0.004), ("int8", 0.95, 0.01), ("int4", 0.8, 0.1), ("keep", 0.96, 0.003)]
)
@pytest.mark.needs("weights")
def test_what_rounded_weights_cost(llm, dtype, same, nats):
    """The figures of docs/engine.md: `pytest -s` prints them."""
    prompts = [llm.tokenizer.encode(chat(text)) for text in PROMPT_SET]
    tokens = [out["token_ids"] for out in llm.generate(prompts, SamplingParams(max_tokens=48, ignore_eos=True))]
    exact = torch.cat(teacher_forced(llm, prompts, tokens)).log_softmax(-1)
    other = LLM(fetch(), dtype=dtype, device="cpu", max_num_seqs=16)
    near = torch.cat(teacher_forced(other, prompts, tokens)).float().log_softmax(-1)
    agree = float((exact.argmax(-1) == near.argmax(-1)).float().mean())
    divergence = float(torch.nn.functional.kl_div(near, exact, log_target=True, reduction="batchmean"))
    print(f"{dtype}: the same greedy token at {agree:.1%} of {len(exact)} positions, {divergence:.4f} nats")
    assert agree >= same and 0 < divergence <= nats


@pytest.mark.needs("weights")
def test_the_question(llm):
    output = llm.generate([{"role": "user", "content": "What is the capital of France?"}])[0]
    assert output["text"] == output.outputs[0].text == "The capital of France is Paris."
    assert output["finish_reason"] == "stop" and output["token_ids"][-1] == 2
    stopping = SamplingParams(stop=("Paris", "is P"))
    output = llm.generate([{"role": "user", "content": "What is the capital of France?"}], stopping)[0]
    assert (output["text"], output["finish_reason"]) == ("The capital of France ", "stop")
