"""The machine code of the microkernels, compiled for sm_90a with no GPU: it does the work that is counted."""

from dataclasses import dataclass, field

import pytest
import torch

from rooflab.bench.compile.compile_worker import read_cubin
from rooflab.bench.compile.sass import parse
from rooflab.bench.compile.sass_flow import find_loops
from rooflab.bench.core.ceilings.compute import dtypes_of, mma_sync, vector, wgmma
from rooflab.bench.core.ceilings.microkernel import Card
from rooflab.bench.core.ceilings.streams import streams
from rooflab.kernels._cuda import compile_cubin, compiler_log

SMS = 132
CARD = Card(torch.device("cpu"), sm=90, sms=SMS, l2_bytes=2**20)


@dataclass
class Recorded:
    """A kernel that is not launched: what it was made of, and its launches."""

    source: str
    name: str
    options: tuple[str, ...]
    arch: str = "sm_90a"
    launches: list = field(default_factory=list)

    def __call__(self, grid, block, *arguments, shared_bytes=0):
        self.launches.append((grid[0], block[0], arguments, shared_bytes))

    def code(self):
        found = read_cubin(compile_cubin(self.source, arch=self.arch, options=self.options), self.name)
        assert found.stack_bytes == 0
        function = parse(found.sass)[self.name]
        assert not [i for i in function.instructions if i.family in ("spill_load", "spill_store")]
        return function


def made(maker, card=CARD, arch="sm_90a"):
    """(limit, microkernel, recorded kernel, its launch of 2 repeats) of every launch shape of a maker."""
    kernels = []

    def load(source, name, *, options=()):
        kernels.append(Recorded(source, name, options, arch))
        return kernels[-1]

    found = []
    for group in maker(card, load):
        for kernel, recorded in zip(group, kernels, strict=True):
            kernel.launch(2)
            found.append((kernel.limit, kernel, recorded))
        kernels.clear()
    return found


def name_of(case):
    return f"{case[0]} {'-'.join(map(str, case[1].config.values()))}"


ALWAYS = ("hbm_read", "l2_copy", "hbm_triad", "fma", "ex2", "bf16 wgmma shared", "fp8_e4m3 wgmma shared")
"""The others, and every launch shape but a limit's first, are compiled and disassembled in the full run."""


def cases(maker):
    """Every launch shape of every limit."""
    seen = set()
    for case in made(maker):
        quick = case[0] in ALWAYS and case[0] not in seen
        yield pytest.param(case, id=name_of(case), marks=[] if quick else [pytest.mark.slow])
        seen.add(case[0])


MEMORY, ARITHMETIC, WGMMA = (list(cases(maker)) for maker in (streams, vector, wgmma))


def hot(function, family):
    """The innermost loop that has `family`, which must be one; a small one that loads from L2 is taken for a wait."""
    (loop,) = [loop for loop in find_loops(function) if (loop.innermost or loop.waits) and loop.counts[family]]
    return loop


@pytest.mark.parametrize("case", MEMORY)
def test_streams_move_16_bytes_at_a_time_and_every_byte_that_is_counted(case):
    limit, kernel, recorded = case
    function = recorded.code()
    access, unroll, threads = limit.split("_")[1], kernel.config["unroll"], kernel.config["threads"]
    loop = hot(function, "global_store" if access == "write" else "global_load")
    loads, stores = ([i for i in loop.instructions if i.family == f"global_{what}"] for what in ("load", "store"))
    arrays_read, arrays_written = {"read": (1, 0), "write": (0, 1), "copy": (1, 1), "triad": (2, 1)}[access]
    assert [len(loads), len(stores)] == [arrays_read * unroll, arrays_written * unroll]
    assert all(i.bytes_per_thread == 16 and not i.guard for i in loads + stores)
    # Past L1, or with nothing kept there.
    assert all(("STRONG" in i.opcode) if limit.startswith("l2") else (".NA." in i.opcode) for i in loads)
    (grid, block, arguments, _) = recorded.launches[0]
    assert block == threads
    chunks, passes = (int(value) for value in arguments[-2:])
    trips = chunks * passes  # dealt to the blocks in turn
    moved = trips * threads * (len(loads) + len(stores)) * 16
    assert passes == 2 and moved == 2 * kernel.work == passes * (arrays_read + arrays_written) * arguments[0].nbytes
    assert grid == (trips if not kernel.config["blocks_per_sm"] else SMS * kernel.config["blocks_per_sm"])


