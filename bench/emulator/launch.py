"""Provides `emulate`, which packs the arguments of a launch and runs the launch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rooflab.bench.emulator.arguments import PtxLaunch, add_tensor, bound_arguments, checked_tensors, whole_numbers
from rooflab.bench.emulator.fresh_memory import Flags
from rooflab.bench.emulator.loader import load
from rooflab.bench.emulator.machine.grid import execute
from rooflab.bench.emulator.machine.launch_order import Turn
from rooflab.bench.emulator.machine.memory import GlobalMemory
from rooflab.bench.emulator.machine.run import MOST_THREADS, SHARED_LIMIT, Checks, Run, VariableLayout
from rooflab.bench.emulator.mended import registers_of
from rooflab.bench.emulator.results import LaunchResult, result_of
from rooflab.bench.emulator.text.syntax import Parameter, PtxKernel, Reference, SizeTriple, Variable
from rooflab.bench.emulator.triton_kernels import bound, in_ctas

MAX_GRID_CTAS = 1 << 22
"""The most CTAs of a grid, run or not.  A CTA costs up to 400 bytes in the race detector, and 0.1 ms or more to run."""
MAX_GRID = (2**31 - 1, 65535, 65535)
MAX_CLUSTER_CTAS = 16
"""The most CTAs of a cluster.  8 CTAs are portable; a kernel may opt in to more."""


def emulate(
    compiled: PtxLaunch | Any,
    grid: Sequence[int],
    args: Sequence[Any],
    *,
    checks: Checks | None = None,
    seed: int = 0,
    ctas: Iterable[int] | None = None,
    written: Mapping[int, Flags] | None = None,
    memory: Iterable[torch.Tensor] = (),
    printed: list[str] | None = None,
    short_accumulator: bool = False,
    views: bool = False,
    turn: Turn | None = None,
) -> LaunchResult:
    """Runs a compiled kernel on the CPU.  The kernel reads and writes CPU tensors in place.

    `compiled` is a `PtxLaunch`, or a kernel that Triton compiled.  `args` are the kernel's arguments: tensors, numbers,
    `TensorMap`s, Triton's tensor descriptors.  `grid` has one to three sizes, in CTAs (for Triton, in programs of
    `num_ctas` CTAs).  A `seed` other than 0 makes the order of warps and copies random.

    `ctas` are the numbers of the CTAs to run, by default all.  With `ctas`, the result lists the stores of these CTAs.
    `written` has a flag for each byte of a tensor, by the address of its storage: whether the byte has valid contents;
    reading others is an error.  The kernel's stores set these flags.  `memory` are tensors that the kernel reaches
    through pointers in memory.  `printed` is a list that gets the lines that the kernel prints, even if
    it fails.  With `short_accumulator`, fp8 matrix multiplications accumulate with
    about 14 bits, as on Hopper.  With `views`, an access must stay among the elements of the tensors in `args` and
    `memory`; otherwise their whole storages may be used.  `turn` tells which earlier launches may still run.

    Raises `PtxError` on PTX that is unknown or not for Hopper.  Raises `ValueError` on arguments that do not fit.
    Raises `EmulationError` if the kernel breaks a rule of the GPU."""
    if not isinstance(compiled, PtxLaunch):
        if not hasattr(compiled, "asm"):
            expected_text = "a PtxLaunch or a kernel that Triton compiled"
            raise ValueError(f"compiled: expected {expected_text}, got a value of type {type(compiled).__name__}")
        grid = in_ctas(compiled, _grid(grid))
        compiled, args, mapped_tensors = bound(compiled, grid, args)
        memory = [*memory, *mapped_tensors]
    if not isinstance(compiled.ptx, str):
        raise ValueError(f"ptx: expected a text, got a value of type {type(compiled.ptx).__name__}")
    program = load(compiled.ptx, compiled.name)
    grid_sizes = _grid(grid)
    cta_count = grid_sizes[0] * grid_sizes[1] * grid_sizes[2]
    if cta_count > MAX_GRID_CTAS:
        raise ValueError(f"grid: expected at most {MAX_GRID_CTAS} CTAs, of which each takes memory, got {tuple(grid)}")
    checks = Checks() if checks is None else checks
    if not isinstance(checks, Checks):
        raise ValueError(f"checks: expected Checks, got a value of type {type(checks).__name__}")
    global_memory = GlobalMemory(by_view=views)
    params = bound_arguments(program.kernel, args, global_memory, compiled.names)
    for tensor in checked_tensors("memory", memory):
        add_tensor(global_memory, tensor, "memory")
    for address, flags in (written or {}).items() if checks.uninitialised else ():
        if (allocation := global_memory.find(address)) is None:
            raise ValueError("written: expected tensors among the arguments or in `memory`, got another")
        allocation.written, allocation.partly_written = flags, bool(flags.any())
    block, cluster = _sizes(program.kernel, compiled, grid_sizes)
    layout = _layout(program.kernel, global_memory)
    dyn_bytes = _dynamic_shared(compiled, layout)
    run = Run(
        program, grid_sizes, block, cluster, global_memory, params, layout, dyn_bytes, checks, seed, short_accumulator
    )
    run.stored = None if ctas is None else []
    run.printed = run.printed if printed is None else printed
    ptx_text, name = compiled.ptx, program.kernel.name
    if turn is not None and run.observer is not None:
        turn.begin(cta_count, compiled.dependent, program.lets_next_begin)
        if turn.watches:
            run.turn = run.observer.turn = turn
    execute(run, range(cta_count) if ctas is None else _chosen(ctas, cta_count), lambda: registers_of(ptx_text, name))
    if turn is not None and not turn.watches:
        turn.add_sectors(name, global_memory)
    return result_of(run, compiled.ptx)


def _chosen(ctas: Iterable[int], count: int) -> list[int]:
    cta_numbers = whole_numbers("ctas", ctas)
    for cta in cta_numbers:
        if not 0 <= cta < count:
            raise ValueError(f"ctas: expected numbers from 0 to {count - 1}, got {cta}")
    if len(set(cta_numbers)) < len(cta_numbers):
        raise ValueError(f"ctas: expected each number once, got {cta_numbers}")
    return cta_numbers


def _grid(grid: Sequence[int]) -> SizeTriple:
    axis_sizes = whole_numbers("grid", grid)
    if not 1 <= len(axis_sizes) <= 3 or any(
        not 1 <= axis_size <= axis_limit for axis_size, axis_limit in zip(axis_sizes, MAX_GRID, strict=False)
    ):
        raise ValueError(f"grid: expected one to three positive sizes that CUDA allows, got {tuple(axis_sizes)}")
    x, y, z = [*axis_sizes, 1, 1][:3]
    return x, y, z


def _sizes(kernel: PtxKernel, launch: PtxLaunch, grid: SizeTriple) -> tuple[SizeTriple, SizeTriple]:
    """Returns the thread block size and the cluster size of a launch. Raises `ValueError` if the kernel does not allow
    them."""
    block = kernel.block if launch.block is None else _three("block", launch.block)
    if block is None:
        raise ValueError(f"block: expected the threads of a CTA, which the PTX of {kernel.name} does not say")
    if kernel.block is not None and block != kernel.block:
        raise ValueError(f"block: expected {kernel.block}, which the PTX of {kernel.name} says, got {block}")
    threads, max_threads = block[0] * block[1] * block[2], min(MOST_THREADS, kernel.most_threads or MOST_THREADS)
    if not 1 <= threads <= max_threads or min(block) < 1:
        raise ValueError(f"block: expected 1 to {max_threads} threads for {kernel.name}, got {block}")
    cluster = _three("cluster", launch.cluster)
    if kernel.cluster is not None and cluster not in ((1, 1, 1), kernel.cluster):
        raise ValueError(f"cluster: expected {kernel.cluster}, which the PTX of {kernel.name} says, got {cluster}")
    cluster = kernel.cluster or cluster
    if min(cluster) < 1 or cluster[0] * cluster[1] * cluster[2] > MAX_CLUSTER_CTAS:
        raise ValueError(f"cluster: expected 1 to {MAX_CLUSTER_CTAS} CTAs, got {cluster}")
    if any(axis_ctas % ctas for axis_ctas, ctas in zip(grid, cluster, strict=True)):
        raise ValueError(f"grid: expected multiples of the cluster {cluster}, got {grid}")
    return block, cluster


def _dynamic_shared(launch: PtxLaunch, layout: VariableLayout) -> int:
    (dynamic_bytes,) = whole_numbers("dynamic_shared", [launch.dynamic_shared])
    own_bytes, total = layout.static_shared, layout.static_shared + dynamic_bytes
    if dynamic_bytes < 0 or total > SHARED_LIMIT:
        raise ValueError(
            f"shared memory: expected 0 to {SHARED_LIMIT} bytes, got {total}, of which {own_bytes} are the kernel's own"
        )
    return dynamic_bytes


def _three(name: str, sizes: Sequence[int]) -> SizeTriple:
    size_list = whole_numbers(name, sizes)
    if len(size_list) != 3:
        raise ValueError(f"{name}: expected three sizes, got {tuple(size_list)}")
    x, y, z = size_list
    return x, y, z


def _layout(kernel: PtxKernel, memory: GlobalMemory) -> VariableLayout:
    addresses: dict[str, int] = {}
    end_by_space = {"shared": 0, "local": 0, "param": 0}
    dynamic_variables = []

    def place(item: Variable | Parameter, space: str) -> None:
        addresses[item.name] = -(-end_by_space[space] // item.align) * item.align
        end_by_space[space] = addresses[item.name] + item.size

    for kernel_parameter in kernel.parameters:
        place(kernel_parameter, "param")
    for ptx_variable in kernel.variables.values():
        if ptx_variable.space in ("global", "const"):
            addresses[ptx_variable.name] = _placed(ptx_variable, memory)
        elif ptx_variable.space == "shared" and not ptx_variable.size:
            dynamic_variables.append(ptx_variable)
        else:
            place(ptx_variable, ptx_variable.space)
    for ptx_variable in kernel.variables.values():
        for symbol_reference in ptx_variable.references:
            _point(ptx_variable, symbol_reference, addresses, memory)
    for ptx_variable in dynamic_variables:
        place(ptx_variable, "shared")
    return VariableLayout(addresses, end_by_space["shared"], end_by_space["local"])


def _placed(variable: Variable, memory: GlobalMemory) -> int:
    """Allocates a variable of the PTX file and writes its initial value. Returns its address."""
    alignment = max(variable.align, 16)
    memory_bytes = np.zeros(-(-variable.size // 16) * 16 + alignment, np.uint8)
    alignment_shift = -memory_bytes.ctypes.data % alignment
    memory_bytes[alignment_shift : alignment_shift + len(variable.initial)] = np.frombuffer(variable.initial, np.uint8)
    base_address = memory_bytes.ctypes.data + alignment_shift
    memory.add(variable.name, base_address, variable.size, memory_bytes, read_only=variable.space == "const")
    return base_address


def _point(variable: Variable, reference: Reference, addresses: dict[str, int], memory: GlobalMemory) -> None:
    """Writes the address of a symbol into the initial value of a PTX variable."""
    if reference.symbol not in addresses:
        return  # the symbol is a function: the parser refuses calls by pointers
    symbol_value = (addresses[reference.symbol] + reference.offset) & reference.mask
    symbol_value >>= (reference.mask & -reference.mask).bit_length() - 1
    variable_memory = memory.find(addresses[variable.name])
    assert variable_memory is not None
    byte_offset = addresses[variable.name] - variable_memory.base + reference.at
    variable_memory.view(1)[byte_offset : byte_offset + reference.size] = np.frombuffer(
        (symbol_value % (1 << 8 * reference.size)).to_bytes(reference.size, "little"), np.uint8
    )
