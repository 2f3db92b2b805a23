"""Runs one step: from batch tensors to sampled token ids."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import torch

from rooflab.engine.batch import DecodeBatch
from rooflab.engine.logits import adjust, logprobs, note_logprobs
from rooflab.engine.model import Chunks, KVCache, Model, StepInput
from rooflab.engine.ops import OpSet
from rooflab.engine.scheduler import Chunk, Step
from rooflab.engine.sequence import Sequence


class ModelRunner:
    """Holds the model, the KV cache and the decode batch."""

    def __init__(
        self, model: Model, ops: OpSet, num_blocks: int, block_size: int, max_num_seqs: int, max_model_len: int
    ):
        self.model = model
        self.ops = ops
        self.device = model.embedding.device
        arch = model.arch
        shape = (num_blocks, block_size, arch.num_kv_heads, arch.head_dim)
        dtype = model.embedding.dtype
        layers = range(arch.num_layers)
        self.cache = KVCache(
            [torch.empty(shape, dtype=dtype, device=self.device) for _ in layers],
            [torch.empty(shape, dtype=dtype, device=self.device) for _ in layers],
        )
        self.block_size = block_size
        self.batch = DecodeBatch(max_num_seqs, -(-max_model_len // block_size), block_size)
        self._sampling: SamplingTensors | None = None

    def run(self, step: Step) -> tuple[list[Sequence], list[int]]:
        """Runs `step` and returns the sequences it drew for and their new tokens, in the same order."""
        for sequence in step.preempted:
            self.leave(sequence)
        assert len(self.batch) == step.num_decodes, "the batch has the sequences that the scheduler decodes"
        logits = self.logits(step)
        ended = [chunk.sequence for chunk in step.chunks if chunk.last]
        sequences = [*self.batch.rows, *ended]
        if not sequences:
            return [], []
        if step.chunks or self._sampling is None:
            sampling = SamplingTensors(sequences, self.device)
            self._sampling = None if step.chunks else sampling
        else:
            sampling = self._sampling
        lengths = self.batch.seq_lens[: len(self.batch)]
        if ended:
            lengths = np.append(lengths, np.array([len(sequence) for sequence in ended], np.int32))
        seen = logprobs(logits, sampling.special)
        adjust(logits, sampling.special)
        ids = sampling.sample(self._ops(step).sample, logits, lengths).cpu().numpy()
        self.batch.advance(ids[: len(self.batch)])
        tokens = ids.tolist()
        if seen:
            numbers = (sequence.request_id for sequence in sequences)
            note_logprobs(seen, dict(zip(numbers, tokens, strict=True)))
        return sequences, tokens

    def logits(self, step: Step) -> torch.Tensor:
        """Logits (num_drawn, vocab_size) of the tokens whose next token is drawn; writes keys and values of all."""
        return self.model.forward(self.inputs(step), self.cache, self._ops(step))

    def _ops(self, step: Step) -> SimpleNamespace:
        return self.ops.step(step.num_decodes, sum(chunk.end - chunk.start for chunk in step.chunks))

    def inputs(self, step: Step) -> StepInput:
        """The tensors of a step over every row of the batch and the chunks of prompts."""
        batch = self.batch
        batch.prepare()
        n = len(batch)
        # Only the columns in use: a kernel that gathers pages pays for the table's width.
        width = int(batch.num_blocks[:n].max()) if n else 0
        table, lens = self._to(batch.block_table[:n, :width]), self._to(batch.seq_lens[:n])
        flat = (batch.token_ids[:n], batch.positions[:n], batch.slot_mapping[:n])
        if not step.chunks:
            tokens, positions, slots = map(self._to, flat)
            return StepInput(tokens, positions, slots, table, lens)
        each = zip(flat, *map(self._flat, step.chunks), strict=True)
        tokens, positions, slots = (self._to(np.concatenate(parts)) for parts in each)
        lengths = np.array([chunk.end - chunk.start for chunk in step.chunks])
        bounds = np.concatenate([[0], np.cumsum(lengths)])
        history = None
        if any(chunk.start for chunk in step.chunks):
            pages = [self.blocks_for(chunk.end) for chunk in step.chunks]
            tables = np.full((len(pages), max(pages)), -1, np.int32)
            for row, (chunk, count) in enumerate(zip(step.chunks, pages, strict=True)):
                tables[row, :count] = chunk.sequence.block_ids[:count]
            history = (self._to(tables), self._to(np.array([chunk.end for chunk in step.chunks], np.int32)))
        chunks = Chunks(self._to(bounds.astype(np.int32)), int(lengths.max()), history)
        last = [n + bound - 1 for bound, chunk in zip(bounds[1:], step.chunks, strict=True) if chunk.last]
        drawn = self._to(np.concatenate([np.arange(n), np.array(last, np.int64)]))
        return StepInput(tokens, positions, slots, table, lens, chunks, drawn)

    def _flat(self, chunk: Chunk) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens, positions and cache slots of a chunk."""
        sequence, size = chunk.sequence, self.block_size
        index = np.arange(chunk.start, chunk.end)
        first = chunk.start // size
        pages = np.asarray(sequence.block_ids[first : self.blocks_for(chunk.end)], np.int64)
        tokens = np.asarray(sequence.token_ids[chunk.start : chunk.end], np.int64)
        return tokens, index, pages[index // size - first] * size + index % size

    def blocks_for(self, num_tokens: int) -> int:
        """How many pages hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def join(self, sequence: Sequence) -> None:
        """Adds a prefilled sequence to the decode batch."""
        self.batch.add(sequence)
        self._sampling = None

    def leave(self, sequence: Sequence) -> None:
        """Removes a sequence from the decode batch, if it is there."""
        if sequence.row >= 0:
            self.batch.remove(sequence)
            self._sampling = None

    def _to(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)  # on a CPU the array itself, without a copy


class SamplingTensors:
    """The per-row arguments of `sample`, built once for as long as the batch has the same sequences."""

    def __init__(self, sequences: list[Sequence], device: torch.device):
        params = [sequence.params for sequence in sequences]
        self.special = [(row, one) for row, one in enumerate(sequences) if not one.params.plain]
        """Rows whose logits are changed first, or shown."""
        self.device = device
        self.temperature = torch.tensor([p.temperature for p in params], dtype=torch.float32, device=device)
        self.top_k = torch.tensor([p.top_k for p in params], dtype=torch.int32, device=device)
        self.top_p = torch.tensor([p.top_p for p in params], dtype=torch.float32, device=device)
        self.min_p = torch.tensor([p.min_p for p in params], dtype=torch.float32, device=device)
        self.seed = torch.tensor([sequence.seed for sequence in sequences], dtype=torch.int64, device=device)

    def sample(self, kernel: Callable[..., torch.Tensor], logits: torch.Tensor, positions: np.ndarray) -> torch.Tensor:
        """Token ids (B,) drawn at `positions`, which are the indices of the new tokens in their sequences."""
        where = torch.from_numpy(positions.astype(np.int64)).to(self.device)
        return kernel(logits, self.temperature, self.top_k, self.top_p, self.min_p, self.seed, where)
