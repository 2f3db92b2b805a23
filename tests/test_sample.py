"""sample: supports worked out by hand, ties, rows on their own, refusals, wrong kernels, and the law of many draws.

Triton's interpreter takes 10 to 150 ms for a row of bisect, so that gets the few rows that tell something.
"""

import math

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from op_kernels import CPU, META

from rooflab.kernels.registry import get_kernel
from rooflab.kernels.sample import _philox, bisect, library, naive, prefilter
from rooflab.reference.distribution import chi_square, smallest_effect
from rooflab.reference.sample import SPEC, philox, race, settings, support
from rooflab.reference.spec import Case, get_scheme

FP32 = get_scheme("fp32")
KERNELS = [pytest.param(module.sample, id=module.__name__.split(".")[-1]) for module in (naive, prefilter, bisect)]
INF = math.inf


def _rows(logits, row, count, seed=0):
    """`count` rows of the same logits and settings; positions and seeds differ."""
    logits = torch.as_tensor(logits, dtype=torch.float32)
    return {"logits": logits.expand(count, -1).contiguous()} | settings([row] * count, CPU, seed)


def _passes(tokens, inputs, scheme=FP32):
    return all(error.passed for error in SPEC.judge((tokens,), SPEC.oracle(inputs), inputs, scheme))


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
]


def _telling(inputs):
    """One row of each pair of the token drawn and the token that would be drawn without a cut: a support that is too
    small misses one of the former, and one that is too large lets through one of the latter."""
    free = {name: torch.full_like(inputs[name], value) for name, value in (("top_k", 0), ("top_p", 1), ("min_p", 0))}
    pairs = zip(naive.sample(**inputs).tolist(), naive.sample(**inputs | free).tolist(), strict=True)
    rows = {pair: row for row, pair in enumerate(pairs)}
    return {name: value[list(rows.values())] for name, value in inputs.items()}


@pytest.mark.parametrize(("logits", "row", "wanted"), SUPPORTS)
def test_traps_20_and_21_the_support_is_the_one_worked_out_by_hand(logits, row, wanted):
    inputs = _rows(logits, row, 24)
    for kernel in (SPEC.reference, naive.sample, prefilter.sample, bisect.sample):
        rows = _telling(inputs) if kernel is bisect.sample else inputs
        tokens = kernel(**rows)
        assert set(tokens.tolist()) == wanted, kernel.__module__
        assert _passes(tokens, rows), kernel.__module__
    as_fp32 = [float(torch.tensor(value)) for value in row]
    kept = support(inputs["logits"][0], as_fp32[0], row[1], *as_fp32[2:]).kept
    assert set(kept.nonzero().flatten().tolist()) == wanted


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


@pytest.mark.parametrize("kernel", KERNELS)
def test_seed_and_position_steer_the_draw(kernel):
    inputs = _rows(torch.zeros(1000), (1.0, 0, 1.0, 0.0), 6)
    inputs["seed"] = torch.tensor([3, 3, 3, 3 + 2**32, -3, 4])
    inputs["position"] = torch.tensor([8, 8 + 2**32, 9, 8, 8, 8])
    tokens = kernel(**inputs).tolist()
    assert tokens == SPEC.reference(**inputs).tolist()
    assert tokens[0] == tokens[1] and len(set(tokens)) == 5


def test_all_kernels_give_the_same_token_over_a_whole_vocabulary():
    """bisect, of which a row takes seconds, with every cut in one row."""
    logits = torch.randn(2, 49152, generator=torch.Generator().manual_seed(4)) * 3
    for row in [(1.0, 0, 1.0, 0.0), (0.8, 0, 0.95, 0.0), (1.0, 0, 1.0, 0.05), (0.7, 50, 0.95, 0.01)]:
        inputs = {"logits": logits} | settings([row] * 2, CPU, 2)
        wanted = SPEC.reference(**inputs).tolist()
        assert [module.sample(**inputs).tolist() for module in (naive, prefilter)] == [wanted] * 2, row
    assert bisect.sample(**{name: value[:1] for name, value in inputs.items()}).tolist() == wanted[:1]


