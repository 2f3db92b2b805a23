"""rope: both pairings by hand, positions, packed views, what it preserves, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rooflab.kernels.registry import Kernel, kernels
from rooflab.reference.rope import SPEC
from rooflab.reference.spec import SCHEMES, Case

CPU = torch.device("cpu")
KERNELS = [kernel for kernel in kernels("rope").values() if kernel.why_not_here(CPU) is None]
TRITON = [kernel for kernel in KERNELS if kernel.backend == "triton"]
by_id = lambda kernel: kernel.name


def inputs(**change: Any) -> dict[str, Any]:
    """Two tokens, D = 4. Position 0 turns nothing; position 1 turns the first pair by 90 degrees."""
    return {
        "q": torch.tensor([1.0, 2.0, 3.0, 4.0]).expand(2, 1, 4).contiguous(),
        "k": torch.tensor([10.0, 20.0, 30.0, 40.0]).expand(2, 1, 4).contiguous(),
        "cos": torch.tensor([[1.0, 1.0], [0.0, 1.0]]),
        "sin": torch.tensor([[0.0, 0.0], [1.0, 0.0]]),
        "positions": torch.tensor([1, 0]),
        **change,
    }


@pytest.mark.parametrize("kernel", KERNELS, ids=by_id)
def test_half_split_pairs_i_with_i_plus_half(kernel: Kernel) -> None:
    q, k = kernel(**inputs())
    assert q.tolist() == [[[-3.0, 2.0, 1.0, 4.0]], [[1.0, 2.0, 3.0, 4.0]]]
    assert k.tolist() == [[[-30.0, 20.0, 10.0, 40.0]], [[10.0, 20.0, 30.0, 40.0]]]


@pytest.mark.parametrize("kernel", KERNELS, ids=by_id)
def test_interleaved_pairs_neighbours(kernel: Kernel) -> None:
    q, k = kernel(**inputs(interleaved=True))
    assert q.tolist() == [[[-2.0, 1.0, 3.0, 4.0]], [[1.0, 2.0, 3.0, 4.0]]]
    assert k.tolist() == [[[-20.0, 10.0, 30.0, 40.0]], [[10.0, 20.0, 30.0, 40.0]]]


@pytest.mark.parametrize("kernel", KERNELS, ids=by_id)
@pytest.mark.parametrize("interleaved", [False, True])
def test_scores_depend_on_the_distance_alone(kernel: Kernel, interleaved: bool) -> None:
    case = Case(T=2, H=1, H_kv=1, D=64, max_position=600, interleaved=interleaved)
    made = SPEC.make_inputs(case, SCHEMES["fp32"], CPU, 0)
    scores = []
    for shift in (0, 100, 500):
        q, k = kernel(**{**made, "positions": torch.tensor([7, 3]) + shift})
        scores.append(float(q[0, 0].double() @ k[1, 0].double()))
    assert max(scores) - min(scores) < 1e-4 * max(abs(score) for score in scores)


@pytest.mark.parametrize("kernel", KERNELS, ids=by_id)
@pytest.mark.parametrize("interleaved", [False, True])
def test_views_of_a_packed_projection(kernel: Kernel, interleaved: bool) -> None:
    case = Case(T=3, H=6, H_kv=2, D=16, max_position=9, interleaved=interleaved)
    made = SPEC.make_inputs(case, SCHEMES["fp32"], CPU, 0)
    packed = torch.full((3, 10, 16), torch.nan)
    packed[:, :6], packed[:, 6:8] = made["q"], made["k"]
    before = packed.clone()
    results = kernel(**{**made, "q": packed[:, :6], "k": packed[:, 6:8]})
    for got, want in zip(results, kernel(**made), strict=True):
        assert torch.equal(got, want)
    assert torch.equal(packed.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize("kernel", KERNELS, ids=by_id)
def test_more_key_heads_than_query_heads_and_no_tokens(kernel: Kernel) -> None:
    made = inputs(k=torch.ones(2, 5, 4))
    q, k = kernel(**made)
    assert q.shape == (2, 1, 4)
    assert k[0, 4].tolist() == [-1.0, 1.0, 1.0, 1.0]
    empty = {name: made[name][:0] for name in ("q", "k", "positions")}
    assert [tuple(t.shape) for t in kernel(**{**made, **empty})] == [(0, 1, 4), (0, 5, 4)]


@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if kernel.takes_out], ids=by_id)
def test_out_is_q_then_k(kernel: Kernel) -> None:
    buffer = torch.full((2, 4, 4), 7.0)
    q, k = kernel(**inputs(), out=(buffer[:, 1:2], buffer[:, 2:3]))
    assert q.data_ptr() == buffer[:, 1:2].data_ptr()
    assert buffer[0].tolist() == [[7.0] * 4, [-3.0, 2.0, 1.0, 4.0], [-30.0, 20.0, 10.0, 40.0], [7.0] * 4]


@pytest.mark.parametrize("kernel", KERNELS, ids=by_id)
def test_low_precision_is_rotated_in_fp32(kernel: Kernel) -> None:
    """1024 cos - 1024 sin = 1/8; in fp16 the cosine rounds to the sine, and 0 comes out."""
    q = torch.tensor([[[1024.0, 1024.0]]], dtype=torch.float16)
    tables = {"cos": torch.tensor([[1.0 - 3 * 2.0**-13]]), "sin": torch.tensor([[1.0 - 4 * 2.0**-13]])}
    new_q, _ = kernel(**inputs(q=q, k=q, positions=torch.tensor([0]), **tables))
    assert new_q.dtype == torch.float16
    assert new_q.tolist() == [[[0.125, 2047.0]]]


@pytest.mark.parametrize("kernel", TRITON, ids=by_id)
def test_a_position_outside_the_tables_reads_nothing(kernel: Kernel) -> None:
    tables = {name: torch.full((3, 2), torch.nan) for name in ("cos", "sin")}
    for table in tables.values():
        table[1] = 1.0
    made = inputs(positions=torch.tensor([1, 0]), cos=tables["cos"][1:2], sin=tables["sin"][1:2])
    q, _ = kernel(**made)
    assert q[0, 0].tolist() == [0.0] * 4
    assert q[1, 0].tolist() == [-2.0, -2.0, 4.0, 6.0]


@pytest.mark.parametrize("kernel", TRITON, ids=by_id)
def test_offsets_past_2_31(kernel: Kernel) -> None:
    """Tokens 2**30 apart: the third starts at 2**31. The storage is only touched where the tokens are."""
    q = torch.empty(2**31 + 4, dtype=torch.float16).as_strided((3, 1, 4), (2**30, 4, 1))
    q.copy_(torch.arange(12).view(3, 1, 4))
    new_q, new_k = kernel(**inputs(q=q, k=q, positions=torch.zeros(3, dtype=torch.int64)))
    assert new_q.tolist() == q.tolist()
    assert new_k.tolist() == q.tolist()


@pytest.mark.parametrize("kernel", KERNELS, ids=by_id)
def test_refusals(kernel: Kernel) -> None:
    for change, message in [
        ({"q": torch.ones(2, 4)}, r"q: expected shape \(\*, \*, \*\), got \(2, 4\)"),
        ({"q": torch.ones(2, 1, 3)}, "q: expected an even head_dim, got 3"),
        ({"k": torch.ones(2, 1, 6)}, r"k: expected shape \(2, \*, 4\), got \(2, 1, 6\)"),
        ({"k": torch.ones(2, 1, 4).half()}, "k: expected torch.float32, got torch.float16"),
        ({"q": torch.ones(2, 4, 3).mT[:, :, :4]}, "q: expected stride 1"),
        ({"cos": torch.ones(2, 4)}, r"cos: expected shape \(\*, 2\), got \(2, 4\)"),
        ({"sin": torch.ones(3, 2)}, r"sin: expected shape \(2, 2\), got \(3, 2\)"),
        ({"cos": torch.ones(2, 2).half()}, "cos: expected torch.float32, got torch.float16"),
        ({"positions": torch.tensor([0])}, r"positions: expected shape \(2\), got \(1,\)"),
        ({"positions": torch.zeros(2, dtype=torch.int32)}, "positions: expected torch.int64, got torch.int32"),
    ]:
        with pytest.raises(ValueError, match=message):
            kernel(**inputs(**change))


@pytest.mark.parametrize("scheme", ["fp32", "fp16", "bf16"])
def test_the_other_pairing_and_the_next_position_are_rejected(scheme: str) -> None:
    case = Case(T=3, H=2, H_kv=1, D=64, max_position=50, interleaved=False)
    made = SPEC.make_inputs(case, SCHEMES[scheme], CPU, 0)
    oracle = SPEC.oracle(made)
    for wrong in ({"interleaved": True}, {"positions": (made["positions"] + 1) % 50}):
        stats = SPEC.judge(SPEC.oracle({**made, **wrong}), oracle, made, SCHEMES[scheme])
        assert not any(stat.passed for stat in stats)


def test_cost_reads_a_shared_position_once() -> None:
    case = Case(T=4, H=8, H_kv=2, D=64, max_position=100, interleaved=False)
    made = SPEC.make_inputs(case, SCHEMES["bf16"], torch.device("meta"), 0)
    cost = SPEC.cost(**{**made, "positions": torch.tensor([5, 5, 5, 6])})
    values = 4 * 10 * 64
    assert cost.read_bytes == 2 * values + 4 * 8 + 2 * (2 * 32 * 4)
    assert cost.write_bytes == 2 * values
