"""The rungs over rows in CUDA C++: more bytes in flight than the rung below, and long rows split over a cluster."""

from __future__ import annotations

from collections.abc import Callable

from rung_claims import code, rung

from rooflab.bench.compile.static import CompiledInfo

LONG = 131072
"""A row that no CTA holds."""


def reads_once(op: str, vectors: int, results: int, inputs: int, weights: int = 0) -> CompiledInfo:
    """The kernel at the most work of llama3_8b: `vectors` loads of inputs, around L1, and `results` stores, all of 16
    bytes; a thread has twice as many under way as one of `fused`, which reads `inputs` and `weights`."""
    info, below = code(op, "cluster"), code(op, "fused")
    assert info.opcodes["LDG.E.NA.128"] in (vectors, 2 * vectors), "twice with a persistent grid: first row and next"
    assert info.opcodes["STG.E.128"] == info.counts["global_store"] == results
    assert not any(opcode.startswith("LDG") and "128" not in opcode for opcode in info.opcodes)
    assert info.opcodes["LDG.E.NA.128"] >= 2 * below.opcodes["LDG.E.128"] * inputs // (inputs + weights)
    return info


def splits_long_rows(op: str, case: str, loads: int) -> None:
    """One launch for rows that no CTA holds: `loads` 16-byte loads of inputs, and CTAs that meet in a cluster."""
    info = code(op, "cluster", "bf16", case)
    assert info.opcodes["LDG.E.NA.128"] == loads and info.launches == 1
    assert info.opcodes["UCGABAR_ARV"] >= 2 and info.counts["barrier"] > 0 and not info.stack_bytes


def norm(op: str, inputs: int, weights: int, named: str = "eps=1e-05") -> Callable[[], None]:
    """The claim about a norm or softmax, which has no `named` options."""

    def claim() -> None:
        info = reads_once(op, 4, 4, inputs, weights)
        assert info.counts["barrier"] >= 1
        splits_long_rows(op, ",".join(filter(None, (f"T=4096,H={LONG}", named))), inputs * 4)

    return claim


rung("rmsnorm/cluster")(norm("rmsnorm", 1, 1))
rung("fused_add_rmsnorm/cluster")(norm("fused_add_rmsnorm", 2, 1))
rung("layernorm/cluster")(norm("layernorm", 1, 2, "bias=true,eps=1e-05"))
rung("softmax/cluster")(norm("softmax", 1, 0, ""))


@rung("silu_and_mul/cluster")
def silu_and_mul_cluster() -> None:
    """Two vectors of gate and of up under way, where fused has one of each, and no barrier."""
    assert reads_once("silu_and_mul", 4, 2, 2).counts["barrier"] == 0


@rung("gelu_and_mul/cluster")
def gelu_and_mul_cluster() -> None:
    """As silu_and_mul/cluster."""
    assert reads_once("gelu_and_mul", 4, 2, 2).counts["barrier"] == 0
