"""The ladders of attention: in which respect each rung's compiled code differs from that of the rung below."""

from __future__ import annotations

import re

from compiled import compile_kernel
from rung_claims import code, loop, new_sums, rung

from rooflab.bench.compile.flow import Loop
from rooflab.bench.compile.sass import SassInstruction
from rooflab.bench.compile.static import CompiledInfo
from rooflab.kernels._device import HOPPER_SMS
from rooflab.kernels.paged_attention.split_kv import SPLIT_KV
from rooflab.kernels.registry import get_kernel
from rooflab.reference.spec import SCHEMES, Case

PENDING = r"wgmma\.wait_group\.sync\.aligned (\d)"
TILE = (128, 64, 8, 2)
"""Query and key tile, warps and stages: the same for two rungs that are compared by their counts."""
LONG = Case(B=1, T=2048, S=2048, H=32, H_kv=8, D=128, causal=True)


def _with_tile(name: str, case: Case = LONG, tile: tuple[int, ...] = TILE) -> CompiledInfo:
    config = get_kernel("flash_attention", name).tuning.config_type(*tile)
    scheme = SCHEMES["fp8_e4m3" if name == "fp8" else "bf16"]
    return compile_kernel("flash_attention", name, case, scheme, config=config)[0]


def _key_loops(info: CompiledInfo) -> tuple[Loop, Loop]:
    """The loop over whole tiles of keys and that over cut ones, by how many values they select; neither may spill."""
    found = [body for body in info.loops if body.innermost and body.counts["wgmma"]]
    assert len(found) == 2 and not any(body.counts["spill_load"] + body.counts["spill_store"] for body in found)
    plain, masked = sorted(found, key=_selects)
    return plain, masked


def _selects(body: Loop) -> int:
    return sum(entry.opcode.startswith("FSEL") for entry in body.instructions)


def _waits_once(body: Loop) -> bool:
    """Whether the products of a step are asked for in one go: the last of them is still running in the next step."""
    return sum(entry.opcode.startswith("WARPGROUP.DEPBAR") for entry in body.instructions) == 1


@rung("flash_attention/masked_tiles", slow=True)
def flash_attention_masked_tiles() -> None:
    """The loop over whole tiles selects nothing and takes two thirds of online's instructions, of equal tiles."""
    below, info = _with_tile("online"), _with_tile("masked_tiles")
    plain, masked = _key_loops(info)
    assert _selects(plain) == 0 < 32 < _selects(masked) and _selects(loop(below)) > 32
    assert len(plain.instructions) < 0.7 * len(loop(below).instructions)
    assert plain.counts["wgmma"] == masked.counts["wgmma"] == loop(below).counts["wgmma"] and _waits_once(plain)


@rung("flash_attention/tma", slow=True)
def flash_attention_tma() -> None:
    """One bulk copy each for keys and values in a step, where cp.async is an instruction for 16 bytes of each thread;
    fewer registers and instructions, of equal tiles."""
    below, info = _with_tile("masked_tiles"), _with_tile("tma")
    (plain_below, _), (plain, masked) = _key_loops(below), _key_loops(info)
    assert plain_below.counts["cp_async"] == 8 and plain_below.counts["tma"] == 0
    assert plain.counts["tma"] == masked.counts["tma"] == 2 and info.counts["tma"]
    assert info.counts["cp_async"] == info.counts["global_load"] == 0
    assert len(plain.instructions) < len(plain_below.instructions) and info.registers < below.registers
    assert _selects(plain) == 0 and _waits_once(plain) and _waits_once(masked)


@rung("flash_attention/packed_gqa", slow=True)
def flash_attention_packed_gqa() -> None:
    """A short query has a CTA for each head of keys, not of queries, of half the rows; the loop is tma's own."""
    short = LONG.but(T=16)
    below, info = (code("flash_attention", name, case=short.id) for name in ("tma", "packed_gqa"))
    assert below.grid[0] == 32 and info.grid[0] == 8 and (below.threads, info.threads) == (256, 128)
    assert all(_waits_once(body) and body.counts["tma"] == 2 for body in _key_loops(info))
    one, other = (_key_loops(code("flash_attention", name))[0] for name in ("tma", "packed_gqa"))
    assert one.counts == other.counts and _selects(other) == 0


@rung("flash_attention/persistent")
def flash_attention_persistent() -> None:
    """As many CTAs as SMs, in a loop around tma's; what that costs is registers, and no spill in a loop of keys."""
    below, info = code("flash_attention", "tma"), code("flash_attention", "persistent")
    assert info.grid[0] == 132 < below.grid[0]
    outer = [body for body in info.loops if not body.innermost and body.counts["wgmma"]]
    assert len(outer) == 1 and not any(not body.innermost and body.counts["wgmma"] for body in below.loops)
    (plain_below, _), (plain, masked) = _key_loops(below), _key_loops(info)
    assert plain.counts["wgmma"] == plain_below.counts["wgmma"] and _waits_once(plain) and _waits_once(masked)
    assert _selects(plain) == 0 and set(re.findall(PENDING, info.ptx)) == {"0"}


