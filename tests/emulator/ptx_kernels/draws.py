"""Random configurations of the matmuls and of the other kernels, for the fuzzer: the same for the same number."""

from __future__ import annotations

import random
from typing import Any

from ptx_kernels.cases import Case

SHARED_BYTES = 200 << 10


def matmul(number: int) -> Case:
    """One configuration that fits."""
    draw = random.Random(f"matmul {number}")
    while True:
        options = _matmul(draw)
        maker = "tma" if options.pop("by_tma") else "pointers"
        if _fits(options):
            return Case("triton_matmul", maker, options)


def _matmul(draw: random.Random) -> dict[str, Any]:
    by_tma = draw.random() < 0.75
    BM, BN, BK = draw.choice([64, 64, 128]), draw.choice([16, 32, 64, 64, 128, 256]), draw.choice([16, 32, 64, 64, 128])
    # Rows of 16 bytes' multiples, as TMA wants them.
    ragged = draw.random() < 0.4
    M, N, K = (
        size * draw.randint(1, most) - (8 * draw.randrange(size // 8) if ragged else 0)
        for size, most in ((BM, 2), (BN, 2), (BK, 5))
    )
    found: dict[str, Any] = {
        "by_tma": by_tma, "M": M, "N": N, "K": K, "BM": BM, "BN": BN, "BK": BK, "stages": draw.randint(1, 4),
        "trans": draw.choice(["NN", "NT", "TN", "TT"]), "dtype": draw.choice(["bf16", "fp16"]),
        "warps": draw.choice([4, 4, 8]),
    }  # fmt: skip
    if not by_tma:
        return found
    found["on_device"] = draw.random() < 0.3
    found["programs"] = draw.choice([0, 1, 2])
    kind = draw.random()
    if kind < 0.4:
        # Triton 3.7 halves large tiles for two groups of consumers, and refuses the host's maps of them.
        found["ws" if kind < 0.3 else "outer_ws"] = True
        found["on_device"] = found["on_device"] or BM == 128
        found["BN"], found["warps"] = min(BN, 128), 4
    elif kind < 0.6:
        found["flatten"] = True
    return found


def _fits(options: dict[str, Any]) -> bool:
    BM, BN, BK = options["BM"], options["BN"], options["BK"]
    accumulator = BM * BN // (32 * options["warps"])
    return accumulator <= 128 and 2 * options["stages"] * BK * (BM + BN) + 4 * BM * BN <= SHARED_BYTES


def anything(number: int) -> Case:
    """One configuration of another kernel: its sizes, types and warps change how values are laid out and moved."""
    draw = random.Random(f"anything {number}")
    return draw.choice([_vectors, _vectors, _dot, _dot, _narrow_pointers])(draw)


def _vectors(draw: random.Random) -> Case:
    power = lambda low, high: 2 ** draw.randint(low, high)
    warps = draw.choice([1, 2, 4, 8, 16])
    maker = draw.choice(["sort", "scan", "reduce", "turn"])
    options = {
        "sort": {
            "N": power(4, 9), "down": draw.random() < 0.5, "warps": warps,
            "dtype": draw.choice(["float32", "float16", "bfloat16", "int32", "int16", "int8", "int64"]),
        },
        "scan": {"R": power(0, 5), "N": power(1, 8), "back": draw.random() < 0.5, "warps": warps},
        "reduce": {"R": power(0, 6), "N": power(1, 9), "programs": draw.randint(1, 3), "warps": warps},
        "turn": {"R": power(0, 6), "N": power(1, 7)},
    }  # fmt: skip
    return Case("triton_vectors", maker, options[maker])


def _dot(draw: random.Random) -> Case:
    power = lambda low, high: 2 ** draw.randint(low, high)
    options = {
        "M": power(4, 7), "N": power(4, 7), "K": power(5, 7), "warps": draw.choice([1, 2, 4, 8, 16]),
        "dtype": draw.choice(["fp16", "bf16", "fp32", "e4m3", "e5m2"]),
    }  # fmt: skip
    return Case("triton_copies", "dot", options)


def _narrow_pointers(draw: random.Random) -> Case:
    options = {
        "dtype": draw.choice(["int8", "e4m3", "e5m2", "fp32"]), "trans": "NT", "BK": draw.choice([32, 64]),
        "BM": draw.choice([64, 128]), "BN": draw.choice([16, 32, 64]), "stages": draw.randint(1, 4),
        "warps": draw.choice([4, 8]), "M": draw.randint(1, 200), "N": draw.randint(1, 100), "K": draw.randint(1, 300),
    }  # fmt: skip
    return Case("triton_matmul", "pointers", options)
