"""Runs one step of the model, from the tensors of the batch to the drawn token ids."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch

from rooflab.engine.batch import DecodeBatch
from rooflab.engine.choose.model_shapes import MOST_REPLAYED
from rooflab.engine.graphs import DecodeGraphs, DecodeReplays
from rooflab.engine.model import KVCache, Model, StepInput
from rooflab.engine.ops import OpSet
from rooflab.engine.sampling import SamplingTensors, on_device
from rooflab.engine.scheduler import Step
from rooflab.engine.sequence import SamplingParams, Sequence
from rooflab.engine.step_tensors import TokenSpan, spans_of, step_input
from rooflab.kernels._native import why_no_compiler
from rooflab.roofline.architecture import Architecture


@dataclass(frozen=True)
class Draw:
    """Holds the tokens that a step drew.  The device may still be computing them."""

    sequences: list[Sequence]
    """The sequence of each row."""
    ids: torch.Tensor
    """(num_drawn,) int64 on a CPU.  Valid once the event `ready` has completed."""
    ready: torch.cuda.Event | None
    seen: tuple[torch.Tensor, ...]
    """For the sequences that want log-probabilities: the ids of the drawn token and the likeliest tokens, and their
    log-probabilities.  Valid once the event `ready` has completed."""
    read_at_once: bool
    """Whether these tokens must be read before the next step starts."""

    def tokens(self) -> list[int]:
        """Waits for the device and returns each row's token.  Appends requested log-probabilities to the sequences."""
        if self.ready is not None:
            self.ready.synchronize()
        if self.seen:
            sequences = [sequence for sequence in self.sequences if sequence.params.logprobs is not None]
            for sequence, token_ids, values in zip(sequences, *(tensor.tolist() for tensor in self.seen), strict=True):
                n = 1 + (sequence.params.logprobs or 0)
                sequence.logprobs.append(dict(zip(token_ids[:n], values[:n], strict=True)))
        return self.ids.tolist()


