"""Asynchronous operations that nothing had waited for when their CTA ended."""

import numpy as np
import pytest

from rooflab.bench.ptx.races.reports import describe
from rooflab.bench.ptx.races.shared_races import SharedRaces
from rooflab.bench.ptx.races.vector_clocks import BULK, LOAD, WGMMA

COPY, READ, WRITE = 7, 8, 9
WARPS = np.arange(4)
PLACES = np.arange(0, 512, 16)
KEY = "barrier"


@pytest.fixture
def races():
    return SharedRaces(2, 4, 1024)


def ended(races, slot=0):
    races.end(slot)
    return [(race.kind, race.first, race.first_actor) for race in races.found]


def copy(races, warp=1):
    races.copy_async(0, np.full(PLACES.size, warp), PLACES, 16, COPY)


def test_a_copy_that_was_waited_for_is_over(races):
    copy(races)
    races.commit_copies(0, 1)
    races.wait_copies(0, 1)
    assert ended(races) == []


@pytest.mark.parametrize(("commits", "pending"), [(0, 0), (1, 1)])
def test_a_copy_that_its_wait_leaves_out_is_told(races, commits, pending):
    copy(races)
    for _ in range(commits):
        races.commit_copies(0, 1)
    races.wait_copies(0, 1, pending)
    assert ended(races) == [("end", COPY, "cp.async of warp 1")]


def test_it_is_said_in_a_sentence(races):
    copy(races)
    races.end(0)
    (race,) = races.found
    assert describe(race, {COPY: "line 3 (cp.async)"}.get) == (
        "the CTA ended, and nothing had waited for cp.async of warp 1: "
        "line 3 (cp.async) may still use its shared memory"
    )


def test_a_load_is_waited_for_by_any_warp(races):
    load = races.begin_async(0, 0, LOAD)
    races.async_write(load, PLACES, 16, WRITE)
    races.signal_async(load, KEY)
    races.complete(0, KEY)
    races.wait(0, 3, KEY)
    assert ended(races) == []


def test_a_load_whose_barrier_nobody_waits_for_is_told(races):
    load = races.begin_async(0, 0, LOAD)
    races.async_write(load, PLACES, 16, WRITE)
    races.signal_async(load, KEY)
    races.complete(0, KEY)
    assert ended(races) == [("end", WRITE, "a TMA load")]


@pytest.mark.parametrize(("kind", "name"), [(WGMMA, "wgmma of warp 0"), (BULK, "a bulk store of warp 0")])
def test_reads_have_to_be_waited_for_too(races, kind, name):
    first, second = (races.begin_async(0, WARPS, kind) for _ in range(2))
    for transfer in (first, second):
        races.async_read(transfer, PLACES, 16, READ)
    races.acquire_async(0, WARPS, first)
    assert ended(races) == [("end", READ, name)]
    races.findings.races.clear()
    races.acquire_async(0, WARPS, second)
    assert ended(races) == []


def test_what_another_cta_left_is_not_told_again(races):
    copy(races)
    races.restart(0)
    assert ended(races) == []
    assert ended(races, slot=1) == []
