"""The engine on a small model: batching, preemption, swaps, Triton in the interpreter, refusals."""

import json
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tiny_model import first_logits, poisoned, prompts, tiny_llm, tokens, write_model

from rooflab.engine import ops as engine_ops
from rooflab.engine.choose.model_shapes import MODEL_OPS, LargestSizes
from rooflab.engine.llm import SamplingParams
from rooflab.engine.load.coded import coded
from rooflab.engine.load.models import open_model
from rooflab.engine.load.weights import dummy_tensors
from rooflab.engine.study import StudyOptions
from rooflab.kernels import registry

GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Each prompt by itself on library kernels: what every other way of running must equal."""
    llm = tiny_llm(tmp_path_factory.mktemp("m"), swap={"gemm": "library"})
    return [llm.generate([prompt], GREEDY)[0]["token_ids"] for prompt in prompts()]


NAIVE = {op: "naive" for op in MODEL_OPS if registry.get_kernel(op, "naive").backend == "torch"}
STATIC, WITHOUT_CACHE = StudyOptions(continuous_batching=False), StudyOptions(kv_cache=False)
COVER = [
    {},
    {"block_size": 1, "prefill_chunk": 16, "prefix_caching": False},
    {"block_size": 3, "prefill_chunk": 1},
    {"block_size": 64, "prefill_chunk": 7, "max_num_seqs": 3, "max_num_batched_tokens": 9},
    {"block_size": 16, "prefill_chunk": 7, "prefix_caching": False, "study": STATIC, "max_num_seqs": 3},
    {"block_size": 4, "chunked_prefill": False, "num_kv_blocks": 16},
    {"swap": NAIVE, "prefill_chunk": 5},
    {"study": WITHOUT_CACHE},
    {"study": StudyOptions(contiguous_kv=True), "max_num_seqs": 3, "prefill_chunk": 7},
    {"overlap": True},
    {"overlap": True, "block_size": 1, "prefill_chunk": 3, "num_kv_blocks": 60},
    {"overlap": True, "block_size": 3, "max_num_seqs": 3, "prefix_caching": False, "study": STATIC},
    {"overlap": True, "study": WITHOUT_CACHE},
]


def ways_to_end(answers, draw):
    """For each prompt parameters that end its answer by length or at a random token of it, and what is left then."""
    for ids in answers:
        cut = draw.randrange(len(ids))
        if draw.random() < 0.5:
            params, left = replace(GREEDY, max_tokens=cut + 1), ids[: cut + 1]
        else:
            params, left = replace(GREEDY, stop_token_ids=(ids[cut],)), ids[: ids.index(ids[cut]) + 1]
        # With log-probabilities the next step must know this one's tokens.
        yield replace(params, logprobs=draw.choice([None, None, None, None, 1])), left


@pytest.mark.sampled(2, 6)
@pytest.mark.parametrize("options", COVER, ids=str)
@torch.inference_mode()
def test_trap_10_batches_chunks_pages_kernels_and_overlap_change_nothing_and_free_pages_are_not_read(
    tmp_path, alone, options
):
    """With `overlap` tokens are read a step later."""
    assert all(len(ids) == 16 for ids in alone)
    assert len({tuple(ids) for ids in alone}) == len(alone), "prompts that all give one answer show nothing"
    llm, draw = poisoned(tiny_llm(tmp_path, **{"swap": {"gemm": "library"}, **options})), random.Random(str(options))
    assert tokens(llm.generate(prompts(), GREEDY)) == alone
    for _ in range(4):  # with prefixes that are there
        params, expected = zip(*ways_to_end(alone, draw), strict=True)
        outputs = llm.generate(prompts(), list(params))
        assert tokens(outputs) == list(expected)
        for output, one in zip(outputs, params, strict=True):
            assert one.logprobs is None or len(output.outputs[0].logprobs) == len(output["token_ids"])
    pages = llm.scheduler.blocks
    assert not llm.has_work and pages.num_free == pages.num_blocks
    assert bool(pages.num_cached) == (pages.prefix_caching and pages.block_size < 40)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("steps", range(7))
def test_trap_6_a_request_may_be_dropped_after_any_step(tmp_path, alone, steps, overlap):
    """Where steps overlap, also while a token of it is not read."""
    pages = {"block_size": 4, "num_kv_blocks": 16, "prefill_chunk": 9}
    llm = poisoned(tiny_llm(tmp_path, swap={"gemm": "library"}, overlap=overlap, **pages))
    dropped, other = (llm.add_request(prompts()[number], GREEDY) for number in (4, 2))
    got = []
    for number in range(40):
        if number == steps:
            assert llm.abort(dropped) and not llm.abort(dropped)
        got += [one.token_ids[-1] for one in llm.step() if one.request_id == other]
    assert got == alone[2] and llm.scheduler.blocks.num_free == 16 and not llm.has_work


@pytest.mark.parametrize("stored, stops", [([7, 9], {7, 9}), (7, {7}), (None, set())])
def test_trap_19_every_end_token_of_every_source_ends(tmp_path, stored, stops):
    folder = write_model(tmp_path, eos_token_id=[3, 22])  # the tokenizer's is 258
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stored}))
    assert open_model(str(folder), False, 0, torch.device("cpu"))[3] == {3, 22, 258, *stops}


@pytest.mark.parametrize(
    "change, message",
    [
        *(
            ({"eos_token_id": wrong}, "expected ids below 1024 as end tokens in config.json")
            for wrong in (-1, True, 1024)
        ),
        ({"vocab_size": 200}, "model: its tokenizer has 259 tokens, and its embedding has 200"),
    ],
)
def test_end_tokens_and_tokens_that_the_embedding_lacks_are_refused(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        open_model(str(write_model(tmp_path, **change)), False, 0, torch.device("cpu"))


@pytest.mark.more
def test_triton_kernels_in_the_interpreter_equal_the_library(tmp_path, alone):
    """The whole engine on the optimized Triton rungs: prefill, then batched decode."""
    swap = {
        op: next(k.name for k in registry.kernels(op).values() if k.role == "optimized" and k.backend == "triton")
        for op in MODEL_OPS
    } | {
        "gemm": "pipelined",
        "flash_attention_varlen": "online",
    }  # the rungs that come before them by name take no fp32
    llm = tiny_llm(tmp_path, swap=swap, interpret=True)
    assert {choice.kernel.backend for choice in llm.ops.choices} == {"triton"}
    # Of 1 and 21 tokens, and a step of decode: the interpreter takes seconds for each.
    few = SamplingParams(max_tokens=2, ignore_eos=True)
    assert tokens(llm.generate(prompts()[:5:4], few)) == [ids[:2] for ids in alone[:5:4]]


def test_trap_24_sampling_depends_on_seed_and_position_not_on_batch_mates(tmp_path):
    llm = tiny_llm(tmp_path)
    params = [SamplingParams(max_tokens=6, temperature=1.5, top_k=50, top_p=0.95, seed=i) for i in range(8)]
    batched = tokens(llm.generate(prompts(), params))
    assert batched == [llm.generate([p], [one])[0]["token_ids"] for p, one in zip(prompts(), params, strict=True)]
    assert batched != tokens(llm.generate(prompts(), [replace(params[0], seed=9)] * 8))
    # Without a seed of its own a request takes one from the engine's seed and its number.
    free = SamplingParams(max_tokens=6, temperature=1.5)
    again = [tokens(tiny_llm(tmp_path / "b", seed=seed).generate(prompts(), free)) for seed in (3, 3, 4)]
    assert again[0] == again[1] != again[2]


def test_trap_6_streams_give_the_tokens_of_generate_in_turns_also_beside_abandoned_ones(tmp_path, alone):
    llm = tiny_llm(tmp_path, swap={"gemm": "library"}, num_kv_blocks=64)
    abandoned, waiting, first, second = (llm.stream(prompts()[number], GREEDY) for number in (5, 6, 2, 5))
    next(abandoned), next(abandoned)
    abandoned.close(), waiting.close()
    for number, events in zip((2, 5), zip(*zip(first, second, strict=True), strict=True), strict=True):
        assert [(event.index, event.token_id) for event in events] == [*enumerate(alone[number])]
        *others, output = (event.output for event in events)
        assert set(others) == {None} and output["token_ids"] == alone[number]
        assert output.timeline.token_times_s == tuple(event.time_s for event in events)
    assert not llm.has_work and llm.scheduler.blocks.num_free == 64


@pytest.mark.parametrize(("dtype", "bound"), (("int8", 0.06), ("int4", 0.2)))
def test_codes_are_the_model_of_the_rounded_weights(tmp_path, monkeypatch, dtype, bound):
    """Codes times scales, in bf16, are another model, whose logits differ from the codes' by rounding alone."""

    def rounded(arch, seed, device):
        for name, tensor in dummy_tensors(arch, seed):
            if "proj" in name or name == "lm_head.weight":
                tensor = coded(tensor, dtype).values()
            yield name, tensor

    def drawn(dtype):
        return first_logits(tiny_llm(tmp_path, {"tie_word_embeddings": False}, dtype=dtype), prompts()[3])

    plain, quantised = drawn("bfloat16"), drawn(dtype)
    monkeypatch.setattr("rooflab.engine.load.models.dummy_tensors", rounded)
    near = drawn("bfloat16")
    assert (quantised - near).abs().max() < bound
    assert (quantised - near).std() < (quantised - plain).std() / 1.5


