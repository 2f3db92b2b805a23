"""paged_attention's ladder: what each rung's compiled code shows over gqa_packed."""

from __future__ import annotations

from rung_claims import rung

from rooflab.bench.compile.static import CompiledInfo, compile_kernel
from rooflab.kernels._device import HOPPER_SMS
from rooflab.kernels.paged_attention import split_kv
from rooflab.reference.spec import SCHEMES, Case

ONE = Case(B=1, context=65536, H=32, H_kv=8, D=128, block_size=16, ragged=False)
"""One long request of Llama-3-8B."""


def compiled(name: str, case: Case = ONE, scheme: str = "bf16") -> list[CompiledInfo]:
    """What a rung launches."""
    return compile_kernel("paged_attention", name, case, SCHEMES[scheme])


def barriers(info: CompiledInfo) -> int:
    """Barriers of a CTA; a warp's own are other instructions."""
    return sum(number for opcode, number in info.opcodes.items() if opcode.startswith("BAR."))


@rung("paged_attention/split_kv")
def paged_attention_split_kv() -> None:
    """As many CTAs as the card holds, for one request as for 64, where gqa_packed has one for each KV head; no barrier
    of a CTA; a second launch adds up, without atomics.  A whole unit of keys and values is asked for before a product
    of the one that has come."""
    (below,) = compiled("gqa_packed")
    assert below.ctas == 8 and barriers(below) > 0
    for case in (ONE, ONE.but(B=64, context=4096)):
        main, combine = compiled("split_kv", case)
        assert main.ctas == HOPPER_SMS * split_kv.heuristic(case).ctas_per_sm
        assert barriers(main) == 0 and main.counts["atomic"] == combine.counts["atomic"] == 0
        assert main.stack_bytes == combine.stack_bytes == 0
    (steady,) = [found for found in main.loops if found.counts["mma"]]
    assert (steady.counts["mma"], steady.counts["ldmatrix"]) == (2 * 128 // 8, 2 * 128 // 16)
    copies = [item.opcode for item in steady.instructions if item.opcode.startswith("LDGSTS")]
    least = 2 * 16 * 256 // 16 // 32
    assert least <= len(copies) < 2 * least, "16 bytes a lane: 16 keys and values; some stand in the way of warps apart"
    order = [item.family for item in steady.instructions if item.family in ("mma", "cp_async")]
    assert order.index("cp_async") < order.index("mma")
    (narrow, _), (wide, _) = compiled("split_kv", ONE, "kv_fp8"), compiled("split_kv", ONE)
    assert narrow.stack_bytes == 0 and narrow.counts["mma"] == wide.counts["mma"]


@rung("paged_attention/chunked")
def paged_attention_chunked() -> None:
    """wgmma on rows of queries and heads, where gqa_packed takes mma.sync on those of one query; steps that all rows
    see are not masked, in a loop of their own; pages are not read in a stage of the pipeline of their own, so that all
    stages hold keys and values."""
    (below,) = compiled("gqa_packed")
    (info,) = compiled("chunked", ONE.but(B=4, context=4096, queries=512))
    assert below.counts["mma"] > 0 and not below.uses_wgmma
    plain, masked = [found for found in info.loops if found.counts["wgmma"]]
    if len(plain.instructions) > len(masked.instructions):
        plain, masked = masked, plain
    assert plain.counts["wgmma"] == masked.counts["wgmma"] == 128 // 16 + 64 // 16
    assert plain.counts["cp_async"] > 0 and len(plain.instructions) < 0.9 * len(masked.instructions)
    assert info.stack_bytes == 0 and info.launches == 1
    (decode,) = compiled("chunked", ONE)
    assert decode.counts["mma"] > 0 and decode.shared_bytes > below.shared_bytes


@rung("paged_attention/tma_pages")
def paged_attention_tma_pages() -> None:
    """TMA copies in a loop that has no product, and products in loops that have no copy and no load, where chunked's
    loop works out addresses and copies by cp.async; a CTA for each SM, which takes one tile after another."""
    case = ONE.but(B=4, context=4096, queries=512)
    (below,), (info,) = compiled("chunked", case), compiled("tma_pages", case)
    assert below.ctas > HOPPER_SMS == info.ctas and info.launches == 1
    assert all(found.counts["cp_async"] for found in below.loops if found.counts["wgmma"])
    steady = [found for found in info.loops if found.counts["wgmma"] == 128 // 16 + 128 // 16]
    assert len(steady) == 4, "with a mask and without, of either warpgroup"
    for found in steady:
        assert not any(item.opcode.startswith(("LDL", "STL", "LDG", "UTMALDG")) for item in found.instructions)
    copies = [
        sum("UTMALDG" in i.opcode for i in found.instructions) for found in info.loops if not found.counts["wgmma"]
    ]
    assert max(copies) >= 2 * (128 // 16) * (128 // 64)