class ModelRunner:
    """Holds the model, the KV cache and the decode batch."""

    def __init__(
        self, model: Model, ops: OpSet, num_blocks: int, block_size: int, max_num_seqs: int, max_model_len: int
    ):
        self.model = model
        self.ops = ops
        self.device = model.embedding.device
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.allocate(num_blocks)
        self.batch = DecodeBatch(max_num_seqs, -(-max_model_len // block_size), block_size)
        self.graphs: DecodeGraphs | DecodeReplays | None = None
        """The recorded decode steps, or None if all steps run eagerly."""
        self._sampling: SamplingTensors | None = None
        self.drawn = torch.empty(0, dtype=torch.int64, device=self.device)
        """The tokens of the last draw, on the device.  The decode batch takes the next step's tokens from here."""

    def allocate(self, num_blocks: int) -> None:
        """Replaces the KV cache with a new cache of `num_blocks` pages."""
        self.cache = self.new_cache(self.model.arch, num_blocks)

    def new_cache(self, arch: Architecture, num_blocks: int) -> KVCache:
        """Returns a KV cache of `num_blocks` pages for `arch`, which is this runner's model or a second model."""
        page_shape = (num_blocks, self.block_size, arch.num_kv_heads, arch.head_dim)

        def pages() -> list[torch.Tensor]:
            dtype = self.model.embedding.dtype
            return [torch.empty(page_shape, dtype=dtype, device=self.device) for _ in range(arch.num_layers)]

        return KVCache(pages(), pages())

    def decode_graphs(self) -> DecodeGraphs | DecodeReplays | None:
        """Returns an object that records and replays decode steps, or None on a CPU without a C++ compiler.  The
        caller allocates the KV cache before the first recording, which holds the cache's addresses."""
        max_rows, table_width = self.batch.block_table.shape
        new_tensor = partial(torch.empty, dtype=self.model.embedding.dtype, device=self.device)
        vocab_size = self.model.arch.vocab_size
        if self.device.type == "cpu":
            if why_no_compiler():
                return None
            return DecodeReplays(self._decode, new_tensor(min(max_rows, MOST_REPLAYED), vocab_size), self.batch)
        return DecodeGraphs(self._decode, new_tensor(max_rows, vocab_size), table_width)

    def _decode(self, inputs: StepInput) -> torch.Tensor:
        return self.model.forward(inputs, self.cache, self.ops.step(len(inputs.seq_lens), 0))

    def run(self, step: Step) -> Draw | None:
        """Runs `step` and draws the next tokens.  Returns None if no sequence is ready for its next token."""
        batch = self.batch
        logits = self.logits(step)
        sequences = batch.rows + step.ending if step.chunks else list(batch.rows)
        if not sequences:
            return None
        positions = batch.seq_lens[: len(batch)].astype(np.int64)
        if len(sequences) > len(batch):
            positions = np.append(positions, [len(sequence) for sequence in sequences[len(batch) :]])
        sampling = self._sampling
        if sampling is None or step.chunks:
            sampling = SamplingTensors(sequences, self.device)
            self._sampling = None if step.chunks else sampling
        token_draw = self.draw(step, sequences, sampling, logits, positions)
        batch.advance()
        return token_draw

    def draw(
        self, step: Step, sequences: list[Sequence], sampling: SamplingTensors, logits: torch.Tensor, at: np.ndarray
    ) -> Draw:
        """Draws a token from each row of `logits` `[num_drawn, vocab_size]`.  `at` `[num_drawn]` int64 holds the index
        of each new token in its sequence."""
        self.drawn, *logprobs = sampling.sample(self.step_ops(step).sample, logits, on_device(at, self.device))
        token_ids, ready_event = self.drawn, None
        if self.device.type != "cpu":
            token_ids, *logprobs = (tensor.to("cpu", non_blocking=True) for tensor in (token_ids, *logprobs))
            ready_event = torch.cuda.current_stream(self.device).record_event()
        return Draw(sequences, token_ids, ready_event, tuple(logprobs), bool(sampling.special))

    def logits(self, step: Step) -> torch.Tensor:
        """Runs the model and returns logits `[num_drawn, vocab_size]`.  Writes all keys and values to the cache."""
        batch = self.batch
        assert len(batch) == step.num_decodes, "the batch has the sequences that the scheduler decodes"
        if (replayed_logits := self.replayed(step)) is not None:
            return replayed_logits
        inputs = step_input(batch, slice(len(batch)), spans_of(step.chunks), self.drawn)
        if isinstance(self.graphs, DecodeGraphs) and inputs.chunks is None:
            return self.graphs(inputs)
        return self.model.forward(inputs, self.cache, self.step_ops(step))

    def replayed(self, step: Step) -> torch.Tensor | None:
        """Replays a decode step on a CPU and returns its logits.  Returns None if the step must run eagerly."""
        return self.graphs(self.drawn) if isinstance(self.graphs, DecodeReplays) and not step.chunks else None

    def step_ops(self, step: Step) -> SimpleNamespace:
        """Returns the kernels for `step`, as a namespace with one function for each op."""
        return self.ops.step(step.num_decodes, step.num_prompt_tokens)

    def rehearse(self, num_tokens: int, num_drawn: int) -> None:
        """Runs a dummy step of `num_tokens` prompt tokens and draws `num_drawn` tokens.  Leaves the cache unchanged."""
        lengths = [min(self.max_model_len, num_tokens - i) for i in range(0, num_tokens, self.max_model_len)]
        pages = np.zeros(self.batch.block_table.shape[1], np.int32)
        token_spans = [TokenSpan([0] * length, 0, pages, 0) for length in lengths]
        inputs = step_input(self.batch, slice(0), token_spans, self.drawn)
        logit_rows, dummy_slots = on_device(np.arange(num_drawn), self.device), torch.full_like(inputs.slot_mapping, -1)
        ops = self.ops.step(0, num_tokens)
        logits = self.model.forward(replace(inputs, slot_mapping=dummy_slots, drawn=logit_rows), self.cache, ops)
        for logit_bias in (None, {0: 0.0}):  # a kernel may be compiled for each
            params = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, logit_bias=logit_bias)
            dummy_sequences = [Sequence(row, [0], 1, params, row, frozenset(), 2, 0.0) for row in range(num_drawn)]
            SamplingTensors(dummy_sequences, self.device).sample(ops.sample, logits, logit_rows)

    def join(self, sequence: Sequence, source: int) -> None:
        """Adds a prefilled sequence to the batch.  Its newest token is in row `source` of the last draw."""
        self.batch.add(sequence, source)
        self._sampling = None

    def leave(self, sequence: Sequence) -> None:
        """Removes a sequence from the decode batch, if it is there."""
        if sequence.row >= 0:
            self.batch.remove(sequence)
            self._sampling = None
