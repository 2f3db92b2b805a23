"""sample: supports computed by hand and for every mix of settings, ties, and rows that do not affect each other.

Triton's interpreter takes 10 to 150 ms for a row of bisect, so bisect runs only on the few rows that matter.
"""

import math

import pytest
import torch
from op_kernels import CPU, is_right

from rooflab.kernels.sample.bisect import bisect
from rooflab.kernels.sample.naive import naive
from rooflab.kernels.sample.prefilter import prefilter
from rooflab.reference.sample import SPEC, settings
from rooflab.reference.sample_law import support
from rooflab.reference.spec import get_scheme

FP32 = get_scheme("fp32")
KERNELS = [pytest.param(kernel, id=kernel.__name__) for kernel in (naive, prefilter, bisect)]
INF = math.inf


def rows_of(logits, row, count, seed=0):
    """`count` rows of the same logits and settings; positions and seeds differ."""
    logits = torch.as_tensor(logits, dtype=torch.float32)
    return {"logits": logits.expand(count, -1).contiguous()} | settings([row] * count, CPU, seed)


TENTHS = [math.log(p) for p in (0.1, 0.2, 0.3, 0.4)]
SUPPORTS = [
    (TENTHS, (1.0, 0, 0.6, 0.0), {2, 3}),
    (TENTHS, (1.0, 0, 0.71, 0.0), {1, 2, 3}),
    (TENTHS, (1.0, 0, 1e-7, 0.0), {3}),
    (TENTHS, (1.0, 3, 0.5, 0.0), {2, 3}),  # 0.4 / 0.9 does not reach one half
    (TENTHS, (1.0, 2, 0.5, 0.0), {3}),  # 0.4 / 0.7 does
    (TENTHS, (1.0, 0, 1.0, 0.49), {1, 2, 3}),
    (TENTHS, (1.0, 0, 1.0, 0.51), {2, 3}),
    (TENTHS, (0.5, 0, 1.0, 0.3), {2, 3}),  # squares: 0.04 / 0.16 falls short
    (TENTHS, (1.0, 3, 0.9, 0.6), {2, 3}),
    ([0.0, 0.0, 0.0, 0.0], (1.0, 3, 1.0, 0.0), {0, 1, 2}),  # a tie at the k-th: the lower index
    ([0.0, 0.0, 0.0, 0.0], (1.0, 0, 0.5, 0.0), {0, 1}),  # reached exactly: nothing more
    ([0.0, 0.0, 0.0, 0.0], (1.0, 0, 0.5 + 2.0**-24, 0.0), {0, 1, 2}),
    ([-0.0, 0.0, -0.0, 0.0], (1.0, 2, 1.0, 0.0), {0, 1}),  # zeros of both signs tie
    ([-INF, 1.0, -INF, 1.0], (1.0, 3, 1.0, 0.0), {1, 3}),
    ([-1.0, -1.0, 200.0, -1.0], (1.0, 4, 0.9, 0.01), {2}),  # the other weights underflow
    ([1e-45, 0.0, 3e-45, -1e-45], (1.0, 2, 1.0, 0.0), {0, 2}),  # equal weights, but the order of denormals
    ([1e-45, 0.0, 3e-45, -1e-45], (1.0, 0, 0.75, 0.0), {0, 1, 2}),
]


def _telling(inputs):
    """One row of each pair of the token drawn and the token that would be drawn without a cut: a support that is too
    small misses one of the former, and one that is too large lets through one of the latter."""
    free = {name: torch.full_like(inputs[name], value) for name, value in (("top_k", 0), ("top_p", 1), ("min_p", 0))}
    pairs = zip(naive(**inputs).tolist(), naive(**inputs | free).tolist(), strict=True)
    rows = {pair: row for row, pair in enumerate(pairs)}
    return {name: value[list(rows.values())] for name, value in inputs.items()}


@pytest.mark.sampled(10)
@pytest.mark.parametrize(("logits", "row", "wanted"), SUPPORTS)
def test_traps_20_and_21_the_support_is_the_one_worked_out_by_hand(logits, row, wanted):
    inputs = rows_of(logits, row, 24)
    for kernel in (SPEC.reference, naive, prefilter, bisect):
        rows = _telling(inputs) if kernel is bisect else inputs
        tokens = kernel(**rows)
        assert set(tokens.tolist()) == wanted, kernel.__module__
        assert is_right(SPEC, tokens, rows, FP32), kernel.__module__
    as_fp32 = [float(torch.tensor(value)) for value in row]
    kept = support(inputs["logits"][0], as_fp32[0], row[1], *as_fp32[2:]).kept
    assert set(kept.nonzero().flatten().tolist()) == wanted


