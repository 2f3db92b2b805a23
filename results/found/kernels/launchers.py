"""Launchers of the faulty kernels of this folder, for `rooflab emulate`; with `mended` they launch the mended ones.

A launcher of CUDA C++ has the name of its kernel.  The Triton programs are our own, after public reports and after the
descriptions of gpuemu's corpus.
"""

from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from rooflab.kernels._cuda import load

FOLDER = Path(__file__).parent


def _cuda(file: str, name: str, ctas: int, threads: int) -> Any:
    """A launcher of one kernel, of a tensor of zeros and one of numbers that count up."""

    def launch(mended: bool = False) -> torch.Tensor:
        kernel = load((FOLDER / file).read_text(), name, options=(f"-DMENDED={int(mended)}", f"-I{FOLDER}"))
        to, numbers = torch.zeros(2048, device="cuda"), torch.arange(4096.0, device="cuda")
        kernel((ctas,), (threads,), to, numbers)
        return to

    return launch


state_store = _cuda("shared.cu", "state_store", 1, 128)
empty_sequence = _cuda("shared.cu", "empty_sequence", 1, 128)
init_then_copy = _cuda("shared.cu", "init_then_copy", 1, 128)
reused_stage = _cuda("shared.cu", "reused_stage", 1, 160)
elected_arrival = _cuda("shared.cu", "elected_arrival", 1, 64)
staged_reduction = _cuda("shared.cu", "staged_reduction", 1, 128)
early_release = _cuda("shared.cu", "early_release", 1, 160)
changed_operand = _cuda("products.cu", "changed_operand", 1, 128)
widened_operand = _cuda("products.cu", "widened_operand", 1, 128)
shared_operand = _cuda("products.cu", "shared_operand", 1, 256)
late_wait = _cuda("products.cu", "late_wait", 1, 160)
missing_wait = _cuda("products.cu", "missing_wait", 1, 160)
counter_of_ctas = _cuda("global.cu", "counter", 2, 1)
counter_of_warps = _cuda("global.cu", "counter", 1, 64)
two_locks = _cuda("global.cu", "two_locks", 2, 32)
lock_of_a_cta = _cuda("global.cu", "lock_of_a_cta", 2, 32)
carried = _cuda("global.cu", "carried", 2, 64)
carried_by_lanes = _cuda("global.cu", "carried_by_lanes", 1, 32)
two_phases = _cuda("global.cu", "two_phases", 2, 32)
flag_then_copy = _cuda("global.cu", "flag_then_copy", 2, 128)


