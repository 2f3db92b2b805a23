"""The ladders of the ops that draw tokens: what each rung's compiled code or calls show over the rung below."""

from __future__ import annotations

from rung_claims import calls, code, launches_once, rung

from rooflab.kernels.registry import ops


@rung("sample/bisect")
def sample_bisect() -> None:
    """One launch, and no sort: no row is written back, for the token is the only thing stored, once, in no loop."""
    assert calls("sample", "naive").sorted_elements > 0
    info = launches_once("sample", "bisect", 10)
    assert info.opcodes["STG.E.64"] == info.counts["global_store"] == 1
    assert len(info.loops) > 1 and not any(found.counts["global_store"] for found in info.loops)
    assert "div.rn.f32" in info.ptx and "lg2.approx" not in info.ptx, "exact division and logarithm"


@rung("sample/prefilter")
def sample_prefilter() -> None:
    """A threshold leaves few tokens to sort, where naive sorts every row whole."""
    cases = [case for case in ops()["sample"].cases["smoke"] if 0 < case["top_k"] < case["V"] // 4]
    naive, filtered = (calls("sample", name, cases[0]).sorted_elements for name in ("naive", "prefilter"))
    assert naive == cases[0]["B"] * cases[0]["V"] and filtered < naive / 2


@rung("sample/cluster")
def sample_cluster() -> None:
    """One launch for a cluster of CTAs per row; the row is loaded in 16 bytes, four loads in flight, where it is staged
    in shared memory, and no other loop loads it; only the token is stored, and nothing is spilled."""
    info = launches_once("sample", "cluster", 10)
    cases = ops()["sample"].cases["llama3_8b"]
    assert info.grid[0] >= 4 * max(int(case["B"]) for case in cases), "CTAs for each row"
    assert info.opcodes["STG.E.64"] == info.counts["global_store"] == 1 and info.stack_bytes == 0
    wide = sum(number for opcode, number in info.opcodes.items() if opcode.startswith("LDG") and ".128" in opcode)
    loading = [found for found in info.loops if any(item.opcode.startswith("LDG") for item in found.instructions)]
    assert wide == 4 and loading and all(found.counts["shared_store"] > 0 for found in loading)
    assert info.opcodes["UCGABAR_ARV"] > 0, "the CTAs of a row wait for each other"


@rung("speculative_verify/fused")
def speculative_verify_fused() -> None:
    """One launch instead of naive's steps: a loop over the row that decides loads both laws and stores nothing."""
    assert calls("speculative_verify", "naive").names.total() > 50
    info = code("speculative_verify", "fused", "fp32")
    assert info.stack_bytes == 0 and len(info.loops) >= 2
    assert not any(found.counts["global_store"] for found in info.loops)
