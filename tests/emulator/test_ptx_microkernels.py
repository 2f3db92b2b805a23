"""The bench's own CUDA C++ in the emulator, launched as on a GPU, and its checks of the memory after the launches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rooflab.bench.core.ceilings import compute, streams
from rooflab.bench.core.ceilings.compute import MmaShape, VectorShape, WgmmaLaunch, mma_sync, vector, wgmma
from rooflab.bench.core.ceilings.microkernel import Card, Microkernel
from rooflab.bench.core.ceilings.streams import StreamShape
from rooflab.bench.emulate.ours import compile_ptx, emulating_cuda
from rooflab.bench.emulator.launch import emulate
from rooflab.bench.emulator.results import LaunchResult
from rooflab.kernels._cuda import CudaCompileError, CudaKernel, load

CARD = Card(torch.device("cpu"), sm=90, sms=2, l2_bytes=2**14)


@pytest.fixture(autouse=True)
def few_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One launch shape of each, small."""
    monkeypatch.setattr(streams, "STREAM_SHAPES", (StreamShape(64, 1, 4),))
    monkeypatch.setattr(streams, "ONE_CHUNK_SHAPES", (StreamShape(64, 1, 4, every_chunk=True),))
    monkeypatch.setattr(streams, "LARGEST_CHUNK", 256)
    monkeypatch.setattr(streams, "HBM_TIMES_L2", 2)
    monkeypatch.setattr(compute, "FMA_SHAPES", (VectorShape(32, 2, 4, 16),))
    monkeypatch.setattr(compute, "SPECIAL_SHAPES", (VectorShape(32, 2, 4, 16),))
    monkeypatch.setattr(compute, "WGMMA_SHAPES", (WgmmaLaunch(64, 2),))
    monkeypatch.setattr(compute, "MMA_SHAPES", (MmaShape(64, 1, 2, 2, 2),))


def kernels(maker: Any, load_: Any = load) -> Iterator[Microkernel]:
    """All of a maker's."""
    for group in maker(CARD, load_):
        yield from group


def checked(kernel: Microkernel, repeats: int, **options: Any) -> LaunchResult:
    """What the one launch of a check did, which must leave what it should."""
    results: list[LaunchResult] = []
    with emulating_cuda(lambda launch, grid, args: results.append(emulate(launch, grid, args, **options))):
        assert kernel.wrong(kernel.fixed_repeats or repeats) == "", kernel.limit
    (result,) = results
    return result


@pytest.mark.parametrize(("maker", "repeats", "seed"), [(wgmma, 9, 0), (mma_sync, 2, 0), (vector, 7, 3)])
def test_every_kernel_and_its_reference_agree(maker: Any, repeats: int, seed: int) -> None:
    for kernel in kernels(maker):
        result = checked(kernel, repeats, seed=seed)
        assert result.races == ()
        assert maker is vector or sum(result.tensor_flops.values()) == repeats * kernel.work
    assert maker is not wgmma or len(list(kernels(wgmma))) == 4, "every dtype"


def test_an_accumulator_of_few_bits_passes_the_check_that_was_made_for_it() -> None:
    kernel = next(kernel for kernel in kernels(wgmma) if kernel.dtype == "fp8_e4m3")
    checked(kernel, 8, short_accumulator=True)


def test_streams_move_the_bytes_that_they_are_counted_with() -> None:
    for kernel in kernels(streams.streams):
        result = checked(kernel, 1)
        if not kernel.limit.endswith("read"):  # it also writes its sums
            passes = kernel.fixed_repeats or 1
            assert result.bytes.global_read + result.bytes.global_write == passes * kernel.work


def test_the_proxy_fence_before_the_tensor_cores_is_missed() -> None:
    def without(source: str, name: str, *, options: tuple[str, ...] = ()) -> CudaKernel:
        fence = 'asm volatile("fence.proxy.async.shared::cta;" ::: "memory");'
        assert fence in source
        return load(source.replace(fence, ""), name, options=options)

    races = checked(next(kernels(wgmma, without)), 1).races
    assert races and all("no fence.proxy.async between" in race for race in races)


def test_a_source_that_is_wrong_gives_the_compilers_words() -> None:
    with pytest.raises(CudaCompileError, match=r"kernel\.cu\(1\): error"):
        compile_ptx("nonsense")
