"""Collects races: one `Race` for each pair of instructions, with a count.  `describe` turns a race into a sentence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rooflab.bench.emulator.faults import Rule

VERBS = {"write-write": ("wrote", "wrote"), "write-read": ("wrote", "read"), "read-write": ("read", "wrote")}
"""By kind of race, the verbs of the first and the second access.  "lanes" and "end" are about one instruction."""
PHASES = {
    "arrival": "the mbarrier at {place}: {second} in {second_actor} may count in the phase before its own, as nothing "
    "orders it after {first} in {first_actor}, which ends that phase",
    "numbered": "barrier {place}: {second} in {second_actor} may count where {first} in {first_actor} counts, in the "
    "barrier's round before, as nothing orders it after that round",
    "wait": "the mbarrier at {place}: the phase after may end, by {second} in {second_actor}, before {first} in "
    "{first_actor} has looked, which then waits for the next phase of this parity: nothing orders them",
    "expect": "the mbarrier at {place}: its phase may end, by {second} in {second_actor}, before {first} in "
    "{first_actor} makes it wait for bytes: nothing orders them",
}
"""By kind of fault in the order of a barrier's arrivals and waits, the text."""


@dataclass(slots=True)
class Race:
    """Describes two accesses to one address without an order between them.  At least one access is a write."""

    space: str
    """The state space of the race: `shared` or `global`."""
    kind: str
    """A key of `VERBS`, with the first access first, or of `PHASES`.  `lanes`: the lanes of one warp wrote different
    values.  `rounding`: these values differ by rounding alone.  `end`: nothing waited for an asynchronous operation
    before its CTA ended."""
    first: int
    """The number of the instruction that came first in this run.  In another run it may come second."""
    second: int
    first_actor: str
    """The actor of the first access: `warp 2`, `a TMA load`, `CTA 7`."""
    second_actor: str
    address: int
    """The byte address of the first granule: within the CTA's shared memory, or the address in global memory."""
    slot: int
    """The CTA's slot in shared memory, or the CTA's number once the launch is over; -1 in global memory."""
    proxy: bool = False
    """Whether only a proxy fence is missing: the accesses are ordered, but go through different proxies."""
    same_value: bool = False
    """Whether the write did not change the value, so that no result can differ."""
    count: int = 1
    """The number of granules or lanes for which the race was found."""

    @property
    def rule(self) -> Rule:
        """Returns the rule that the accesses break."""
        if self.proxy:
            return "missing-fence"
        if self.kind in PHASES:
            return "barrier" if self.kind == "numbered" else "mbarrier-phase"
        return "early-exit" if self.kind == "end" else "race"

    @property
    def harmless(self) -> bool:
        """Returns whether both accesses store the same value, and belong to two CTAs or to one instruction.  Compilers
        generate such accesses."""
        is_cross_cta = self.space == "global" and self.kind == "write-write"
        return self.same_value and (is_cross_cta or self.first == self.second)


class Findings:
    """Stores one race for each kind of race and pair of instructions, and at most `limit` harmful races.

    Harmless races do not count towards `limit`.  Compilers cause many of them, and they must not displace a real fault.
    """

    def __init__(self, limit: int = 100) -> None:
        self.races: list[Race] = []
        self._limit, self._harmful = limit, 0
        self._by_key: dict[tuple[str, int, int, bool, bool], Race] = {}

    def add(self, race: Race) -> None:
        """Stores `race`.  If an equal race is stored already, only adds the count of `race` to the stored count."""
        race_key = (race.kind, race.first, race.second, race.proxy, race.same_value)
        earlier_race = self._by_key.get(race_key)
        if earlier_race is not None:
            earlier_race.count += race.count
        elif race.harmless or self._harmful < self._limit:
            self._by_key[race_key] = race
            self.races.append(race)
            self._harmful += not race.harmless


def describe(race: Race, name_of_instruction: Callable[[int], str]) -> str:
    """Describes `race` in a sentence.  `name_of_instruction` turns a number into a text: `line 40 (st.shared)`."""
    location = f"{race.space} memory at {race.address:#x}" + (f" (CTA {race.slot})" if race.slot > 0 else "")
    second = name_of_instruction(race.second)
    if race.kind == "lanes":
        return f"lanes of one warp write different values to one address: {second} in {race.second_actor}, {location}"
    if race.kind == "rounding":
        return (
            f"lanes of one warp write values to one address that differ by rounding, and which one stays is undefined: "
            f"{second} in {race.second_actor}, {location} (enable_fp_fusion=False lets all lanes round alike)"
        )
    if race.kind == "end":
        return f"the CTA ended, and nothing had waited for {race.first_actor}: {second} may still use its shared memory"
    if race.kind in PHASES:
        place = str(race.address) if race.kind == "numbered" else f"{race.address:#x}"
        place += f" of CTA {race.slot}" if race.slot > 0 else ""
        actors = {"first_actor": race.first_actor, "second_actor": race.second_actor}
        return PHASES[race.kind].format(place=place, first=name_of_instruction(race.first), second=second, **actors)
    first_verb, second_verb = VERBS[race.kind]
    return (
        f"{race.kind} race on {location}: {name_of_instruction(race.first)} {first_verb} it in {race.first_actor}, and "
        f"{second} {second_verb} it in {race.second_actor}, with {_missing(race)} between"
        + ("; both leave the same value" if race.same_value else "")
    )


def _missing(race: Race) -> str:
    if race.proxy:
        is_compiler_fault = race.first_actor.startswith("cp.async") and race.second_actor.startswith("wgmma")
        return "no fence.proxy.async" + (" (Triton puts one there from 3.7.1 on)" if is_compiler_fault else "")
    is_awaitable = race.space == "shared" and not race.first_actor.startswith("warp ")
    return f"no wait for {race.first_actor}" if is_awaitable else "nothing that orders them"
