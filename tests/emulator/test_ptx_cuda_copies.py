"""Asynchronous copies, tensor cores and clusters in inline PTX: values, no races where all is ordered, and races."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ptx_cuda import BOTH_ORDERS, run

from rooflab.bench.emulator.machine.run import EmulationError
from rooflab.bench.emulator.tiles.tensor_map import TensorMap


def found(name: str, args: list[object], racy: int, **options: object) -> str:
    """What is said of a kernel from which a step was left out: its races, or the error that it ends with."""
    try:
        return "\n".join(run("copies", name, args, options=(f"-DRACY={racy}",), **options).races)  # type: ignore[arg-type]
    except EmulationError as error:
        return str(error)


@pytest.mark.parametrize("seed", BOTH_ORDERS)
@pytest.mark.parametrize("polls", [0, 1])
def test_bulk_copies_go_there_and_back(polls: int, seed: int) -> None:
    x, y = torch.randn(512), torch.zeros(512)
    assert run("copies", "bulk_there_and_back", [x, y, polls], grid=(2,), seed=seed).races == ()
    assert torch.equal(y, 2 * x)


@pytest.mark.parametrize(
    ("racy", "words"),
    [(3, "no wait for"), (4, "no fence.proxy.async"), (5, "may still read its shared memory"), (6, "race on shared")],
)
def test_bulk_copies_out_of_order_are_reported(racy: int, words: str) -> None:
    x, y = torch.ones(512), torch.zeros(512)
    text = found("bulk_there_and_back", [x, y, 0], racy, grid=(2,))
    assert words in text and "kernel.cu" in text


def _tiles(x: torch.Tensor) -> TensorMap:
    return TensorMap(x.data_ptr(), "f32", tuple(reversed(x.shape)), (4 * x.shape[1],), (32, 32))


@pytest.mark.parametrize("seed", BOTH_ORDERS)
def test_blocks_of_a_cluster_read_and_write_each_others_shared_memory(seed: int) -> None:
    x, y = np.arange(512, dtype=np.int32), np.zeros(512, np.int32)
    assert run("copies", "neighbours", [x, y], grid=(8,), block=64, seed=seed).races == ()
    blocks = x.reshape(2, 4, 64)
    before = np.roll(blocks, 1, axis=1)
    assert (y.reshape(2, 4, 64) == before + 10 * before[:, :, ::-1]).all()


@pytest.mark.parametrize("seed", BOTH_ORDERS)
def test_atomics_reach_another_blocks_shared_memory(seed: int) -> None:
    y = np.zeros(128, np.int32)
    assert run("copies", "shared_counter", [y], grid=(4,), block=32, seed=seed).races == ()
    assert (y == 32 * 3).all()


@pytest.mark.parametrize("seed", BOTH_ORDERS)
def test_stores_that_tell_an_mbarrier_reach_the_other_block(seed: int) -> None:
    x, y = np.arange(512, dtype=np.int32), np.zeros(256, np.int32)
    assert run("copies", "sent_stores", [x, y], grid=(4,), block=64, seed=seed).races == ()
    box = x.reshape(2, 2, 128)[:, ::-1]
    assert (y.reshape(2, 2, 64) == box[..., :63:-1] * 3 + box[..., :64]).all()


@pytest.mark.parametrize("seed", BOTH_ORDERS)
def test_bulk_copies_go_from_block_to_block(seed: int) -> None:
    x, y = np.arange(256, dtype=np.int32), np.zeros(256, np.int32)
    assert run("copies", "copied_across", [x, y], grid=(4,), block=64, seed=seed).races == ()
    assert (y.reshape(2, 2, 64) == x.reshape(2, 2, 64)[:, ::-1, ::-1] + 5).all()


@pytest.mark.parametrize("seed", BOTH_ORDERS)
def test_a_cluster_barrier_orders_global_memory_too(seed: int) -> None:
    x = np.arange(256, dtype=np.float32)
    want = 2 * x.reshape(2, 2, 64)[:, ::-1, ::-1]
    assert run("copies", "swapped_rows", [x], grid=(4,), block=64, seed=seed).races == ()
    assert (x.reshape(2, 2, 64) == want).all()
    assert "write-read race on global memory" in found("swapped_rows", [x], 14, grid=(4,), block=64, seed=seed)


def test_a_store_that_was_not_waited_for_is_reported() -> None:
    x, y = np.arange(512, dtype=np.int32), np.zeros(256, np.int32)
    assert "kernel.cu" in found("sent_stores", [x, y], 12, grid=(4,), block=64)


@pytest.mark.parametrize("seed", BOTH_ORDERS)
def test_multicast_brings_a_tile_to_every_block_of_a_cluster(seed: int) -> None:
    x, y = torch.randn(3, 64, 32), torch.zeros(3, 2, 64)
    args = [_tiles(x.view(192, 32)), y, 3]
    assert run("copies", "multicast", args, grid=(2,), block=64, memory=[x], seed=seed).races == ()
    columns = (torch.arange(32) + torch.arange(64)[:, None]) % 32
    sums = (x[:, torch.arange(64)[:, None], columns] * (torch.arange(32) + 1)).sum(-1).cumsum(0)
    # Up to 96 terms of some hundred, added in fp32: their sum may be near 0.
    assert torch.allclose(y, sums[:, None].expand(3, 2, 64), atol=2e-3)


def test_a_multicast_before_the_tile_was_read_is_reported() -> None:
    x, y = torch.randn(3, 64, 32), torch.zeros(3, 2, 64)
    text = found("multicast", [_tiles(x.view(192, 32)), y, 3], 11, grid=(2,), block=64, memory=[x])
    assert "kernel.cu" in text
