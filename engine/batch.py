"""Keeps the tensors of a decode step between steps, and changes them in place.

New block tables for every step would cost milliseconds of Python at 256 sequences.  So a step changes only the
positions, and the rows of sequences that join, leave or get a page.
"""

from __future__ import annotations

import numpy as np

from rooflab.engine.sequence import Sequence


class DecodeBatch:
    """Holds the decode batch: a row per running sequence, without gaps.  Its tensors share memory with NumPy arrays."""

    def __init__(self, max_num_seqs: int, max_blocks: int, block_size: int):
        self.block_size = block_size
        self.rows: list[Sequence] = []
        self.source = np.zeros(max_num_seqs, np.int64)
        """For each row, the index of the row's token in the last draw.  The drawn tokens are on the device."""
        self.positions = np.zeros(max_num_seqs, np.int64)
        """For each row, the position of the token that the step computes."""
        self.seq_lens = np.zeros(max_num_seqs, np.int32)
        """For each row, the number of tokens to attend to, including the token that the step computes."""
        self.slot_mapping = np.zeros(max_num_seqs, np.int64)
        self.block_table = np.full((max_num_seqs, max_blocks), -1, np.int32)
        self.num_blocks = np.zeros(max_num_seqs, np.int64)
        self._row_index = np.arange(max_num_seqs)
        self.changed = True
        """Whether rows joined, left or moved by more than one token since the last step."""
        self._advanced = False

    def __len__(self) -> int:
        return len(self.rows)

    def add(self, sequence: Sequence, source: int) -> None:
        """Adds `sequence` as the last row of the batch. The input of the next step is the sequence's newest token.
        `source` is the index of this token among the tokens of the last draw."""
        row, self.changed = len(self.rows), True
        self.rows.append(sequence)
        sequence.row = row
        self.num_blocks[row] = 0
        self.set_blocks(sequence)
        self.positions[row] = len(sequence) - 1
        self.source[row] = source

    def set_blocks(self, sequence: Sequence) -> None:
        """Copies the new page ids of `sequence` to its row of the block table."""
        row, filled_blocks, blocks = sequence.row, int(self.num_blocks[sequence.row]), sequence.block_ids
        self.block_table[row, filled_blocks : len(blocks)] = blocks[filled_blocks:]
        self.num_blocks[row] = len(blocks)

    def remove(self, sequence: Sequence) -> None:
        """Removes `sequence`.  The last row of the batch moves into the free row."""
        row, last_sequence, self.changed = sequence.row, self.rows.pop(), True
        if last_sequence is not sequence:
            for row_array in (self.source, self.positions, self.block_table, self.num_blocks):
                row_array[row] = row_array[len(self.rows)]
            self.rows[row], last_sequence.row = last_sequence, row
        sequence.row = -1

    def prepare(self) -> None:
        """Computes `block_table`, `seq_lens` and `slot_mapping` of the step from the positions."""
        num_rows = len(self.rows)
        positions = self.positions[:num_rows]
        was_advanced, self._advanced = self._advanced, False
        if not self.changed and (positions % self.block_size).all():  # no row begins a page
            self.seq_lens[:num_rows] += was_advanced
            self.slot_mapping[:num_rows] += was_advanced
            return
        self.changed = False
        block_index = positions // self.block_size
        for row in np.flatnonzero(block_index >= self.num_blocks[:num_rows]):
            self.set_blocks(self.rows[row])
        np.add(positions, 1, out=self.seq_lens[:num_rows], casting="same_kind")
        pages = self.block_table[self._row_index[:num_rows], block_index].astype(np.int64)
        self.slot_mapping[:num_rows] = pages * self.block_size + positions % self.block_size

    def advance(self) -> None:
        """Adds 1 to every position, for the token that the step draws.  Row i's token is at index i of the draw."""
        num_rows = len(self.rows)
        self.source[:num_rows] = self._row_index[:num_rows]
        self.positions[:num_rows] += 1
        self._advanced = True
