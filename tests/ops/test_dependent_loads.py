"""The least time of kernels at one token: a chain of loads as deep as the rungs' chains, and the target above it."""

from types import SimpleNamespace

import pytest
import torch
from targets import chain as dependent
from targets import one_token
from test_targets import record

from rooflab.bench.compile.cases import KernelCase
from rooflab.bench.compile.sass import parse_code
from rooflab.bench.compile.static import compile_kernels
from rooflab.bench.compile.store import Store
from rooflab.bench.core import record_files
from rooflab.bench.core.noise import Samples
from rooflab.bench.emulate.ours import emulating_cuda
from rooflab.bench.emulator.launch import emulate
from rooflab.bench.predict.chip import chip_of, span_cycles
from rooflab.bench.suite.entries import Context
from rooflab.kernels._cuda import load
from rooflab.kernels.registry import get_op
from rooflab.reference.spec import Case, get_scheme
from rooflab.roofline.device import get_device

ENTRY = one_token.TARGETS[0]
OP = ENTRY.arguments["op"]
SPEC = get_op(OP)
DEVICE = get_device("h100-sxm")
CHIP = chip_of(DEVICE)
LONG = 1e6
"""Clocks of a load, beside which all else takes no time."""


def paths(code):
    """Every way through code without a loop, as lists of instructions."""
    places = {entry.address: number for number, entry in enumerate(code)}
    found = []

    def follow(number, taken):
        for place in range(number, len(code)):
            entry = code[place]
            taken = [*taken, entry]
            if entry.name == "EXIT":
                found.append(taken)
                if not entry.guard:
                    return
            if entry.target is not None:
                assert places[entry.target] > place, "a loop"
                follow(places[entry.target], taken)
                if not entry.guard:
                    return

    follow(0, [])
    return found


def waits_for_loads(code):
    """How many loads follow one another on the longest way: by how much it grows with what a load takes, issued in
    order, a load that nobody waited for before it overlapped."""
    spans = [[span_cycles(path, CHIP, 4, clocks) for clocks in (LONG, 2 * LONG)] for path in paths(code)]
    return max((longer - shorter) / LONG for shorter, longer in spans)


@pytest.mark.more
@pytest.mark.parametrize("entry", one_token.TARGETS, ids=lambda entry: entry.id)
def test_the_floor_is_as_deep_as_the_rungs(entry):
    """Of a rotation a position, then its angles; of a norm the row and the weight together."""
    op, case = entry.arguments["op"], Case.parse(entry.arguments["case"])
    names = ("fused",) if op == OP else ("fused", "cluster")
    asked = [KernelCase(op, name, get_op(op).check_case(case), get_scheme("bf16")) for name in names]
    for (found,) in compile_kernels(asked, Store()):
        depth = waits_for_loads(parse_code(found.sass))
        assert depth == pytest.approx(entry.arguments["depth"], abs=0.01), found.name
    assert entry.arguments["depth"] == one_token.DEPTHS[op]


def test_the_chain_is_right_in_the_emulator_and_loads_nothing_twice():
    results = []
    with emulating_cuda(lambda launch, grid, args: results.append(emulate(launch, grid, args))):
        assert dependent.chain(load, torch.device("cpu"), 3).wrong(1) == ""
    (result,) = results
    assert result.races == () and result.bytes.hbm_read == result.bytes.global_read == 3 * 4 * dependent.CHAIN_THREADS
    assert result.bytes.global_write == 4 * dependent.CHAIN_THREADS
    with pytest.raises(ValueError, match="depth: expected at least 1, got 0"):
        dependent.chain(load, torch.device("cpu"), 0)


def test_the_chain_finds_out_a_load_that_is_left_out():
    for text, instead in [("load < DEPTH", "load < DEPTH - 1"), ("next[at]", "next[0]")]:

        def change(source, name, *, options=(), text=text, instead=instead):
            assert text in source
            return load(source.replace(text, instead), name, options=options)

        with emulating_cuda(emulate):
            assert dependent.chain(change, torch.device("cpu"), 4).wrong(1)


@pytest.mark.parametrize(
    ("kernel_us", "floors_l2", "fault", "bar", "reason"),
    [
        (3.5, "cold", "", "MET", ""),
        (3.7, "cold", "", "MISSED", ""),
        (3.5, "cold", "a clock was replaced", "UNMEASURED", "fused: a clock was replaced"),
        (3.5, "warm", "", "UNMEASURED", "fused: timed with L2 cold, the floor with L2 warm"),
    ],
)
def test_the_time_is_held_against_the_chains(monkeypatch, tmp_path, kernel_us, floors_l2, fault, bar, reason):
    one = record("fused", "T=1", 1.0, op=OP, bound_ms=1e-3)
    floor = SimpleNamespace(wrong=lambda _: "", launch=print)
    samples = {
        "fused": Samples((kernel_us * 1e-6,) * 5, "cuda events", "cold", fault=fault),
        one_token.FLOOR: Samples((3.0e-6,) * 5, "cuda events", floors_l2),
    }
    monkeypatch.setattr(one_token, "measure", lambda *args: ([one], False))
    monkeypatch.setattr(dependent, "chain", lambda *of: floor)
    monkeypatch.setattr(one_token.Rotation, "copies", lambda *args: [])
    monkeypatch.setattr(one_token, "time_together", lambda ready, *args: (samples, {}, None))
    found = one_token.one_token(Context(tmp_path, "cpu", False, 10.0), **ENTRY.arguments)
    assert found.bar == bar and reason in found.reason
    if bar != "UNMEASURED":
        assert found.figures["time over floor"] == pytest.approx(kernel_us / 3.0)
        (kept,) = record_files.read(tmp_path)
        assert kept.latency_median_ms == pytest.approx(kernel_us * 1e-3)
        assert kept.metrics["chain_median_ms"] == pytest.approx(3e-3)
        assert kept.bound_fraction == pytest.approx(1 / kernel_us)