@triton.jit
def _norm_and_rope(x_ptr, N: tl.constexpr, ROTARY: tl.constexpr, MODE: tl.constexpr):
    """A row of N is normalised in place, and its last ROTARY elements are rotated in pairs.  MODE 0 stores twice."""
    at = tl.arange(0, N)
    x = tl.load(x_ptr + at)
    normed = x * tl.rsqrt(tl.sum(x * x) / N + 1e-6)
    if MODE == 0:
        tl.store(x_ptr + at, normed)
        pair = N - ROTARY + 2 * tl.arange(0, ROTARY // 2)
        scale = tl.rsqrt(tl.sum(x * x) / N + 1e-6)
        a, b = tl.load(x_ptr + N + pair) * scale, tl.load(x_ptr + N + pair + 1) * scale
        tl.store(x_ptr + pair, -b)
        tl.store(x_ptr + pair + 1, a)
    else:
        other = tl.load(x_ptr + N + (at ^ 1)) * tl.rsqrt(tl.sum(x * x) / N + 1e-6)
        tl.store(x_ptr + at, tl.where(at < N - ROTARY, normed, tl.where(at % 2 == 0, -other, other)))


def overlapping_stores(mended: bool = False, warps: int = 4) -> torch.Tensor:
    x = torch.arange(1.0, 1025.0, device="cuda").repeat(2)  # the second half is a copy, which nothing writes
    _norm_and_rope[(1,)](x, 1024, 512, int(mended), num_warps=warps)
    return x[:1024]


@triton.jit
def _stored_and_read(x_ptr, N: tl.constexpr, BARRIER: tl.constexpr):
    """A row is scaled in place, and its halves are read again, by other threads than those that wrote them."""
    at = tl.arange(0, N)
    tl.store(x_ptr + at, tl.load(x_ptr + at) * 2)
    if BARRIER:
        tl.debug_barrier()
    half = tl.arange(0, N // 2)
    a, b = tl.load(x_ptr + half), tl.load(x_ptr + N // 2 + half)
    if BARRIER:
        tl.debug_barrier()
    tl.store(x_ptr + half, a - b)
    tl.store(x_ptr + N // 2 + half, a + b)


def stored_and_read(mended: bool = False, warps: int = 8) -> torch.Tensor:
    x = torch.arange(1.0, 1025.0, device="cuda")
    _stored_and_read[(1,)](x, 1024, mended, num_warps=warps)
    return x


@triton.jit
def _split(x_ptr, N: tl.constexpr, BARRIER: tl.constexpr):
    """Pairs that lie together are put in two halves, in place."""
    pair = tl.arange(0, N // 2)
    a, b = tl.load(x_ptr + 2 * pair), tl.load(x_ptr + 2 * pair + 1)
    if BARRIER:
        tl.debug_barrier()
    tl.store(x_ptr + pair, a)
    tl.store(x_ptr + N // 2 + pair, b)


def split_in_place(mended: bool = False, warps: int = 4) -> torch.Tensor:
    x = torch.arange(1.0, 1025.0, device="cuda")
    _split[(1,)](x, 1024, mended, num_warps=warps)
    return x


@triton.jit
def _locked_sum(x_ptr, sum_ptr, lock_ptr, N: tl.constexpr, BARRIER: tl.constexpr):
    """Each program adds its row to one sum, under a lock."""
    at = tl.arange(0, N)
    x = tl.load(x_ptr + tl.program_id(0) * N + at)
    while tl.atomic_cas(lock_ptr, 0, 1) == 1:
        pass
    tl.store(sum_ptr + at, tl.load(sum_ptr + at) + x)
    if BARRIER:
        tl.debug_barrier()
    tl.atomic_xchg(lock_ptr, 0)


def released_lock(mended: bool = False) -> torch.Tensor:
    x, total = torch.ones(3, 256, device="cuda"), torch.zeros(256, device="cuda")
    _locked_sum[(3,)](x, total, torch.zeros(1, dtype=torch.int32, device="cuda"), 256, mended)
    return total


@triton.jit
def _softmax(x_ptr, out_ptr, n, BLOCK: tl.constexpr, PADDING: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.program_id(0) * n + at, mask=at < n, other=PADDING)
    e = tl.exp(x - tl.max(x))
    tl.store(out_ptr + tl.program_id(0) * n + at, e / tl.sum(e), mask=at < n)


def softmax(x: torch.Tensor, mended: bool = False) -> torch.Tensor:
    out = torch.empty_like(x)
    _softmax[(len(x),)](x, out, x.shape[1], triton.next_power_of_2(x.shape[1]), float("-inf") if mended else 0.0)
    return out


def softmax_reference(x: torch.Tensor, mended: bool) -> torch.Tensor:
    return torch.softmax(x, -1)


@triton.jit
def _silu(x_ptr, out_ptr, n, FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)
    tl.store(out_ptr + at, x * tl.sigmoid(FACTOR * x), mask=at < n)


def silu(x: torch.Tensor, mended: bool = False) -> torch.Tensor:
    out = torch.empty_like(x)
    _silu[(1,)](x, out, x.numel(), 1.0 if mended else 2.0, triton.next_power_of_2(x.numel()))
    return out


def silu_reference(x: torch.Tensor, mended: bool) -> torch.Tensor:
    return torch.nn.functional.silu(x)


@triton.jit
def _matmul(a_ptr, b_ptr, out_ptr, K, BLOCK: tl.constexpr, ADDS: tl.constexpr):
    row, column, k = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :], tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(0, K, BLOCK):
        a = tl.load(a_ptr + row * K + start + k[None, :])
        b = tl.load(b_ptr + (start + k[:, None]) * BLOCK + column)
        product = tl.dot(a, b)
        total = total + product if ADDS else product
    tl.store(out_ptr + row * BLOCK + column, total)


def matmul(a: torch.Tensor, b: torch.Tensor, mended: bool = False) -> torch.Tensor:
    out = torch.empty(len(a), b.shape[1], device=a.device)
    _matmul[(1,)](a, b, out, a.shape[1], 16, mended)
    return out


def matmul_reference(a: torch.Tensor, b: torch.Tensor, mended: bool) -> torch.Tensor:
    return a @ b


@triton.jit
def _weighted_mean(s_ptr, v_ptr, out_ptr, n, BLOCK: tl.constexpr, RESCALES: tl.constexpr):
    """The sum of v with the weights softmax(s), block by block with a running largest score."""
    largest, weight, total = float("-inf"), 0.0, 0.0
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        s = tl.load(s_ptr + at)
        new = tl.maximum(largest, tl.max(s))
        e, alpha = tl.exp(s - new), tl.exp(largest - new)
        weight = weight * alpha + tl.sum(e)
        total = (total * alpha if RESCALES else total) + tl.sum(e * tl.load(v_ptr + at))
        largest = new
    tl.store(out_ptr, total / weight)


def online_softmax(s: torch.Tensor, v: torch.Tensor, mended: bool = False) -> torch.Tensor:
    out = torch.empty(1, device=s.device)
    _weighted_mean[(1,)](s, v, out, s.numel(), 16, mended)
    return out


def online_softmax_reference(s: torch.Tensor, v: torch.Tensor, mended: bool) -> torch.Tensor:
    return (torch.softmax(s, -1) * v).sum().reshape(1)
