"""Greedy answers of SmolLM2 with every kind of speculation beside those without: by `LLM`, and through the server.

`results/speculation/parity.txt` has what all cases printed.
"""

from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import pytest
from served import served
from speculating import watched
from test_speculate_drafts import eagle, medusa

from rooflab.engine.llm import LLM, SamplingParams
from rooflab.engine.model_files import fetch

ROOT = Path(__file__).parents[2]
NEW = 40
"""Tokens of an answer."""
PARAMS = SamplingParams(max_tokens=NEW, ignore_eos=True)
TIE = 2e-3
"""Where the two best logits are nearer, rounding may decide."""
HIDDEN, VOCAB = 576, 49152
"""SmolLM2-135M's."""
SIZES = {"hidden_size": HIDDEN, "vocab_size": VOCAB, "num_attention_heads": 9, "max_position_embeddings": 512}
KINDS = {
    "ngram": lambda folder: {},
    "draft": lambda folder: {"draft": str(fetch())},  # the model itself: nearly all is right
    "layers": lambda folder: {"speculate": "draft", "draft": 3},
    "medusa": lambda folder: {"draft": medusa(folder, heads=8, hidden=HIDDEN, vocab=VOCAB)},
    "eagle": lambda folder: {"draft": eagle(folder, (HIDDEN, 2 * HIDDEN), **SIZES)},
}  # the last two have random weights, and nothing that they draft is right
FIRST = (16, 4, "ngram")
CASES = [
    pytest.param(*case, marks=pytest.mark.more if case == FIRST else pytest.mark.slow)
    for case in product((16, 1), (1, 4, 8), KINDS)
]
"""Batch, most tokens of a draft, and kind; each takes a minute or two."""
TINY = {"num_kv_blocks": 120, "block_size": 4, "prefill_chunk": 33}
"""A pool that preempts sequences, and chunks."""


def real_prompts(tokenizer):
    """32: chats that ask for a text again, chats that do not, and beginnings of the licence."""
    text = tokenizer.encode((ROOT / "LICENSE").read_text())
    lines = "alpha = 1\nbeta = alpha + 1\ngamma = beta + alpha\nprint(alpha, beta, gamma)\n"
    asked = [
        f"Write this program again, with {name} in place of alpha:\n{lines}" for name in ("delta", "total", "x", "n")
    ]
    asked += [f"Say the words {words} ten times." for words in ("yes and no", "left right", "one two three", "go")]
    asked += [f"What is the capital of {name}?" for name in ("France", "Japan", "Peru", "Egypt")]
    asked += [f"Write two sentences about {name}." for name in ("rain", "copper", "chess", "bees")]
    chats = [tokenizer.encode([{"role": "user", "content": content}]) for content in asked]
    return chats + [text[start : start + length] for start, length in zip(range(0, 480, 30), [16, 31, 64, 97] * 4)]  # noqa: B905


def gap(llm, ids):
    """The two largest logits behind `ids`, one minus the other."""
    found, logits = [], llm.runner.logits
    llm.runner.logits = lambda step: found.append(logits(step)) or found[-1]
    llm.generate([ids], SamplingParams(max_tokens=1))
    llm.runner.logits = logits
    best = found[-1][-1].float().topk(2).values
    return float(best[0] - best[1])


