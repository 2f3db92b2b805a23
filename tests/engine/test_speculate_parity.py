"""Greedy answers of SmolLM2 with every kind of speculation equal those without: by `LLM`, and through the server.

`results/speculation/parity.txt` has the output for more prompts, batches and lengths of drafts.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from op_kernels import slow
from served import served
from speculating import Always, watched
from test_speculate_drafts import eagle

from rooflab.engine.llm import LLM, SamplingParams
from rooflab.engine.load.model_files import fetch

ROOT = Path(__file__).parents[2]
NEW = 40
"""Tokens of an answer."""
TIE = 2e-3
"""Where the two best log-probabilities are nearer, rounding may decide."""
HIDDEN, VOCAB = 576, 49152
"""SmolLM2-135M's."""
SIZES = {"hidden_size": HIDDEN, "vocab_size": VOCAB, "num_attention_heads": 9, "max_position_embeddings": 512}
KINDS = {
    "ngram": lambda folder: {},
    "draft": lambda folder: {"draft": str(fetch())},  # the model itself: nearly all is right
    "eagle": lambda folder: {"draft": eagle(folder, (HIDDEN, 2 * HIDDEN), **SIZES)},
}  # the last has random weights, and nothing that it drafts is right
ASKED = [
    *(f"Write again with {name} for a: a = 1\nb = a + 1\nprint(a, b)" for name in ("x", "total")),
    *(f"Say the words {words} ten times." for words in ("yes and no", "left right", "one two three")),
    *(f"What is the capital of {name}?" for name in ("France", "Japan", "Peru")),
]
pytestmark = [pytest.mark.needs("weights"), pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def greedy():
    """Prompts, chats and beginnings of the licence, and the answers of an engine that does not speculate."""
    plain = LLM(fetch(), device="cpu", max_num_seqs=16, max_model_len=512)
    text = plain.tokenizer.encode((ROOT / "LICENSE").read_text())
    prompts = [plain.tokenizer.encode([{"role": "user", "content": content}]) for content in ASKED]
    prompts += [text[:length] for length in (16, 31, 64, 97)]
    return prompts, plain.generate(prompts, SamplingParams(max_tokens=NEW, ignore_eos=True, logprobs=1))


def is_that_of(wanted, got):
    """Whether the tokens `got` are those of the answer, or other ones behind a near tie."""
    pairs = enumerate(zip(wanted["token_ids"], got, strict=True))
    if (first := next((place for place, (one, other) in pairs if one != other), None)) is None:
        return True
    best, second = sorted(wanted.outputs[0].logprobs[first].values(), reverse=True)[:2]
    return best - second < TIE


@pytest.mark.parametrize("kind", [pytest.param("ngram", marks=pytest.mark.more), *map(slow, [*KINDS][1:])])
def test_greedy_answers_of_a_real_model_are_those_without_speculation(tmp_path, greedy, kind):
    prompts, wanted = greedy
    llm = LLM(fetch(), device="cpu", max_model_len=512, **{"speculate": kind, **KINDS[kind](tmp_path / kind)})
    llm.core.speculator.lengths = Always(llm.speculation.num_tokens)
    seen = watched(llm)
    found = llm.generate(prompts, SamplingParams(max_tokens=NEW, ignore_eos=True))
    assert all(is_that_of(one, other["token_ids"]) for one, other in zip(wanted, found, strict=True))
    drafted, accepted = (sum(column) for column in zip(*seen, strict=True))
    assert drafted > 100 and (accepted > 50 or kind not in ("ngram", "draft"))


@pytest.mark.slow
def test_so_are_they_through_the_server_which_counts_what_it_drafts(tmp_path, greedy):
    prompts, wanted = (part[::3] for part in greedy)
    with served(tmp_path, "--speculate", "ngram", "--max-model-len", "512", model=str(fetch())) as server:

        def answered(prompt):
            asked = {"model": server.ask("/v1/models")[1]["data"][0]["id"], "prompt": prompt, "temperature": 0}
            return server.ask("/v1/completions", {**asked, "max_tokens": NEW, "ignore_eos": True})[1]

        with ThreadPoolExecutor() as pool:
            replies = list(pool.map(answered, prompts))
        names = "drafts", "draft_tokens", "accepted_tokens", "emitted_tokens", "accepted_tokens_per_pos"
        drafts, drafted, accepted, of_steps, places = (
            int(server.metric(f"vllm:spec_decode_num_{name}_total")) for name in names
        )
        emitted = server.metric("vllm:generation_tokens_total")
        steps = [step for step in server.ask("/steps")[1]["steps"] if step["drafted"]]
    same = [reply["choices"][0]["text"] == one["text"] for reply, one in zip(replies, wanted, strict=True)]
    assert same.count(False) <= 1, "all but a near tie"
    assert drafted >= drafts > 0 and places == accepted and of_steps <= emitted == NEW * len(prompts)
    for step in steps:
        assert 0 < step["draft_s"] + step["verify_s"] + step["accept_s"] <= step["end_s"] - step["begin_s"]
