"""Runs one step: from batch tensors to sampled token ids."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from rooflab.engine.batch import DecodeBatch
from rooflab.engine.graphs import DecodeGraphs
from rooflab.engine.model import Chunks, KVCache, Model, StepInput
from rooflab.engine.ops import OpSet
from rooflab.engine.sampling import SamplingTensors, on_device
from rooflab.engine.scheduler import Chunk, Step
from rooflab.engine.sequence import SamplingParams, Sequence
from rooflab.engine.speculate.drafter import Drafter
from rooflab.engine.speculate.rows import DraftRows, accepted
from rooflab.roofline.architecture import Architecture


@dataclass(frozen=True)
class Draw:
    """The tokens that a step drew, one for each of `sequences`, or more for one with a draft; the device may still be
    at work on them."""

    sequences: list[Sequence]
    ids: torch.Tensor
    """(num_drawn,) int64 on a CPU: for each sequence one for each token of its draft, and one more; valid after
    `ready`."""
    ready: torch.cuda.Event | None
    seen: tuple[torch.Tensor, ...]
    """Of the rows of sequences that want to see some: the drawn token and the likeliest, and their log-probabilities;
    valid after `ready`."""
    read_at_once: bool
    """Whether the next step needs to know the tokens before it starts."""

    def tokens(self) -> list[list[int]]:
        """The tokens of each sequence, as soon as they are there; also gives it the log-probabilities that it wants."""
        if self.ready is not None:
            self.ready.synchronize()
        drawn: list[int] = self.ids.tolist()
        found = accepted(self.sequences, drawn) if len(drawn) > len(self.sequences) else [[token] for token in drawn]
        if self.seen:
            ids, values = (seen.tolist() for seen in self.seen)
            row = 0
            for sequence, own in zip(self.sequences, found, strict=True):
                if sequence.params.logprobs is None:
                    continue
                n = 1 + sequence.params.logprobs
                # A step that broke off after the draw is run again.
                del sequence.logprobs[len(sequence.token_ids) - sequence.num_prompt_tokens :]
                for place in range(row, row + len(own)):
                    sequence.logprobs.append(dict(zip(ids[place][:n], values[place][:n], strict=True)))
                row += 1 + len(sequence.draft)
        return found


class ModelRunner:
    """Holds the model, the KV cache and the decode batch."""

    def __init__(
        self, model: Model, ops: OpSet, num_blocks: int, block_size: int, max_num_seqs: int, max_model_len: int,
        most_rows: int = 1,
    ):  # fmt: skip
        self.model = model
        self.most_rows = most_rows
        """Of a decoding sequence in a step: a token, and those of its draft."""
        self.ops = ops
        self.device = model.embedding.device
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.drafter = Drafter()
        self.allocate(num_blocks)
        self.batch = DecodeBatch(max_num_seqs, -(-max_model_len // block_size), block_size)
        self.graphs: DecodeGraphs | None = None
        self._sampling: SamplingTensors | None = None
        self._drawn = torch.empty(0, dtype=torch.int64, device=self.device)
        """The tokens of the last draw; where drafts were verified, the last one of each sequence."""
        self.verified: DraftRows | None = None
        """The rows of the step that runs, if it verifies drafts."""

    def allocate(self, num_blocks: int) -> None:
        """Makes the KV cache again, with this number of pages."""
        self.cache = self.new_cache(self.model.arch, num_blocks)
        self.drafter.allocate(num_blocks)

    def new_cache(self, arch: Architecture, num_blocks: int) -> KVCache:
        """Pages for a model that runs beside this one, or for this one."""
        shape = (num_blocks, self.block_size, arch.num_kv_heads, arch.head_dim)

        def pages() -> list[torch.Tensor]:
            dtype = self.model.embedding.dtype
            return [torch.empty(shape, dtype=dtype, device=self.device) for _ in range(arch.num_layers)]

        return KVCache(pages(), pages())

    def decode_graphs(self) -> DecodeGraphs:
        """Graphs of decode steps, not recorded yet: they hold the addresses of the KV cache.  Once they are recorded,
        they serve as `graphs`."""
        rows, width = self.batch.block_table.shape
        dtype, vocab_size = self.model.embedding.dtype, self.model.arch.vocab_size
        return DecodeGraphs(self._decode, torch.empty(rows, vocab_size, dtype=dtype, device=self.device), width)

    def _decode(self, inputs: StepInput) -> torch.Tensor:
        return self.model.forward(inputs, self.cache, self.ops.step(len(inputs.seq_lens), 0))

    def run(self, step: Step) -> Draw | None:
        """Runs `step` and draws the next token of its sequences; None if it ends no prompt and decodes nothing."""
        for sequence in step.preempted:
            self.leave(sequence)
        batch = self.batch
        assert len(batch) == step.num_decodes, "the batch has the sequences that the scheduler decodes"
        rows = self.verified = DraftRows(batch) if step.drafting else None
        logits = self.logits(step)
        ended = [chunk.sequence for chunk in step.chunks if chunk.last]
        sequences = [*batch.rows, *ended]
        if not sequences:
            return None
        if step.chunks or self._sampling is None:
            sampling = SamplingTensors(sequences, self.device)
            self._sampling = None if step.chunks else sampling
        else:
            sampling = self._sampling
        lengths = batch.seq_lens[: len(batch)].astype(np.int64)
        if rows is not None:
            lengths = lengths[rows.index] + rows.ahead
            place, none = len(batch) + np.arange(len(ended)), np.zeros(len(ended), np.int64)
            sampling = sampling.taken(np.append(rows.index, place), np.append(rows.ahead, none))
            sequences = [*rows.sequences, *ended]
        if ended:
            lengths = np.append(lengths, [len(sequence) for sequence in ended])
        drawn, *seen = sampling.sample(self._ops(step).sample, logits, on_device(lengths, self.device))
        self._drawn = drawn
        special = bool(sampling.special)
        if rows is None:
            batch.advance()
        if self.device.type == "cpu":
            return Draw(sequences, drawn, None, tuple(seen), special)
        ids, *seen = (found.to("cpu", non_blocking=True) for found in (drawn, *seen))
        return Draw(sequences, ids, torch.cuda.current_stream(self.device).record_event(), tuple(seen), special)

    def noted(self, tokens: list[list[int]]) -> None:
        """Takes the tokens of the draw that verified drafts: the next step computes the last of each sequence."""
        if (rows := self.verified) is not None:
            order = np.concatenate([rows.plain, rows.drafted])
            counts = np.fromiter(map(len, tokens), np.int64, len(tokens))
            self.batch.advance(order, counts[: len(order)])
            self._drawn = self.on_device(np.array([own[-1] for own in tokens]))
            self.verified = None

    def logits(self, step: Step) -> torch.Tensor:
        """Logits (num_drawn, vocab_size) of the tokens whose next token is drawn; writes keys and values of all."""
        inputs, drafter, hidden = self.inputs(step), self.drafter, None
        if self.graphs is not None and inputs.chunks is None:
            logits = self.graphs(inputs)
        elif drafter.reads == "tokens":
            logits = self.model.forward(inputs, self.cache, self._ops(step))
        else:
            drawn = inputs.drawn if drafter.reads == "all hidden states" else None
            whole = inputs if drawn is None else replace(inputs, drawn=None)
            hidden = self.model.hidden(whole, self.cache, self._ops(step))
            logits = self._ops(step).gemm(hidden if drawn is None else hidden[drawn], self.model.lm_head)
        drafter.follow(step, inputs, hidden, self._sizes(step))
        return logits

    def rehearse(self, num_tokens: int) -> None:
        """Computes a step of `num_tokens` tokens of prompts and a draw for the largest batch, and writes no page."""
        lengths = [min(self.max_model_len, num_tokens - i) for i in range(0, num_tokens, self.max_model_len)]
        bounds = np.cumsum([0, *lengths], dtype=np.int32)
        index = np.concatenate([np.arange(length) for length in lengths])
        rows = min(len(self.batch.source) * self.most_rows, num_tokens)
        none = np.empty((0, 1), np.int32)
        columns = (np.zeros_like(index), index, np.full_like(index, -1), none, none[:, 0])
        ids, positions, slots, table, lens = map(self.on_device, columns)
        chunks = Chunks(self.on_device(bounds), max(lengths), None)
        step = StepInput(ids, positions, slots, table, lens, chunks, self.on_device(np.arange(rows)))
        ops = self.ops.step(0, num_tokens)
        logits = self.model.forward(step, self.cache, ops)
        for bias in (None, {0: 0.0}):  # a kernel may be compiled for each
            params = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, logit_bias=bias)
            drawing = [Sequence(row, [0], 1, params, row, frozenset(), 2, 0.0) for row in range(rows)]
            SamplingTensors(drawing, self.device).sample(ops.sample, logits, self.on_device(np.arange(rows)))

    def _ops(self, step: Step) -> SimpleNamespace:
        return self.ops.step(*self._sizes(step))

    def _sizes(self, step: Step) -> tuple[int, int, int]:
        drafted = 0 if self.verified is None else int(self.verified.ahead.astype(bool).sum())
        return step.num_decodes, sum(chunk.end - chunk.start for chunk in step.chunks), drafted

    def inputs(self, step: Step) -> StepInput:
        """The tensors of a step over every row of the batch and the chunks of prompts."""
        batch, rows = self.batch, self.verified
        batch.prepare()
        plain: Any = slice(len(batch)) if rows is None else rows.plain
        # Only the columns in use: a kernel that gathers pages pays for the table's width.
        width = int(batch.num_blocks[plain].max(initial=0))
        table, lens = self.on_device(batch.block_table[plain, :width]), self.on_device(batch.seq_lens[plain])
        tokens = self._drawn[self.on_device(batch.source[plain])]
        flat = (batch.positions[plain], batch.slot_mapping[plain])
        if not step.chunks and rows is None:
            positions, slots = map(self.on_device, flat)
            return StepInput(tokens, positions, slots, table, lens)
        prompts, *places = zip(*self._flats(step), strict=True)
        tokens = torch.cat([tokens, self.on_device(np.concatenate(prompts))])
        each = zip(flat, places, strict=True)
        positions, slots = (self.on_device(np.concatenate([first, *others])) for first, others in each)
        lengths = np.array([chunk.end - chunk.start for chunk in step.chunks], np.int64)
        counts = lengths[:0] if rows is None else rows.counts
        bounds = np.concatenate([[0], np.cumsum([*counts, *lengths])])
        history = self._history(step) if rows is not None or any(chunk.start for chunk in step.chunks) else None
        chunks = Chunks(self.on_device(bounds.astype(np.int32)), int(np.diff(bounds).max()), history)
        # Every row of the batch and of its drafts, and the last of each prompt.
        n, ends = len(lens), bounds[1 + len(counts) :]
        last = [n + bound - 1 for bound, chunk in zip(ends, step.chunks, strict=True) if chunk.last]
        drawn = self.on_device(np.concatenate([np.arange(n + bounds[len(counts)]), np.array(last, np.int64)]))
        return StepInput(tokens, positions, slots, table, lens, chunks, drawn)

    def _flats(self, step: Step) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Tokens, positions and cache slots of the drafted rows, and of each chunk."""
        drafts = []
        if self.verified is not None:
            for sequence in self.verified.sequences[len(self.verified.plain) :]:
                self.batch.set_blocks(sequence)
            drafts = [self.verified.flat(self.batch)]
        return drafts + [self._flat(chunk) for chunk in step.chunks]

    def _history(self, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """The pages (rows, most of them) and lengths (rows,) of the drafted rows and the chunks, up to their ends."""
        rows, batch = self.verified, self.batch
        drafted = np.empty(0, np.int64) if rows is None else rows.drafted
        counts = drafted if rows is None else rows.counts
        ends = [*(batch.positions[drafted] + counts), *(chunk.end for chunk in step.chunks)]
        pages = [-(-int(end) // self.block_size) for end in ends]
        tables = np.full((len(pages), max(pages)), -1, np.int32)
        n = len(drafted)
        if n:
            width = max(pages[:n])
            tables[:n, :width] = batch.block_table[drafted, :width]
        for row, (chunk, count) in enumerate(zip(step.chunks, pages[n:], strict=True), n):
            tables[row, :count] = chunk.sequence.block_ids[:count]
        return self.on_device(tables), self.on_device(np.array(ends, np.int32))

    def _flat(self, chunk: Chunk) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens, positions and cache slots of a chunk."""
        sequence, size = chunk.sequence, self.block_size
        index = np.arange(chunk.start, chunk.end)
        first = chunk.start // size
        pages = np.asarray(sequence.block_ids[first : -(-chunk.end // size)], np.int64)
        tokens = np.asarray(sequence.token_ids[chunk.start : chunk.end], np.int64)
        return tokens, index, pages[index // size - first] * size + index % size

    def join(self, sequence: Sequence, source: int) -> None:
        """Adds a prefilled sequence to the decode batch; its last token is the `source`-th of the last draw."""
        self.batch.add(sequence, source)
        self._sampling = None

    def leave(self, sequence: Sequence) -> None:
        """Removes a sequence from the decode batch, if it is there."""
        if sequence.row >= 0:
            self.batch.remove(sequence)
            self._sampling = None

    def on_device(self, array: np.ndarray) -> torch.Tensor:
        """The array on the runner's device (`on_device`)."""
        return on_device(array, self.device)
