"""speculative_verify: the law of every token, identical and certain drafts, and input that is refused."""

import math

import pytest
import torch
from op_kernels import CPU, is_right, refuses

from rooflab.kernels.sample.naive import naive as sample
from rooflab.kernels.speculative_verify.fused import fused
from rooflab.kernels.speculative_verify.naive import naive
from rooflab.reference.distribution import chi_square
from rooflab.reference.sample import settings
from rooflab.reference.spec import get_scheme
from rooflab.reference.speculative_verify import SPEC

FP32 = get_scheme("fp32")
KERNELS = [pytest.param(kernel, id=kernel.__name__) for kernel in (naive, fused)]
TARGET = torch.tensor([[0.5, 0.2, 0.2, 0.1], [0.1, 0.1, 0.1, 0.7], [0.25, 0.25, 0.25, 0.25]])
DRAFT = torch.tensor([[0.1, 0.6, 0.2, 0.1], [0.4, 0.3, 0.2, 0.1]])


def _many(count, target=TARGET, draft=DRAFT, seed=0):
    """`count` sequences of the same two laws, whose drafts are drawn from `draft`."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.stack([torch.multinomial(q, count, True, generator=generator) for q in draft], dim=1)
    return {
        "draft_tokens": tokens,
        "target_probs": target.repeat(count, 1, 1),
        "num_drafts": torch.full((count,), len(draft), dtype=torch.int32),
        "seed": torch.randint(-(2**62), 2**62, (count,), generator=generator),
        "position": torch.randint(0, 1000, (count,), generator=generator),
        "draft_probs": draft.repeat(count, 1, 1),
    }


@pytest.mark.parametrize("ngram", [False, True])
def test_tokens_follow_the_target_law_whatever_the_draft(ngram):
    """The first two tokens together: the second one is drawn by this call, or would be by the next one."""
    count = 200_000
    inputs = _many(count)
    if ngram:
        inputs |= {"draft_probs": None, "draft_tokens": torch.tensor([[1, 3]]).repeat(count, 1)}
    tokens, accepted = naive(**inputs)
    first = tokens[:, 0]
    found = chi_square(first, TARGET[0].double())
    assert found.passed and found.smallest_effect < 0.02, found
    # Among those whose first draft was accepted, the second token has its own law, whatever the first one was.
    after = [second for token in range(4) if len(second := tokens[(accepted >= 1) & (first == token), 1])]
    assert all(chi_square(second, TARGET[1].double()).passed for second in after)
    assert chi_square(tokens[accepted == 2, 2], TARGET[2].double()).passed
    rate = float(torch.minimum(TARGET[0], DRAFT[0]).sum()) if not ngram else float(TARGET[0, 1])
    assert float((accepted >= 1).double().mean()) == pytest.approx(rate, abs=5 * math.sqrt(0.25 / count))


def test_tokens_follow_the_target_law_where_sample_drew_the_drafts():
    """With the same seeds and positions, as in an engine: the draft's race must not be the one of its replacement."""
    count = 40_000
    p, q = torch.tensor([[0.1, 0.5, 0.4], [0.2, 0.2, 0.6]]), torch.tensor([[0.7, 0.01, 0.29]])
    inputs = _many(count, target=p, draft=q)
    own = settings([(1.0, 0, 1.0, 0.0)] * count, CPU, 0) | {name: inputs[name] for name in ("seed", "position")}
    drafts = sample(q[0].log().repeat(count, 1), **own)
    inputs["draft_tokens"] = drafts[:, None]
    assert chi_square(drafts, q[0].double()).passed
    tokens, accepted = naive(**inputs)
    assert chi_square(tokens[:, 0], p[0].double()).passed
    assert chi_square(tokens[accepted == 1, 1], p[1].double()).passed


@pytest.mark.parametrize("kernel", KERNELS)
def test_an_identical_draft_is_accepted_whole(kernel):
    inputs = _many(16, draft=TARGET[:2])
    tokens, accepted = kernel(**inputs)
    assert accepted.tolist() == [2] * 16 and torch.equal(tokens[:, :2], inputs["draft_tokens"])
    assert ((tokens[:, 2] >= 0) & (tokens[:, 2] < 4)).all() and len(tokens[:, 2].unique()) == 4


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("ngram", [False, True])
def test_a_certain_target_gives_the_greedy_tokens(kernel, ngram):
    greedy = torch.tensor([2, 0, 3])
    inputs = _many(12, target=torch.nn.functional.one_hot(greedy, 4).float())
    inputs["num_drafts"] = torch.arange(12, dtype=torch.int32) % 3
    if ngram:
        inputs["draft_probs"] = None
    tokens, accepted = kernel(**inputs)
    for row, count in enumerate(accepted.tolist()):
        drafts = inputs["draft_tokens"][row, : int(inputs["num_drafts"][row])].tolist()
        right = next((i for i, token in enumerate(drafts) if token != greedy[i]), len(drafts))
        assert count == right and tokens[row].tolist() == greedy[: right + 1].tolist() + [-1] * (2 - right)


BAD = [
    ({"target_probs": torch.zeros(3, 3, 4)}, "target_probs: .*row 0"),
    ({"target_probs": torch.rand(3, 3, 4) - 2 * torch.eye(3)[1, :, None, None]}, "target_probs: .*row 1"),
    ({"target_probs": torch.ones(3, 3, 4) / torch.tensor([1, 1, 0])[:, None, None]}, "target_probs: .*row 2"),
    ({"target_probs": torch.zeros(3, 3, 0), "draft_probs": torch.zeros(3, 2, 0)}, "target_probs: "),
    ({"draft_probs": torch.full((3, 2, 4), math.nan)}, "draft_probs: .*row 0"),
    ({"num_drafts": torch.tensor([0, 3, 1], dtype=torch.int32)}, "num_drafts: .* row 1"),
    ({"draft_tokens": torch.tensor([[0, 0], [0, 0], [0, 4]])}, "draft_tokens: .* row 2"),
]


@pytest.mark.parametrize("kernel", [SPEC.reference, *KERNELS])
def test_laws_counts_and_tokens_that_cannot_be_are_refused_with_their_row(kernel):
    refuses(kernel, lambda: _many(3), BAD)


def test_the_comparison_excuses_only_what_fp32_may_decide():
    inputs = {name: value[:1] for name, value in _many(1).items()}
    tokens, accepted = SPEC.oracle(inputs)
    other = tokens.clone()
    other[0, int(accepted)] = (int(tokens[0, int(accepted)]) + 1) % 4
    assert not is_right(SPEC, (other, accepted), inputs, FP32)
    assert not SPEC.judge((tokens.int(), accepted), (tokens, accepted), inputs, FP32)[0].passed
