"""Reads the blocks of a quantised GGUF tensor as codes, scales and minimums, without a change of any value.

A block has 32 or 256 values of a row.  ggml's `ggml-common.h` defines the blocks; `ggml-quants.c` says which value a
bit belongs to.
"""

from __future__ import annotations

import numpy as np
import torch

from rooflab.engine.load.coded import CodedWeight
from rooflab.engine.load.gguf_file import GGUFTensor
from rooflab.reference.quantization import pack_int4

KEPT_FORMATS = {2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K"}
"""The formats that `read_codes` reads, by ggml's number."""
Parts = tuple[np.ndarray, np.ndarray, np.ndarray | None]
"""Codes `[N, K]`, scales and minimums `[N, groups]`."""


def read_codes(tensor: GGUFTensor) -> CodedWeight:
    """Reads a matrix `[N, K]` in one of `KEPT_FORMATS`."""
    name, (N, _) = KEPT_FORMATS[tensor.kind], tensor.shape
    raw_rows = np.fromfile(tensor.path, np.uint8, tensor.size, offset=tensor.start).reshape(N, -1)
    codes, scale, minimum = _super_blocks(raw_rows, name) if name.endswith("K") else _blocks(raw_rows, name)
    code_tensor = torch.from_numpy(np.ascontiguousarray(codes))
    if name.startswith("Q4"):
        code_tensor = pack_int4(code_tensor)
    minimums = None if minimum is None else torch.from_numpy(np.ascontiguousarray(minimum))
    return CodedWeight(code_tensor, torch.from_numpy(np.ascontiguousarray(scale)), minimums)


def _blocks(rows: np.ndarray, name: str) -> Parts:
    """Decodes blocks of 32 values with an fp16 scale, and in the formats `_1` an fp16 minimum."""
    N, code_bytes = len(rows), 32 if name == "Q8_0" else 16
    head_bytes = (4 if name.endswith("1") else 2) + 4 * name.startswith("Q5")
    blocks = rows.reshape(N, -1, head_bytes + code_bytes)
    scale = _halves(blocks[..., :2])[..., 0]
    minimum = -_halves(blocks[..., 2:4])[..., 0] if name.endswith("1") else None
    codes = blocks[..., head_bytes:]
    if name == "Q8_0":
        return codes.reshape(N, -1).view(np.int8), scale, None
    codes = np.concatenate((codes & 15, codes >> 4), axis=-1)
    if name.startswith("Q5"):
        fifth_bits = np.unpackbits(blocks[..., head_bytes - 4 : head_bytes], axis=-1, bitorder="little")
        codes = (codes | fifth_bits << 4).view(np.int8)
        if minimum is None:
            codes = codes - np.int8(16)
    return codes.reshape(N, -1), scale, minimum


def _super_blocks(rows: np.ndarray, name: str) -> Parts:
    """Decodes blocks of 256 values, in which each group has an integer scale.  Returns scales in fp32."""
    N = len(rows)
    if name == "Q6_K":
        blocks = rows.reshape(N, -1, 210)
        low_bits, high_bits = blocks[..., :128].reshape(N, -1, 2, 2, 32), blocks[..., 128:192].reshape(N, -1, 2, 1, 32)
        low_bits = np.concatenate((low_bits & 15, low_bits >> 4), axis=-2)
        high_bits = high_bits >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
        codes = (low_bits | high_bits << 4).view(np.int8) - np.int8(32)
        scale = blocks[..., 192:208].view(np.int8) * _halves(blocks[..., 208:]).astype(np.float32)
        return codes.reshape(N, -1), scale.reshape(N, -1), None
    blocks = rows.reshape(N, -1, 144 if name == "Q4_K" else 176)
    scale_codes, minimum_codes = _six_bits(blocks[..., 4:16])
    step = _halves(blocks[..., :4]).astype(np.float32)
    scale, minimum = step[..., :1] * scale_codes, step[..., 1:] * minimum_codes
    codes = blocks[..., -128:].reshape(N, -1, 4, 1, 32)
    codes = np.concatenate((codes & 15, codes >> 4), axis=-2)
    if name == "Q5_K":
        fifth_bits = blocks[..., 16:48].reshape(N, -1, 1, 1, 32) >> np.arange(8, dtype=np.uint8).reshape(4, 2, 1) & 1
        codes = (codes | fifth_bits << 4).view(np.int8)
    return codes.reshape(N, -1), scale.reshape(N, -1), minimum.reshape(N, -1)


def _halves(two_bytes: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(two_bytes).view(np.float16)


def _six_bits(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Unpacks the 8 scales and 8 minimums, of 6 bits each, that take 12 bytes `[..., 12]`."""
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate((first & 63, third & 15 | first >> 6 << 4), axis=-1)
    minimums = np.concatenate((second & 63, third >> 4 | second >> 6 << 4), axis=-1)
    return scales, minimums