def test_top_p_past_the_first_guess_of_the_prefilter():
    inputs = _rows(torch.linspace(0, 1, 5000), (1.0, 0, 0.97, 0.0), 20)
    tokens = prefilter.sample(**inputs)
    assert torch.equal(tokens, naive.sample(**inputs)) and _passes(tokens, inputs)


@pytest.mark.parametrize("kernel", [SPEC.reference, naive.sample, library.sample, prefilter.sample])
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
        tokens = bisect.sample(logits, **settings([row] * 6, CPU, 0))
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


@pytest.mark.parametrize("kernel", [SPEC.reference, naive.sample, prefilter.sample])
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"edit_ids": torch.tensor([1, 1, 0, 2], dtype=torch.int32)}, "edit_ids: expected each token once.* row 0"),
        ({"edit_ids": torch.tensor([1, 2, 0, 8], dtype=torch.int32)}, "edit_ids: expected 0 to 7, got 8 in row 1"),
        ({"edit_counts": torch.tensor([1, 2, -2, 0], dtype=torch.int32)}, "edit_counts: expected >= -1.* row 1"),
        ({"edit_bias": torch.tensor([0.0, INF, 0.0, 0.0])}, "edit_bias: expected a finite value or -inf.* row 0"),
        ({"edit_bias": None}, "edit_bias: expected a tensor beside"),
        ({"edit_offsets": torch.tensor([0, 3, 2], dtype=torch.int32)}, "edit_offsets: expected to rise"),
        ({"repetition_penalty": torch.tensor([1.0, 0.0])}, "repetition_penalty: expected a finite value > 0.* row 1"),
        ({"presence_penalty": torch.tensor([math.nan, 0.0])}, "presence_penalty: expected a finite value.* row 0"),
        ({"frequency_penalty": torch.zeros(3)}, "frequency_penalty: expected shape"),
        ({"allowed": torch.zeros(2, 2, dtype=torch.int32)}, "allowed: expected shape"),
        ({"allowed": torch.zeros(2, 1, dtype=torch.int32)}, "logits: row 0: expected a finite largest value"),
        ({"top_n": 9}, "top_n: expected 0 to 8, got 9"),
    ],
)
def test_wrong_edits_are_refused_with_their_row(change, message):
    edits = {
        "edit_offsets": torch.tensor([0, 2, 4], dtype=torch.int32),
        "edit_ids": torch.tensor([1, 2, 0, 2], dtype=torch.int32),
        "edit_counts": torch.tensor([1, 2, -1, 0], dtype=torch.int32),
        "edit_bias": torch.zeros(4),
    }
    inputs = _rows(torch.zeros(8), (1.0, 0, 1.0, 0.0), 2) | edits
    for module in (naive, library, prefilter):
        module.sample(**inputs)
        with pytest.raises(ValueError, match=message):
            module.sample(**inputs | change)


def test_a_kernel_that_ignores_an_edit_is_rejected():
    inputs = _edited(24, 60)
    assert _judged(naive.sample(**inputs), inputs)
    for name, value in (("allowed", None), ("repetition_penalty", None), ("edit_bias", 0.5), ("edit_counts", None)):
        left = torch.full_like(inputs["edit_counts"], -1) if name == "edit_counts" else value
        left = inputs["edit_bias"].clamp(min=value) if name == "edit_bias" else left
        assert not _judged(naive.sample(**inputs | {name: left}), inputs), name
    tokens, ids, values = naive.sample(**inputs)
    assert not _judged((tokens, ids.flip(1), values), inputs) and not _judged((tokens, ids, values + 1e-3), inputs)


def _judged(found, inputs):
    return all(stats.passed for stats in SPEC.judge(found, SPEC.oracle(inputs), inputs, FP32))


@pytest.mark.parametrize("row", [(1.0, 0, 1.0, 0.0), (0.6, 4, 0.97, 0.0), (1.0, 0, 1.0, 0.3)])
def test_the_library_draws_from_the_same_law_by_its_own_stream(row):
    torch.manual_seed(0)
    law = support(torch.tensor(LAW).log(), *row).probabilities
    found = chi_square(_draws(library.sample, row, 40000), law)
    assert found.passed and found.smallest_effect < 0.05, found


