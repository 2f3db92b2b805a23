"""What four warps of one CTA do to shared memory, in the tests of races: stores, copies, loads, products, saves."""

import numpy as np

from rooflab.bench.ptx.races.vector_clocks import BULK, LOAD, WGMMA

SIZE = 16384
ALL = np.arange(4)
LANE_WARPS = np.arange(128) // 32
LANES = np.arange(128) * 16
STAGE = 2048
TILE = np.arange(0, STAGE, 1024)
"""The first 2 KiB in blocks: what the 128 lanes cover with 16 bytes each."""
FULL, EMPTY = 8192, 8256
"""The first addresses of two rings of mbarriers."""
STORE, READ, COPY, TMA, MMA, SAVE, INIT, USE, INVAL = range(1, 10)


def kinds(races):
    return [(race.kind, race.first, race.second, race.proxy) for race in races.found]


def store(races):
    races.write(0, LANE_WARPS, LANES, 16, STORE)


def read(races):
    races.read(0, LANE_WARPS, LANES[::-1], 16, READ)


def copy(races, offset=0):
    races.copy_async(0, LANE_WARPS, offset + LANES, 16, COPY)


def load(races, stage=0, warp=0):
    """A TMA load whose phase of the mbarrier is over when it is done; waiting for it is the caller's."""
    key = FULL + 8 * stage
    races.signal(0, warp, key)
    transfer = races.begin_async(0, warp, LOAD)
    races.async_write(transfer, TILE + STAGE * stage, 1024, TMA)
    races.signal_async(transfer, key)
    races.complete(0, key)
    return transfer


def multiply(races, stage=0):
    transfer = races.begin_async(0, ALL, WGMMA)
    races.async_read(transfer, TILE + STAGE * stage, 1024, MMA)
    return transfer


def save(races, warp=0):
    transfer = races.begin_async(0, warp, BULK)
    races.async_read(transfer, TILE, 1024, SAVE)
    return transfer
