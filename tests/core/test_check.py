"""The checker: its runs, its messages, its guards; its verdict on each known kernel is tested in `zoo/`."""

from __future__ import annotations

import pytest
import torch
from triton.compiler.errors import CompilationError
from zoo import small
from zoo.entries import with_change
from zoo.tiny_ops import LOOSE, MANY_KEYS, PROJECT, SCALE, kernel_of

from rooflab.bench.checks.drawn import of_several_tiles
from rooflab.bench.core import check as check_module
from rooflab.bench.core import poison
from rooflab.bench.core.check import check_kernel
from rooflab.bench.core.check_data import CheckResult
from rooflab.bench.core.poison import bits, guard, guard_output, poisoned_allocations
from rooflab.kernels.registry import Kernel, get_kernel, get_op
from rooflab.reference.spec import Case, OpSpec, get_scheme


def check(spec: OpSpec, kernel: Kernel, scheme: str = "fp32", case: Case | None = None) -> CheckResult:
    return check_kernel(kernel, spec, case or spec.cases["smoke"][0], get_scheme(scheme))


def test_a_dropped_key_among_many_is_seen_by_the_planted_key_alone():
    """Among 16384 keys that weigh the same, one less is within any honest tolerance."""

    def drops_the_last_key(q, k, v, causal=False, softmax_scale=None):
        return get_kernel("flash_attention", "naive").fn(q, k[:, :-1], v[:, :-1], causal, softmax_scale)

    kernel = kernel_of(MANY_KEYS, drops_the_last_key)
    case, fp16 = MANY_KEYS.cases["smoke"][0], get_scheme("fp16")
    random = check_kernel(kernel, MANY_KEYS, case, fp16, planted=False)
    planted = check_kernel(kernel, MANY_KEYS, case, fp16)
    assert random.status == "OK", "random data has begun to show a dropped key: the test needs more keys"
    assert planted.status == "INCORRECT" and "planted key 16383" in planted.reason