def test_traps_20_and_21_supports_of_every_mix_of_settings_are_right():
    """Rows of 5 to 32 tokens of which some tie; a tenth is greedy."""
    B, V, generator = 300, 32, torch.Generator().manual_seed(5)

    def uniform(*shape):
        return torch.rand(*shape, generator=generator)

    x = torch.randn(B, V, generator=generator) * (0.3 + 2 * uniform(B, 1))
    x = torch.where(uniform(B, 1) < 0.3, x.round(), x)
    x = torch.where(torch.arange(V) < 5 + uniform(B, 1) * (V - 4), x, -INF).gather(1, uniform(B, V).argsort(1))
    inputs = rows_of(x[0], (1.0, 0, 1.0, 0.0), B, 5) | {
        "logits": x,
        "temperature": torch.where(uniform(B) < 0.1, 0.0, 1 + 3 * uniform(B)),
        "top_k": torch.where(uniform(B) < 0.5, 0, 1 + uniform(B) * (V + 3)).int(),
        "top_p": torch.where(uniform(B) < 0.4, 1.0, 1 - 0.98 * uniform(B)),
        "min_p": torch.where(uniform(B) < 0.6, 0.0, 0.6 * uniform(B)),
    }
    tokens = naive(**inputs)
    assert is_right(SPEC, tokens, inputs, FP32) and torch.equal(prefilter(**inputs), tokens)
    fewer = inputs | {"top_k": torch.where(inputs["top_k"] > 1, inputs["top_k"] - 1, inputs["top_k"])}
    assert not is_right(SPEC, naive(**fewer), inputs, FP32)


@pytest.mark.parametrize("kernel", [pytest.param(SPEC.reference, id="reference"), *KERNELS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_temperature_zero_takes_the_highest_logit_and_of_equals_the_first(kernel, dtype):
    logits = torch.full((3, 2500), -2.0, dtype=dtype)
    logits[0, [1700, 2499]] = 3.0
    logits[1, [0, 1024]] = 3.0
    logits[2] = -7.0
    assert kernel(logits, **settings([(0.0, 5, 0.5, 0.1)] * 3, CPU, 0)).tolist() == [1700, 0, 0]


@pytest.mark.parametrize("kernel", KERNELS)
def test_traps_24_and_26_a_draw_depends_on_nothing_but_its_own_row(kernel):
    kinds = [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.7, 20, 1.0, 0.0), (1.0, 0, 0.8, 0.0), (1.3, 50, 0.9, 0.02)]
    logits = torch.randn(5, 400, generator=torch.Generator().manual_seed(0)) * 3
    inputs = {"logits": logits} | settings(kinds, CPU, 1)
    together = kernel(**inputs)
    assert is_right(SPEC, together, inputs, FP32)
    assert [int(kernel(**{n: x[b : b + 1] for n, x in inputs.items()})) for b in range(5)] == together.tolist()
    order = torch.tensor([3, 1, 4, 0, 2])
    assert torch.equal(kernel(**{n: x[order] for n, x in inputs.items()}), together[order])
    padded = {n: torch.cat([x[:1], x, x[:2]]) for n, x in inputs.items()}
    wide = torch.full((8, 433), 1e9)
    wide[:, 21:421] = padded["logits"]
    assert torch.equal(kernel(**padded | {"logits": wide[:, 21:421]})[1:6], together)


@pytest.mark.parametrize("kernel", KERNELS)
def test_seed_and_position_steer_the_draw(kernel):
    inputs = rows_of(torch.zeros(1000), (1.0, 0, 1.0, 0.0), 6)
    inputs["seed"] = torch.tensor([3, 3, 3, 3 + 2**32, -3, 4])
    inputs["position"] = torch.tensor([8, 8 + 2**32, 9, 8, 8, 8])
    tokens = kernel(**inputs).tolist()
    assert tokens == SPEC.reference(**inputs).tolist()
    assert tokens[0] == tokens[1] and len(set(tokens)) == 5


@pytest.mark.parametrize("kernel", KERNELS)
def test_extreme_but_lawful_rows(kernel):
    logits = torch.full((3, 50), -3e38)
    logits[:, 33] = 1.0
    logits[1, 20] = 1.0 - 2.0**-23
    inputs = {"logits": logits} | settings([(1.0, 0, 1.0, 0.0), (1e-9, 0, 0.9, 0.0), (1e30, 1, 1.0, 0.0)], CPU, 0)
    assert kernel(**inputs).tolist() == [33, 33, 33]


def test_a_token_at_the_edge_of_top_p_is_excused_and_one_beyond_is_not():
    logits = torch.tensor([math.log(0.5), math.log(0.3), math.log(0.2)])
    for offset, doubtful in ((1e-6, True), (1e-5, False)):
        law = support(logits, 1.0, 0, 0.8 - offset, 0.0)
        assert law.kept.tolist() == [True, True, False] and bool(law.doubtful[2]) is doubtful
    exact = support(torch.zeros(4), 1.0, 0, 0.5, 0.0)
    assert exact.kept.tolist() == [True, True, False, False] and not bool(exact.doubtful.any())
