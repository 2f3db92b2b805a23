"""Builds the tensors of one step: first the decode batch's rows, then spans of tokens, such as chunks of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from rooflab.engine.batch import DecodeBatch
from rooflab.engine.model import Chunks, StepInput
from rooflab.engine.sampling import on_device
from rooflab.engine.scheduler import Chunk


class TokenSpan(NamedTuple):
    """Describes successive tokens of one sequence."""

    tokens: Sequence[int]
    start: int
    """The position of the first token."""
    block_ids: Any
    """The pages of the sequence, as a list or an array, at least up to the page of the last token."""
    num_drawn: int
    """The number of tokens, counted back from the end of the span, whose next token is drawn."""


def spans_of(chunks: Sequence[Chunk]) -> list[TokenSpan]:
    """Returns the prompt chunks as token spans.  The last chunk of a prompt also draws the next token."""
    return [
        TokenSpan(sequence.token_ids[start:chunk_end], start, sequence.block_ids, int(chunk_end == len(sequence)))
        for sequence, start, chunk_end in chunks
    ]


def ramp(counts: np.ndarray) -> np.ndarray:
    """Returns `concatenate([arange(count) for count in counts])` as int64."""
    start_offsets = np.cumsum(counts) - counts
    return np.asarray(np.arange(counts.sum()) - np.repeat(start_offsets, counts))


def step_input(batch: DecodeBatch, rows: Any, spans: Sequence[TokenSpan], drawn: torch.Tensor) -> StepInput:
    """Builds the input tensors of a step.  It decodes one token for each of `rows`, a slice or index array into the
    batch, and computes the tokens of `spans`. Each span has successive tokens of a sequence, such as part of a prompt.

    `drawn` `[num_drawn]` int64 holds the tokens that the previous step drew.  They are the input tokens of `rows`.
    """
    batch.prepare()
    device = drawn.device
    # Only the columns in use: a kernel that gathers pages pays for the table's width.
    table_width = int(batch.num_blocks[rows].max(initial=0))
    table, seq_lens = on_device(batch.block_table[rows, :table_width], device), on_device(batch.seq_lens[rows], device)
    token_ids = drawn[on_device(batch.source[rows], device)]
    positions, slots = batch.positions[rows], batch.slot_mapping[rows]
    if not spans:
        return StepInput(token_ids, on_device(positions, device), on_device(slots, device), table, seq_lens)
    span_starts = np.array([span.start for span in spans])
    span_lengths = np.array([len(span.tokens) for span in spans])
    span_ends, span_bounds = span_starts + span_lengths, np.concatenate([[0], np.cumsum(span_lengths)])
    pages = -(-span_ends // batch.block_size)
    tables = np.full((len(spans), pages.max()), -1, np.int32)
    for row, (span, num_pages) in enumerate(zip(spans, pages.tolist(), strict=True)):
        tables[row, :num_pages] = span.block_ids[:num_pages]
    span_positions = ramp(span_lengths) + np.repeat(span_starts, span_lengths)
    page = tables[np.repeat(np.arange(len(spans)), span_lengths), span_positions // batch.block_size].astype(np.int64)
    history = (on_device(tables, device), on_device(span_ends.astype(np.int32), device)) if span_starts.any() else None
    chunks = Chunks(on_device(span_bounds.astype(np.int32), device), int(span_lengths.max()), history)
    # Every row of the batch, and the last tokens of the spans.
    n, sample_counts = len(seq_lens), np.array([span.num_drawn for span in spans])
    span_rows = n + ramp(sample_counts) + np.repeat(span_bounds[1:] - sample_counts, sample_counts)
    return StepInput(
        torch.cat([token_ids, on_device(np.concatenate([span.tokens for span in spans]), device)]),
        on_device(np.concatenate([positions, span_positions]), device),
        on_device(np.concatenate([slots, page * batch.block_size + span_positions % batch.block_size]), device),
        table,
        seq_lens,
        chunks,
        on_device(np.concatenate([np.arange(n), span_rows]), device),
    )
