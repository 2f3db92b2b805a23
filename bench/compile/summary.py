"""Summarizes one compiled kernel: resources, occupancy, waves, the most costly loop, and options without effect."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from operator import itemgetter
from typing import Any

from rooflab.bench.base.plain import Row
from rooflab.bench.compile.sass import TENSOR_CORES, WARPGROUP_WARPS, widths
from rooflab.bench.compile.sass_flow import Loop, feeding_loop, hot_loop
from rooflab.bench.compile.static import CompiledInfo
from rooflab.roofline.device import Device
from rooflab.roofline.occupancy import occupancy, waves

COPY_FAMILIES = ("tma", "cp_async", "ldmatrix")
LOAD_OPCODES = ("LDG", "LD", "LDGSTS")


@dataclass(frozen=True)
class Summary:
    """Summarizes one compiled kernel of one launch."""

    name: str
    backend: str
    target: str
    device: str
    """The GPU for which occupancy and waves are computed."""
    grid: tuple[int, ...]
    launches: int
    ctas: int
    threads: int
    registers: int
    stack_bytes: int
    spill_loads: int
    spill_stores: int
    shared_bytes: int
    ctas_per_sm: int
    occupancy: float
    """The warps on an SM divided by the maximum number of warps on an SM."""
    occupancy_limiter: str
    waves: float | None
    """The number of waves; None if no CTA fits on an SM, or if the grid is empty."""
    full_waves: int | None
    tail_ctas: int | None
    """The number of CTAs in the last wave, if this wave is only partly filled."""
    wave_efficiency: float | None
    tensor_path: str
    """The newest tensor-core instruction that the code uses: `wgmma`, `mma` or `none`."""
    counts: Mapping[str, int]
    """The number of instructions by family in the whole code."""
    loop: Row | None
    """The hot loop, as `_loop` returns it; None if the code has no loop."""
    load_bytes_worst: int | None
    """Bytes per thread of the narrowest load from global memory in the whole code."""
    load_bytes_usual: int | None
    """Bytes per thread of the most frequent load from global memory in the whole code."""
    options: tuple[Option, ...]
    asked: Mapping[str, Any]
    code_hash: str

    @property
    def findings(self) -> list[str]:
        """Returns one sentence for each requested option that took no effect."""
        return [checked_option.sentence for checked_option in self.options if not checked_option.took_effect]

    @property
    def in_loop(self) -> Mapping[str, int]:
        """Returns the number of instructions of each kind, such as `wgmma` or `tma`, in the main loop.  If another loop
        loads the data for the main loop, its instructions are added.  A kernel without a loop counts its whole code."""
        if self.loop is None:
            return self.counts
        return {
            family: self.loop["counts"].get(family, 0) + self.loop["fed_by"].get(family, 0) for family in self.counts
        }

    def to_json(self) -> dict[str, Any]:
        """Returns the fields as JSON values, for the field `compiled` of a record."""
        return {**asdict(self), "grid": list(self.grid), "findings": self.findings}


_COMPILED_FIELDS = (
    *("name", "backend", "target", "grid", "launches", "ctas", "threads", "registers", "stack_bytes"),
    *("spill_loads", "spill_stores", "shared_bytes", "code_hash"),
)


def summarize(info: CompiledInfo, scheme: str, device: Device) -> Summary:
    """Summarizes one compiled kernel for the GPU `device`."""
    residency = occupancy(device, info.threads, info.registers, info.shared_bytes)
    grid_waves = waves(info.ctas, residency.ctas_per_sm, device.sms) if info.ctas and residency.ctas_per_sm else None
    main_loop = hot_loop(info.loops)
    load_widths = widths(info.opcodes.items(), *LOAD_OPCODES)
    return Summary(
        **{name: getattr(info, name) for name in _COMPILED_FIELDS},
        device=device.name,
        ctas_per_sm=residency.ctas_per_sm,
        occupancy=residency.fraction,
        occupancy_limiter=residency.limiter,
        waves=grid_waves.waves if grid_waves else None,
        full_waves=grid_waves.full if grid_waves else None,
        tail_ctas=grid_waves.tail_ctas if grid_waves else None,
        wave_efficiency=grid_waves.efficiency if grid_waves else None,
        tensor_path=tensor_path(info),
        counts=_present(info.counts),
        loop=_loop(main_loop, feeding_loop(info.loops, main_loop)),
        load_bytes_worst=load_widths[0],
        load_bytes_usual=load_widths[1],
        options=tuple(options(info, scheme)),
        asked=dict(info.asked),
    )


def tensor_path(info: CompiledInfo) -> str:
    """Returns the newest kind of tensor-core instruction in the code: `wgmma`, `mma` or `none`."""
    return next((family for family in TENSOR_CORES if info.counts[family]), "none")


def _loop(hot: Loop | None, feeding: Loop | None) -> Row | None:
    """Returns the loop in which the kernel spends its time.  With specialised warps, `feeding` loads its data.

    `depth` is 1 for an outermost loop.  `counts` and `fed_by` are the instructions of each family of `sass.FAMILIES` in
    the loop, and in the loop that loads the data.  `load_bytes_worst` and `load_bytes_usual` are the bytes per thread
    of the narrowest and of the most frequent load from global memory; None if there is no such load."""
    if hot is None:
        return None
    # The loads of both loops, because with specialised warps one loop loads the data of the other.
    all_opcodes = [*hot.opcodes.items(), *(feeding.opcodes.items() if feeding else ())]
    min_width, usual_width = widths(all_opcodes, *LOAD_OPCODES)
    return {
        "address": hot.start,
        "depth": hot.depth,
        "instructions": len(hot.instructions),
        "counts": _present(hot.counts),
        "fed_by": _present(feeding.counts) if feeding else {},
        "load_bytes_worst": min_width,
        "load_bytes_usual": usual_width,
    }


def _present(counts: Mapping[str, int]) -> dict[str, int]:
    return {family: instruction_count for family, instruction_count in counts.items() if instruction_count}


WGMMA_ROWS = 64
"""The rows (M) of one wgmma.  A tile with fewer rows uses the older mma (PTX ISA, "wgmma.mma_async")."""
# Triton prints operands as `tensor<128x64xbf16>`, Gluon those in shared memory as `!ttg.memdesc<128x64xbf16, ...>`.
_DOT_OP = re.compile(r"(?:tt\.dot|warp_group_dot)\b.*? : !?(?:ttg\.)?(?:tensor|memdesc)<(\d+(?:x\d+)*)x(\w+)")
_DOT_PRECISION = re.compile(r"inputPrecision = (\w+)")
_PRECISIONS = {"0": "tf32", "1": "tf32x3", "2": "ieee", "3": "bf16x3", "4": "bf16x6"}
"""The names of precisions, by the number that Gluon's IR prints for a matrix product."""
_LOOP_STAGES = re.compile(r"tt\.num_stages = (\d+)")
_TMA_PATTERN = re.compile(
    r"tt\.(?:descriptor_\w+|make_tensor_descriptor|experimental_descriptor_\w+)|async_tma_copy\w*|"
    r"async_tma_(?:gather|scatter|reduce)"
)
_NARROW_DTYPE = re.compile(r"(?:b?f16|f8\w*|i8)$")


