"""The granule of the race detectors: as wide as a kernel's narrowest access, at most 16 bytes."""

from __future__ import annotations

import pytest

from rooflab.bench.emulator.text.parse import parse
from rooflab.bench.emulator.text.program import granule

KERNEL = """
.version 8.7
.target sm_90a
.address_size 64
.visible .entry one(.param .u64 p) {{
    .reg .pred %p<4>; .reg .b16 %h<4>; .reg .b32 %r<10>; .reg .b64 %rd<4>; .reg .f32 %f<9>;
    {text}
    ret;
}}
"""


@pytest.mark.parametrize(
    ("text", "shared", "everywhere"),
    [
        ("", 16, 16),
        ("ld.global.v4.b32 {%r0, %r1, %r2, %r3}, [%rd0];", 16, 16),
        ("ld.global.v2.b32 {%r0, %r1}, [%rd0]; st.shared.b32 [%r2], %r0;", 4, 8),
        ("ld.b16 %h0, [%rd0];", 2, 2),
        ("ld.param.b32 %r0, [p];", 16, 16),
        ("atom.global.add.v2.f32 {%f0, %f1}, [%rd0], {%f2, %f3};", 16, 4),
        ("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r0}, [%r1];", 16, 16),
        ("cp.async.cg.shared.global [%r0], [%rd0], 16;", 16, 16),
        ("cp.async.cg.shared.global [%r0], [%rd0], 16, %r1;", 16, 4),
        ("cp.async.ca.shared.global [%r0], [%rd0], 8;", 8, 8),
        ("mbarrier.init.shared::cta.b64 [%r0], 1;", 8, 16),
        ("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r0], [%rd0], 64, [%r1];", 8, 16),
        ("cp.async.bulk.tensor.1d.global.shared::cta.bulk_group [%rd0, {%r0}], [%r1];", 16, 1),
    ],
)
def test_the_narrowest_access_decides(text: str, shared: int, everywhere: int) -> None:
    kernel = parse(KERNEL.format(text=text)).kernel("one")
    assert (granule(kernel, "shared"), granule(kernel, "global")) == (shared, everywhere)
