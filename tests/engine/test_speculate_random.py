"""Speculation under random work: arrivals, aborts, drafters and pools of every kind, with NaN in every free page."""

import random

import pytest
import torch
from speculating import LIBRARY, Known, exact, only_accepted, prefixes, speculating
from test_speculate_drafts import SMALL as LAYER
from test_speculate_drafts import eagle
from tiny_model import poisoned, tiny_llm, write_config

from rooflab.engine.llm import SamplingParams

SMALL = {**LAYER, "num_hidden_layers": 2, "vocab_size": 48, "max_position_embeddings": 96}
POOLS = [
    {"block_size": 4, "num_kv_blocks": 22, "prefill_chunk": 7},
    {"block_size": 1, "num_kv_blocks": 90, "max_num_seqs": 3, "max_num_batched_tokens": 11},
    {"block_size": 16, "num_kv_blocks": 9, "prefix_caching": False},
    {"block_size": 8, "num_kv_blocks": 12, "chunked_prefill": False, "num_speculative_tokens": 7},
]


@pytest.fixture(scope="module")
@torch.inference_mode()
def engines(tmp_path_factory):
    """One that does not speculate, and one for each pool and drafter; they serve all examples, and so reuse pages."""
    folder = tmp_path_factory.mktemp("m")
    made = [speculating(folder, SMALL, Known(n, 48) if n % 2 else None, **POOLS[n // 2]) for n in range(2 * len(POOLS))]
    drafts = {
        "draft": write_config(folder / "draft", **SMALL, rope_theta=500.0).parent,
        "eagle": eagle(folder / "eagle", (64, 128), **{**SMALL, "num_hidden_layers": 1}),
    }
    for pool, kind in zip(POOLS, ("draft", "eagle") * 2, strict=True):
        draft = drafts[kind]
        made.append(speculating(folder, SMALL, speculate=kind, draft=draft, **pool))
    return tiny_llm(folder, SMALL, **LIBRARY), [(poisoned(llm), prefixes(llm)) for llm in made]


def params_of(draw):
    asked = {"max_tokens": draw.randint(1, 24), "ignore_eos": True}
    if draw.random() < 0.5:
        asked |= {"temperature": draw.choice([0.5, 1.0, 2.0]), "seed": draw.randrange(1000)}
        asked |= draw.choice([{}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {"n": 2}])
    if draw.random() < 0.3:
        asked |= draw.choice(
            [
                {"presence_penalty": 1.5, "logit_bias": {3: 4.0, 5: 4.0, 9: 3.5}},
                {"repetition_penalty": 1.3},
                {"logprobs": 1},
                {
                    "stop_token_ids": (draw.randrange(48), 3),
                    "min_tokens": min(3, asked["max_tokens"]),
                    "logprobs": 1,
                    "logit_bias": {3: 3.0},
                },
            ]
        )
    return SamplingParams(**asked)


@torch.inference_mode()
def run_example(seed, engines):
    """Requests that come and are dropped at random steps: each answer is that of the other engine, or begins it."""
    plain, made = engines
    draw = random.Random(seed)
    llm, published = draw.choice(made)
    period = draw.randint(1, 9)  # prompts that repeat, and prompts that do not
    asked = []
    for _ in range(draw.randint(1, 6)):
        prompt = [draw.randrange(48) for _ in range(draw.randint(1, 40))]
        prompt = [token if i < period or draw.random() < 0.2 else prompt[i - period] for i, token in enumerate(prompt)]
        asked.append((prompt, params_of(draw)))
    wanted = [output.outputs for output in plain.generate(*map(list, zip(*asked, strict=True)))]
    known = isinstance(llm.runner.drafter, Known)
    if known:
        llm.runner.drafter.right = draw.choice([0.0, 0.7, 1.0])
    coming, going, got = list(asked), [], {}
    while coming or llm.has_work:
        if coming and (draw.random() < 0.4 or not llm.has_work):
            going.append(llm.submit(*coming.pop(0)))
            if known:
                right = zip(going[-1], wanted[len(going) - 1], strict=True)
                llm.runner.drafter.answers |= {one.request_id: other.token_ids for one, other in right}
        if going and draw.random() < 0.04:
            llm.core.abort(draw.choice(going))
        for one in llm.step():
            got[one.request_id] = got.get(one.request_id, 0) + 1
        exact(llm)
    whole = []
    for several, (prompt, _), others in zip(going, asked, wanted, strict=True):
        for one, other in zip(several, others, strict=True):
            dropped = one.finish_reason == "abort"
            wanted_ids = other.token_ids[: len(one.output_ids)] if dropped else other.token_ids
            assert one.output_ids == wanted_ids
            assert dropped or one.finish_reason == other.finish_reason
            assert got.get(one.request_id, 0) == len(one.output_ids), "a token is given once"
            same = zip(one.logprobs or (), other.logprobs or (), strict=not dropped)
            assert all(found == pytest.approx(wanted, abs=1e-4) for found, wanted in same)
            whole.append(prompt + one.output_ids)
    blocks = llm.scheduler.blocks
    assert blocks.num_free == blocks.num_blocks and not llm.runner.batch.rows
    only_accepted(published, whole)
    published.clear()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("first", "end"),
    [
        (0, 6),
        pytest.param(6, 40, marks=pytest.mark.more),
        *(pytest.param(n, n + 40, marks=pytest.mark.slow) for n in range(40, 320, 40)),
    ],
)
def test_examples(engines, first, end):
    for seed in range(first, end):
        run_example(seed, engines)
