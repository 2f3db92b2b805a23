"""Elements of tensors of `torch.empty` that no kernel and no function of torch wrote, and that somebody reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rooflab.bench.emulator.fresh_memory import FreshMemory

MINE = """
import torch, triton, triton.language as tl

@triton.jit
def _copy(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=at < n), mask=at < n)

def part(x):
    out = torch.empty_like(x)
    _copy[(x.numel() // 32,)](x, out, x.numel() - 3, BLOCK=32)
    return out

def halves(x):
    out = torch.empty_like(x)
    for half in (0, 1):
        _copy[(1,)](x.view(2, -1)[half], out.view(2, -1)[half], x.numel() // 2, BLOCK=32)
    return out

def summed(x):
    return part(x).sum()

def scratch(x):
    out = torch.empty(x.numel() + 5)
    _copy[(2,)](x, out, x.numel(), BLOCK=32)
    return out[: x.numel()] * 1

def again(x):
    once, out = part(x), torch.empty_like(x)
    _copy[(2,)](once, out, x.numel(), BLOCK=32)
    return out

def filled(x):
    cache, out = torch.empty(9, 8), torch.empty(8, 8)
    cache[:8] = x
    _copy[(2,)](cache[1:], out, x.numel(), BLOCK=32)
    return out

def same(x):
    return x
"""
NOTE = "nobody wrote 3 of its 64 elements, the first at [7, 5]; torch.empty allocated it"


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        ("part", 0, f"note [output-not-written]: _copy: output 0 of the launcher: {NOTE}"),
        ("part --reference {}::same", 11, "INCORRECT: output 0: 3 of 64 elements off"),
        ("summed", 0, f"note [output-not-written]: _copy: a tensor of shape [8, 8], which aten.sum reads: {NOTE}"),
        (
            "again",
            0,
            "note [unwritten-read]: _copy: mine.py:7 (ld.global.b32): a read of byte 244 of x_ptr, which nobody has",
        ),
        (
            "filled",
            0,
            "note [unwritten-read]: _copy: mine.py:7 (ld.global.b32): a read of byte 256 of x_ptr, which nobody has",
        ),
        ("halves", 0, ""),
        ("scratch", 0, ""),
        ("part --ctas 0 --shape x=16x8", 0, ""),
    ],
)
def test_an_output_that_nobody_wrote_is_a_note(
    rooflab: Any, tmp_path: Path, arguments: str, status: int, words: str
) -> None:
    """A scratch tensor that nobody reads is none."""
    (tmp_path / "mine.py").write_text(MINE)
    path, shape = f"{tmp_path}/mine.py", [] if "--shape" in arguments else ["--shape", "x=8x8"]
    got, out, err = rooflab("emulate", *f"{path}::{arguments.format(path)}".split(), *shape)
    assert got == status and words in out and ("note [" in out) == words.startswith(("note [", "INCORRECT")), out + err


def test_only_what_reads_unwritten_elements_is_reported() -> None:
    found: list[tuple[int, str]] = []
    with FreshMemory() as fresh:
        fresh.report = lambda launch, text: found.append((launch, text))
        tensor = torch.empty(4, 8, dtype=torch.int16)
        (flags,) = fresh.written([tensor], 3).values()
        flags.reshape(4, 8, 2)[:, :6] = True
        flags[1] = False  # half of an element
        assert flags is next(iter(fresh.written([tensor[1]], 5).values())), "a view has the flags of its storage"
        torch.zeros_like(tensor)
        tensor.t()[2:6].t().clone()
        assert found == []
        tensor_again = torch.empty(4, 8, dtype=torch.int16)
        fresh.written([tensor_again], 7)
        tensor_again.fill_(1)
        tensor_again.clone()
        assert found == [] and np.count_nonzero(flags) == 47
        wide = torch.empty(4, 8)
        next(iter(fresh.written([wide], 8).values()))[: 4 * 30] = True
        torch.cat([wide.t()[3:], torch.ones(1, 4)])
    assert found == [
        (
            8,
            "a tensor of shape [5, 4], which aten.cat reads: nobody wrote 2 of its 20 elements, the first at [3, 3]; "
            "torch.empty allocated it",
        )
    ]