@dataclass(frozen=True)
class Option:
    """A compiler option that the kernel or its dtypes request, such as TMA, and whether the option took effect."""

    name: str
    took_effect: bool
    sentence: str
    """The request and its effect in the compiled code, in one sentence."""


def options(info: CompiledInfo, scheme: str) -> list[Option]:
    """Checks whether the compiler did what was requested, such as TMA, pipelining or exact fp32 products.  A request
    comes from the kernel, or from the dtypes of `scheme`.  Returns one result for each request."""
    option_checks = (_precision, _wgmma, _serialized, _pipelining, _tma, _warp_specialization)
    return [option for option_check in option_checks for option in option_check(info, scheme)]


def dots(ir: str) -> list[tuple[int, str, str]]:
    """Returns the matrix multiplications in a kernel's IR, which Triton or Gluon made: the rows, the dtype of the first
    operand, such as `bf16` or `f32`, and the precision.  This is `ieee`, `tf32` (the default of tl.dot), or another; it
    has no meaning for operands narrower than fp32."""
    found_dots = []
    for ir_line in ir.splitlines():
        dot_match = _DOT_OP.search(ir_line)
        if dot_match:
            precision = _DOT_PRECISION.search(ir_line)
            # The IR prints every precision but its own default, ieee; it prints tl.dot's default, tf32.
            name = precision[1] if precision else "ieee"
            found_dots.append((int(dot_match[1].split("x")[-2]), dot_match[2], _PRECISIONS.get(name, name)))
    return found_dots


def _precision(info: CompiledInfo, scheme: str) -> Iterator[Option]:
    """Checks that fp32 matrix products run in IEEE fp32, or with split operands (`tf32x3`) if requested."""
    if scheme != "fp32":
        return
    fp32_precisions = [precision for _, dtype, precision in dots(info.ir) if dtype == "f32"]
    tf32_count = sum(opcode_count for opcode, opcode_count in info.opcodes.items() if "TF32" in opcode.split("."))
    split_precisions = sorted({precision for precision in fp32_precisions if "x" in precision})
    if split_precisions:
        mma_count = sum(info.counts[family] for family in TENSOR_CORES)
        evidence_text = f"the code has {tf32_count} TF32 and {mma_count} tensor-core instructions in all"
        yield Option(
            f"precision {split_precisions[0]}",
            mma_count > 0,
            f"input_precision {split_precisions[0]} was asked for, and {evidence_text}",
        )
    elif info.uses_tf32:
        rounding_source = "tl.dot's default" if "tf32" in fp32_precisions else "the kernel's own code"
        evidence_text = f"fp32 operands are rounded to TF32 by {rounding_source}: {tf32_count} TF32 instructions"
        yield Option("precision fp32", False, evidence_text)
    elif "ieee" in fp32_precisions:
        evidence_text = f"{info.counts['fma']} FMAs and no TF32"
        yield Option("precision ieee", True, f"input_precision ieee was asked for: {evidence_text}")


