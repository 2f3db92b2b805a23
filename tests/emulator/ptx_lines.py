"""Builds kernels of a few PTX lines, and runs them in the emulator."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rooflab.bench.emulator.arguments import PtxLaunch
from rooflab.bench.emulator.launch import emulate
from rooflab.bench.emulator.machine.run import EmulationError
from rooflab.bench.emulator.results import LaunchResult

TEXT = """.version 8.7
.target sm_90a
.address_size 64
{outer}
.visible .entry k(.param .u64 to)
{{
    .reg .pred %p<8>; .reg .b32 %r<32>; .reg .b64 %d<8>; .reg .b16 %h<8>; .reg .f32 %f<8>; .reg .f64 %e<8>;
    {declared}
    ld.param.u64 %d0, [to];
    mov.u32 %r0, %tid.x;
    mov.u32 %r31, %ctaid.x;
    mad.lo.u32 %r30, %r31, {block}, %r0;
    mul.wide.u32 %d1, %r30, 4;
    add.u64 %d2, %d0, %d1;
    setp.eq.u32 %p0, %r0, 0;
    {body}
    st.global.u32 [%d2], %r1;
    ret;
}}
"""
SHARED = ".shared .align 1024 .b8 s[1024];"


def launch(
    body: str,
    *,
    declared: str = "",
    outer: str = "",
    block: int = 32,
    grid: int = 1,
    cluster: tuple[int, int, int] = (1, 1, 1),
    to: torch.Tensor | None = None,
    **more: Any,
) -> tuple[list[int], LaunchResult]:
    """What each thread leaves in %r1, and the result."""
    to = torch.zeros(block * grid, dtype=torch.int32) if to is None else to
    text = TEXT.format(outer=outer, declared=declared, block=block, body=body)
    result = emulate(PtxLaunch(text, "k", (block, 1, 1), 0, cluster), (grid,), [to], **more)
    return to.tolist(), result


def error(body: str, **more: Any) -> str:
    """The sentence that a run ends with."""
    with pytest.raises(EmulationError) as caught:
        launch(body, **more)
    return str(caught.value)


def kinds(body: str, **more: Any) -> list[str]:
    """The races of a run."""
    return [race.split(" on ")[0] for race in map(str, launch(body, **more)[1].races)]