def _order(instructions: tuple[SassInstruction, ...]) -> list[str]:
    """What matters of a loop, each kind once where several of it follow each other."""
    kinds = {"HGMMA": "product", "MUFU": "exponential", "WARPGROUP.DEPBAR.LE": "wait", "F2FP": "rounding"}
    seen: list[str] = []
    for instruction in instructions:
        found = next((kind for name, kind in kinds.items() if instruction.opcode.startswith(name)), None)
        if found == "wait":
            found += instruction.operands.rstrip(" ;")[-1]
        if found and found not in seen[-1:]:
            seen.append(found)
    return seen


@rung("flash_attention/ping_pong")
def flash_attention_ping_pong() -> None:
    """The exponentials stand between the wait for the scores and that for the values' product, in a loop with neither
    a mask nor a load nor a spill, in warps that do nothing else; below, all warps do all of it."""
    below, info = code("flash_attention", "online"), code("flash_attention", "ping_pong")
    assert not below.uses_warp_specialization and info.uses_warp_specialization
    assert (
        "1" in re.findall(PENDING, info.ptx) and info.counts["tma"] and "setmaxnreg" in info.ptx and info.threads == 384
    )
    products = [body for body in info.loops if body.innermost and body.counts["wgmma"]]
    steady = [body for body in products if not any(op.startswith("FSEL") for op in body.opcodes)]
    assert len(products) == 4 and len(steady) == 2, "for each consumer one with a mask and one without"
    for body in steady:
        counts = body.counts
        assert counts["global_load"] == counts["shared_load"] == counts["spill_load"] == counts["spill_store"] == 0
        # 128 columns of the scores, and of the result: 8 products of 16 columns of a head, and 8 of 16 keys.
        assert counts["wgmma"] == 16
        order = " ".join(_order(body.instructions))
        assert re.fullmatch(r"product wait1( exponential| rounding)+ wait0", order), order


COLUMNS = LONG.but(v_columns=True)
FP8_TILE = (64, 128, 4, 2)
PRODUCT = r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(\d+)\.f32\.(\w+)\."


def _products(info: CompiledInfo) -> set[tuple[str, str]]:
    """The operands' dtypes of all wgmma, with how much of the sums' index each takes."""
    return {(dtype, k) for _, k, dtype in re.findall(PRODUCT, info.ptx)}


@rung("flash_attention/fp8", slow=True)
def flash_attention_fp8() -> None:
    """Of equal tiles, half of tma's wgmma where values come in columns: nothing of them passes a register, and every
    tile's sum begins anew and is added up once.  Values in rows take three quarters, and a store of them in fp16."""
    below, rows, columns = (
        _with_tile(name, case, FP8_TILE) for name, case in (("tma", LONG), ("fp8", LONG), ("fp8", COLUMNS))
    )
    assert _products(below) == {("bf16", "16")}
    assert _products(rows) == {("e4m3", "32"), ("f16", "16")} and _products(columns) == {("e4m3", "32")}
    of_below, of_rows, of_columns = (_key_loops(info)[0].counts for info in (below, rows, columns))
    assert (of_below["wgmma"], of_rows["wgmma"], of_columns["wgmma"]) == (16, 12, 8)
    assert of_below["tma"] == of_rows["tma"] == of_columns["tma"] == 2
    assert of_columns["shared_store"] == of_columns["shared_load"] == 0 < of_rows["shared_store"]
    outputs = 64 * 128 // columns.threads  # of a thread
    assert of_columns["fma"] - of_below["fma"] == outputs and of_rows["fma"] == of_below["fma"]
    # Two loops, of four products of 32 keys each; weights come out of registers.
    assert [new_sums(info, r"R\d+, ") for info in (columns, rows)] == [(2, 8), (0, 0)]
    assert code("flash_attention", "fp8", "fp8_e4m3", COLUMNS.id).registers <= 65536 // (2 * 128), "two CTAs an SM"


ONE = Case(B=1, context=65536, H=32, H_kv=8, D=128, block_size=16, ragged=False)
"""One long request of Llama-3-8B."""


def _paged(name: str, case: Case = ONE, scheme: str = "bf16") -> list[CompiledInfo]:
    """What a rung launches."""
    return compile_kernel("paged_attention", name, case, SCHEMES[scheme])


