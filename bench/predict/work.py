"""Computes the work of one launch, from its compiled code and its share of the op's work.

A *turn* is one iteration of an innermost loop that multiplies matrices or loads. A *round* is the code that a CTA runs
once for each of its tiles, such as an outer loop or an epilogue. All other code runs once.

A *role* is a group of specialised warps, and begins where it sets its register budget (setmaxnreg). The thread counts
of a role's named barriers give its number of warps. A role without such barriers counts as one warpgroup if it
multiplies, else as one warp. If only one role multiplies, it gets all warpgroups that the other roles leave.

Code without register budgets may have one loop that multiplies and another that copies operands. The warps of the
copying loop count as one warpgroup, or as one warp if they copy by TMA. Loops that only wait are ignored.

Compiled code does not say how many turns its loops have. The model takes enough turns for the launch's matrix FLOPs and
its bytes. This is too low if lanes load the same bytes or are masked off, as in a tile of 16 rows with one valid row.

The number of rounds is the launch's written bytes divided by the bytes that one round stores. A CTA does whole rounds,
so the busiest CTA sets the time. If several CTAs may share a tile, all CTAs count as equally busy.

A CTA needs at least the time of its slowest role, and the busy time of each pipe. The model assumes that one role
multiplies during the epilogue of another, except in the last round. With too few pipeline stages this is wrong, because
both roles wait for the same stage.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rooflab.bench.compile.sass import TMA_STORES, WARPGROUP_WARPS, SassFunction, SassInstruction, parse_code
from rooflab.bench.compile.sass_flow import Loop, find_loops
from rooflab.bench.compile.static import CompiledInfo
from rooflab.bench.predict.chip import Chip, Pipe, bytes_in_flight, span_cycles, steady_cycles
from rooflab.roofline.device import Device
from rooflab.roofline.occupancy import WARP_THREADS, Occupancy, Waves, occupancy, waves

SassCode = tuple[SassInstruction, ...]


@dataclass(frozen=True)
class Role:
    """Holds the code of one role: a group of warps in a CTA that run the same code."""

    warps: int
    once: SassCode
    rounds: SassCode
    """The code that runs once for each tile.  Empty if a CTA has one tile."""
    loops: tuple[SassCode, ...]
    """For each loop that multiplies or loads, one turn of the loop."""

    @property
    def turn(self) -> SassCode:
        """Returns the instructions of one iteration of each loop of the role, a group of warps with the same code."""
        return tuple(entry for body in self.loops for entry in body)

    @property
    def multiplies(self) -> bool:
        """Tells whether these warps multiply matrices in a loop.  A role is a group of warps that run the same code."""
        return any(entry.mma_flops for entry in self.turn)


def roles_of(code: Sequence[SassInstruction], threads: int) -> list[Role]:
    """Splits the code of a kernel into roles (groups of warps).  The CTA has `threads` threads.

    If the warps are specialised, the last role is the code that all warps run.  This role has no loops."""
    warps = max(1, threads // WARP_THREADS)
    role_starts = [entry.address for entry in code if entry.name == "USETMAXREG"]
    all_loops = find_loops(SassFunction("kernel", tuple(code)))
    loops = [loop for loop in all_loops if not (_own(loop) & set(role_starts))]
    poll_addresses = {address for loop in loops if loop.waits for address in _own(loop)}
    code = [entry for entry in code if entry.address not in poll_addresses and entry.name != "NOP"]
    loops = [loop for loop in loops if not loop.waits]
    body_by_start = {loop.start: _turn(code, loop) for loop in _working(code, loops)}
    body_addresses = {entry.address for body in body_by_start.values() for entry in body}
    loop_addresses = {address for loop in loops if _own(loop) & body_by_start.keys() for address in _own(loop)}
    whole_kernel_role = Role(
        warps,
        tuple(entry for entry in code if entry.address not in loop_addresses),
        tuple(entry for entry in code if entry.address in loop_addresses - body_addresses),
        tuple(body_by_start.values()),
    )
    return _specialised(whole_kernel_role, body_by_start, role_starts) if role_starts else _fed(whole_kernel_role)


def _own(loop: Loop) -> set[int]:
    return {entry.address for entry in loop.instructions}


def _inside(code: Sequence[SassInstruction], loop: Loop) -> SassCode:
    addresses = _own(loop)
    return tuple(entry for entry in code if entry.address in addresses)


def _working(code: Sequence[SassInstruction], loops: Sequence[Loop]) -> list[Loop]:
    """Returns the innermost loops that multiply matrices. If these loops contain no asynchronous copies, adds the
    innermost loops with such copies. If no loop multiplies, returns the innermost loops that load."""
    inner_loops = [(loop, _inside(code, loop)) for loop in loops if loop.innermost]
    mma_loops = [body for _, body in inner_loops if any(entry.mma_flops for entry in body)]
    if not mma_loops:
        return [loop for loop, body in inner_loops if any(entry.loads_global or entry.loads_async for entry in body)]
    has_no_copies = not any(entry.loads_async for body in mma_loops for entry in body)
    return [
        loop
        for loop, body in inner_loops
        if any(entry.mma_flops for entry in body) or (has_no_copies and any(entry.loads_async for entry in body))
    ]


def _turn(code: Sequence[SassInstruction], loop: Loop) -> SassCode:
    """Returns a loop iteration's instructions. Omits code that a branch can skip, unless it multiplies or loads."""
    body = _inside(code, loop)
    last_address = max((entry.address for entry in body if entry.target == loop.start), default=body[-1].address)
    has_copies = any(entry.loads_async for entry in body)
    skipped_addresses: set[int] = {entry.address for entry in body if entry.address > last_address}
    for instr in body:
        if instr.target is None or not instr.address < instr.target <= last_address:
            continue
        skippable_code = [entry for entry in body if instr.address < entry.address < instr.target]
        if not any(e.mma_flops or e.loads_async or (e.loads_global and not has_copies) for e in skippable_code):
            skipped_addresses |= {entry.address for entry in skippable_code}
    return tuple(entry for entry in body if entry.address not in skipped_addresses)


