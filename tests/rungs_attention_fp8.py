"""flash_attention/fp8: in which respect its code differs from that of the rung below."""

from __future__ import annotations

import re

from rung_claims import code, rung

from rooflab.bench.compile.flow import Loop
from rooflab.bench.compile.static import CompiledInfo, CompileFailure, Request, compile_kernels
from rooflab.kernels.registry import get_kernel
from rooflab.reference.spec import SCHEMES, Case

LONG = Case(B=1, T=2048, S=2048, H=32, H_kv=8, D=128, causal=True)
COLUMNS = LONG.but(v_columns=True)
TILE = (64, 128, 4, 2)
PRODUCT = r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(\d+)\.f32\.(\w+)\."


def compiled(name: str, case: Case) -> CompiledInfo:
    scheme = "fp8_e4m3" if name == "fp8" else "bf16"
    config = get_kernel("flash_attention", name).tuning.config_type(*TILE)
    (found,) = compile_kernels([Request("flash_attention", name, case, SCHEMES[scheme], config=config)])
    assert not isinstance(found, CompileFailure), found
    return found[0]


def key_loops(info: CompiledInfo) -> list[Loop]:
    """The loops over keys, none of which may spill; the one with no mask first."""
    found = [body for body in info.loops if body.innermost and body.counts["wgmma"]]
    assert len(found) == 2 and not any(body.counts["spill_load"] + body.counts["spill_store"] for body in found)
    return sorted(found, key=lambda body: len(body.instructions))


def products(info: CompiledInfo) -> set[tuple[str, str]]:
    """The operands' dtypes of all wgmma, with how much of the sums' index each takes."""
    return {(dtype, k) for _, k, dtype in re.findall(PRODUCT, info.ptx)}


def new_sums(info: CompiledInfo) -> tuple[int, int]:
    """wgmma of weights, out of registers, that begin a sum, and all of them."""
    found = re.findall(r"QGMMA\.\S+ R\d+, R\d+, gdesc\[UR\d+\], (\w+)", info.sass)
    return found.count("RZ"), len(found)


@rung("flash_attention/fp8")
def flash_attention_fp8() -> None:
    """Of equal tiles, half of tma's wgmma where values come in columns: nothing of them passes a register, and every
    tile's sum begins anew and is added up once.  Values in rows take three quarters, and a store of them in fp16."""
    below, rows, columns = compiled("tma", LONG), compiled("fp8", LONG), compiled("fp8", COLUMNS)
    assert products(below) == {("bf16", "16")}
    assert products(rows) == {("e4m3", "32"), ("f16", "16")} and products(columns) == {("e4m3", "32")}
    of_below, of_rows, of_columns = (key_loops(info)[0].counts for info in (below, rows, columns))
    assert (of_below["wgmma"], of_rows["wgmma"], of_columns["wgmma"]) == (16, 12, 8)
    assert of_below["tma"] == of_rows["tma"] == of_columns["tma"] == 2
    assert of_columns["shared_store"] == of_columns["shared_load"] == 0 < of_rows["shared_store"]
    outputs = 64 * 128 // columns.threads  # of a thread
    assert of_columns["fma"] - of_below["fma"] == outputs and of_rows["fma"] == of_below["fma"]
    # Two loops, of four products of 32 keys each.
    assert new_sums(columns) == (2, 8) and new_sums(rows) == (0, 0)
    assert code("flash_attention", "fp8", "fp8_e4m3", COLUMNS.id).registers <= 65536 // (2 * 128), "two CTAs an SM"
