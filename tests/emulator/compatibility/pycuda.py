"""PyCUDA's CUDA C++ examples and its reduction: strings in Python files, with the sizes that these files use."""

from __future__ import annotations

import ast
from typing import Any

import numpy as np
import torch

from compatibility.entries import Entry, Project
from compatibility.sources import Source
from rooflab.kernels import _cuda

SOURCE = Source("PyCUDA", "pycuda==2026.1")
SUM: dict[str, Any] = {
    "out_type": "float",
    "arguments": "const float *x",
    "block_size": 128,
    "neutral": "0",
    "reduce_expr": "a + b",
}
SUM |= {"map_expr": "x[i]", "name": "sums", "preamble": ""}


def _kernel(file: str, symbol: str, which: int = 0, **values: Any) -> _cuda.CudaKernel:
    """The kernel `symbol` in the string number `which` of a file that has kernels; `values` are its template's."""
    tree = ast.parse((SOURCE.fetched() / file).read_text())
    strings = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    text = [text for text in strings if "__global__" in text][which]
    lines = [line for line in (text % values if values else text).splitlines() if "#include" not in line]
    # `uint` comes from a header of the host compiler, which NVRTC does not have.
    return _cuda.load("\n".join(['extern "C" {', *lines, "}"]), symbol, options=("-Duint=unsigned",))


def _example(name: str) -> str:
    return f"examples/from-wiki/{name}.py"


def _into(kernel: _cuda.CudaKernel, grid: tuple[int, ...], block: tuple[int, ...], *args: Any) -> Any:
    """Launches a kernel whose first argument is its output."""
    kernel(grid, block, *args)
    return args[0]


def _transposed(a: torch.Tensor) -> Any:
    kernel = _kernel(_example("matrix_transpose"), "transpose", block_size=16)
    sizes = np.int32(a.shape[1]), np.int32(a.shape[0])
    return _into(kernel, (a.shape[1] // 16, a.shape[0] // 16), (16, 16), a.new_empty(a.shape[::-1]), a, *sizes)


def _transposed_in_big_blocks(a: torch.Tensor) -> Any:
    kernel = _kernel(_example("matrix_transpose"), "transpose", 1, block_size=16)
    sizes, out = (np.int32(a.shape[1]), np.int32(a.shape[0])), a.new_empty(a.shape[::-1])
    kernel((a.shape[1] // 32, a.shape[0] // 32), (16, 16), a, out, *sizes)
    return out


def _product(a: torch.Tensor, b: torch.Tensor) -> Any:
    out = torch.empty_like(a)
    _kernel(_example("matrixmul_simple"), "MatrixMulKernel", MATRIX_SIZE=19)((1,), (19, 19), a, b, out)
    return out


def _tiled_product(a: torch.Tensor, b: torch.Tensor) -> Any:
    out = torch.empty_like(a)
    kernel = _kernel(_example("matrixmul_tiled"), "MatrixMulKernel", MATRIX_SIZE=48, BLOCK_SIZE=16)
    kernel((3, 3), (16, 16), a, b, out)
    return out


def _life(c: torch.Tensor) -> Any:
    out = torch.empty_like(c)
    _kernel(_example("game_of_life"), "step")((3, 3), (8, 8), c, out)
    return out


def _lives(c: torch.Tensor) -> torch.Tensor:
    around = sum(c.roll((i, j), (0, 1)) for i in (-1, 0, 1) for j in (-1, 0, 1)) - c
    return torch.where(around == 2, c, (around == 3).int())


def _grey(r: torch.Tensor, g: torch.Tensor, b: torch.Tensor) -> Any:
    return _into(_kernel(_example("simple_rgb2gray"), "rgb2gray"), (2,), (256,), torch.empty_like(r), r, g, b)


def _sine(a: torch.Tensor) -> Any:
    return _into(_kernel(_example("simple_speed_test"), "gpusin"), (3,), (64,), torch.empty_like(a), a, np.int32(3))


def _multiplied(a: torch.Tensor, b: torch.Tensor) -> Any:
    return _into(_kernel("examples/hello_gpu.py", "multiply_them"), (1,), (400,), torch.empty_like(a), a, b)


def _sums(x: torch.Tensor) -> Any:
    """One sum of each CTA's 256 elements.

    Its last steps need a warp in lockstep, as the emulator runs one; since Volta a GPU promises that no more.
    """
    kernel, out = _kernel("pycuda/reduction.py", "sums", **SUM), x.new_empty(3)
    kernel((3,), (128,), out, x, np.uint32(2), np.uint64(x.numel()), shared_bytes=512)
    return out


PROJECT = Project(
    SOURCE,
    (
        Entry("transpose", "a=32x48", _transposed, lambda a: a.T.contiguous()),
        Entry("transpose in blocks of 32", "a=32x64", _transposed_in_big_blocks, lambda a: a.T.contiguous()),
        Entry("product", "a=19x19,b=19x19", _product, torch.matmul),
        Entry("product in tiles", "a=48x48,b=48x48", _tiled_product, torch.matmul),
        Entry("game of life", "c=24x24:i32<2", _life, _lives),
        Entry("rgb2gray", "r=512,g=512,b=512", _grey, lambda r, g, b: 0.299 * r + 0.587 * g + 0.114 * b),
        Entry("sine", "a=192", _sine, lambda a: a.sin().sin().sin()),
        Entry("multiply", "a=400,b=400", _multiplied, torch.mul),
        Entry("sum by CTA", "x=700", _sums, lambda x: torch.stack([part.sum() for part in x.split(256)])),
    ),
)
