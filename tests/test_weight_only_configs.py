"""Configs of the rungs for weights of eight and four bits: arithmetic against compiled code, and results of some."""

from __future__ import annotations

import dataclasses
import random

import pytest

from rooflab.bench.compile.static import CompileFailure, Request, compile_kernels
from rooflab.bench.emulate.calls import call
from rooflab.bench.emulate.checks import emulators
from rooflab.bench.predict.cases import Target
from rooflab.kernels import registry
from rooflab.kernels.configs import legal_configs
from rooflab.kernels.tuning import SHARED_BYTES_PER_CTA
from rooflab.reference.spec import Case, get_scheme

BOUNDARY = [
    ("gemm_w4a16", "w4a16_g128", Case(M=64, N=4096, K=4096, zeros=True, bias=False)),
    ("gemm_w4a16", "w4a16_g32", Case(M=64, N=4096, K=4096, zeros=False, bias=False)),
    ("gemm_w8a16", "w8a16", Case(M=64, N=4096, K=4096, bias=False)),
]
STREAMS = [(op, scheme, case.but(M=M)) for op, scheme, case in BOUNDARY for M in (1, 4)]


def infos(entries):
    for request, found in zip(entries, compile_kernels(entries), strict=True):
        assert not isinstance(found, CompileFailure), f"{request.config}: {found}"
        kernel = registry.get_kernel(request.op, request.kernel)
        yield request.config, kernel.tuning.footprint(request.config, request.case, request.scheme), found[0]


def test_tiles_are_as_large_as_the_arithmetic_says():
    """Around what fits, so that a tile called illegal does not, and none that is called legal spills its operand."""
    entries = []
    for op, scheme, case in BOUNDARY:
        kernel, of = registry.get_kernel(op, "dequant_dot"), get_scheme(scheme)
        sizes = {
            config: kernel.tuning.footprint(config, case, of).shared_bytes for config in kernel.tuning.configs(case, of)
        }
        near = sorted(sizes, key=lambda config: abs(sizes[config] - SHARED_BYTES_PER_CTA))
        entries += [Request(op, "dequant_dot", case, of, config=config) for config in near[:2]]
    for config, size, info in infos(entries):
        assert 0.97 * info.shared_bytes <= size.shared_bytes <= info.shared_bytes, config
        assert size.registers <= info.registers or info.stack_bytes, config
        assert info.threads == size.threads and size.ctas == info.grid[0]


def test_streams_are_as_large_as_the_arithmetic_says():
    entries = []
    for op, scheme, case in STREAMS:
        kernel, of = registry.get_kernel(op, "gemv"), get_scheme(scheme)
        chosen = [kernel.tuning.heuristic(case, of), *random.Random(0).sample(legal_configs(kernel, case, of), 2)]
        entries += [Request(op, "gemv", case, of, config=config) for config in chosen]
    for config, size, info in infos(entries):
        assert info.shared_bytes == size.shared_bytes and info.threads == size.threads, config
        assert size.ctas == info.grid[0] and size.registers <= info.registers, config


@pytest.mark.parametrize("op", ["gemm_w4a16", "gemm_w8a16"])
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gemv", {"warps": 8, "warps_k": 8, "split": 4, "depth": 2}),
        ("gemv", {"warps": 4, "warps_k": 2, "split": 1, "depth": 6}),
        ("dequant_dot", {"block_m": 16, "block_n": 64, "num_warps": 4, "num_stages": 3, "split": 4}),
        ("dequant_dot", {"block_m": 32, "block_n": 128, "num_warps": 8, "num_stages": 2, "split": 1}),
    ],
)
def test_a_config_that_is_given_is_used_and_right(op, name, changes):
    """In the emulator, on ragged sizes: K in more shares than the heuristic takes, and in fewer."""
    kernel = registry.get_kernel(op, name)
    case = Case(M=3, N=70, K=4144, **({"zeros": True} if op == "gemm_w4a16" else {}), bias=True)
    scheme = get_scheme("w4a16_g32" if op == "gemm_w4a16" else "w8a16")
    config = dataclasses.replace(kernel.tuning.heuristic(case, scheme), **changes)
    assert kernel.tuning.is_legal(config, case, scheme)
    answer = call(Target(op, name, case, scheme, config=config)).answer
    assert answer["status"] == "OK" and not answer["races"], answer
    assert answer["of"] >= kernel.tuning.footprint(config, case, scheme).ctas


WITH_ANOTHER_SCALE = """
import torch
from rooflab.kernels.registry import get_kernel, register

kernel = get_kernel("{op}", "{name}")

@register(op="{op}", name="{name}_{dtype}", role="optimized", backend=kernel.backend, min_sm=90, devices=kernel.devices,
          prepare=kernel.prepare)
def with_another_scale({arguments}, bias=None):
    return kernel.fn({arguments_given}, scale=scale.to(torch.{dtype}), bias=bias)
"""


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", ["gemv", "dequant_dot"])
@pytest.mark.parametrize("op", ["gemm_w4a16", "gemm_w8a16"])
def test_scales_of_a_checkpoint_are_taken_as_they_are(op, name, dtype, tmp_path):
    """fp16, as checkpoints have them, and fp32: both hold these bf16 scales exactly."""
    four = op == "gemm_w4a16"
    file = tmp_path / "mine.py"
    file.write_text(
        WITH_ANOTHER_SCALE.format(
            op=op,
            name=name,
            dtype=dtype,
            arguments="a, b, scale, zero=None" if four else "a, b, scale",
            arguments_given="a=a, b=b, zero=zero" if four else "a=a, b=b",
        )
    )
    case = Case(M=3, N=24, K=256, **({"zeros": True} if four else {}), bias=True)
    asked = {"do": "run", "op": op, "kernel": f"{name}_{dtype}", "case": dict(case), "file": str(file), "races": True}
    asked["scheme"] = "w4a16_g64" if four else "w8a16"
    answer = emulators().ask({**asked, "config": None, "seed": 0, "schedule": 0, "sample": None, "save": None})
    assert answer.get("status") == "OK" and answer["launches"], answer
