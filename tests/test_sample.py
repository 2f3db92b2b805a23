"""sample: supports worked out by hand, ties, rows on their own, refusals, wrong kernels; draws in their own file."""

import math
import os
import subprocess
import sys

import pytest
import torch

from rooflab.kernels.registry import get_kernel
from rooflab.kernels.sample import bisect, naive, prefilter
from rooflab.reference.sample import SPEC, settings, support
from rooflab.reference.spec import Case, get_scheme

CPU = torch.device("cpu")
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


@pytest.mark.parametrize("kernel", [pytest.param(SPEC.reference, id="reference"), *KERNELS])
@pytest.mark.parametrize(("logits", "row", "wanted"), SUPPORTS)
def test_the_support_is_the_one_worked_out_by_hand(kernel, logits, row, wanted):
    inputs = _rows(logits, row, 24)
    tokens = kernel(**inputs)
    assert set(tokens.tolist()) == wanted
    assert _passes(tokens, inputs)
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
def test_a_draw_depends_on_nothing_but_its_own_row(kernel):
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


@pytest.mark.parametrize("row", [(1.0, 0, 1.0, 0.0), (0.7, 50, 0.95, 0.0), (0.8, 0, 0.95, 0.0), (1.0, 0, 1.0, 0.05)])
def test_all_kernels_give_the_same_token_over_a_whole_vocabulary(row):
    logits = torch.randn(2, 49152, generator=torch.Generator().manual_seed(4)) * 3
    inputs = {"logits": logits} | settings([row] * 2, CPU, 2)
    wanted = SPEC.reference(**inputs).tolist()
    assert [module.sample(**inputs).tolist() for module in (naive, prefilter)] == [wanted] * 2
    one = {name: value[:1] for name, value in inputs.items()}
    assert bisect.sample(**one).tolist() == wanted[:1]


def test_top_p_past_the_first_guess_of_the_prefilter():
    inputs = _rows(torch.linspace(0, 1, 5000), (1.0, 0, 0.97, 0.0), 20)
    tokens = prefilter.sample(**inputs)
    assert torch.equal(tokens, naive.sample(**inputs)) and _passes(tokens, inputs)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("row", [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (1.0, 3, 0.9, 0.0), (1.0, 0, 0.5, 0.1)])
def test_rows_without_a_law_still_give_a_token_of_the_vocabulary(kernel, row):
    logits = torch.randn(6, 70)
    logits[0] = -INF
    logits[1] = torch.nan
    logits[2, 5] = torch.nan
    logits[3, 6] = INF
    logits[4, ::2] = INF
    logits[5] = 3e38
    tokens = kernel(logits, **settings([row] * 6, CPU, 0))
    assert ((tokens >= 0) & (tokens < 70)).all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_extreme_but_lawful_rows(kernel):
    logits = torch.full((3, 50), -3e38)
    logits[:, 33] = 1.0
    logits[1, 20] = 1.0 - 2.0**-23
    inputs = {"logits": logits} | settings([(1.0, 0, 1.0, 0.0), (1e-9, 0, 0.9, 0.0), (1e30, 1, 1.0, 0.0)], CPU, 0)
    assert kernel(**inputs).tolist() == [33, 33, 33]


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


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_kernel_is_rejected(wrong):
    case = Case(B=4, V=300, temperature=0.8, top_k=40, top_p=0.9, min_p=0.02)
    runs = [SPEC.make_inputs(case, FP32, CPU, 0), *(inputs for _, inputs in SPEC.planted(case, FP32, CPU, 0))]
    assert all(_passes(naive.sample(**inputs), inputs) for inputs in runs)
    assert not all(_passes(WRONG[wrong](**inputs), inputs) for inputs in runs)


def test_a_token_at_the_edge_of_top_p_is_excused_and_one_beyond_is_not():
    logits = torch.tensor([math.log(0.5), math.log(0.3), math.log(0.2)])
    for offset, doubtful in ((1e-6, True), (1e-5, False)):
        law = support(logits, 1.0, 0, 0.8 - offset, 0.0)
        assert law.kept.tolist() == [True, True, False] and bool(law.doubtful[2]) is doubtful
    exact = support(torch.zeros(4), 1.0, 0, 0.5, 0.0)
    assert exact.kept.tolist() == [True, True, False, False] and not bool(exact.doubtful.any())


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
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
    ],
)
def test_bad_input_is_refused_in_one_sentence(kernel, change, message):
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
    meta = SPEC.make_inputs(SPEC.cases["llama3_8b"][-1], get_scheme("bf16"), torch.device("meta"), 0)
    assert SPEC.cost(**meta).read_bytes == 16 * (128256 * 2 + 32)
    assert (
        get_kernel("sample", "naive").traffic_of(meta).bytes
        > 100 * get_kernel("sample", "bisect").traffic_of(meta).bytes
    )


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from rooflab.kernels.sample.bisect import BLOCK, NUM_WARPS, SEARCH_BLOCK, bisect_kernel as fn
const = dict(BLOCK=BLOCK, SEARCH_BLOCK=SEARCH_BLOCK)
types = dict(zip(fn.arg_names, "*bf16 *fp32 *i32 *fp32 *fp32 *i64 *i64 *i64 i32 i32 constexpr constexpr".split()))
keys = {(fn.arg_names.index(name),): value for name, value in const.items()}
source = triton.compiler.ASTSource(fn, types, keys)
ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=NUM_WARPS)).asm["ptx"]
print("div.rn.f32" in ptx, "lg2.approx" in ptx)
"""


def test_bisect_compiles_for_sm_90_with_exact_division_and_logarithm():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "False"]