def test_a_case_that_lets_wrong_answers_pass_is_reported():
    loose = check(LOOSE, kernel_of(LOOSE, small.plain))
    assert loose.status == "OK" and not loose.discriminating
    assert loose.weak == ("y: zeros", "y: the mean", "y: shifted by one")
    all_zero = check(SCALE, kernel_of(SCALE, small.in_triton), case=Case(T=3, factor=0.0))
    assert "y: zeros" in all_zero.weak


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (ValueError("UNSUPPORTED: needs K % 128 == 0"), "UNSUPPORTED", "needs K % 128 == 0"),
        (ValueError("x: expected shape (1,), got (2,)"), "RUNTIME_ERROR", "ValueError: x: expected shape"),
        (torch.cuda.OutOfMemoryError("CUDA out of memory"), "OUT_OF_MEMORY", "CUDA out of memory"),
        (RuntimeError("illegal memory access"), "RUNTIME_ERROR", "RuntimeError: illegal memory access (test_check.py"),
        (CompilationError(None, None, "no such op"), "COMPILE_ERROR", "no such op"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_what_a_kernel_raises_becomes_a_status(error, status, words):
    def raises(x, weight):
        raise error

    result = check(PROJECT, kernel_of(PROJECT, raises))
    assert result.status == status and words in result.reason and result.checked_by == "none"


def test_a_small_check_takes_one_thread_and_gives_the_others_back(threads):
    seen = set()
    threads(2)
    check(PROJECT, kernel_of(PROJECT, lambda x, weight: seen.add(torch.get_num_threads())))
    assert (seen, torch.get_num_threads()) == ({1}, 2)


@pytest.mark.parametrize("shape", [(5, 8), (2, 5, 4, 8), (3, 3, 8), (40, 2, 8), (3, 1)])
def test_most_rows_of_a_far_tensor_lie_beyond_2_31_and_no_two_elements_meet(shape):
    near = torch.empty(shape)
    places = torch.cartesian_prod(*map(torch.arange, shape))
    for strides in {poison.strides_of(near, kind) for kind in poison.FAR_LAYOUTS} - {near.stride()}:
        offsets = (places * torch.tensor(strides)).sum(1)
        assert offsets.unique().numel() == near.numel() and strides[-1] == 1
        assert (offsets >= 2**31).sum() >= near.numel() / 3 and min(strides[:-1]) < 2**31


def test_planted_sets_meet_a_program_that_takes_several_tiles():
    """A softmax that forgets a first tile of 1,024 columns of -inf; the smoke case has 64 columns."""
    spec = get_op("softmax")

    def online(x):
        lost = (x[:, :1024] == -torch.inf).all(1) & (x.shape[1] > 1024)
        return x.double().softmax(1).masked_fill(lost[:, None], 0).to(x.dtype)

    kernel = kernel_of(spec, online)
    assert check_kernel(kernel, spec, spec.cases["smoke"][0], get_scheme("fp32")).status == "OK"
    found = check_kernel(kernel, spec, of_several_tiles(spec), get_scheme("fp32"), planted="planted alone")
    assert found.status == "INCORRECT" and "planted first half -inf" in found.reason


def test_parts_of_longer_sequences_that_a_kernel_keeps_are_found():
    """A workspace keeps its rows behind a short sequence; the lengths drawn for one shape never became shorter."""
    spec, longest = get_op("paged_attention"), dict[torch.Size, torch.Tensor]()

    def keeps_parts(of):
        longest[of.q.shape] = torch.maximum(of.seq_lens, longest.get(of.q.shape, of.seq_lens))
        return {"seq_lens": longest[of.q.shape]}

    found = check(spec, kernel_of(spec, with_change(spec.name, keeps_parts)))
    assert found.status == "INCORRECT" and "planted shorter sequences" in found.reason, found.describe()


def test_a_short_format_is_named_for_products_where_most_elements_are_off():
    def in_bf16(of):
        return of.a.bfloat16().float() @ of.b.bfloat16().float()

    changes = (
        ("gemm", in_bf16),
        ("gemm", lambda of: torch.cat((in_bf16(of)[:1], (of.a @ of.b)[1:]))),
        ("rmsnorm", lambda of: {"x": of.x.bfloat16().float()}),
    )
    reasons = [check(get_op(op), kernel_of(get_op(op), with_change(op, change))).reason for op, change in changes]
    assert ["products in" in reason for reason in reasons] == [True, False, False] and all(reasons), reasons


def test_guards_keep_strides_alignment_and_bits():
    x = torch.arange(24.0).reshape(4, 6)
    x[1, 2] = torch.nan
    for tensor in (x, x.mT, x[:, 1:4], x[0, 0], x[:1].expand(3, 6), x[:0], torch.arange(5, dtype=torch.int32)[1:]):
        guarded = guard(tensor)
        assert guarded.view.stride() == tensor.stride() and guarded.view.data_ptr() % 16 == tensor.data_ptr() % 16
        assert torch.equal(bits(guarded.view), bits(tensor)), "a NaN equals itself"
        assert guarded.damage(may_change=False) is None
    padded = guard(x, "padded")
    assert padded.view.stride() == (6 + 16, 1) and padded.view.data_ptr() % 16 == 0
    assert torch.equal(bits(padded.view), bits(x)) and padded.buffer.isnan().sum() == padded.buffer.numel() - 23


def test_damage_tells_inside_from_outside():
    guarded = guard(torch.zeros(2, 3), "padded")
    guarded.view[1, 1] = -0.0
    assert guarded.damage(may_change=True) is None
    assert guarded.damage(may_change=False) == "was changed"
    guarded.buffer[guarded.view.storage_offset() + 3] = 1.0
    assert "first at element 3 from" in str(guarded.damage(may_change=True))
    integers = guard_output((2,), torch.int64, torch.device("cpu"))
    assert (integers.view > 2**48).all() and integers.damage(may_change=True) is None


def test_uninitialised_memory_is_poison_only_inside():
    with poisoned_allocations():
        assert torch.empty(3).isnan().all() and torch.empty(3, dtype=torch.int64).eq(2**63 - 1).all()
        assert torch.empty_like(torch.zeros(2, dtype=torch.bfloat16)).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_fault_that_shows_when_inputs_are_made_is_the_kernels_own(monkeypatch):
    """A launch is asynchronous: what it broke may be met by the next use of the device, whoever makes it."""
    state = iter(["", "CUDA error: misaligned address"])
    monkeypatch.setattr(check_module, "already_broken", lambda device: next(state))

    def run(self, seed, planted):
        self.labels.append("first data")
        raise RuntimeError("CUDA error: misaligned address\nCUDA kernel errors might be reported asynchronously")

    monkeypatch.setattr(check_module.Check, "run", run)
    result = check(PROJECT, kernel_of(PROJECT, small.plain))
    assert (result.status, result.reason) == ("RUNTIME_ERROR", "first data: CUDA error: misaligned address")
    monkeypatch.setattr(check_module, "already_broken", lambda device: "")
    with pytest.raises(RuntimeError, match="misaligned"):
        check(PROJECT, kernel_of(PROJECT, small.plain))  # a fault of the spec or of the checker
