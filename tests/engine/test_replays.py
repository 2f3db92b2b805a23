"""Decode steps on a CPU that are recorded once and replayed: the same tokens as eager steps, by one call of C++."""

import logging

import pytest
import torch
from tiny_model import poisoned, prompts, tiny_llm, tokens
from torch.utils._python_dispatch import TorchDispatchMode

from rooflab.engine.choose import choose_kernels
from rooflab.engine.graphs import DecodeReplays
from rooflab.engine.llm import LLM, SamplingParams
from rooflab.engine.load.model_files import fetch

pytestmark = pytest.mark.needs("C++ compiler")
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.fixture(autouse=True)
def native_is_fastest(tmp_path, monkeypatch):
    """Any C++ kernel takes 1 us and any other kernel 2 us, so that every step can be replayed."""

    def times(op, rows, kernels, *rest):
        return {kernel.name: 1.0 if kernel.backend == "cpp" else 2.0 for kernel in kernels}

    monkeypatch.setattr(choose_kernels, "time_kernels", times)
    monkeypatch.setattr(choose_kernels, "folder", lambda: tmp_path / "times")


def sizes(llm):
    return {size for size, _ in llm.runner.graphs.recordings}


@pytest.mark.sampled(1, 6)
@pytest.mark.parametrize(
    "options",
    (
        {},
        {"dtype": "bfloat16"},
        {"dtype": "float16"},
        {"dtype": "int8"},
        {"dtype": "int4"},
        {"dtype": "int8", "speculate": "ngram"},
        {"num_kv_blocks": 24, "block_size": 4},
        {"prefill_chunk": 5, "block_size": 4},
        {"speculate": "ngram"},
        {"config": {"model_type": "qwen3", "head_dim": 32}},
        {"config": {"model_type": "qwen2"}},
        {"config": {"model_type": "gemma", "head_dim": 32, "hidden_act": "gelu_pytorch_tanh"}},
        {"config": {"model_type": "mistral", "sliding_window": 20}},
    ),
    ids=str,
)
def test_replayed_steps_draw_the_tokens_of_eager_steps(tmp_path, options):
    found = []
    for eager in (True, False):
        llm = poisoned(tiny_llm(tmp_path, enforce_eager=eager, **options))
        several = [[3, 4, 5] * 6, *prompts(6), *prompts(6)]  # the second time with cached prefixes
        found.append(tokens(llm.generate(several, GREEDY)) + tokens(llm.generate(several[:1], GREEDY)))
    assert found[0] == found[1]
    assert {1, 3} & sizes(llm) and max(sizes(llm)) <= 16 and not llm.runner.graphs.refusals


def test_large_batches_run_eagerly_and_smaller_ones_are_replayed(tmp_path):
    params = [SamplingParams(max_tokens=3 + n, ignore_eos=True) for n in range(19)]
    many = [prompt * 2 for prompt in (*prompts(8), *prompts(8), *prompts(3))]
    eager = tiny_llm(tmp_path, enforce_eager=True)
    llm = tiny_llm(tmp_path)
    assert eager.runner.graphs is None and isinstance(llm.runner.graphs, DecodeReplays)
    assert tokens(llm.generate(many, params)) == tokens(eager.generate(many, params))
    assert sizes(llm) == set(range(1, 17)), "each number of sequences has its own recording"


def test_other_threads_get_a_recording_of_their_own(tmp_path, threads):
    llm, before = tiny_llm(tmp_path), torch.get_num_threads()
    expected = tokens(llm.generate(prompts(3), GREEDY))
    threads(other := 2 if before == 1 else 1)
    assert tokens(llm.generate(prompts(3), GREEDY)) == expected
    assert {count for _, count in llm.runner.graphs.recordings} == {before, other}


