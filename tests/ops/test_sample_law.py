"""The law of sample's draws, the random words and the race that make a draw, and the test of a law itself."""

import math

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from op_kernels import CPU
from test_sample import FP32, rows_of

from rooflab.bench.core.check import check_kernel
from rooflab.kernels.lib import philox as torch_philox
from rooflab.kernels.lib import race as device_race
from rooflab.kernels.registry import Kernel
from rooflab.kernels.sample import library, naive
from rooflab.reference.distribution import chi_square, smallest_effect
from rooflab.reference.philox import philox
from rooflab.reference.sample import SPEC, settings
from rooflab.reference.sample_law import EDIT_ARGUMENTS, edited, support
from rooflab.reference.spec import Case

VECTORS = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def test_philox_gives_the_known_answers_of_random123():
    for counter, key, words in VECTORS:
        assert philox(np.array(counter, np.uint64), np.array(key, np.uint64)).tolist() == words


def test_the_torch_words_are_the_references():
    token = torch.tensor([0, 1, 2, 151935, 2**31 - 2])
    for seed, position in zip(
        (0, 1, -1, 2**63 - 1, -(2**63), 0x299F31D0A4093822), (0, 7, 2**32 - 1, 2**32 + 7, 7, 2**32 - 1), strict=True
    ):
        counter = np.zeros((5, 4), np.uint64)
        counter[:, 0], counter[:, 1] = position & 0xFFFFFFFF, token.numpy() // 4
        words = philox(counter, np.array([seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF], np.uint64))
        wanted = words[np.arange(5), token.numpy() % 4].tolist()
        key = torch.tensor([seed]), torch.tensor([position])
        assert torch_philox.words_of_tokens(*(each.expand(5) for each in key), token).tolist() == wanted
        assert torch_philox.words_of_rows(*key, 11)[0, [0, 1, 2]].tolist() == wanted[:3]


@triton.jit
def _log_exponential_kernel(word_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, device_race.log_exponential(tl.load(word_ptr + i).to(tl.uint32)))


def test_log_of_the_exponential_is_right_to_a_few_ulps_over_the_whole_range():
    ends = [0, 1, 2, 3, 255, 2**30 - 1, 2**30, 2**30 + 1, 2**31, 2**32 - 257, 2**32 - 2, 2**32 - 1]
    spread = (2.0 ** torch.linspace(0, 32, 500, dtype=torch.float64)[:-1]).long().tolist()
    words = torch.tensor((ends + spread + [0] * 512)[:512])
    u = np.minimum(
        words.numpy().astype(np.float32) * np.float32(2.0**-32) + np.float32(2.0**-33), np.float32(1 - 2.0**-24)
    )
    wanted = torch.from_numpy(np.log(-np.log1p(-u.astype(np.float64))))
    assert wanted.min() == pytest.approx(-33 * math.log(2))
    assert wanted.max() == pytest.approx(math.log(24 * math.log(2)))
    compiled = torch.empty(512)
    _log_exponential_kernel[(1,)](words, compiled, 512)
    for found in (torch_philox.log_exponential(words), compiled):
        assert ((found.double() - wanted).abs() <= 4 * 2.0**-24 * (wanted.abs() + 1)).all()


LAW = (0.02, 0.4, 0.08, 0.2, 0.3)
NO_CUT, CUT = (1.0, 0, 1.0, 0.0), (0.6, 4, 0.97, 0.0)


MIXES = {
    "no cut": (NO_CUT, {}),
    "top-k": ((0.6, 3, 1.0, 0.0), {}),
    "top-p": ((1.3, 0, 0.8, 0.0), {}),
    "min-p": ((1.0, 0, 1.0, 0.3), {}),
    "all": ((1.5, 6, 0.95, 0.05), {}),
    "all with penalties and a mask": ((2.0, 4, 0.97, 0.02), {"penalties": True, "allowed": True}),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("row", "edits"), MIXES.values(), ids=MIXES)
def test_traps_22_and_25_many_draws_follow_the_law(row, edits):
    count, V = 200_000, 8
    case = Case(B=1, V=V, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, sigma=1.0, **edits)
    one = SPEC.make_inputs(case, FP32, CPU, 2)
    law = support(
        edited(**{name: value for name, value in one.items() if name in EDIT_ARGUMENTS})[0], *row
    ).probabilities
    assert int((law > 0).sum()) >= 2
    inputs = {
        name: value.repeat(count, *[1] * (value.ndim - 1)) for name, value in one.items() if name in EDIT_ARGUMENTS
    }
    if "edit_offsets" in one:
        inputs["edit_offsets"] = torch.arange(count + 1, dtype=torch.int32) * int(one["edit_offsets"][1])
    inputs |= settings([row] * count, CPU, 11)
    found = chi_square(naive.naive(**inputs), law)
    assert found.passed and found.smallest_effect < 0.03, found