@pytest.mark.parametrize(
    "options, message",
    [
        ({"dtype": "int2"}, "dtype: expected float32, .*int8, int4, keep, got 'int2'"),
        (
            {"dtype": "int4", "config": {"intermediate_size": 400}},
            "dtype: int4 needs intermediate_size in multiples of 32, and .* has 400",
        ),
        ({"max_model_len": 257}, "max_model_len: expected at most 256"),
        ({"num_kv_blocks": 10**12}, "num_kv_blocks: .* more than is free"),
        ({"block_size": 1.5}, "block_size: expected an integer"),
        ({"max_num_batched_tokens": 255}, "max_num_batched_tokens: expected at least max_num_seqs, which is 256"),
        ({"swap": {"softmax": "naive"}}, "swap: the engine uses embedding, .*got 'softmax'"),
        ({"swap": {"gemm": "best"}}, "kernel: gemm has naive, library.*got 'best'"),
        ({"swap": {"gemm": "tensor_core"}}, "gemm/tensor_core: UNSUPPORTED: needs a CUDA device"),
    ],
)
def test_bad_options_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        tiny_llm(tmp_path, **options)


def test_bad_prompts_are_refused_and_leave_nothing_behind(tmp_path):
    llm = tiny_llm(tmp_path, num_kv_blocks=4, block_size=16)
    for prompt, params, message in [
        ([[]], GREEDY, "empty prompt"),
        ([[1024]], GREEDY, "expected token ids below 1024, got 1024"),
        (["\ud800"], GREEDY, "prompt: expected text in UTF-8"),
        ([[1, "a"]], GREEDY, "prompt: expected a string, chat messages or token ids, got .1, 'a'."),
        ([[1] * 256], GREEDY, "expected fewer tokens than max_model_len, which is 256, got 256"),
        ([[1, 2], [1] * 60], GREEDY, "need 5 pages of the KV cache, which has 4"),
        ([], GREEDY, "expected a prompt or a list of prompts"),
        ([[1], [2], [3]], [GREEDY] * 2, "params: expected one or 3, got 2"),
    ]:
        with pytest.raises(ValueError, match=message):
            llm.generate(prompt, params)
        assert not llm.has_work


