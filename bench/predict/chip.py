"""Models one Hopper SM: the rates of its pipes, the latencies of its instructions, and a simple in-order simulation.

The rates are from the CUDA C++ Programming Guide, "Throughput of Native Arithmetic Instructions", compute capability
9.0. In lanes per clock and SM they are: 128 for fp32 and packed 16-bit multiply-adds; 64 for integer, logic, compare
and conversion operations; 16 for special functions; 32 for shuffles, loads and stores. Each of the four schedulers
issues one instruction per clock. Shared memory and L1 move 128 bytes per clock (same guide).

NVIDIA does not publish the rate of Hopper's L2 for all SMs. The A100's L2 of 40 MB moves 5,120 bytes per clock (NVIDIA
A100 whitepaper). The model scales this rate by 50 / 40, because Hopper's L2 has 50 MB. 5,120 would be too low:
ThunderKittens' 855 TFLOP/s on an H100 need 5,470 (unshared 128 x 256 tiles, boost clock).

Under full tensor load, an H100 lowers its clock at its power limit. The clock depends on the card, its cooling and the
data. `TENSOR_CLOCK_HZ` is one published measurement on one card.

The latencies, in clocks, have these sources:
- shared memory 30, constants 21: pointer chasing on an H100 80GB HBM3 (a report of mt4g, TU Munich).
- L2 281: pointer chasing on a GH200 over both L2 partitions (github.com/markdewing/AI_kernels).
- HBM 500: fitted to published times of public attention kernels (`public.py`). Pointer chasing gives 834 on that H100
  and 690 on that GH200, but kernels mostly load sequentially. The median error over all these times is 46% with 834,
  27% with 500 and 26% with 400. All of this gain comes from one kernel, SGLang's decode kernel, so no second kernel
  confirms the value (`results/published`).
- arithmetic 4: Jia et al., "Dissecting the NVIDIA Volta GPU Architecture via Microbenchmarking", 2018.
- mma.sync m16n8k16 33: Sun et al., "Dissecting Tensor Cores via Microbenchmarks", 2022, on an A100.
- special functions 20, shuffles 24: assumptions without a published source.

The simulation runs one role (a group of warps with the same code) in lockstep, without other warps on the SM.
Instructions issue in order, and wait for their pipe and registers. `WARPGROUP.DEPBAR` waits for its groups of wgmma. A
wgmma does not wait for an earlier wgmma with the same accumulator. Barriers cost nothing.

The simulation has two results: the least time of dependent steps, and the maximum bytes in flight per thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rooflab.bench.compile.sass import WARPGROUP_WARPS, SassInstruction
from rooflab.roofline.device import Device

Pipe = Literal["issue", "fma", "integer multiply", "alu", "sfu", "load/store", "tensor"]

HBM_SUSTAINED_SHARE = 0.9
"""The share of the data sheet's bandwidth that streaming reaches: torch.clone on an H100 SXM, 89.6% in bf16 and 90.4%
in fp32 (QuACK, hadamard roofline notes); on an H200 the best reading is 87% (cudnn-frontend's norm benchmarks)."""
TENSOR_CLOCK_HZ = 1.6e9
"""The clock of an H800 SXM while wgmma keeps its tensor cores busy (FlashMLA, docs, "deep dive"): 865 of the data
sheet's 989 TFLOP/s in bf16.  Published products that run for 5 ms or more agree: the fastest do 885 on an H100 SXM and
842 on an H200 (`results/published`).  The clock of cards with less power falls further; the clock of a card that rests
between launches does not fall."""
MMA_SYNC_SHARE = 0.75
"""The share of Hopper's tensor rate that mma.sync can reach.  The full rate needs wgmma (Machete, vLLM PR 7174)."""
_INTEGER_MULTIPLY_OPCODES = ("IMAD",)
_FMA_OPCODES = ("FFMA", "FMUL", "FADD", "HFMA2", "HMUL2", "HADD2", "FSWZADD")
_SFU_OPCODES = ("MUFU", "POPC", "FLO", "BREV")
_ALU_OPCODES = (
    "IADD3 IADD VIADD LOP3 PLOP3 ISETP FSETP HSETP2 SEL FSEL FMNMX HMNMX2 IMNMX VIMNMX PRMT SHF SHL SHR LEA MOV SGXT"
    " BMSK IABS F2FP F2F F2I I2F I2FP FRND P2R R2P VOTE CS2R"
).split()
_LOAD_STORE_OPCODES = ("LD", "ST", "ATOM", "RED", "SHFL")


@dataclass(frozen=True)
class Chip:
    """Holds hardware constants of a Hopper GPU: FLOPs and bytes per clock, and latencies of instructions in clocks."""

    tensor_flops_per_clock: Mapping[str, float]
    """By operand dtype, the dense FLOPs per clock of one SM."""
    clock_hz: float
    sms: int
    tensor_share: float = 1.0
    """The share of the tensor rate that wgmma sustains if the tensor cores are always busy."""
    hbm_latency: float = 500
    l2_latency: float = 281
    shared_latency: float = 30
    constant_latency: float = 21
    arithmetic_latency: float = 4
    mma_latency: float = 33
    sfu_latency: float = 20
    shuffle_latency: float = 24
    shared_bytes_per_clock: float = 128
    sm_bytes_per_clock: float = 64
    """The bytes per clock that one SM can take from L2."""
    l2_bytes_per_clock: float = 6400
    """The bytes per clock that L2 gives to all SMs together."""

    @property
    def hbm_latency_s(self) -> float:
        """Returns the seconds from the issue of a load to its first byte, if HBM is idle."""
        return self.hbm_latency / self.clock_hz

    def cycles(self, entry: SassInstruction) -> dict[Pipe, float]:
        """Returns the clocks that one warp instruction occupies each pipe of an SM. The pipe `issue` is occupied for
        0.25 clocks, because an SM has four schedulers.
        """
        clocks_by_pipe: dict[Pipe, float] = {"issue": 0.25}
        name = entry.name
        if entry.mma_flops:
            # All four warps of a warpgroup issue its product; each warp does a quarter of the FLOPs.
            flops = entry.mma_flops / (WARPGROUP_WARPS if entry.is_wgmma else 1)
            tensor_rate_share = self.tensor_share if entry.is_wgmma else min(self.tensor_share, MMA_SYNC_SHARE)
            clocks_by_pipe["tensor"] = flops / (self.tensor_rate(entry.mma_dtype) * tensor_rate_share)
            if entry.is_wgmma:
                clocks_by_pipe["load/store"] = _operand_bytes(entry) / WARPGROUP_WARPS / self.shared_bytes_per_clock
        elif name in _FMA_OPCODES:
            clocks_by_pipe["fma"] = 0.25
        elif name in _INTEGER_MULTIPLY_OPCODES:
            clocks_by_pipe |= {"fma": 0.25, "integer multiply": 0.5}
        elif name in _SFU_OPCODES:
            clocks_by_pipe["sfu"] = 2.0
        elif name in _ALU_OPCODES:
            clocks_by_pipe["alu"] = 0.5
        elif name.startswith(_LOAD_STORE_OPCODES) and name not in ("LDC", "LDGDEPBAR"):
            clocks_by_pipe["load/store"] = max(1.0, 32 * entry.bytes_per_thread / self.shared_bytes_per_clock)
        return clocks_by_pipe

    def l2_share(self, ctas: int) -> float:
        """Returns how many bytes per clock each of `ctas` CTAs can read from L2, if each SM runs at most one CTA."""
        return min(self.sm_bytes_per_clock, self.l2_bytes_per_clock / min(ctas, self.sms))

    def tensor_rate(self, dtype: str) -> float:
        """Returns the FLOPs per clock of one SM's tensor cores.  Raises `ValueError` on an unsupported dtype."""
        if dtype not in self.tensor_flops_per_clock:
            dtypes = ", ".join(self.tensor_flops_per_clock)
            raise ValueError(f"dtype: expected one that the tensor cores multiply ({dtypes}), got {dtype!r}")
        return self.tensor_flops_per_clock[dtype]

    def latency(self, entry: SassInstruction, load_latency: float) -> float:
        """Returns the clocks that an instruction's result needs after the instruction has left its execution unit.  A
        load from global memory needs `load_latency` clocks."""
        name = entry.name
        if entry.loads_global:
            return load_latency
        if entry.mma_flops:
            return self.mma_latency
        if name in ("LDS", "LDSM", "ATOMS") or name.startswith("S2"):
            return self.shared_latency
        if name in ("LDC", "ULDC", "LDCU"):
            return self.constant_latency
        if name.startswith(("ATOM", "LDL")):
            return self.l2_latency
        if name == "SHFL":
            return self.shuffle_latency
        return self.sfu_latency if name in _SFU_OPCODES else self.arithmetic_latency


def _operand_bytes(entry: SassInstruction) -> float:
    """Returns the bytes that a wgmma reads from shared memory: operand B, and operand A unless it is in registers."""
    mma_shape = entry.mma_shape
    assert mma_shape is not None, "asked of matrix products only"
    m, n, k = mma_shape
    bytes_per_element = {"tf32": 4, "int8": 1, "fp8_e4m3": 1}.get(entry.mma_dtype, 2)
    has_register_a = len(entry.arguments) > 1 and entry.arguments[1].startswith("R")
    return float(k * bytes_per_element * (n + (0 if has_register_a else m)))


def chip_of(device: Device) -> Chip:
    """Returns the rates and latencies of a Hopper GPU.  Raises `ValueError` for a GPU of another architecture."""
    if device.compute_capability != (9, 0):
        raise ValueError(f"gpu: expected a Hopper GPU, whose figures the predictor has, got {device.full_name}")
    clocks_per_s = device.sms * device.boost_clock_hz
    tensor_rates = {dtype: flops_per_s / clocks_per_s for dtype, flops_per_s in device.matrix_flops_per_s.items()}
    return Chip(tensor_rates, device.boost_clock_hz, device.sms, min(1.0, TENSOR_CLOCK_HZ / device.boost_clock_hz))


@dataclass
class Walk:
    """Walks through the code of one group of warps and simulates it.  Each call of `run` continues the walk."""

    chip: Chip
    warps: int
    """The number of warps that run the code together."""
    load_latency: float
    """The latency of a load from global memory, in clocks."""
    now: float = 0.0
    """The clock from which the next instruction can issue."""
    most_bytes: int = 0
    """The most bytes of loads in flight at once, per thread."""
    _ready: dict[str, float] = field(default_factory=dict)
    _free: dict[Pipe, float] = field(default_factory=dict)
    _flying: list[tuple[int, frozenset[str]]] = field(default_factory=list)
    _groups: list[float] = field(default_factory=list)
    """The clock at which each group of wgmma ends, in order."""

    def run(self, code: Sequence[SassInstruction]) -> float:
        """Simulates `code` once.  Returns the number of clocks from the start until the next instruction can issue."""
        start_clock = self.now
        for entry in code:
            # wgmmas add to an accumulator in the order of issue; a wgmma does not wait for the earlier sum.
            input_registers = entry.reads - entry.writes if entry.is_wgmma else entry.reads
            clocks_by_pipe = {pipe: self.warps * cycles for pipe, cycles in self.chip.cycles(entry).items()}
            issue_clock = max(
                [
                    self.now,
                    *(self._ready.get(name, 0.0) for name in input_registers),
                    *(self._free.get(busy_pipe, 0.0) for busy_pipe in clocks_by_pipe),
                ]
            )
            if entry.groups_left is not None and len(self._groups) > entry.groups_left:
                issue_clock = max(issue_clock, self._groups[-1 - entry.groups_left])
            self._land(entry.reads | entry.writes)
            for pipe, cycles in clocks_by_pipe.items():
                self._free[pipe] = issue_clock + cycles
            result_clock = issue_clock + max(clocks_by_pipe.values()) + self.chip.latency(entry, self.load_latency)
            for name in entry.writes:
                self._ready[name] = result_clock
            if entry.commits:
                self._groups.append(result_clock)
            if entry.loads_global:
                self._flying.append((entry.bytes_per_thread, entry.writes))
                self.most_bytes = max(self.most_bytes, sum(num_bytes for num_bytes, _ in self._flying))
            self.now = issue_clock + max(1.0, clocks_by_pipe["issue"])
        return self.now - start_clock

    def finish(self) -> float:
        """Advances the clock until every result is ready.  Returns this clock."""
        self.now = max([self.now, *self._ready.values()])
        self._flying.clear()
        return self.now

    def _land(self, names: frozenset[str]) -> None:
        """Removes finished loads from the list of loads in flight. An instruction that uses the registers `names` has
        waited for the loads to these registers. Loads finish in order, so all earlier loads are removed too."""
        last_index = max((i for i, (_, registers) in enumerate(self._flying) if registers & names), default=-1)
        del self._flying[: last_index + 1]


def steady_cycles(body: Sequence[SassInstruction], chip: Chip, warps: int, load_latency: float) -> float:
    """Returns the clocks of one loop iteration in the steady state: the third of three simulated iterations."""
    simulator = Walk(chip, warps, load_latency)
    simulator.run(body)
    simulator.run(body)
    return simulator.run(body)


def span_cycles(code: Sequence[SassInstruction], chip: Chip, warps: int, load_latency: float) -> float:
    """Returns the number of clocks from the first instruction of `code` until the last result is ready."""
    simulator = Walk(chip, warps, load_latency)
    simulator.run(code)
    return simulator.finish()


def bytes_in_flight(code: Sequence[SassInstruction], chip: Chip) -> int:
    """Returns the maximum bytes of global loads that a thread has in flight, in two runs of `code` in a row."""
    simulator = Walk(chip, 1, chip.hbm_latency)
    simulator.run(code)
    simulator.run(code)
    return simulator.most_bytes