def _with(change):
    return lambda **inputs: naive.sample(**change(dict(inputs)))


def _top_k_off_by_one(inputs):
    return inputs | {"top_k": torch.where(inputs["top_k"] > 0, inputs["top_k"] + 1, 0).int()}


def _drop_the_crossing_token(inputs):
    return inputs | {"top_p": torch.where(inputs["top_p"] < 1, inputs["top_p"] / 2, 1.0)}


def _ties_from_the_end(**inputs):
    V = inputs["logits"].shape[1]
    return V - 1 - naive.sample(**inputs | {"logits": inputs["logits"].flip(1)})


WRONG = {
    "top_k off by one": _with(_top_k_off_by_one),
    "drops the crossing token": _with(_drop_the_crossing_token),
    "no top_p": _with(lambda inputs: inputs | {"top_p": torch.ones_like(inputs["top_p"])}),
    "ties from the end": _ties_from_the_end,
    "greedy": _with(lambda inputs: inputs | {"temperature": torch.zeros_like(inputs["temperature"])}),
    "another stream": _with(lambda inputs: inputs | {"seed": inputs["seed"] + 1}),
    "another dtype": lambda **inputs: naive.sample(**inputs).int(),
    "out of the vocabulary": lambda **inputs: naive.sample(**inputs) + inputs["logits"].shape[1],
}


def test_a_wrong_kernel_is_rejected():
    case = Case(B=4, V=300, temperature=0.8, top_k=40, top_p=0.9, min_p=0.02)
    runs = [SPEC.make_inputs(case, FP32, CPU, 0), *(inputs for _, inputs in SPEC.planted(case, FP32, CPU, 0))]
    runs = [{name: value for name, value in inputs.items() if name != "top_n"} for inputs in runs]
    assert all(_passes(naive.sample(**inputs), inputs) for inputs in runs)
    passed = [name for name, wrong in WRONG.items() if all(_passes(wrong(**inputs), inputs) for inputs in runs)]
    assert passed == []


def test_a_token_at_the_edge_of_top_p_is_excused_and_one_beyond_is_not():
    logits = torch.tensor([math.log(0.5), math.log(0.3), math.log(0.2)])
    for offset, doubtful in ((1e-6, True), (1e-5, False)):
        law = support(logits, 1.0, 0, 0.8 - offset, 0.0)
        assert law.kept.tolist() == [True, True, False] and bool(law.doubtful[2]) is doubtful
    exact = support(torch.zeros(4), 1.0, 0, 0.5, 0.0)
    assert exact.kept.tolist() == [True, True, False, False] and not bool(exact.doubtful.any())


BAD = [
    ({"logits": torch.zeros(8)}, "logits: expected shape"),
    ({"logits": torch.zeros(2, 8, dtype=torch.float64)}, "logits: expected torch.float32 or"),
    ({"logits": torch.zeros(2, 0)}, "logits: expected between 1 and"),
    ({"logits": torch.zeros(8, 2).mT}, "logits: expected stride 1"),
    ({"temperature": torch.tensor([1.0, -0.1])}, "temperature: expected a finite value >= 0, got -0.1"),
    ({"temperature": torch.tensor([1.0, math.nan])}, "temperature: expected a finite value"),
    ({"temperature": torch.ones(3)}, "temperature: expected shape"),
    ({"top_k": torch.tensor([0, -1], dtype=torch.int32)}, "top_k: expected >= 0"),
    ({"top_k": torch.tensor([0, 1])}, "top_k: expected torch.int32"),
    ({"top_p": torch.tensor([1.0, 0.0])}, r"top_p: expected a value in \(0, 1\], got 0.0"),
    ({"top_p": torch.tensor([1.0, 1.5])}, r"top_p: expected a value in \(0, 1\]"),
    ({"min_p": torch.tensor([0.0, 1.1])}, r"min_p: expected a value in \[0, 1\]"),
    ({"seed": torch.zeros(2, dtype=torch.int32)}, "seed: expected torch.int64"),
    ({"position": torch.zeros(1, dtype=torch.int64)}, "position: expected shape"),
]


