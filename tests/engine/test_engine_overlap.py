"""Steps that start before the tokens of the previous step are read, and steps that run as recorded graphs."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tiny_model import check_pages, poisoned, prompts, tiny_llm, tokens, with_graphs

from rooflab.engine import memory, model_runner
from rooflab.engine.llm import SamplingParams
from rooflab.engine.model_runner import Draw

GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)
LIBRARY = {"swap": {"gemm": "library"}}


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    return tokens(tiny_llm(tmp_path_factory.mktemp("m"), **LIBRARY).generate(prompts(), GREEDY))


@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"speculate": "ngram"}], ids=str)
@pytest.mark.parametrize("moment", ["before the launch", "after the launch", "after the read"])
def test_a_step_that_breaks_off_loses_no_token(tmp_path, answers, moment, monkeypatch, options):
    """Nor its log-probability.  The pool is so small that some requests are preempted besides."""
    llm = tiny_llm(tmp_path, num_kv_blocks=20, block_size=4, **LIBRARY, **options)
    owner, name = (Draw, "tokens") if moment == "after the read" else (llm.runner, "run")
    real, calls = getattr(owner, name), []

    def sometimes(*arguments):
        calls.append(arguments)
        breaks = len(calls) % 4 == 0
        if breaks and moment == "before the launch":
            raise KeyboardInterrupt
        result = real(*arguments)
        if breaks:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(owner, name, sometimes)
    requests = [llm.submit(prompt, replace(GREEDY, logprobs=0))[0] for prompt in prompts()]
    given, broken = Counter(), 0
    while llm.has_work:
        try:
            given.update(sequence.request_id for sequence in llm.step())
        except KeyboardInterrupt:
            broken += 1
            check_pages(llm.scheduler.blocks, [])
    assert broken > 3 and [request.output_ids for request in requests] == answers
    assert [[*kept] for one in requests for kept in one.logprobs] == [[token] for ids in answers for token in ids]
    assert [given[request.request_id] for request in requests] == [16] * 8, "a token is given once"


def test_a_step_starts_before_the_tokens_before_are_read(tmp_path, monkeypatch):
    llm = tiny_llm(tmp_path, overlap=True, **LIBRARY)
    events, run, read = [], llm.runner.run, Draw.tokens
    llm.runner.run = lambda step: events.append("run") or run(step)
    monkeypatch.setattr(Draw, "tokens", lambda draw: events.append("read") or read(draw))
    llm.generate([[1, 2]], replace(GREEDY, max_tokens=3))
    assert events == ["run", "run", "read", "run", "read", "read"]
    events.clear()
    llm.generate([[1, 2]], replace(GREEDY, max_tokens=3, presence_penalty=1.0))
    assert events == ["run", "read"] * 3, "a penalty needs to know the token"


def test_settings_go_to_the_device_once_for_a_batch(tmp_path, monkeypatch):
    llm, made = tiny_llm(tmp_path), []
    of = model_runner.SamplingTensors
    monkeypatch.setattr(model_runner, "SamplingTensors", lambda *what: made.append(what) or of(*what))
    llm.generate([[1, 2]], GREEDY)
    assert len(made) == 2, "one for the prompt, one for 15 steps"


@pytest.mark.parametrize("overlap", [False, True])
@torch.inference_mode()
def test_trap_39_a_graph_gives_the_eager_logits_at_every_batch_size_and_table_width(tmp_path, overlap):
    sizes, logits = set(), []
    for graph in (False, True):
        llm = poisoned(tiny_llm(tmp_path, block_size=4, max_num_seqs=19, num_kv_blocks=200, overlap=overlap, **LIBRARY))
        if graph:
            with_graphs(llm)
        for cache in (*llm.runner.cache.keys, *llm.runner.cache.values):
            cache.fill_(torch.nan)

        def noted(step, compute=llm.runner.logits, found=(own := [])):
            found.append(compute(step).clone())
            if not step.chunks:
                sizes.add(step.num_decodes)
            return found[-1]

        llm.runner.logits = noted
        # One sequence less in every step, behind long prompts and then behind short ones.
        for length in (60, 3):
            params = [replace(GREEDY, max_tokens=2 + number) for number in range(19)]
            llm.generate([[(5 * i + n) % 1000 for n in range(length + i)] for i in range(19)], params)
        logits.append(own)
    assert sizes == set(range(1, 20))
    torch.testing.assert_close(*logits, rtol=0, atol=1e-5)


def test_the_pool_leaves_free_what_the_largest_step_took(monkeypatch, tmp_path):
    """On a card of which 1,000,000 bytes are free, and a tenth stays so."""
    taken = []
    cuda = SimpleNamespace(
        reset_peak_memory_stats=lambda device: taken.clear(),
        memory_allocated=lambda device: 1000,
        max_memory_allocated=lambda device: 1000 + sum(taken),
        synchronize=lambda device: None,
        empty_cache=lambda: None,
        mem_get_info=lambda device: (1_000_000, 9_000_000),
    )
    limits = SimpleNamespace(
        arch=tiny_llm(tmp_path).arch,
        max_model_len=64,
        block_size=16,
        dtype=torch.float32,
        device=torch.device("cuda"),
        sequences=80,
    )
    monkeypatch.setattr(memory.torch, "cuda", cuda)
    page = 16 * 2 * 2 * 2 * 32 * 4  # tokens, keys and values, layers, heads, head_dim, bytes
    assert memory.kv_cache_blocks(limits, [lambda: taken.append(100_000)] * 2) == 700_000 // page
    with pytest.raises(ValueError, match="max_model_len: 64 tokens need 0.00 GB of KV cache"):
        memory.kv_cache_blocks(limits, [lambda: taken.append(890_000)])