def test_with_random_weights_bytes_are_ids_and_the_text_of_a_token_is_its_id(tmp_path, alone):
    llm, text = tiny_llm(tmp_path, swap={"gemm": "library"}), "".join(f" {token}" for token in alone[2])
    assert llm.tokenizer.encode([{"role": "user", "content": "Hi"}]) == llm.tokenizer.encode("Hi") == [72, 105]
    until = replace(GREEDY, stop=(text[9:14],))
    for params, wanted in ((GREEDY, text), (until, text[:9])):
        events = list(llm.stream(prompts()[2], params))
        assert llm.generate([prompts()[2]], params)[0]["text"] == "".join(event.text for event in events) == wanted


def test_a_layer_may_multiply_and_activate_in_one_kernel(tmp_path, alone):
    swap = {"gemm_silu_and_mul": "library"}
    llm = tiny_llm(tmp_path, swap={"gemm": "library", **swap})
    step = llm.ops.step
    llm.ops.step = lambda *sizes: SimpleNamespace(**{**vars(step(*sizes)), "silu_and_mul": None})
    assert tokens(llm.generate(prompts(), GREEDY)) == alone
    gemma = {"model_type": "gemma", "hidden_act": "gelu_pytorch_tanh"}
    for config, dtype in ((gemma, "float32"), ({}, "int8")):
        with pytest.raises(ValueError, match="swap: the engine uses .*sample, got 'gemm_silu_and_mul'"):
            tiny_llm(tmp_path / "other", config, swap=swap, dtype=dtype)


def test_on_cuda_no_default_gathers_pages_sorts_a_vocabulary_or_waits(tmp_path, monkeypatch):
    """What a GPU would be given, asked without one."""
    arch = tiny_llm(tmp_path).arch
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    monkeypatch.setattr(registry.Kernel, "why_not_here", lambda kernel, device: None)
    limits = LargestSizes(arch, torch.device("cuda"), torch.bfloat16, 16, 256, 8192, 256, 256)

    def named(fused=None):
        """The kernels by op and bucket."""
        record = {"gemm_silu_and_mul": {"kernel": fused}} if fused else {}
        monkeypatch.setattr(engine_ops, "recorded_choice", lambda op, card, bucket: record.get(op, {}))
        return {(choice.op, choice.bucket): choice.kernel.name for choice in engine_ops.resolve(limits).choices}

    found = named()
    assert found["decode_attention", "rows:512"] == "split_kv" and found["paged_attention", "rows:64"] == "chunked"
    assert found["sample", "rows:1"] == "cluster" and found["rope_and_cache", "rows:512"] == "fused"
    assert found["gemm", "rows:1"] == "library" and ("gemm_silu_and_mul", "rows:1") not in found
    assert named("fused")["gemm_silu_and_mul", "rows:1"] == "fused"
    assert ("gemm_silu_and_mul", "rows:1") not in named("library"), "the two ops do the same"