@pytest.mark.parametrize("row", [NO_CUT, CUT, (1.0, 0, 1.0, 0.3)])
def test_the_library_draws_from_the_same_law_by_its_own_stream(row):
    torch.manual_seed(0)
    law = support(torch.tensor(LAW).log(), *row).probabilities
    found = chi_square(library.library(**rows_of([math.log(p) for p in LAW], row, 40000, seed=11)), law)
    assert found.passed and found.smallest_effect < 0.05, found


def test_draws_of_two_rows_and_of_two_positions_are_independent():
    inputs = rows_of([math.log(p) for p in LAW], (1.0, 0, 1.0, 0.0), 40000)
    inputs["seed"] = torch.arange(2).repeat(20000)  # two requests side by side, position by position
    inputs["position"] = torch.arange(20000).repeat_interleave(2)
    pairs = naive.naive(**inputs).view(-1, 2)
    law = torch.tensor(LAW, dtype=torch.float64)
    joint = torch.outer(law, law).flatten()
    assert chi_square(pairs[:, 0] * 5 + pairs[:, 1], joint).passed
    assert chi_square(pairs[:-1, 0] * 5 + pairs[1:, 0], joint).passed


def _by_numbers(weights, numbers):
    mass = weights.double().cumsum(1)
    return torch.searchsorted(mass, numbers.double()[:, None] * mass[:, -1:], right=True)[:, 0]


OWN_STREAMS = {
    "right": (lambda w: _by_numbers(w, torch.rand(len(w))), None),
    "one number for all rows": (lambda w: _by_numbers(w, torch.rand(1).expand(len(w))), "the probabilities"),
    "one for two rows": (
        lambda w: _by_numbers(w, torch.rand(len(w)).repeat_interleave(2)[: len(w)]),
        "independent rows",
    ),
    "all alike": (lambda w: torch.multinomial((w > 0).float(), 1)[:, 0], "the probabilities"),
    "square roots": (lambda w: torch.multinomial(w.sqrt(), 1)[:, 0], "the probabilities"),
}


@pytest.mark.parametrize(("draw", "fault"), OWN_STREAMS.values(), ids=OWN_STREAMS)
def test_a_check_counts_the_draws_of_an_own_stream(draw, fault):
    """Each token is one that may be drawn, so the counts alone tell."""

    def own(logits, temperature, top_k, top_p, min_p, seed, position):
        sorted_logits, ids = torch.sort(logits.float(), dim=-1, descending=True, stable=True)
        kept, scores = naive.support_of(sorted_logits, temperature, top_k, top_p, min_p)
        kept[:, 1:] &= (temperature > 0)[:, None]
        return ids.gather(1, draw(scores.exp() * kept)[:, None])[:, 0]

    torch.manual_seed(0)
    kernel = Kernel("sample", "own", "optimized", backend="torch", fn=own, nondeterministic="its own numbers")
    found = check_kernel(kernel, SPEC, SPEC.cases["smoke"][0], FP32, planted="planted alone")
    assert found.status == ("INCORRECT" if fault else "OK") and (fault or "") in found.reason, found.describe()


def test_chi_square_finds_the_effect_that_it_states():
    law, generator = torch.tensor(LAW, dtype=torch.float64), torch.Generator().manual_seed(0)
    effect = smallest_effect(20000, 4)
    bent = law + torch.tensor([0, 1, 0, 0, -1]) * effect / math.sqrt(1 / 0.4 + 1 / 0.3)
    assert float(((bent - law) ** 2 / law).sum()) == pytest.approx(effect**2)
    missed = sum(chi_square(torch.multinomial(bent, 20000, True, generator=generator), law).passed for _ in range(40))
    assert missed <= 3  # 0.4 expected at the stated power of 0.99
    assert all(chi_square(torch.multinomial(law, 20000, True, generator=generator), law).passed for _ in range(40))
    impossible = torch.tensor([0.5, 0.5, 0.0])
    assert not chi_square(torch.tensor([0, 1] * 100 + [2]), impossible).passed, "one draw of what cannot be drawn"
    with pytest.raises(ValueError, match="at least two cells"):
        chi_square(torch.tensor([0] * 100), torch.tensor([1.0]))