class Counter(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_a_replayed_step_calls_no_torch_op_between_the_token_ids_and_the_logits(tmp_path):
    llm = tiny_llm(tmp_path)
    llm.generate(prompts(3), GREEDY)
    with Counter() as counter:
        assert llm.runner.graphs.recordings[3, torch.get_num_threads()]() is None
    assert counter.names == []


def test_a_kernel_that_cannot_be_recorded_is_named_once_and_serves_eagerly(tmp_path, caplog):
    eager = tiny_llm(tmp_path, enforce_eager=True, swap={"rmsnorm": "library"})
    llm = tiny_llm(tmp_path, swap={"rmsnorm": "library"})
    with caplog.at_level(logging.WARNING):
        assert tokens(llm.generate(prompts(1), GREEDY)) == tokens(eager.generate(prompts(1), GREEDY))
    (message,) = caplog.messages
    assert message.startswith("decode steps of rows:1 run eagerly: rmsnorm/library calls torch.")
    assert not llm.runner.graphs.recordings


def test_a_launch_that_refuses_its_arguments_says_what_the_eager_kernel_says(tmp_path):
    llm = tiny_llm(tmp_path)
    llm.generate(prompts(2), GREEDY)
    llm.add_request(prompts(2)[1], GREEDY)
    llm.step(), llm.step()
    llm.runner.batch.block_table[0, 0] = 10**6
    with pytest.raises(ValueError, match="block_table: expected pages below 4096 up to each length, got 1000000"):
        llm.step()


def test_the_faster_whole_step_decides(tmp_path, monkeypatch):
    def times(op, rows, kernels, *rest):
        us = {"gemm": {"native": gemm, "packed": 1000.0, "library": 5000.0}}.get(op, {})
        return {kernel.name: us.get(kernel.name, 9.0 if kernel.backend == "cpp" else 7.0) for kernel in kernels}

    monkeypatch.setattr(choose_kernels, "time_kernels", times)
    for gemm, expected in ((1050.0, "cpp"), (1500.0, "torch")):
        monkeypatch.setattr(choose_kernels, "folder", lambda gemm=gemm: tmp_path / str(gemm))
        for eager in (False, True):
            choices = tiny_llm(tmp_path, enforce_eager=eager).ops.choices
            step = {choice.op: choice for choice in choices if choice.bucket == "rows:1" and choice.op != "sample"}
            for op in ("embedding", "fused_add_rmsnorm", "gemm", "rope_and_cache", "decode_attention"):
                assert step[op].kernel.backend == ("torch" if eager else expected), (op, gemm, eager)
            if not eager and expected == "cpp":
                assert "a replayed step 1.0 ms, an eager one 1.1" in step["gemm"].why


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.needs("weights")
def test_the_default_model_replays_the_tokens_of_eager_steps(threads):
    """64 prompts, compared up to the first token whose two best logits of the eager engine differ by 2e-3 or less."""
    options = {"device": "cpu", "max_model_len": 256}
    eager = LLM(fetch(), enforce_eager=True, max_num_seqs=16, **options)
    words = (
        "The roofline model relates the performance of a kernel to its arithmetic intensity and to bandwidth".split()
    )
    prompts = [eager.tokenizer.encode(" ".join(words[n % 16 :][: 2 + n % 7] * (1 + n // 16))) for n in range(64)]
    expected = []
    for output in eager.generate(prompts, SamplingParams(max_tokens=12, ignore_eos=True, logprobs=2)):
        best = [sorted(row.values())[-2:] for row in output.outputs[0].logprobs]
        clear = next((n for n, (second, first) in enumerate(best) if first - second <= 2e-3), 12)
        expected.append(output["token_ids"][:clear])
    assert sum(map(len, expected)) > 0.97 * 64 * 12
    greedy = SamplingParams(max_tokens=12, ignore_eos=True)

    def check(llm):
        for output, tokens_before_a_tie in zip(llm.generate(prompts, greedy), expected, strict=True):
            assert output["token_ids"][: len(tokens_before_a_tie)] == tokens_before_a_tie
        assert llm.runner.graphs.recordings and not llm.runner.graphs.refusals

    for batch in (1, 3, 16):
        llm = LLM(fetch(), max_num_seqs=batch, **options)
        check(llm)
        check(llm)  # now every prefix is cached
    threads(1)
    check(llm)
    check(LLM(fetch(), max_num_seqs=16, num_kv_blocks=40, **options))  # sequences are preempted
    check(LLM(fetch(), max_num_seqs=3, speculate="ngram", **options))
