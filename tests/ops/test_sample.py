"""sample: supports worked out by hand and of many rows, ties, rows on their own, edits, refusals, wrong kernels.

Triton's interpreter takes 10 to 150 ms for a row of bisect, so that gets the few rows that tell something.
"""

import math

import numpy as np
import pytest
import torch
from op_kernels import CPU, is_right, refuses

from rooflab.kernels.sample.bisect import bisect
from rooflab.kernels.sample.library import library
from rooflab.kernels.sample.naive import naive
from rooflab.kernels.sample.prefilter import prefilter
from rooflab.reference.philox import philox
from rooflab.reference.sample import SPEC, settings
from rooflab.reference.sample_law import support
from rooflab.reference.spec import Case, get_scheme

FP32 = get_scheme("fp32")
KERNELS = [pytest.param(kernel, id=kernel.__name__) for kernel in (naive, prefilter, bisect)]
INF = math.inf


def rows_of(logits, row, count, seed=0):
    """`count` rows of the same logits and settings; positions and seeds differ."""
    logits = torch.as_tensor(logits, dtype=torch.float32)
    return {"logits": logits.expand(count, -1).contiguous()} | settings([row] * count, CPU, seed)


def _passes(found, inputs):
    return is_right(SPEC, found, inputs, FP32)