def _specialised(whole: Role, turns: Mapping[int, SassCode], cuts: Sequence[int]) -> list[Role]:
    """Splits a kernel's code into roles (groups of warps). A new code part begins at each `setmaxnreg`, which sets a
    register budget. Each part that contains a loop becomes a role. The last role gets the remaining code."""
    roles, shared_code = [], list(whole.once)
    end_address = max(entry.address for entry in (*whole.once, *whole.rounds, *whole.turn)) + 1
    for start, role_end in pairwise((*cuts, end_address)):
        loops = tuple(body for loop_start, body in turns.items() if start <= loop_start < role_end)
        if not loops:
            continue
        one_time_code, tile_code = (
            tuple(entry for entry in code if start <= entry.address < role_end) for code in (whole.once, whole.rounds)
        )
        has_mma = any(entry.mma_flops for body in loops for entry in body)
        role_code = (*one_time_code, *tile_code, *(entry for body in loops for entry in body))
        num_warps = max(_counted(role_code), default=WARPGROUP_WARPS if has_mma else 1)
        roles.append(Role(num_warps, one_time_code, tile_code, loops))
        shared_code = [entry for entry in shared_code if not start <= entry.address < role_end]
    mma_roles = [role for role in roles if role.multiplies]
    if len(mma_roles) == 1 and mma_roles[0].warps == WARPGROUP_WARPS:
        num_other_warpgroups = sum(math.ceil(role.warps / WARPGROUP_WARPS) for role in roles if not role.multiplies)
        roles += (whole.warps // WARPGROUP_WARPS - num_other_warpgroups - 1) * mma_roles
    return [*roles, Role(whole.warps, tuple(shared_code), (), ())]


def _counted(code: Sequence[SassInstruction]) -> Iterator[int]:
    """Yields the number of warps at each barrier with a thread count. `BAR.SYNC 0x2, 0x80` (128 threads) gives 4."""
    for entry in code:
        if entry.name == "BAR" and len(entry.arguments) == 2 and entry.arguments[1].startswith("0x"):
            yield int(entry.arguments[1], 16) // WARP_THREADS


def _fed(whole: Role) -> list[Role]:
    copy_loops = tuple(body for body in whole.loops if not any(entry.mma_flops for entry in body))
    if not whole.multiplies or not copy_loops or whole.warps <= WARPGROUP_WARPS:
        return [whole]
    mma_loops = tuple(body for body in whole.loops if body not in copy_loops)
    num_copy_warps = 1 if all(any(entry.fills_by_tma for entry in body) for body in copy_loops) else WARPGROUP_WARPS
    return [
        Role(whole.warps - num_copy_warps, (), (), mma_loops),
        Role(num_copy_warps, (), (), copy_loops),
        Role(whole.warps, whole.once, whole.rounds, ()),
    ]


@dataclass(frozen=True)
class Share:
    """Holds the part of an op's work that one compiled kernel does: its matrix FLOPs and its bytes."""

    matrix_flops: float
    read_bytes: float
    write_bytes: float = 0.0
    cuts_tiles: bool = False
    """Whether several CTAs may share a tile, so that every CTA can get the same work."""


@dataclass(frozen=True)
class LaunchWork:
    """Describes the work of one launch of a compiled kernel: its CTAs, loops, and busy clocks of each pipe."""

    name: str
    launches: int
    ctas: int
    occupancy: Occupancy
    waves: Waves
    roles: int
    """The number of groups of warps with loops of their own."""
    rounds: float
    """The tiles of the mean CTA; 1 if the code has no loop over tiles."""
    most_rounds: float
    """The tiles of the busiest CTA."""
    turns: float
    """The turns of the loops that do the work, in the mean CTA; 0 if there is no loop."""
    pipe_cycles: dict[Pipe, float]
    """By pipe of an SM, the clocks for which the mean CTA occupies the pipe."""
    cta_cycles: float
    """The clocks of the busiest CTA's dependent steps, if the CTA is alone on its SM."""
    in_flight_bytes: float
    """The most bytes of loads that one CTA has in flight at once."""
    async_bytes: float
    """The bytes that the mean CTA copies from L2 to shared memory by cp.async or TMA."""
    uses_mma_sync: bool

    @property
    def uneven(self) -> float:
        """Returns the work of the busiest CTA divided by the work of the average CTA."""
        return self.most_rounds / self.rounds


def work_of(info: CompiledInfo, device: Device, chip: Chip, share: Share) -> LaunchWork:
    """Returns the work of one kernel launch.  `share` holds the matrix FLOPs and bytes of all `info.launches` launches.

    Raises `ValueError` on code for another architecture, on a CTA that does not fit on an SM, and on an empty grid."""
    sm_target = f"sm_{device.compute_capability[0]}{device.compute_capability[1]}"
    if info.target.rstrip("af") != sm_target:
        raise ValueError(f"compiled: expected code for {sm_target}, {device.full_name}'s, got {info.target}")
    cta_occupancy = occupancy(device, info.threads, info.registers, info.shared_bytes)
    if cta_occupancy.ctas_per_sm == 0:
        raise ValueError(f"compiled: {info.name} does not fit on an SM, for lack of {cta_occupancy.limiter}")
    ctas = info.ctas or math.prod(info.grid)
    if ctas < 1:
        raise ValueError(f"compiled: expected a grid of {info.name} that has CTAs, got {tuple(info.grid)}")
    code = parse_code(info.sass)
    roles = roles_of(code, info.threads)
    loads_per_cta = _Loads(code, roles, info)
    cta_share = 1 / (info.launches * ctas)
    rounds, max_rounds = _rounds(roles, share.write_bytes * cta_share), 1.0
    if rounds > 1:
        max_rounds = rounds if share.cuts_tiles else math.ceil(round(rounds * ctas) / ctas)
    turns = _turns(roles, share.matrix_flops * cta_share, share.read_bytes * cta_share, loads_per_cta.turn)
    requested_cta_bytes = turns * loads_per_cta.turn + loads_per_cta.once
    hbm_share = min(1.0, share.read_bytes * cta_share / requested_cta_bytes) if requested_cta_bytes else 1.0
    latency = hbm_share * chip.hbm_latency + (1 - hbm_share) * chip.l2_latency
    cycles = _cta_cycles(
        roles, max_rounds, turns * max_rounds / rounds, loads_per_cta.requested / chip.l2_share(ctas), latency, chip
    )
    return LaunchWork(
        name=info.name,
        launches=info.launches,
        ctas=ctas,
        occupancy=cta_occupancy,
        waves=waves(ctas, cta_occupancy.ctas_per_sm, device.sms),
        roles=sum(bool(role.loops) for role in roles),
        rounds=rounds,
        most_rounds=max_rounds,
        turns=turns,
        pipe_cycles=_pipe_cycles(roles, 1, rounds, turns, chip),
        cta_cycles=cycles + bool(loads_per_cta.copied) * chip.hbm_latency,
        in_flight_bytes=loads_per_cta.in_flight(chip),
        async_bytes=turns * loads_per_cta.requested,
        uses_mma_sync=any(entry.mma_flops and not entry.is_wgmma for entry in code),
    )


class _Loads:
    """Counts the bytes that one CTA loads, over all its threads."""

    def __init__(self, code: Sequence[SassInstruction], roles: Sequence[Role], info: CompiledInfo):
        self._code, self._roles, self._info = code, roles, info
        self.copied = sum(self._copied(role.turn, role.warps) for role in roles)
        """The bytes that cp.async and TMA copy to shared memory in one turn."""
        self.requested = self.copied * self._share()
        """The part of `copied` that this CTA asks L2 for; the other CTAs of the cluster ask for the rest."""
        self.turn = self.requested + sum(_plain(role.turn, role.warps) for role in roles)
        self.once = sum(
            self._copied(body, role.warps) + _plain(body, role.warps)
            for role in roles
            for body in (role.once, role.rounds)
        )

    def in_flight(self, chip: Chip) -> float:
        """Returns the maximum bytes of loads that one CTA has in flight at one time."""
        code_sections = [body for role in self._roles for body in (role.once, role.rounds, *role.loops)]
        plain_bytes = float(max(bytes_in_flight(body, chip) for body in code_sections) * self._info.threads)
        if not self.copied and not any(entry.loads_async for entry in self._code):
            return plain_bytes
        shared_bytes = self._info.shared_bytes
        stages = max(2, shared_bytes // self.copied if self.copied else self._info.num_stages)
        # The CTA reads one stage of the ring while the other stages fill.
        return max(plain_bytes, (stages - 1) * min(self.copied or shared_bytes, shared_bytes / stages) * self._share())

    def _share(self) -> float:
        """Returns the ratio of copies that a CTA starts to those that it receives. A multicast makes it less than 1."""
        tma_loads = [entry for role in self._roles for entry in role.turn if entry.fills_by_tma]
        return len(tma_loads) / sum(_receivers(self._code, entry) for entry in tma_loads) if tma_loads else 1.0

    def _copied(self, body: Sequence[SassInstruction], warps: int) -> float:
        num_bytes = sum(
            float(e.bytes_per_thread * WARP_THREADS * warps) for e in body if e.loads_async and e.bytes_per_thread
        )
        if not any(entry.fills_by_tma for entry in body):
            return num_bytes
        # The code tells a barrier how many bytes TMA will copy; without a constant, the model takes one stage.
        expected_bytes = sum(_constant(self._code, e) for e in body if e.opcode == "SYNCS.ARRIVE.TRANS64")
        return num_bytes + (expected_bytes or self._info.shared_bytes / max(1, self._info.num_stages))


def _receivers(code: Sequence[SassInstruction], load: SassInstruction) -> int:
    """Returns how many CTAs of the cluster receive a copy. A multicast has a constant mask with one bit per CTA."""
    return max(1, _constant(code, load).bit_count()) if "MULTICAST" in load.modifiers else 1


def _constant(code: Sequence[SassInstruction], entry: SassInstruction) -> int:
    """Returns the constant value of an instruction's last operand, or 0 if the value is not constant."""
    register = entry.arguments[-1]
    writers = [e for e in code if e.address < entry.address and e.arguments and e.arguments[0] == register]
    constant_text = writers[-1].arguments[-1] if writers and writers[-1].name in ("MOV", "IMAD", "UMOV") else ""
    return int(constant_text, 16) if constant_text.startswith("0x") else 0


def _plain(body: Iterable[SassInstruction], warps: int) -> float:
    return sum(float(entry.bytes_per_thread * WARP_THREADS * warps) for entry in body if entry.loads_global)


def _flops(body: Iterable[SassInstruction], warps: int) -> float:
    return sum(e.mma_flops * (warps / WARPGROUP_WARPS if e.is_wgmma else warps) for e in body)


def _fma_flops(body: Iterable[SassInstruction], warps: int) -> float:
    return sum(2.0 * WARP_THREADS * warps for entry in body if entry.name == "FFMA")


def _rounds(roles: Sequence[Role], write_bytes: float) -> float:
    """Returns the number of tiles that a CTA stores (rounds): its `write_bytes` divided by the bytes that one tile
    stores. With TMA, counts stores to shared memory."""
    stored_bytes = 0.0
    for role in roles:
        uses_tma = any(entry.name in TMA_STORES for entry in role.rounds)
        tile_store_code = [e for e in role.rounds if (e.family == "shared_store" if uses_tma else e.stores_global)]
        stored_bytes += sum(float(e.bytes_per_thread * WARP_THREADS * role.warps) for e in tile_store_code)
    return max(1.0, write_bytes / stored_bytes) if stored_bytes else 1.0


def _turns(roles: Sequence[Role], flops: float, read_bytes: float, loaded: float) -> float:
    if not any(role.loops for role in roles):
        return 0.0
    flops_per_iter = sum(_flops(role.turn, role.warps) for role in roles)
    non_loop_flops = sum(_flops(role.once, role.warps) for role in roles)
    if not flops_per_iter and not non_loop_flops:
        flops_per_iter = sum(_fma_flops(role.turn, role.warps) for role in roles)
        non_loop_flops = sum(_fma_flops(role.once, role.warps) for role in roles)
    flop_iterations = max(0.0, flops - non_loop_flops) / flops_per_iter if flops_per_iter else 0.0
    byte_iterations = read_bytes / loaded if loaded else 0.0
    return max(1.0, flop_iterations, byte_iterations)


def _pipe_cycles(roles: Iterable[Role], once: float, rounds: float, turns: float, chip: Chip) -> dict[Pipe, float]:
    cycles_by_pipe: Counter[Pipe] = Counter()
    for role in roles:
        for body, num_repeats in ((role.once, once), (role.rounds, rounds), (role.turn, turns)):
            for entry in body:
                for pipe_name, cycles in chip.cycles(entry).items():
                    cycles_by_pipe[pipe_name] += cycles * num_repeats * role.warps  # type: ignore[assignment]
    return dict(cycles_by_pipe)


def _cta_cycles(
    roles: Sequence[Role], rounds: float, turns: float, copy_cycles: float, load_latency: float, chip: Chip
) -> float:
    """Returns the clock cycles of a CTA alone on its SM. `copy_cycles` are those of one loop iteration's copies."""
    shared_cycles = max_cycles = begin_cycles = end_cycles = 0.0
    for role in roles:
        once_cycles, round_cycles = (
            span_cycles(body, chip, role.warps, chip.hbm_latency) for body in (role.once, role.rounds)
        )
        if not role.loops:
            shared_cycles += once_cycles + rounds * round_cycles  # all warps run this code
            continue
        iter_cycles = sum(steady_cycles(body, chip, role.warps, load_latency) for body in role.loops)
        has_copies = any(entry.loads_async for entry in role.turn)
        max_cycles = max(
            max_cycles, once_cycles + rounds * round_cycles + turns * max(iter_cycles, has_copies * copy_cycles)
        )
        begin_cycles, end_cycles = max(begin_cycles, once_cycles), max(end_cycles, round_cycles)
    loop_roles = [role for role in roles if role.loops]
    if len(loop_roles) > 1:
        shared_pipes = _pipe_cycles(loop_roles, 0, rounds, turns, chip)
        max_cycles = max(max_cycles, begin_cycles + max(shared_pipes.values()) + end_cycles)
    return shared_cycles + max_cycles
