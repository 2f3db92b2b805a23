"""The randomness of sample: Philox's published vectors, the race's noise, and the law of many draws."""

import math

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from rooflab.kernels.sample import _philox, bisect, naive, prefilter
from rooflab.reference.distribution import chi_square, smallest_effect
from rooflab.reference.sample import philox, race, settings, support

CPU = torch.device("cpu")


def _rows(logits, row, count, seed=0):
    """`count` rows of the same logits and settings; positions and seeds differ."""
    logits = torch.as_tensor(logits, dtype=torch.float32)
    return {"logits": logits.expand(count, -1).contiguous()} | settings([row] * count, CPU, seed)


VECTORS = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), VECTORS)
def test_philox_gives_the_known_answers_of_random123(counter, key, words):
    assert philox(np.array(counter, np.uint64), np.array(key, np.uint64)).tolist() == words


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 0x299F31D0A4093822])
@pytest.mark.parametrize("position", [0, 7, 2**32 - 1, 2**32 + 7])
def test_the_torch_words_are_the_references(seed, position):
    token = torch.tensor([0, 1, 2, 151935, 2**31 - 2])
    counter = np.zeros((5, 4), np.uint64)
    counter[:, 0], counter[:, 1] = position & 0xFFFFFFFF, token.numpy()
    wanted = philox(counter, np.array([seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF], np.uint64))[:, 0].tolist()
    assert _philox.first_word(torch.tensor(seed), torch.tensor(position), token).tolist() == wanted
    assert _philox.first_word_of_row(seed, position, token).tolist() == wanted


@triton.jit
def _log_exponential_kernel(word_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, bisect.log_exponential(tl.load(word_ptr + i).to(tl.uint32)))


def test_log_of_the_exponential_is_right_to_a_few_ulps_over_the_whole_range():
    ends = [0, 1, 2, 3, 255, 2**30 - 1, 2**30, 2**30 + 1, 2**31, 2**32 - 257, 2**32 - 2, 2**32 - 1]
    spread = (2.0 ** torch.linspace(0, 32, 500, dtype=torch.float64)[:-1]).long().tolist()
    words = torch.tensor((ends + spread + [0] * 512)[:512])
    u = np.minimum(
        words.numpy().astype(np.float32) * np.float32(2.0**-32) + np.float32(2.0**-33), np.float32(1 - 2.0**-24)
    )
    wanted = torch.from_numpy(np.log(-np.log1p(-u.astype(np.float64))))
    assert wanted.min() == pytest.approx(-33 * math.log(2)) and wanted.max() == pytest.approx(
        math.log(24 * math.log(2))
    )
    compiled = torch.empty(512)
    _log_exponential_kernel[(1,)](words, compiled, 512)
    for found in (_philox.log_exponential(words), compiled):
        assert ((found.double() - wanted).abs() <= 4 * 2.0**-24 * (wanted.abs() + 1)).all()


def test_the_reference_race_is_keyed_by_seed_position_and_token():
    first = race(5, 9, 300)
    assert torch.equal(first[:100], race(5, 9, 100))
    assert torch.equal(first, race(5, 9 + 2**32, 300))
    for other in (race(6, 9, 300), race(5 + 2**32, 9, 300), race(5, 10, 300)):
        assert not bool((first == other).any())


def _draws(kernel, law, row, count):
    return kernel(**_rows([math.log(p) for p in law], row, count, seed=11))


LAW = (0.02, 0.4, 0.08, 0.2, 0.3)


NO_CUT, CUT = (1.0, 0, 1.0, 0.0), (0.6, 4, 0.97, 0.0)


@pytest.mark.parametrize(
    ("kernel", "row", "count", "effect"),
    [
        pytest.param(naive.sample, NO_CUT, 40000, 0.05, id="naive"),
        pytest.param(naive.sample, CUT, 40000, 0.05, id="naive, cut"),
        pytest.param(prefilter.sample, NO_CUT, 4000, 0.15, id="prefilter"),
        pytest.param(prefilter.sample, CUT, 4000, 0.15, id="prefilter, cut"),
        # Few draws, for the interpreter takes 10 to 50 ms each; that its tokens are naive's is checked row by row.
        pytest.param(bisect.sample, NO_CUT, 400, 0.4, id="bisect"),
        pytest.param(bisect.sample, CUT, 80, 0.9, id="bisect, cut"),
    ],
)
def test_many_draws_follow_the_law(kernel, row, count, effect):
    law = support(torch.tensor(LAW).log(), *row).probabilities
    tokens = _draws(kernel, LAW, row, count)
    found = chi_square(tokens, law)
    assert found.passed, found
    assert found.smallest_effect < effect
    assert torch.equal(tokens[:80], _draws(naive.sample, LAW, row, count)[:80])


def test_draws_of_two_rows_and_of_two_positions_are_independent():
    inputs = _rows([math.log(p) for p in LAW], (1.0, 0, 1.0, 0.0), 40000)
    inputs["seed"] = torch.arange(2).repeat(20000)  # two requests side by side, position by position
    inputs["position"] = torch.arange(20000).repeat_interleave(2)
    pairs = naive.sample(**inputs).view(-1, 2)
    law = torch.tensor(LAW, dtype=torch.float64)
    joint = torch.outer(law, law).flatten()
    assert chi_square(pairs[:, 0] * 5 + pairs[:, 1], joint).passed
    assert chi_square(pairs[:-1, 0] * 5 + pairs[1:, 0], joint).passed


def test_chi_square_finds_the_effect_that_it_states():
    law = torch.tensor(LAW, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    effect = smallest_effect(20000, 4)
    bent = law + torch.tensor([0, 1, 0, 0, -1]) * effect / math.sqrt(1 / 0.4 + 1 / 0.3)
    assert float(((bent - law) ** 2 / law).sum()) == pytest.approx(effect**2)
    missed = sum(chi_square(torch.multinomial(bent, 20000, True, generator=generator), law).passed for _ in range(100))
    assert missed <= 6  # 1 expected at the stated power of 0.99
    assert all(chi_square(torch.multinomial(law, 20000, True, generator=generator), law).passed for _ in range(100))


def test_chi_square_rejects_one_draw_of_what_cannot_be_drawn_and_a_law_that_says_nothing():
    law = torch.tensor([0.5, 0.5, 0.0])
    assert not chi_square(torch.tensor([0, 1] * 100 + [2]), law).passed
    with pytest.raises(ValueError, match="at least two cells"):
        chi_square(torch.tensor([0] * 100), torch.tensor([1.0]))