TENTHS = [math.log(p) for p in (0.1, 0.2, 0.3, 0.4)]
SUPPORTS = [
    (TENTHS, (1.0, 0, 0.6, 0.0), {2, 3}),
    (TENTHS, (1.0, 0, 0.71, 0.0), {1, 2, 3}),
    (TENTHS, (1.0, 0, 0.39, 0.0), {3}),
    (TENTHS, (1.0, 0, 1e-7, 0.0), {3}),
    (TENTHS, (1.0, 0, 1.0, 0.0), {0, 1, 2, 3}),
    (TENTHS, (1.0, 3, 0.5, 0.0), {2, 3}),  # 0.4 / 0.9 does not reach one half
    (TENTHS, (1.0, 2, 0.5, 0.0), {3}),  # 0.4 / 0.7 does
    (TENTHS, (1.0, 9, 1.0, 0.0), {0, 1, 2, 3}),
    (TENTHS, (1.0, 0, 1.0, 0.49), {1, 2, 3}),
    (TENTHS, (1.0, 0, 1.0, 0.51), {2, 3}),
    (TENTHS, (0.5, 0, 1.0, 0.3), {2, 3}),  # squares: 0.04 / 0.16 falls short
    (TENTHS, (1.0, 3, 0.9, 0.6), {2, 3}),
    ([math.log(p) for p in (0.3, 0.4, 0.3)], (1.0, 2, 1.0, 0.0), {0, 1}),  # a tie at the k-th: the lower index
    ([0.0, 0.0, 0.0, 0.0], (1.0, 3, 1.0, 0.0), {0, 1, 2}),
    ([0.0, 0.0, 0.0, 0.0], (1.0, 0, 0.5, 0.0), {0, 1}),  # reached exactly: nothing more
    ([0.0, 0.0, 0.0, 0.0], (1.0, 0, 0.5 + 2.0**-24, 0.0), {0, 1, 2}),
    ([-0.0, 0.0, -0.0, 0.0], (1.0, 2, 1.0, 0.0), {0, 1}),  # zeros of both signs tie
    ([-5.0, -5.0, -9.0, -5.0], (1.0, 2, 0.5, 0.0), {0}),
    ([-INF, 1.0, -INF, 1.0], (1.0, 3, 1.0, 0.0), {1, 3}),
    ([-INF, -INF, -3.0, -INF], (1.0, 0, 0.9, 0.0), {2}),
    ([-1.0, -1.0, 200.0, -1.0], (1.0, 4, 0.9, 0.01), {2}),  # the other weights underflow
    (TENTHS, (2.0, 1, 1.0, 0.0), {3}),
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
        assert _passes(tokens, rows), kernel.__module__
    as_fp32 = [float(torch.tensor(value)) for value in row]
    kept = support(inputs["logits"][0], as_fp32[0], row[1], *as_fp32[2:]).kept
    assert set(kept.nonzero().flatten().tolist()) == wanted


def _all_mixes(B, V):
    """Rows of 5 to V tokens of which some tie, with every mix of settings; a tenth is greedy."""
    generator = torch.Generator().manual_seed(5)

    def uniform(*shape):
        return torch.rand(*shape, generator=generator)

    x = torch.randn(B, V, generator=generator) * (0.3 + 2 * uniform(B, 1))
    x = torch.where(uniform(B, 1) < 0.3, x.round(), x)
    x = torch.where(torch.arange(V) < 5 + uniform(B, 1) * (V - 4), x, -INF).gather(1, uniform(B, V).argsort(1))
    inputs = {"logits": x} | settings([(1.0, 0, 1.0, 0.0)] * B, CPU, 5)
    inputs["temperature"] = torch.where(uniform(B) < 0.1, 0.0, 1 + 3 * uniform(B))
    inputs["top_k"] = torch.where(uniform(B) < 0.5, 0, 1 + uniform(B) * (V + 3)).int()
    inputs["top_p"] = torch.where(uniform(B) < 0.4, 1.0, 1 - 0.98 * uniform(B))
    inputs["min_p"] = torch.where(uniform(B) < 0.6, 0.0, 0.6 * uniform(B))
    return inputs


def _winners(inputs):
    """The tokens (B,) drawn from the supports, from these with the next token, and from these without their last one;
    a support is worked out from every pair of tokens, without a sort."""
    x, t = inputs["logits"].double(), inputs["temperature"].double()[:, None]
    V, k, p, m = x.shape[1], *(inputs[name][:, None].double() for name in ("top_k", "top_p", "min_p"))
    ahead = (x[:, None] > x[:, :, None]) | ((x[:, None] == x[:, :, None]) & torch.ones(V, V).tril(-1).bool())
    rank = ahead.sum(-1)
    best = x.amax(1, keepdim=True)
    weights = torch.where((k == 0) | (rank < k), ((x - best) / t.clamp(min=1e-9)).exp(), 0.0)
    before = (ahead.double() @ weights[..., None])[..., 0] / weights.sum(1, keepdim=True)
    size = ((weights > 0) & ((p == 1) | (before < p)) & (weights >= m)).sum(1, keepdim=True)
    counter = torch.zeros(len(x), V // 4, 4).numpy().astype(np.uint64)
    counter[..., 0], counter[..., 1] = inputs["position"][:, None].numpy(), np.arange(V // 4)
    seed = inputs["seed"].numpy().view(np.uint64)
    words = philox(counter, np.stack([seed & 0xFFFFFFFF, seed >> 32], -1)[:, None]).astype(np.float32).reshape(-1, V)
    u = words.astype(np.float32) * np.float32(2.0**-32) + np.float32(2.0**-33)
    noise = torch.from_numpy(np.log(-np.log1p(-np.minimum(u, np.float32(1 - 2.0**-24)).astype(np.float64))))
    scores = torch.where(t > 0, (x - best) / t - noise, x)
    return [torch.where(rank < n, scores, -INF).argmax(1) for n in (size, size + 1, (size - 1).clamp(min=1))]


@pytest.mark.more
def test_traps_20_and_21_the_supports_of_ten_thousand_rows_are_exact():
    """Of all settings together; a thousand rows have another token if supports are one token too large, and a thousand
    if they are one too small."""
    inputs = _all_mixes(10_000, 32)
    wanted, *wrong = _winners(inputs)
    assert all(1000 < int((wanted != other).sum()) for other in wrong)
    for kernel in (naive, prefilter):
        tokens = kernel(**inputs)
        rows = (tokens != wanted).nonzero().flatten()  # where fp32 may cut otherwise
        assert len(rows) < 5, kernel.__module__
        assert not len(rows) or _passes(tokens[rows], {name: value[rows] for name, value in inputs.items()})


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
    assert _passes(together, inputs)
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


@pytest.mark.more
def test_all_kernels_give_the_same_token_over_a_whole_vocabulary():
    """bisect, of which a row takes seconds, with every cut in one row."""
    logits = torch.randn(2, 49152, generator=torch.Generator().manual_seed(4)) * 3
    for row in [(1.0, 0, 1.0, 0.0), (0.8, 0, 0.95, 0.0), (1.0, 0, 1.0, 0.05), (0.7, 50, 0.95, 0.01)]:
        inputs = {"logits": logits} | settings([row] * 2, CPU, 2)
        wanted = SPEC.reference(**inputs).tolist()
        assert [kernel(**inputs).tolist() for kernel in (naive, prefilter)] == [wanted] * 2, row
    assert bisect(**{name: value[:1] for name, value in inputs.items()}).tolist() == wanted[:1]


def test_top_p_past_the_first_guess_of_the_prefilter():
    inputs = rows_of(torch.linspace(0, 1, 5000), (1.0, 0, 0.97, 0.0), 20)
    tokens = prefilter(**inputs)
    assert torch.equal(tokens, naive(**inputs)) and _passes(tokens, inputs)


@pytest.mark.parametrize("kernel", [SPEC.reference, naive, library, prefilter])
@pytest.mark.parametrize("row", [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (1.0, 3, 0.9, 0.0), (1.0, 0, 0.5, 0.1)])
def test_trap_23_a_row_without_a_law_is_refused_by_its_number(kernel, row):
    logits = torch.randn(4, 70)
    for value, place in ((math.nan, 5), (INF, 69), (-INF, slice(None))):
        for kinds in ([row] * 4, [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), row, row]):
            spoilt = logits.clone()
            spoilt[2, place] = value
            with pytest.raises(ValueError, match=r"logits: row 2: expected a finite largest value, got (nan|-?inf)"):
                kernel(spoilt, **settings(kinds, CPU, 0))


def test_trap_23_where_no_kernel_can_raise_such_a_row_gives_a_token_of_the_vocabulary():
    logits = torch.randn(6, 70)
    logits[0] = -INF
    logits[1] = torch.nan
    logits[2, 5] = torch.nan
    logits[3, 6] = INF
    logits[4, ::2] = INF
    logits[5] = 3e38
    for row in [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (1.0, 3, 0.9, 0.0), (1.0, 0, 0.5, 0.1)]:
        tokens = bisect(logits, **settings([row] * 6, CPU, 0))
        assert ((tokens >= 0) & (tokens < 70)).all(), row


@pytest.mark.parametrize("kernel", KERNELS)
def test_extreme_but_lawful_rows(kernel):
    logits = torch.full((3, 50), -3e38)
    logits[:, 33] = 1.0
    logits[1, 20] = 1.0 - 2.0**-23
    inputs = {"logits": logits} | settings([(1.0, 0, 1.0, 0.0), (1e-9, 0, 0.9, 0.0), (1e30, 1, 1.0, 0.0)], CPU, 0)
    assert kernel(**inputs).tolist() == [33, 33, 33]


def _edited(B, V, **changes):
    """Inputs of rows that edit tokens, with a mask."""
    case = Case(B=B, V=V, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, penalties=True, allowed=True, top_n=4)
    return SPEC.make_inputs(case, FP32, CPU, 3) | changes


@pytest.mark.parametrize("kernel", [SPEC.reference, naive, prefilter, bisect])
def test_edits_penalties_and_the_mask_are_those_worked_out_by_hand(kernel):
    """x = logit + bias; / or * 1.5 from a count of 0 on; then less 2 * count + 10 from a count of 1 on."""
    edits = {
        "repetition_penalty": torch.tensor([1.5] * 6),
        "presence_penalty": torch.tensor([10.0] * 6),
        "frequency_penalty": torch.tensor([2.0] * 6),
        "edit_offsets": torch.tensor([0, 1, 2, 3, 4, 5, 5], dtype=torch.int32),
        "edit_ids": torch.tensor([1, 1, 1, 1, 2], dtype=torch.int32),
        "edit_counts": torch.tensor([-1, 0, 0, 1, -1], dtype=torch.int32),
        "edit_bias": torch.tensor([0.0, 0.0, -12.0, 12.1, -INF]),
        "allowed": torch.tensor([[-1]] * 5 + [[0b1000]], dtype=torch.int32),
    }
    logits = torch.tensor([[-9.0, 9.0, 5.9, 0.0]]).repeat(6, 1)
    logits[2] = torch.tensor([-9.0, 9.0, -4.4, -4.5])  # 9 - 12 = -3 becomes -4.5
    logits[3] = torch.tensor([-9.0, 9.0, 2.0, 2.2])  # 21.1 / 1.5 - 12 = 2.07
    logits[4, 1] = 1.0
    found = kernel(logits, **settings([(0.0, 0, 1.0, 0.0)] * 6, CPU, 0), **edits, top_n=1)
    assert found[0].tolist() == [1, 1, 2, 3, 1, 3]
    wanted = logits.double().log_softmax(-1)
    assert found[1].tolist() == [[1, 1], [1, 1], [2, 1], [3, 1], [1, 2], [3, 1]]
    assert torch.allclose(found[2].double(), wanted.gather(1, found[1]), atol=1e-5)


def test_wrong_edits_are_refused_with_their_row():
    changes = [
        ({"edit_ids": torch.tensor([1, 1, 0, 2], dtype=torch.int32)}, "edit_ids: expected each token once.* row 0"),
        ({"edit_ids": torch.tensor([1, 2, 0, 8], dtype=torch.int32)}, "edit_ids: expected 0 to 7, got 8 in row 1"),
        ({"edit_counts": torch.tensor([1, 2, -2, 0], dtype=torch.int32)}, "edit_counts: expected >= -1.* row 1"),
        ({"edit_bias": torch.tensor([0.0, INF, 0.0, 0.0])}, "edit_bias: expected a finite value or -inf.* row 0"),
        ({"edit_bias": None}, "edit_bias: expected a tensor beside"),
        ({"edit_offsets": torch.tensor([0, 3, 2], dtype=torch.int32)}, "edit_offsets: expected offsets from 0 to 4"),
        ({"repetition_penalty": torch.tensor([1.0, 0.0])}, "repetition_penalty: expected a finite value > 0.* row 1"),
        ({"presence_penalty": torch.tensor([math.nan, 0.0])}, "presence_penalty: expected a finite value.* row 0"),
        ({"allowed": torch.zeros(2, 2, dtype=torch.int32)}, "allowed: expected 1 words, a bit for each token, got 2"),
        ({"allowed": torch.zeros(2, 1, dtype=torch.int32)}, "logits: row 0: expected a finite largest value"),
        ({"top_n": 9}, "top_n: expected 0 to 8, got 9"),
    ]
    edits = {
        "edit_offsets": torch.tensor([0, 2, 4], dtype=torch.int32),
        "edit_ids": torch.tensor([1, 2, 0, 2], dtype=torch.int32),
        "edit_counts": torch.tensor([1, 2, -1, 0], dtype=torch.int32),
        "edit_bias": torch.zeros(4),
    }
    inputs = rows_of(torch.zeros(8), (1.0, 0, 1.0, 0.0), 2) | edits
    for call in (SPEC.reference, naive, library, prefilter):
        call(**inputs)
        refuses(call, lambda: inputs, changes)


def test_a_kernel_that_ignores_an_edit_is_rejected():
    inputs = _edited(24, 60)
    assert _passes(naive(**inputs), inputs)
    for name, value in (("allowed", None), ("repetition_penalty", None), ("edit_bias", 0.5), ("edit_counts", None)):
        left = torch.full_like(inputs["edit_counts"], -1) if name == "edit_counts" else value
        left = inputs["edit_bias"].clamp(min=value) if name == "edit_bias" else left
        assert not _passes(naive(**inputs | {name: left}), inputs), name
    tokens, ids, values = naive(**inputs)
    assert not _passes((tokens, ids.flip(1), values), inputs) and not _passes((tokens, ids, values + 1e-3), inputs)


def test_a_token_at_the_edge_of_top_p_is_excused_and_one_beyond_is_not():
    logits = torch.tensor([math.log(0.5), math.log(0.3), math.log(0.2)])
    for offset, doubtful in ((1e-6, True), (1e-5, False)):
        law = support(logits, 1.0, 0, 0.8 - offset, 0.0)
        assert law.kept.tolist() == [True, True, False] and bool(law.doubtful[2]) is doubtful
    exact = support(torch.zeros(4), 1.0, 0, 0.5, 0.0)
    assert exact.kept.tolist() == [True, True, False, False] and not bool(exact.doubtful.any())


BAD = [
    ({"logits": torch.zeros(2, 0)}, "logits: expected between 1 and"),
    ({"temperature": torch.tensor([1.0, -0.1])}, "temperature: expected a finite value >= 0, got -0.1.* in row 1"),
    ({"temperature": torch.tensor([1.0, math.nan])}, "temperature: expected a finite value >= 0, got nan in row 1"),
    ({"top_k": torch.tensor([0, -1], dtype=torch.int32)}, "top_k: expected >= 0 .*, got -1 in row 1"),
    ({"top_p": torch.tensor([1.0, 0.0])}, r"top_p: expected a value in \(0, 1\], got 0.0 in row 1"),
    ({"top_p": torch.tensor([1.0, 1.5])}, r"top_p: expected a value in \(0, 1\], got 1.5 in row 1"),
    ({"min_p": torch.tensor([0.0, 1.1])}, r"min_p: expected a value in \[0, 1\], got 1.1.* in row 1"),
]


@pytest.mark.parametrize("kernel", [SPEC.reference, *KERNELS])
def test_bad_input_is_refused_in_one_sentence(kernel):
    refuses(kernel, lambda: rows_of(torch.zeros(8), (1.0, 0, 1.0, 0.0), 2), BAD)


@pytest.mark.parametrize("kernel", KERNELS)
def test_out_strided_rows_and_an_empty_batch(kernel):
    inputs = rows_of(torch.randn(600), (1.0, 30, 0.9, 0.0), 3)
    wanted = kernel(**inputs)
    wide = torch.full((3, 900), INF)
    wide[:, 100:700] = inputs["logits"]
    out = torch.full((3,), -1)
    assert kernel(**inputs | {"logits": wide[:, 100:700]}, out=out) is out
    assert torch.equal(out, wanted)
    assert kernel(**{name: value[:0] for name, value in inputs.items()}).shape == (0,)
    with pytest.raises(ValueError, match="out: expected torch.int64"):
        kernel(**inputs, out=torch.zeros(3))