def _barriers(info: CompiledInfo) -> int:
    """Barriers of a CTA; a warp's own are other instructions."""
    return sum(number for opcode, number in info.opcodes.items() if opcode.startswith("BAR."))


@rung("paged_attention/split_kv", slow=True)
def paged_attention_split_kv() -> None:
    """As many CTAs as the card holds, for one request as for 64, where gqa_packed has one for each KV head; no barrier
    of a CTA; one launch, with one atomic for a part.  The loop that multiplies has no loop within and loads nothing but
    a page's number; a whole unit of keys and values is asked for before a product of the one that has come."""
    (below,) = _paged("gqa_packed")
    assert below.ctas == 8 and _barriers(below) > 0
    for case in (ONE, ONE.but(B=64, context=4096)):
        (main,) = _paged("split_kv", case)
        assert main.ctas == HOPPER_SMS * SPLIT_KV.heuristic(case).ctas_per_sm
        assert _barriers(main) == 0 and main.counts["atomic"] == 1 and main.stack_bytes == 0
    (steady,) = [found for found in main.loops if found.counts["mma"] and found.innermost]
    assert steady.counts["global_load"] == 1 and steady.counts["global_store"] == 0
    assert (steady.counts["mma"], steady.counts["ldmatrix"]) == (2 * 128 // 8, 2 * 128 // 16)
    copies = [item.opcode for item in steady.instructions if item.opcode.startswith("LDGSTS")]
    least = 2 * 16 * 256 // 16 // 32
    assert least <= len(copies) < 2 * least, "16 bytes a lane: 16 keys and values; some stand in the way of warps apart"
    order = [item.family for item in steady.instructions if item.family in ("mma", "cp_async")]
    assert order.index("cp_async") < order.index("mma")
    (narrow,), (wide,) = _paged("split_kv", ONE, "kv_fp8"), _paged("split_kv", ONE)
    assert narrow.stack_bytes == 0 and narrow.counts["mma"] == wide.counts["mma"]


@rung("paged_attention/chunked", slow=True)
def paged_attention_chunked() -> None:
    """wgmma on rows of queries and heads, where gqa_packed takes mma.sync on those of one query; steps that all rows
    see are not masked, in a loop of their own; pages are not read in a stage of the pipeline of their own, so that all
    stages hold keys and values."""
    (below,) = _paged("gqa_packed")
    (info,) = _paged("chunked", ONE.but(B=4, context=4096, queries=512))
    assert below.counts["mma"] > 0 and not below.counts["wgmma"]
    plain, masked = [found for found in info.loops if found.counts["wgmma"]]
    if len(plain.instructions) > len(masked.instructions):
        plain, masked = masked, plain
    assert plain.counts["wgmma"] == masked.counts["wgmma"] == 128 // 16 + 64 // 16
    assert plain.counts["cp_async"] > 0 and len(plain.instructions) < 0.9 * len(masked.instructions)
    assert info.stack_bytes == 0 and info.launches == 1
    (decode,) = _paged("chunked", ONE)
    assert decode.counts["mma"] > 0 and decode.shared_bytes > below.shared_bytes


@rung("paged_attention/tma_pages")
def paged_attention_tma_pages() -> None:
    """TMA copies in a loop that has no product, and products in loops that have no copy and no load, where chunked's
    loop works out addresses and copies by cp.async; a CTA for each SM, which takes one tile after another.  A block's
    page numbers come in one load, each copy takes all columns of a page, and the producer's loop does not spill.  A
    block's exponentials stand between the wait for its scores and that for the values' product."""
    case = ONE.but(B=4, context=4096, queries=512)
    (below,), (info,) = _paged("chunked", case), _paged("tma_pages", case)
    assert below.ctas > HOPPER_SMS == info.ctas and info.launches == 1
    assert all(found.counts["cp_async"] for found in below.loops if found.counts["wgmma"])
    steady = [found for found in info.loops if found.counts["wgmma"] == 128 // 16 + 128 // 16]
    assert len(steady) == 4, "with a mask and without, of either warpgroup"
    for found in steady:
        assert not any(item.opcode.startswith(("LDL", "STL", "LDG", "UTMALDG")) for item in found.instructions)
        order = " ".join(_order(found.instructions))
        assert re.fullmatch(r"product( rounding product)* wait1 exponential wait0", order), order
    copies = [found for found in info.loops if found.innermost and found.counts["tma"]]
    assert [(found.counts["tma"], found.counts["global_load"]) for found in copies] == [(4, 0)] * 2
    producer = min((found for found in info.loops if found.counts["tma"] == 8), key=lambda it: len(it.instructions))
    counts = producer.counts
    assert counts["global_load"] == 1 and counts["spill_load"] == counts["spill_store"] == counts["wgmma"] == 0
