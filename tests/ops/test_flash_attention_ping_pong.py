"""flash_attention/ping_pong: any stride, rows far apart and peaks that grow, emulated."""

from __future__ import annotations

import pytest
import torch
from op_kernels import python_without_interpreter

from rooflab.kernels.registry import get_kernel


def test_a_stride_that_nothing_is_multiplied_by_may_be_any():
    odd = torch.ones(71, dtype=torch.bfloat16).as_strided((1, 1, 1, 64), (3, 5, 7, 1))
    assert get_kernel("flash_attention", "ping_pong").why_not_args({"q": odd, "k": odd, "v": odd}) is None


ON_VIEWS = """
import torch
from rooflab.bench.compile.cases import SM, properties
from rooflab.bench.emulator.launch import emulate
from rooflab.bench.emulate.ours import emulation
from rooflab.bench.emulator.triton_kernels import bound, emulating_triton, in_ctas
from rooflab.kernels.flash_attention import ping_pong
from rooflab.kernels.flash_attention.ping_pong import PingPongConfig
from rooflab.reference.flash_attention import reference

def handle(kernel, grid, args):
    grid = in_ctas(kernel, grid)
    launch, values, reached = bound(kernel, grid, args)
    races = emulate(launch, grid, values, memory=reached).races
    assert not races, races

def judge(out, lse, q, k, v, **options):
    wanted, wanted_lse = reference(q, k, v, return_lse=True, **options)
    assert (out.double() - wanted).abs().max() < 0.02, (out.double() - wanted).abs().max()
    assert lse is None or torch.allclose(lse.double(), wanted_lse, atol=1e-4)

def far():
    # Rows 2**30 apart: the third starts at 2**31. The storage is only touched where the rows are.
    k = torch.empty(2**31 + 64, dtype=torch.bfloat16).as_strided((1, 3, 1, 64), (2**32, 2**30, 64, 1))
    k.copy_(torch.randn(1, 3, 1, 64))
    q = torch.randn(1, 2, 1, 64).bfloat16()
    judge(ping_pong.ping_pong(q, k, k), None, q, k, k)

def growing():
    # Peaks of keys that come later are 2**-30 to 2**60 times as heavy, in some warps only.
    for D, consumers, H in ((128, 2, 1), (64, 3, 2)):
        q, k, v = (torch.randn(1, T, H, D) for T in (200, 700, 700))
        k *= torch.rand(1, 700, 1, 1) ** 3 * 8
        q[:, ::5] *= 4
        for causal, sinks, cap in ((True, None, None), (False, torch.randn(H), 30.0)):
            given = [x.bfloat16() for x in (q, k, v)]
            config = PingPongConfig(128, 2, consumers)
            options = dict(causal=causal, sinks=sinks, softcap=cap)
            out, lse = ping_pong.ping_pong(*given, **options, return_lse=True, config=config)
            judge(out, lse, *given, **options)

with emulation(), emulating_triton(SM, properties(), handle):
    torch.manual_seed(0)
    for check in (far, growing):
        check()
"""


@pytest.mark.slow  # a minute
def test_rows_far_apart_and_peaks_that_grow():
    python_without_interpreter("-c", ON_VIEWS)
