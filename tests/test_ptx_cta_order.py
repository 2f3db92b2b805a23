"""What one warp of a CTA may release for the others, and what these learn through it."""

import numpy as np
import pytest

from rooflab.bench.ptx.races.global_races import GlobalRaces
from rooflab.bench.ptx.races.shared_races import SharedRaces

WARPS = 4
DATA, FLAG, OTHER = 0x1000, 0x2000, 0x3000
STORE, ATOMIC, LOAD = 1, 2, 3
ALL = np.arange(WARPS)


class Grid:
    """Two CTAs of four warps, whose shared memory nobody uses."""

    def __init__(self):
        self.races = GlobalRaces(2, warps=WARPS)
        for base in (DATA, FLAG, OTHER):
            self.races.add(base, 1024)
        self.clocks = SharedRaces(2, WARPS, 1024)
        for cta in range(2):
            self.races.attach(cta, self.clocks, cta)

    def store(self, cta, warps=ALL, base=DATA):
        warps = np.atleast_1d(warps)
        self.races.write(cta * WARPS + warps, base + 4 * warps, 4, STORE)

    def load(self, cta, warps=ALL, base=DATA):
        # Each warp reads what another has written.
        warps = np.atleast_1d(warps)
        self.races.read(cta * WARPS + warps, base + 4 * (WARPS - 1 - warps), 4, LOAD)

    def barrier(self, cta):
        self.clocks.barrier(cta, ALL)

    def atomic(self, cta, warp=0, **order):
        self.races.atomic(np.array([cta * WARPS + warp]), np.array([FLAG]), 4, ATOMIC)
        self.races.synchronise(cta * WARPS + warp, FLAG, **order)

    def fence(self, cta, warps=ALL):
        for warp in np.atleast_1d(warps):
            self.races.fence(cta * WARPS + int(warp))

    @property
    def readers(self):
        return sum(race.count for race in self.races.found)


@pytest.fixture
def grid():
    return Grid()


def hand_over(grid, before=True, after=True):
    """CTA 0 writes, its warp 0 releases; warp 0 of CTA 1 acquires, all its warps read."""
    grid.store(0)
    if before:
        grid.barrier(0)
    grid.atomic(0, release=True)
    grid.atomic(1, acquire=True)
    if after:
        grid.barrier(1)
    grid.load(1)


def test_a_release_after_a_barrier_is_of_the_whole_cta(grid):
    hand_over(grid)
    assert grid.races.found == []


def test_a_release_without_a_barrier_is_of_one_warp(grid):
    hand_over(grid, before=False)
    assert grid.readers == WARPS - 1


def test_an_acquire_without_a_barrier_is_of_one_warp(grid):
    hand_over(grid, after=False)
    assert grid.readers == WARPS - 1


def test_what_a_warp_does_after_the_barrier_is_not_released(grid):
    grid.store(0)
    grid.barrier(0)
    grid.store(0, 2, base=OTHER)
    grid.atomic(0, release=True)
    grid.atomic(1, acquire=True)
    grid.barrier(1)
    grid.load(1)
    assert grid.races.found == []
    grid.load(1, 1, base=OTHER)
    assert grid.readers == 1


def test_what_a_cta_has_learnt_its_other_warps_release(grid):
    found = GlobalRaces(3, warps=WARPS)
    found.add(DATA, 1024)
    clocks = SharedRaces(3, WARPS, 1024)
    for cta in range(3):
        found.attach(cta, clocks, cta)
    found.write(np.array([0]), np.array([DATA]), 4, STORE)
    found.synchronise(0, FLAG, release=True)
    found.synchronise(WARPS, FLAG, acquire=True)
    clocks.barrier(1, ALL)
    found.synchronise(WARPS + 3, OTHER, release=True)
    found.synchronise(2 * WARPS, OTHER, acquire=True)
    found.read(np.array([2 * WARPS]), np.array([DATA]), 4, LOAD)
    assert found.found == []


@pytest.mark.parametrize(("fences_before", "raced"), [(True, 0), (False, WARPS)])
def test_a_fence_of_each_warp_and_a_barrier_make_a_plain_atomic_a_release(grid, fences_before, raced):
    grid.store(0)
    if fences_before:
        grid.fence(0)
    grid.barrier(0)
    grid.atomic(0)
    grid.atomic(1)
    grid.barrier(1)
    grid.fence(1)
    grid.load(1)
    assert grid.readers == raced


def test_a_fence_of_one_warp_before_the_barrier_is_of_what_that_one_did(grid):
    grid.store(0)
    grid.fence(0, 0)
    grid.barrier(0)
    grid.atomic(0)
    grid.atomic(1, acquire=True)
    grid.barrier(1)
    grid.load(1)
    assert grid.readers == WARPS - 1


def test_warps_of_one_cta_do_not_race_here(grid):
    grid.store(0)
    grid.load(0)
    grid.races.write(np.arange(WARPS), np.full(WARPS, OTHER), 4, STORE)
    assert grid.races.found == []


def test_warps_of_two_ctas_race_when_they_write_one_address_at_once(grid):
    grid.races.write(np.arange(2 * WARPS), np.full(2 * WARPS, OTHER), 4, STORE)
    (race,) = grid.races.found
    assert (race.first_actor, race.second_actor) == ("CTA 0", "CTA 1")


def test_warps_are_counted_from_one():
    with pytest.raises(ValueError, match="warps: expected at least 1, got 0"):
        GlobalRaces(2, warps=0)
