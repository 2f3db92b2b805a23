"""Runs one step: from batch tensors to sampled token ids."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from rooflab.engine.batch import DecodeBatch
from rooflab.engine.model import KVCache, Model, StepInput
from rooflab.engine.ops import OpSet
from rooflab.engine.scheduler import Step
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
        """Runs `step` and returns the sequences it sampled for and their new tokens, in the same order."""
        for sequence in step.preempted:
            self.leave(sequence)
        if step.phase == "prefill":
            logits = self.prefill_logits(step.sequences)
            tokens = SamplingTensors(step.sequences, self.device).sample(
                self.ops.step("prefill", sum(map(len, step.sequences))).sample,
                logits,
                np.array([len(sequence) for sequence in step.sequences]),
            )
            return step.sequences, tokens.tolist()
        return self.batch.rows, self._decode()

    def prefill_logits(self, sequences: list[Sequence]) -> torch.Tensor:
        """Logits of each sequence's last token, (num_sequences, vocab_size); writes their KV pages."""
        tokens = np.concatenate([np.asarray(sequence.token_ids, np.int64) for sequence in sequences])
        positions = np.concatenate([np.arange(len(sequence)) for sequence in sequences])
        size = self.block_size
        slots = []
        for sequence in sequences:
            index = np.arange(len(sequence))
            slots.append(np.asarray(sequence.block_ids, np.int64)[index // size] * size + index % size)
        ends = tuple(int(end) for end in np.cumsum([len(sequence) for sequence in sequences]))
        step = StepInput(self._to(tokens), self._to(positions), self._to(np.concatenate(slots)), prompt_ends=ends)
        return self.model.forward(step, self.cache, self.ops.step("prefill", len(tokens)))

    def decode_inputs(self) -> StepInput:
        """The tensors of a decode step over every row of the batch."""
        batch = self.batch
        batch.prepare()
        n = len(batch)
        # Only the columns in use: a kernel that gathers pages pays for the table's width.
        width = int(batch.num_blocks[:n].max())
        return StepInput(
            self._to(batch.token_ids[:n]),
            self._to(batch.positions[:n]),
            self._to(batch.slot_mapping[:n]),
            block_table=self._to(batch.block_table[:n, :width]),
            seq_lens=self._to(batch.seq_lens[:n]),
        )

    def decode_logits(self) -> torch.Tensor:
        """Logits of every row's next token, (rows, vocab_size)."""
        return self.model.forward(self.decode_inputs(), self.cache, self.ops.step("decode", len(self.batch)))

    def _decode(self) -> list[int]:
        logits = self.decode_logits()
        if self._sampling is None:
            self._sampling = SamplingTensors(self.batch.rows, self.device)
        positions = self.batch.seq_lens[: len(self.batch)]
        tokens = self._sampling.sample(self.ops.step("decode", len(self.batch)).sample, logits, positions)
        ids = tokens.cpu().numpy()
        self.batch.advance(ids)
        return list(ids.tolist())

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
