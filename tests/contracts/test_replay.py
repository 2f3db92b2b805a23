"""Recordings of C++ launches on a CPU: a replay computes what the function would, in memory that is planned once."""

import random
from types import SimpleNamespace

import pytest
import torch

from rooflab.kernels import _native
from rooflab.kernels._replay import ALIGNMENT, Buffer, RecordError, planned, record
from rooflab.kernels.registry import get_kernel

pytestmark = pytest.mark.needs("C++ compiler")
T, H, INTER, V = 3, 48, 40, 20


def kernel(op, name="native"):
    return get_kernel(op, name).fn


def problem(dtype):
    """Static inputs, and a function of several launches with views, results in two outputs, and reused memory."""
    made = SimpleNamespace(
        ids=torch.arange(T),
        table=torch.randn(V, H).to(dtype),
        norm=torch.randn(H).to(dtype),
        gate_up=get_kernel("gemm", "native").prepare(torch.randn(H, 2 * INTER).to(dtype)),
        down=get_kernel("gemm", "native").prepare(torch.randn(INTER, H).to(dtype)),
    )

    def function():
        x = residual = kernel("embedding")(made.ids, made.table)
        for eps in (1e-5, 0.25, 1e-5):
            x, residual = kernel("fused_add_rmsnorm")(x, residual, made.norm, eps)
            wide = kernel("gemm")(x, made.gate_up).view(T, 2, INTER).flatten(1)
            x = kernel("gemm")(kernel("silu_and_mul")(wide), made.down)
        return kernel("rmsnorm")(x, made.norm, 1e-5)

    return made, function


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_a_replay_computes_what_the_function_computes_on_new_inputs(dtype):
    inputs, function = problem(dtype)
    out = torch.full((T, H), torch.nan, dtype=dtype)
    recording = record(function, out)
    assert recording.kernels[:3] == ["embedding/native", "fused_add_rmsnorm/native", "gemm/native"]
    for ids in (torch.tensor([7, 0, 19]), torch.tensor([3, 3, 4])):
        inputs.ids.copy_(ids)
        inputs.table.mul_(0.5)
        recording.memory.fill_(255)  # NaN in every dtype: a launch that reads what no launch wrote would show it
        assert recording() is None
        assert torch.equal(out, function())
    assert recording.memory.nbytes < 6 * T * 2 * INTER * 4 + ALIGNMENT, "the memory of a tensor is used again"


def test_a_timed_replay_has_the_seconds_of_each_launch_and_the_same_result():
    inputs, function = problem(torch.float32)
    out = torch.zeros(T, H)
    recording = record(function, out)
    inputs.ids.copy_(torch.tensor([1, 2, 3]))
    times = []
    assert recording.timed(lambda *launch: times.append(launch)) is None
    assert [kernel for kernel, _ in times] == recording.kernels and all(0 < seconds < 1 for _, seconds in times)
    assert torch.equal(out, function())


def test_a_function_that_refuses_its_arguments_ends_the_replay_with_its_kernel():
    inputs, function = problem(torch.float32)
    out = torch.zeros(T, H)
    recording = record(function, out)
    recording()
    before = out.clone()
    inputs.ids[1] = V
    assert recording() == "embedding/native" and torch.equal(out, before)
    with pytest.raises(ValueError, match="token_ids: expected values from 0 to 19, got 0 to 20"):
        function()


def test_other_torch_ops_are_refused_with_the_kernel_and_the_op():
    inputs, function = problem(torch.float32)
    out = torch.zeros(T, H)
    refused = (
        (lambda: kernel("embedding", "library")(inputs.ids, inputs.table), "embedding/library calls torch.index_"),
        (lambda: function() * 2, "the function calls torch.mul"),
        (lambda: function().add_(1), "the function calls torch.add_"),
        (lambda: function().t().contiguous().t(), "the function calls torch.clone"),
        (lambda: function()[:2], r"the result \(2, 48\)"),
        (lambda: inputs.table[:T], r"the result \(3, 48\) is no new tensor"),
    )
    for case, expected in refused:
        with pytest.raises(RecordError, match=expected):
            record(case, out)
    assert _native.note_launch is None, "a refusal ends the recording"
    assert record(function, out)() is None


def test_buffers_that_live_at_the_same_time_share_no_memory_and_others_do():
    draw = random.Random(0)
    for _ in range(200):
        spans = [sorted((draw.randrange(30), draw.randrange(30))) for _ in range(draw.randrange(1, 25))]
        buffers = [Buffer(0, draw.randrange(1, 5000), *span) for span in spans]
        offsets, total = planned(buffers)
        for i, (a, begin) in enumerate(zip(buffers, offsets, strict=True)):
            assert begin % ALIGNMENT == 0 and begin + a.nbytes <= total
            for b, other in list(zip(buffers, offsets, strict=True))[:i]:
                together = a.first <= b.last and b.first <= a.last
                assert not together or begin + a.nbytes <= other or other + b.nbytes <= begin
    chain = [Buffer(0, 64, i, i + 1) for i in range(50)]
    assert planned(chain)[1] == 2 * ALIGNMENT
