"""Decode steps that are recorded: one call replays all kernels of a step, from the embedding to the logits.

On CUDA a recording is a CUDA graph, on a CPU a list of C++ launches (`kernels/_replay.py`)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from rooflab.engine.batch import DecodeBatch
from rooflab.engine.model import StepInput
from rooflab.kernels._replay import RecordError, Recording, record
from rooflab.kernels.tuning import bucket_of

Record = Callable[[Callable[[], None]], Callable[[], None]]
"""Takes a function, and returns a function that repeats the same work on the current contents of the same tensors."""


def batch_sizes(most: int) -> list[int]:
    """Returns the batch sizes for which a graph is recorded: 1, 2, 4, 8, the multiples of 16, and `most`."""
    return sorted({size for size in (1, 2, 4, 8, *range(16, most, 16)) if size < most} | {most})


class DecodeGraphs:
    """The model's `forward` for decode steps of up to `max_num_seqs` sequences, with one graph for each of
    `batch_sizes`.

    A batch between two sizes takes the graph of the larger size.  The padded rows have no keys (length 0) and write to
    no slot (-1).  So they change nothing, and their logits are dropped.  Every graph has the full width of the block
    table.  All graphs share `logits` (max_num_seqs, vocab_size): separate logits take 2,191 rows for 256 sequences."""

    def __init__(self, forward: Callable[[StepInput], torch.Tensor], logits: torch.Tensor, max_blocks: int):
        most, device = len(logits), logits.device

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        table = zeros(most, max_blocks, dtype=torch.int32)
        lengths = zeros(most, dtype=torch.int32)
        self._forward = forward
        self._columns = (zeros(most), zeros(most), zeros(most) - 1, table, lengths)  # as in StepInput
        self._logits = logits
        self._replays: dict[int, Callable[[], None]] = {}

    def record(self, record: Record) -> None:
        """Records all graphs, the largest first, because the memory of the largest is enough for the others."""
        for size in batch_sizes(len(self._logits))[::-1]:
            self._replays[size] = record(partial(self.step, size))
        self._replays = dict(sorted(self._replays.items()))

    def step(self, size: int | None = None) -> None:
        """Computes the logits of the first `size` rows, or of all rows if `size` is None."""
        ids, positions, slots, table, lengths = (column[:size] for column in self._columns)
        self._logits[:size] = self._forward(StepInput(ids, positions, slots, table, lengths))

    def __call__(self, step: StepInput) -> torch.Tensor:
        """Returns the logits of a decode step.  The next call overwrites these logits."""
        n, (ids, positions, slots, table, lengths) = len(step.seq_lens), self._columns
        size = next(size for size in self._replays if size >= n)
        ids[:n], positions[:n], slots[:n], lengths[:n] = (
            step.token_ids,
            step.positions,
            step.slot_mapping,
            step.seq_lens,
        )
        table[:n, : step.block_table.shape[1]] = step.block_table
        slots[n:size], lengths[n:size] = -1, 0
        self._replays[size]()
        return self._logits[:n]


class DecodeReplays:
    """Decode steps of up to `MOST_REPLAYED` sequences on a CPU, each size with a recording of its own.

    A size is recorded at its first step, because a recording takes 10 ms.  Other threads need another recording.  The
    inputs are the arrays of `batch` themselves, so that a step copies only the token ids.  `forward` computes a step's
    logits (n, vocab_size), and `logits` (up to `MOST_REPLAYED`, vocab_size) is the memory for them."""

    def __init__(self, forward: Callable[[StepInput], torch.Tensor], logits: torch.Tensor, batch: DecodeBatch):
        self.recordings: dict[tuple[int, int], Recording] = {}
        """The recordings by number of sequences and number of threads."""
        self.refusals: dict[str, str] = {}
        """The reasons why steps cannot be recorded, by bucket of the number of sequences."""
        self._forward = forward
        self._logits = logits
        self._batch = batch
        self._ids = torch.zeros(len(logits), dtype=torch.int64)

    def __call__(self, drawn: torch.Tensor) -> torch.Tensor | None:
        """Returns the logits of the batch's next decode step, which the next call overwrites; or None if the step must
        run eagerly.  `drawn` (num_drawn,) int64 holds the tokens of the previous draw."""
        n = len(self._batch)
        if not 0 < n <= len(self._logits) or (self.refusals and bucket_of(n) in self.refusals):
            return None
        self._batch.prepare()
        torch.index_select(drawn, 0, torch.from_numpy(self._batch.source[:n]), out=self._ids[:n])
        replay = self.recordings.get((n, torch.get_num_threads())) or self._record(n)
        if replay is None:
            return None
        if kernel := replay():
            self._step(n)  # the kernel's own check says what is wrong
            raise RuntimeError(f"{kernel} refused its arguments in a replayed step, and not in the same step again")
        return self._logits[:n]

    def _step(self, n: int) -> torch.Tensor:
        batch = self._batch
        arrays = (batch.positions, batch.slot_mapping, batch.block_table, batch.seq_lens)
        return self._forward(StepInput(self._ids[:n], *(torch.from_numpy(array[:n]) for array in arrays)))

    def _record(self, n: int) -> Recording | None:
        try:
            replay = self.recordings[n, torch.get_num_threads()] = record(partial(self._step, n), self._logits[:n])
        except RecordError as error:
            self.refusals[bucket_of(n)] = str(error)
            logging.getLogger(__name__).warning("decode steps of %s run eagerly: %s", bucket_of(n), error)
            return None
        return replay


def record_graph(pool: Any, function: Callable[[], None]) -> Callable[[], None]:
    """Records `function` as a CUDA graph and returns the graph's replay.  Calls `function` once before, because first
    calls compile kernels and allocate workspaces.

    Raises `ValueError` if `function` waits for the device, because such a call cannot be captured."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, pool=pool):
            function()
    except RuntimeError as error:
        cause = error.__context__ or error  # torch's end of the capture raises again, and says less
        if isinstance(cause, torch.OutOfMemoryError):
            raise
        first = str(cause).partition("\n")[0]
        raise ValueError(
            f"enforce_eager: a decode step with these kernels cannot be captured as a CUDA graph ({first}); "
            "expected kernels that do not wait for the device, or enforce_eager=True"
        ) from error
    replay: Callable[[], None] = graph.replay
    return replay