def excused(llm, prompts, wanted, got):
    """The answers that differ, where the first other token is a near tie; any other difference fails."""
    doubtful = []
    for number, (prompt, one, other) in enumerate(zip(prompts, wanted, got, strict=True)):
        if one != other:
            first = next(
                (place for place, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None
            )
            assert first is not None, "one answer ends before the other"
            least = gap(llm, prompt + one[:first])
            assert least < TIE, f"prompt {number} differs at token {first}, where the gap is {least:.1e}"
            doubtful.append(number)
    return doubtful


pytestmark = [pytest.mark.needs("weights"), pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def greedy():
    """An engine that does not speculate, prompts, and its answers."""
    plain = LLM(fetch(), device="cpu", max_num_seqs=16, max_model_len=512)
    prompts = real_prompts(plain.tokenizer)
    return plain, prompts, plain.generate(prompts, PARAMS)


def judged(greedy, got, shown):
    """Prints `shown` and the answers `got` (tokens) that differ at a near tie, of which there may be three."""
    plain, prompts, wanted = greedy
    doubtful = excused(plain, prompts, [output["token_ids"] for output in wanted], got)
    print(f"{shown}; {len(got)} answers of {NEW} tokens, other behind a near tie: {doubtful or 'none'}")
    assert len(doubtful) <= 3


def speculating_llm(tmp_path, kind, **options):
    asked = {"speculate": kind, **KINDS[kind](tmp_path / kind), **options}
    llm = LLM(fetch(), device="cpu", max_model_len=512, **asked)
    llm.core.lengths.adapts = False
    return llm, watched(llm)


def counts(kind, seen):
    """Drafted and accepted tokens as a text."""
    drafted, accepted = (sum(column) for column in zip(*seen, strict=True))
    assert drafted > 100 and (accepted > 100 or kind not in ("ngram", "draft"))
    return f"{drafted} drafted, {accepted} accepted"


@pytest.mark.parametrize(("batch", "k", "kind"), CASES)
def test_greedy_answers_of_a_real_model_are_those_without_speculation(tmp_path, greedy, batch, k, kind):
    llm, seen = speculating_llm(tmp_path, kind, max_num_seqs=batch, num_speculative_tokens=k)
    got = [output["token_ids"] for output in llm.generate(greedy[1], PARAMS)]
    judged(greedy, got, f"{kind}, k = {k}, batch {batch}: {counts(kind, seen)}")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [TINY, {"num_kv_blocks": 600}], ids=["small pool", "prefixes"])
def test_so_are_they_if_requests_are_preempted_and_behind_prefixes_that_are_there(tmp_path, greedy, kind, options):
    """Each prompt once more, and then with half of its answer."""
    _, prompts, wanted = greedy
    llm, seen = speculating_llm(tmp_path, kind, max_num_seqs=16, **options)
    steps, schedule = [], llm.scheduler.schedule
    llm.scheduler.schedule = lambda drafting: steps.append(schedule(drafting)) or steps[-1]
    llm.generate(prompts, PARAMS)
    for half in (0, NEW // 2):
        begun = [output["token_ids"][:half] for output in wanted]
        params = SamplingParams(max_tokens=NEW - half, ignore_eos=True)
        outputs = llm.generate([prompt + own for prompt, own in zip(prompts, begun, strict=True)], params)
        got = [own + output["token_ids"] for own, output in zip(begun, outputs, strict=True)]
        judged(greedy, got, f"{kind}, {options}, half of an answer: {half > 0}: {counts(kind, seen)}")
    assert bool(sum(len(step.preempted) for step in steps)) == (options is TINY)


@pytest.mark.parametrize(("batch", "k", "kind"), CASES)
def test_so_are_they_through_the_server(tmp_path, greedy, batch, k, kind):
    some = slice(None, None, 4 if (batch, k, kind) == FIRST else 1)
    plain, prompts, wanted = greedy[0], greedy[1][some], greedy[2][some]
    options = {"speculate": kind, "num_speculative_tokens": k, "max_num_seqs": batch, "max_model_len": 512}
    options |= KINDS[kind](tmp_path / kind)
    flags = [text for name, value in options.items() for text in ("--" + name.replace("_", "-"), str(value))]
    with served(tmp_path, *flags, "--max-queue", "64", model=str(fetch())) as server:

        def answered(prompt):
            asked = {"model": server.ask("/v1/models")[1]["data"][0]["id"], "prompt": prompt, "temperature": 0}
            status, reply = server.ask("/v1/completions", {**asked, "max_tokens": NEW, "ignore_eos": True})
            assert status == 200 and reply["usage"]["completion_tokens"] == NEW, reply
            return reply["choices"][0]["text"]

        with ThreadPoolExecutor(batch) as pool:
            texts = list(pool.map(answered, prompts))
        names = "drafts", "draft_tokens", "accepted_tokens", "emitted_tokens", "accepted_tokens_per_pos"
        counted = [int(server.metric(f"vllm:spec_decode_num_{name}_total")) for name in names]
        emitted = server.metric("vllm:generation_tokens_total")
        steps = [step for step in server.ask("/steps")[1]["steps"] if step["drafted"]]
    drafts, drafted, accepted, of_steps, places = counted
    assert drafted >= drafts and places == accepted and of_steps <= emitted == NEW * len(prompts)
    for step in steps:
        assert 0 < step["draft_s"] + step["verify_s"] + step["accept_s"] <= step["end_s"] - step["begin_s"]
    got = [as_tokens(plain, output["token_ids"], text) for output, text in zip(wanted, texts, strict=True)]
    assert drafted > 0  # on a busy machine few drafts pay
    judged(
        (plain, prompts, wanted), got, f"{kind}, k = {k}, batch {batch}, server: {drafted} drafted, {accepted} accepted"
    )


def as_tokens(plain, wanted, text):
    """The tokens `wanted` as far as `text` is theirs, and then another; a text has no tokens of its own."""
    lengths = (n for n in range(len(wanted), -1, -1) if text.startswith(plain.tokenizer.decode(wanted[:n])))
    same = len(wanted) if text == plain.tokenizer.decode(wanted) else min(next(lengths), len(wanted) - 1)
    return wanted[:same] + [-1] * (len(wanted) - same)
