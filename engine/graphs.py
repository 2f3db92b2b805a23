"""Records decode steps.  One call replays all kernels of a step, from the embedding to the logits.

On CUDA a recording is a CUDA graph.  On a CPU it is a list of C++ launches (`kernels/_replay.py`)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from rooflab.engine.batch import DecodeBatch
from rooflab.engine.model import StepInput
from rooflab.kernels._replay import RecordError, Recording, record
from rooflab.kernels.tuning import bucket_of

Record = Callable[[Callable[[], None]], Callable[[], None]]
"""Takes a function, and returns a function that repeats the same work on the current contents of the same tensors."""


def batch_sizes(most: int) -> list[int]:
    """Returns the batch sizes that get a CUDA graph: 1, 2, 4, 8, multiples of 16, and the largest batch size `most`."""
    return sorted({size for size in (1, 2, 4, 8, *range(16, most, 16)) if size < most} | {most})


class DecodeGraphs:
    """Runs decode steps from CUDA graphs, one graph for each batch size in `batch_sizes`.

    A batch of another size is padded to the next larger size.  A padded row reads no keys (length 0), writes nothing to
    the KV cache (slot -1), and its logits are dropped.  All graphs write to one tensor `logits` `[max_num_seqs,
    vocab_size]`.  A tensor for each batch size up to 256 would need 2,191 rows in all."""

    def __init__(self, forward: Callable[[StepInput], torch.Tensor], logits: torch.Tensor, max_blocks: int):
        max_rows, device = len(logits), logits.device

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        block_table = zeros(max_rows, max_blocks, dtype=torch.int32)
        lengths = zeros(max_rows, dtype=torch.int32)
        self._forward = forward
        self._columns = (zeros(max_rows), zeros(max_rows), zeros(max_rows) - 1, block_table, lengths)  # as in StepInput
        self._logits = logits
        self._replays: dict[int, Callable[[], None]] = {}

    def record(self, record: Record) -> None:
        """Records all graphs, the largest first.  The smaller graphs then reuse the memory of the largest graph."""
        for size in batch_sizes(len(self._logits))[::-1]:
            self._replays[size] = record(partial(self.step, size))
        self._replays = dict(sorted(self._replays.items()))

    def step(self, size: int | None = None) -> None:
        """Computes the logits of the first `size` rows, or of all rows if `size` is None."""
        token_ids, positions, slots, block_table, lengths = (input_column[:size] for input_column in self._columns)
        self._logits[:size] = self._forward(StepInput(token_ids, positions, slots, block_table, lengths))

    def __call__(self, step: StepInput) -> torch.Tensor:
        """Replays the CUDA graph of a decode step and returns the logits.  The next call overwrites these logits."""
        n, (token_ids, positions, slots, block_table, lengths) = len(step.seq_lens), self._columns
        size = next(size for size in self._replays if size >= n)
        token_ids[:n], positions[:n], slots[:n], lengths[:n] = (
            step.token_ids,
            step.positions,
            step.slot_mapping,
            step.seq_lens,
        )
        block_table[:n, : step.block_table.shape[1]] = step.block_table
        slots[n:size], lengths[n:size] = -1, 0
        self._replays[size]()
        return self._logits[:n]


class DecodeReplays:
    """Replays recorded decode steps on a CPU.  A recording serves one number of sequences and one number of threads.

    The first step that needs a recording makes it, in about 50 ms for SmolLM2-135M.  `forward` computes the logits, and
    the tensor `logits` `[rows, vocab_size]` stores them.  A step with more than `rows` sequences is not replayed."""

    def __init__(self, forward: Callable[[StepInput], torch.Tensor], logits: torch.Tensor, batch: DecodeBatch):
        self.recordings: dict[tuple[int, int], Recording] = {}
        """Maps the number of sequences and of threads to a recording."""
        self.refusals: dict[str, str] = {}
        """Maps a bucket to the reason why its steps cannot be recorded."""
        self.note_time: Callable[[str, float], None] | None = None
        """Gets the kernel and the seconds of each launch of a replay, if it is set."""
        self._forward = forward
        self._logits = logits
        self._batch = batch
        self._ids = np.zeros(len(logits), np.int64)

    def __call__(self, drawn: torch.Tensor) -> torch.Tensor | None:
        """Runs the next decode step from a recording, and returns its logits. Returns None if the step must run
        eagerly. `drawn`, int64 `[num_drawn]`, holds the previous draw's tokens. The next call overwrites the logits."""
        n = len(self._batch)
        if not 0 < n <= len(self._logits) or (self.refusals and bucket_of(n) in self.refusals):
            return None
        self._batch.prepare()
        self._ids[:n] = drawn.numpy()[self._batch.source[:n]]
        recorded_step = self.recordings.get((n, torch.get_num_threads()))
        time_hook = recorded_step and self.note_time  # the first step is an eager one too, whose ops are timed then
        recorded_step = recorded_step or self._record(n)
        if recorded_step is None:
            return None
        if kernel := recorded_step.timed(time_hook) if time_hook else recorded_step():
            self._step(n)  # the kernel's own check says what is wrong
            raise RuntimeError(f"{kernel} refused its arguments in a replayed step, and not in the same step again")
        return self._logits[:n]

    def _step(self, n: int) -> torch.Tensor:
        batch = self._batch
        step_arrays = (self._ids, batch.positions, batch.slot_mapping, batch.block_table, batch.seq_lens)
        ids, positions, slots, block_table, lengths = (torch.from_numpy(step_array[:n]) for step_array in step_arrays)
        return self._forward(StepInput(ids, positions, slots, block_table, lengths))

    def _record(self, n: int) -> Recording | None:
        try:
            recorded_step = record(partial(self._step, n), self._logits[:n])
        except RecordError as error:
            self.refusals[bucket_of(n)] = str(error)
            logging.getLogger(__name__).warning("decode steps of %s run eagerly: %s", bucket_of(n), error)
            return None
        self.recordings[n, torch.get_num_threads()] = recorded_step
        return recorded_step


def record_graph(pool: Any, function: Callable[[], None]) -> Callable[[], None]:
    """Records `function` as a CUDA graph and returns a function that replays the graph.  First calls `function` once,
    because a first call compiles kernels and allocates workspaces.

    Raises `ValueError` if `function` waits for the device, because CUDA cannot capture such a wait."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, pool=pool):
            function()
    except RuntimeError as error:
        first_error = error.__context__ or error  # torch's end of the capture raises again, and says less
        if isinstance(first_error, torch.OutOfMemoryError):
            raise
        first_line = str(first_error).partition("\n")[0]
        raise ValueError(
            f"enforce_eager: a decode step with these kernels cannot be captured as a CUDA graph ({first_line}); "
            "expected kernels that do not wait for the device, or enforce_eager=True"
        ) from error
    graph_replay: Callable[[], None] = graph.replay
    return graph_replay
