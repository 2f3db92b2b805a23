"""Makes TMA tensor maps for CUDA C++ kernels.  The CUDA driver encodes a map at each launch."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

MAP_BYTES, ALIGNMENT = 128, 64
"""The size of a CUtensorMap, and the alignment of its address, in bytes."""
BOX_ROWS, ROW_BYTES = 64, 128
"""The rows of a box, and the bytes of a box's row: 128 bytes are the widest swizzle."""
ELEMENT_TYPES = {torch.float8_e4m3fn: ("u8", 0), torch.float16: ("f16", 6), torch.bfloat16: ("bf16", 9)}
"""The name in PTX and the number in CUtensorMapDataType (cuda.h) of each dtype."""
DRIVER_LIBRARY = "libcuda.so.1"
"""The file name of CUDA's driver."""
INTERLEAVE_NONE, SWIZZLE_128_BYTES, L2_PROMOTE_128, OOB_FILL_ZERO = 0, 3, 2, 0
"""Values of the driver's enumerations: the layout in memory, the swizzle, the size of L2's requests, and how elements
out of bounds are filled."""


@dataclass(frozen=True)
class CudaMap:
    """A matrix in memory whose rows are contiguous.  TMA copies boxes of 64 rows by 128 bytes of it, swizzled."""

    base: torch.Tensor
    """The tensor that gives the map's address, dtype and device."""
    rows: int
    columns: int
    stride: int
    """The number of elements from a row to the next row.  In bytes, a multiple of 16."""

    @property
    def box(self) -> tuple[int, int]:
        """Returns the size of a box: the number of elements per row, and the number of rows."""
        return ROW_BYTES // self.base.element_size(), BOX_ROWS

    def encoded(self) -> Any:
        """Returns the 128 bytes of the map as a NumPy array of one element.  A kernel takes this array by value.
        Raises `ValueError` if there is no driver, or if the driver refuses the map."""
        map_buffer = np.zeros(MAP_BYTES + ALIGNMENT, np.uint8)
        map_offset = -map_buffer.ctypes.data % ALIGNMENT
        map_bytes = map_buffer[map_offset : map_offset + MAP_BYTES]
        driver_status = _encode()(
            ctypes.c_void_p(map_bytes.ctypes.data),
            ELEMENT_TYPES[self.base.dtype][1],
            2,
            ctypes.c_void_p(self.base.data_ptr()),
            (ctypes.c_uint64 * 2)(self.columns, self.rows),
            (ctypes.c_uint64 * 1)(self.stride * self.base.element_size()),
            (ctypes.c_uint32 * 2)(*self.box),
            (ctypes.c_uint32 * 2)(1, 1),
            INTERLEAVE_NONE,
            SWIZZLE_128_BYTES,
            L2_PROMOTE_128,
            OOB_FILL_ZERO,
        )
        if driver_status:
            expected_matrix = "a matrix that cuTensorMapEncodeTiled takes"
            problem_text = (
                f"error {driver_status} for {self.rows} rows {self.stride} elements apart at {self.base.data_ptr():#x}"
            )
            raise ValueError(f"tensor map: expected {expected_matrix}, got {problem_text}")
        return map_bytes.view([("bytes", np.uint8, MAP_BYTES)])


@cache
def _encode() -> Any:
    try:
        return ctypes.CDLL(DRIVER_LIBRARY).cuTensorMapEncodeTiled
    except (OSError, AttributeError) as error:
        raise ValueError(f"tensor map: expected CUDA's driver with cuTensorMapEncodeTiled, got {error}") from error
