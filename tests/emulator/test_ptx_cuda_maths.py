"""Functions of CUDA C++, as NVRTC's own library computes them by many instructions, against NumPy and torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from ptx_cuda import run

THREADS = 128


def inputs() -> npt.NDArray[np.float32]:
    """(128,) float32: ordinary numbers, and large ones whose sine needs a long division by pi."""
    x = (np.random.default_rng(3).standard_normal(THREADS) * 3).astype(np.float32)
    x[:6] = [0, 1e-4, -1e-4, 50.25, 1e5, -3.1415927]
    return x


def within(found: npt.NDArray[Any], want: npt.NDArray[Any], units: float) -> bool:
    """Whether numbers differ by at most so many units of their last place."""
    rounded = want.astype(found.dtype)
    return bool((np.abs(found.astype(want.dtype) - want) <= units * np.spacing(np.abs(rounded))).all())


def test_functions_of_the_library_are_as_exact_as_it_says() -> None:
    x, y = inputs(), np.zeros((THREADS, 16), np.float32)
    run("maths", "functions", [x, y])
    v = x.astype(np.float64)
    p = (np.abs(x) + np.float32(1e-3)).astype(np.float64)
    with np.errstate(over="ignore"):
        want = [
            np.sin(v), np.cos(v), np.exp(np.minimum(v, 200)), np.log(p), v / p, np.sqrt(p), 1 / np.sqrt(p),
            p ** np.float64(np.float32(1.7)), np.tanh(v), torch.erf(torch.from_numpy(v)).numpy(), np.log1p(p),
            np.exp2(v), np.fmod(v, np.float64(np.float32(0.7))), np.arctan2(v, p), np.cbrt(v), np.tan(v),
        ]  # fmt: skip
    finite = x < 80
    # Largest errors in units of the last place: CUDA C++ Programming Guide, "Mathematical Functions".
    for place, units in enumerate([2, 2, 2, 1, 0.5, 0.5, 2, 4, 2, 2, 1, 2, 0.5, 3, 1, 4]):
        assert within(y[finite, place], want[place][finite], units + 0.01), place


def test_functions_in_double_precision() -> None:
    x, y = inputs().astype(np.float64) * 1.0000001, np.zeros((THREADS, 8))
    run("maths", "double_functions", [x, y])
    v = x.astype(np.longdouble)
    p = (np.abs(x) + 1e-9).astype(np.longdouble)
    want = [np.sin(v), np.exp(np.minimum(v, 500)), np.log(p), v / p, np.sqrt(p), p ** np.longdouble(2.3), np.tanh(v)]
    finite = x < 500
    for place, values in enumerate(want):
        assert within(y[finite, place], values[finite], 2), place
    rounded = np.rint(x) + np.trunc(x) + np.ceil(x)
    assert np.allclose(y[:, 7], np.nextafter(x, np.copysign(0, x)) + x * x - np.float64(p) + rounded, atol=1e-5)
