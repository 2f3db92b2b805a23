"""Decode steps as CUDA graphs: one launch replays all kernels of a step, from the embedding to the logits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from rooflab.engine.model import StepInput

Replay = Callable[[], torch.Tensor]
"""Runs a recorded function again on what its tensors hold now, and returns its result, always the same tensor."""


def batch_sizes(most: int) -> list[int]:
    """The batch sizes with a graph: 1, 2, 4, 8, the multiples of 16, and `most`."""
    return sorted({size for size in (1, 2, 4, 8, *range(16, most, 16)) if size < most} | {most})


class DecodeGraphs:
    """`forward` for decode steps of up to `max_num_seqs` sequences, each recorded once for each of `batch_sizes`.

    A batch between two sizes takes the larger.  Its padded rows have no keys (length 0) and write to no slot (-1), so
    they change nothing, and their logits are dropped.  The block table has its full width in every graph.

    `record` makes a `Replay` of a function; `record_graph` is the one for CUDA.
    """

    def __init__(
        self,
        forward: Callable[[StepInput], torch.Tensor],
        max_num_seqs: int,
        max_blocks: int,
        device: torch.device,
        record: Callable[[Callable[[], torch.Tensor]], Replay],
    ):
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        table = zeros(max_num_seqs, max_blocks, dtype=torch.int32)
        lengths = zeros(max_num_seqs, dtype=torch.int32)
        self._input = StepInput(zeros(max_num_seqs), zeros(max_num_seqs), zeros(max_num_seqs) - 1, table, lengths)
        # The largest comes first: the memory that its recording takes is enough for all others.
        sizes = batch_sizes(max_num_seqs)[::-1]
        self._replays = {size: record(partial(forward, self._first(size))) for size in sizes}
        self._sizes = sizes[::-1]

    def _first(self, rows: int) -> StepInput:
        own = self._input
        return StepInput(
            own.token_ids[:rows],
            own.positions[:rows],
            own.slot_mapping[:rows],
            own.block_table[:rows],
            own.seq_lens[:rows],
        )

    def __call__(self, step: StepInput) -> torch.Tensor:
        """The logits of a decode step; they hold until the next call."""
        n, own = len(step.seq_lens), self._input
        size = next(size for size in self._sizes if size >= n)
        own.token_ids[:n] = step.token_ids
        own.positions[:n] = step.positions
        own.slot_mapping[:n] = step.slot_mapping
        own.slot_mapping[n:size] = -1
        own.block_table[:n, : step.block_table.shape[1]] = step.block_table
        own.seq_lens[:n] = step.seq_lens
        own.seq_lens[n:size] = 0
        return self._replays[size]()[:n]


def recorder() -> Callable[[Callable[[], torch.Tensor]], Replay]:
    """`record_graph` with one pool of memory for all graphs, which never run at the same time."""
    return partial(record_graph, torch.cuda.graph_pool_handle())


def record_graph(pool: Any, function: Callable[[], torch.Tensor]) -> Replay:
    """`function` as a CUDA graph.  It is called once before, because first calls compile kernels and make workspaces.

    Raises `ValueError` if a call in it waits for the device, so that it cannot be captured.
    """
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, pool=pool):
            result = function()
    except RuntimeError as error:
        first = str(error).partition("\n")[0]
        raise ValueError(
            f"enforce_eager: a decode step with these kernels cannot be captured as a CUDA graph ({first}); "
            "expected kernels that do not wait for the device, or enforce_eager=True"
        ) from error

    def replay() -> torch.Tensor:
        graph.replay()
        return result

    return replay