def _wgmma(info: CompiledInfo, scheme: str) -> Iterator[Option]:
    """Checks that a matrix product uses wgmma if it has at least 64 rows and operands narrower than fp32."""
    wgmma_dots = [dot for dot in dots(info.ir) if dot[0] >= WGMMA_ROWS and _NARROW_DTYPE.match(dot[1])]
    if not wgmma_dots:
        return
    wgmma_count = info.counts["wgmma"]
    rows, dtype, _ = max(wgmma_dots, key=itemgetter(0))
    product = f"a product of {rows} rows in {dtype} can be wgmma's"
    if wgmma_count:
        yield Option("wgmma", True, f"{product}: {wgmma_count} wgmma instructions")
        return
    note = (
        f"; num_warps={info.num_warps} is less than a warpgroup's {WARPGROUP_WARPS}"
        if info.num_warps < WARPGROUP_WARPS
        else ""
    )
    yield Option("wgmma", False, f"{product}, and the code has {info.counts['mma']} mma and no wgmma instruction{note}")


def _serialized(info: CompiledInfo, scheme: str) -> Iterator[Option]:
    """Reports wgmma instructions that the assembler serialized, because it could not prove that they may overlap."""
    serial_warnings = [log_warning for log_warning in info.warnings if "serializ" in log_warning]
    if serial_warnings:
        yield Option("asynchronous wgmma", False, f"wgmma instructions wait for one another: {serial_warnings[0]}")


def _pipelining(info: CompiledInfo, scheme: str) -> Iterator[Option]:
    """Checks that a requested number of pipeline stages has an effect: the code must contain asynchronous copies."""
    stage_counts = [int(stage_count) for stage_count in _LOOP_STAGES.findall(info.ir)]
    if isinstance(info.asked.get("num_stages"), int) and info.backend == "triton":
        stage_counts.append(int(info.asked["num_stages"]))
    max_stages = max(stage_counts, default=1)
    if max_stages < 2:
        return
    stages_text = f"num_stages={max_stages} was asked for"
    copy_count = info.counts["cp_async"] + info.counts["tma"]
    if copy_count:
        copy_kind = "TMA" if info.counts["tma"] else "cp.async"
        yield Option("pipelining", True, f"{stages_text}: {copy_count} asynchronous copies ({copy_kind})")
    elif not info.loops:
        yield Option("pipelining", False, f"{stages_text}, and the code has no loop to pipeline")
    else:
        yield Option("pipelining", False, f"{stages_text}, and the code has no asynchronous copy: nothing is pipelined")


def _tma(info: CompiledInfo, scheme: str) -> Iterator[Option]:
    """Checks that the compiler turned tensor descriptors into TMA instructions, which exist from sm_90 on."""
    descriptor_ops = sorted(set(_TMA_PATTERN.findall(info.ir)))
    if not descriptor_ops:
        return
    request_text = f"TMA was asked for ({', '.join(descriptor_ops)})"
    if info.counts["tma"]:
        yield Option("TMA", True, f"{request_text}: {info.counts['tma']} TMA instructions")
    else:
        load_count = info.counts["global_load"] + info.counts["cp_async"]
        yield Option("TMA", False, f"{request_text}, and the code has none, but {load_count} ordinary loads and copies")


def _warp_specialization(info: CompiledInfo, scheme: str) -> Iterator[Option]:
    """Tells whether the compiler applied the warp specialisation that a Triton kernel asks for.  If it did, the CTA has
    more than `32 * num_warps` threads.  Also tells whether registers move between warps."""
    if "tt.warp_specialize" not in info.ir and "ttg.warp_specialize" not in info.ir:
        return
    asked_threads = 32 * info.num_warps
    block = f"the block has {info.threads} threads at num_warps={info.num_warps}"
    if info.threads > asked_threads:
        moves = "registers move between warps" if info.uses_warp_specialization else "no register moves between warps"
        yield Option("warp specialization", True, f"warp specialization was asked for: {block}, and {moves}")
    else:
        yield Option("warp specialization", False, f"warp specialization was asked for and ignored: {block}, no more")
