"""The engine against transformers on the same weights: logits and tokens, alone and batched together.

Teacher-forced on transformers' own greedy tokens, EOS ignored, so that one near-tie does not end the comparison.  A
token counts where transformers' two best logits are more than 2e-3 apart.
"""

import pytest
import torch
from oracle import NEW_TOKENS, continuations_and_logits, load_transformers, real_prompts, teacher_forced

from rooflab.engine.llm import LLM
from rooflab.engine.model_files import fetch

LOGIT_TOLERANCE = 1e-3
CLEAR_GAP = 2e-3


@pytest.fixture(scope="module")
def llm():
    return LLM(fetch(), dtype="float32", device="cpu", max_num_seqs=16)


# 20 tokens reach the next page of every prompt; all 64 take minutes.
@pytest.fixture(scope="module", params=[20, pytest.param(NEW_TOKENS, marks=pytest.mark.slow)])
def expected(request, llm):
    """Prompts, and what transformers answers and from which logits."""
    prompts = real_prompts(llm.tokenizer)
    model = load_transformers(fetch())
    return prompts, continuations_and_logits(model, prompts, request.param)


def compare(prompts, expected, logits):
    counted = total = 0
    for prompt, (tokens, theirs), ours in zip(prompts, expected, logits, strict=True):
        assert ours.shape == theirs.shape == (len(tokens), 49152)
        error = float((ours - theirs).abs().max())
        assert error <= LOGIT_TOLERANCE, f"prompt of {len(prompt)} tokens: logits differ by {error}"
        best = theirs.topk(2).values
        clear = best[:, 0] - best[:, 1] > CLEAR_GAP
        agree = ours.argmax(-1) == torch.tensor(tokens)
        assert bool(agree[clear].all()), f"prompt of {len(prompt)} tokens: another token"
        counted, total = counted + int(clear.sum()), total + len(clear)
    assert counted >= 0.95 * total, f"only {counted} of {total} positions count"


@pytest.mark.timeout(900)
def test_batched_together(llm, expected):
    prompts, answers = expected
    assert len(prompts) >= 8 and {1, 15, 16, 17, 600} <= {len(prompt) for prompt in prompts}
    logits = teacher_forced(llm, prompts, [tokens for tokens, _ in answers])
    compare(prompts, answers, logits)


@pytest.mark.timeout(900)
def test_alone(llm, expected):
    prompts, answers = expected
    logits = [teacher_forced(llm, [prompt], [tokens])[0] for prompt, (tokens, _) in zip(prompts, answers, strict=True)]
    compare(prompts, answers, logits)


def test_the_question(llm):
    output = llm.generate([{"role": "user", "content": "What is the capital of France?"}])[0]
    assert output["text"] == output.outputs[0].text == "The capital of France is Paris."
    assert output["finish_reason"] == "stop" and output["token_ids"][-1] == 2