@pytest.mark.parametrize("case", ARITHMETIC)
def test_arithmetic_loops_hold_the_instructions_that_are_counted(case):
    limit, kernel, recorded = case
    function = recorded.code()
    grid, block, arguments, _ = recorded.launches[0]
    assert int(arguments[-1]) == 2
    loop = hot(function, "fma" if limit == "fma" else "special_function")
    if limit == "fma":
        count, per = loop.opcodes["FFMA"], 2
        assert count == 2 * kernel.config["pairs"] * kernel.config["steps"] == 512
        assert len(loop.instructions) <= 1.01 * count, "the loop's own instructions"
    else:
        count, per = loop.opcodes["MUFU.EX2"], 1
        assert count == loop.counts["special_function"] == kernel.config["steps"] == 64
        # A special function takes the unit 8 issue slots a warp; what stands beside it must take fewer.
        assert len(loop.instructions) - count < 4 * count
    assert 2 * kernel.work == grid * block * 2 * count * per


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", WGMMA)
def test_wgmma_is_issued_back_to_back(case):
    limit, kernel, recorded = case
    function = recorded.code()
    assert "serialized" not in compiler_log(recorded.source, options=recorded.options)
    grid, block, arguments, shared_bytes = recorded.launches[0]
    n, warpgroups, dtype = kernel.config["n"], kernel.config["warpgroups"], kernel.dtype
    loop = hot(function, "wgmma")
    products = [i for i in loop.instructions if i.family == "wgmma"]
    k = {"bf16": 16, "fp16": 16, "tf32": 8, "fp8_e4m3": 32}[dtype]
    shape = {"bf16": ".F32.BF16", "fp16": ".F32", "tf32": ".F32.TF32", "fp8_e4m3": ".F32.E4M3.E4M3"}[dtype]
    assert {i.opcode for i in products} == {("QGMMA" if k == 32 else "HGMMA") + f".64x{n}x{k}{shape}"}
    assert len(products) == 16
    # Nothing waits between two of them but once a pass, and then not for the last.
    waits = [i for i in loop.instructions if i.opcode.startswith("WARPGROUP.DEPBAR")]
    assert [i.operands for i in waits] == ["gsb0, 0x1"] and waits[0].address > products[-1].address
    assert (grid, block) == (SMS, 128 * warpgroups)
    assert int(arguments[-1]) == 2
    assert 2 * kernel.work == SMS * warpgroups * 2 * len(products) * (2 * 64 * n * k)
    assert shared_bytes == (n + 64 * warpgroups) * 4 * 128


def test_no_wgmma_where_there_is_none_and_no_fp8_that_is_converted():
    def groups(sm, maker):
        return list(maker(Card(CARD.device, sm, 8, CARD.l2_bytes), Recorded))

    assert groups(89, wgmma) == [] and groups(100, wgmma) == [] and groups(75, mma_sync) == []
    last = {sm: dtypes_of(sm)[-1] for sm in (80, 89, 90, 100, 120)}
    assert last == {80: "tf32", 89: "fp8_e4m3", 90: "tf32", 100: "tf32", 120: "fp8_e4m3"}


def test_the_compilers_complaint_about_wgmma_is_heard():
    """The accumulators read while wgmma writes them: without `hold` ptxas serializes, and the bench must say so."""
    _, kernel, recorded = WGMMA[0].values[0]
    bare = recorded.source.replace('asm volatile("" : "+f"(d[i])::"memory")', "(void)d")
    assert bare != recorded.source
    assert "serialized" in compiler_log(bare, options=recorded.options)
