"""Compares the emulator's short fp8 sums with those of mmaemu, and writes README.md's table.

pip install --no-deps --target build/mmaemu mmaemu==0.1.0
PYTHONPATH=build/mmaemu python results/fp8_oracle/make.py
"""

from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from itertools import product
from pathlib import Path

import numpy as np
import torch

from rooflab.bench.base.plain import markdown_table
from rooflab.bench.emulator.tiles.mma import truncated_wgmma

PAGE, BEGIN = Path(__file__).with_name("README.md"), "<!-- make.py writes what follows -->\n"
DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
M, N = 48, 40


def families(random: np.random.Generator, k: int) -> Iterator[tuple[str, tuple[np.ndarray, ...]]]:
    """Operands (M, k) and (N, k) before their rounding to fp8, and an accumulator (M, N)."""
    a, b, zero = random.standard_normal((M, k)), random.standard_normal((N, k)), np.zeros((M, N))
    some = 2.0 ** random.integers(-16, 9, (M, N)) * random.standard_normal((M, N))
    spread = [each * 2.0 ** random.integers(-9, 8, each.shape) for each in (a, b)]
    nearly = np.concatenate([a[:, : k // 2], -a[:, : k // 2] * (1 + (random.random((M, k // 2)) < 0.1) / 8)], 1)
    rare = np.where(random.random(a.shape) < 1 / k, random.choice([np.inf, -np.inf, np.nan], a.shape), a)
    yield "normal, with an accumulator", (a, b, some)
    yield "exponents spread over 16, with an accumulator", (*spread, some)
    yield "terms that cancel", (nearly, np.concatenate([b[:, : k // 2]] * 2, 1), zero)
    yield "subnormals", (a * 2.0**-9, b * 2.0**-9, zero)
    yield "one large product of 32, the rest small", (a * np.where(np.arange(k) % 32, 2.0**-6, 200), b * 4, zero)
    yield "an accumulator that cancels the sum", (a, b, -(a @ b.T))
    yield "an accumulator below 2^-126", (a * 0, b, np.ldexp(some, -136))
    yield "negative zeros alone", (np.abs(a) * -0.0, np.abs(b), -zero)
    yield "infinities and NaN", (rare, b * (random.random(b.shape) < 0.9), zero)


if __name__ == "__main__":
    dot = import_module("mmaemu.model.chain").dot  # not in this project's environment
    equal: Counter[tuple[str, int]] = Counter()
    for seed, (pair, k) in enumerate(product(product(DTYPES, DTYPES), (32, 128, 1024))):
        for name, operands in families(np.random.default_rng(seed), k):
            a, b = (torch.tensor(each).to(DTYPES[element]) for each, element in zip(operands, pair, strict=False))
            found = c = operands[2].astype(np.float32)
            for at in range(0, k, 32):
                left, right = (each.float().numpy()[:, at : at + 32] for each in (a, b))
                found = truncated_wgmma(found, left, right, *pair)
            wide = (each.double() for each in (a[:, None].expand(-1, N, -1), b[None].expand(M, -1, -1)))
            wanted = dot(*wide, torch.tensor(c), preset="hopper", fmt=pair).numpy()
            same = (found.view(np.uint32) == wanted.view(np.uint32)) | (np.isnan(found) & np.isnan(wanted))
            equal[name, k] += int(same.sum())
    rows = [(*key, f"{n} of {4 * M * N}") for key, n in equal.items()]
    table = "\n".join(markdown_table(("operands", "K:", "the same bits:"), rows))
    PAGE.write_text(f"{PAGE.read_text().partition(BEGIN)[0]}{BEGIN}{table}\n")