@pytest.mark.parametrize("kernel", KERNELS)
def test_bad_input_is_refused_in_one_sentence(kernel):
    for change, message in BAD:
        with pytest.raises(ValueError, match=message) as error:
            kernel(**_rows(torch.zeros(8), (1.0, 0, 1.0, 0.0), 2) | change)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("kernel", KERNELS)
def test_out_strided_rows_and_an_empty_batch(kernel):
    inputs = _rows(torch.randn(600), (1.0, 30, 0.9, 0.0), 3)
    wanted = kernel(**inputs)
    wide = torch.full((3, 900), INF)
    wide[:, 100:700] = inputs["logits"]
    out = torch.full((3,), -1)
    assert kernel(**inputs | {"logits": wide[:, 100:700]}, out=out) is out
    assert torch.equal(out, wanted)
    assert kernel(**{name: value[:0] for name, value in inputs.items()}).shape == (0,)
    with pytest.raises(ValueError, match="out: expected torch.int64"):
        kernel(**inputs, out=torch.zeros(3))


def test_cost_reads_the_logits_once_and_counts_what_must_be_drawn():
    greedy = SPEC.cost(**_rows(torch.zeros(1000), (0.0, 0, 1.0, 0.0), 4))
    assert greedy.read_bytes == 4 * (4000 + 32) and greedy.write_bytes == 32 and greedy.sfu_ops == 0
    assert SPEC.cost(**_rows(torch.zeros(1000), (1.0, 0, 1.0, 0.0), 4)).sfu_ops == 4 * 2000
    assert SPEC.cost(**_rows(torch.zeros(1000), (1.0, 50, 0.9, 0.0), 4)).sfu_ops == 4 * (50 + 2)
    meta = SPEC.make_inputs(SPEC.cases["llama3_8b"][-1], get_scheme("bf16"), META, 0)
    assert SPEC.cost(**meta).read_bytes == 16 * (128256 * 2 + 32)
    assert (
        get_kernel("sample", "naive").traffic_of(meta).bytes
        > 100 * get_kernel("sample", "bisect").traffic_of(meta).bytes
    )


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
        assert _philox.words_of_tokens(*(each.expand(5) for each in key), token).tolist() == wanted
        assert _philox.words_of_rows(*key, 11)[0, [0, 1, 2]].tolist() == wanted[:3]


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


LAW = (0.02, 0.4, 0.08, 0.2, 0.3)
NO_CUT, CUT = (1.0, 0, 1.0, 0.0), (0.6, 4, 0.97, 0.0)


def _draws(kernel, row, count):
    return kernel(**_rows([math.log(p) for p in LAW], row, count, seed=11))


@pytest.mark.parametrize(
    ("kernel", "row", "count", "effect"),
    [
        pytest.param(naive.sample, NO_CUT, 40000, 0.05, id="naive"),
        pytest.param(naive.sample, CUT, 40000, 0.05, id="naive, cut"),
        pytest.param(prefilter.sample, NO_CUT, 4000, 0.15, id="prefilter"),
        pytest.param(prefilter.sample, CUT, 4000, 0.15, id="prefilter, cut"),
        pytest.param(bisect.sample, NO_CUT, 400, 0.4, id="bisect", marks=pytest.mark.slow),
        pytest.param(bisect.sample, CUT, 80, 0.9, id="bisect, cut", marks=pytest.mark.slow),
    ],
)
def test_traps_22_and_25_many_draws_follow_the_law(kernel, row, count, effect):
    law = support(torch.tensor(LAW).log(), *row).probabilities
    tokens = _draws(kernel, row, count)
    found = chi_square(tokens, law)
    assert found.passed, found
    assert found.smallest_effect < effect
    assert torch.equal(tokens[:80], _draws(naive.sample, row, count)[:80])


@pytest.mark.parametrize(("row", "count"), [(NO_CUT, 40), (CUT, 12)])
def test_bisect_draws_what_naive_draws(row, count):
    assert torch.equal(_draws(bisect.sample, row, count), _draws(naive.sample, row, count))


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
