"""A GPU's ceilings measured again: what is kept then, what is lost never, and what is said."""

from dataclasses import replace

import pytest
import torch
from test_ceilings_cuda import World, measure
from test_ceilings_kept import CUDA, READINGS, card, environment, reading, rooflab  # noqa: F401  fixtures

from rooflab.bench.calls import calls
from rooflab.bench.ceilings import cuda as ceilings_cuda
from rooflab.bench.ceilings.ceilings import ceilings_for, cuda_ceilings, kept_ceilings, raise_cuda_ceilings
from rooflab.bench.ceilings.kept import keep
from rooflab.bench.ceilings.microkernels.microkernel import Group
from rooflab.bench.ceilings.readings import assemble, better

OK = [found for found in READINGS if found.status == "OK"]


@pytest.fixture
def again(card, monkeypatch):  # noqa: F811
    """Ceilings that are kept; what is set as `readings`, or raised as `error`, is measured from then on."""

    class Again:
        readings = OK
        error = None

    def measure(device, **options):
        if Again.error is not None:
            raise Again.error
        return Again.readings

    cuda_ceilings(CUDA)
    monkeypatch.setattr(ceilings_cuda, "measure_cuda", measure)
    return Again


def test_a_measurement_that_fails_costs_neither_the_run_nor_the_ceilings(again, capfd):
    known = ceilings_for(CUDA)
    again.readings = [replace(found, status="INVALID", reason="throttled") for found in OK]
    assert raise_cuda_ceilings(known, CUDA) == known == ceilings_for(CUDA)
    assert "measuring again failed (no measured ceilings without HBM, fma" in capfd.readouterr().err
    again.error = ValueError("cupy: expected the package")
    assert raise_cuda_ceilings(known, CUDA) == known == ceilings_for(CUDA)
    assert "cupy: expected the package" in capfd.readouterr().err


def test_only_what_failed_alone_is_left_out(again):
    """A limit that could not be read again is as it was, and the others are raised."""
    known = ceilings_for(CUDA)
    again.readings = [
        replace(found, status="RUNTIME_ERROR") if found.limit == "fma" else replace(found, work=1.2 * found.work)
        for found in OK
    ]
    raised = raise_cuda_ceilings(known, CUDA)
    assert raised.vector_flops_per_s == known.vector_flops_per_s
    assert raised.hbm_bytes_per_s == pytest.approx(1.2 * known.hbm_bytes_per_s) and ceilings_for(CUDA) == raised


def test_a_refresh_that_makes_no_ceilings_is_shown_and_keeps_those_there_were(again):
    known = ceilings_for(CUDA)
    again.readings = [found for found in OK if found.limit != "fma"]
    shown = cuda_ceilings(CUDA, refresh=True)
    assert shown.ceilings is None and shown.reason.startswith("no measured ceilings without fma; those of 20")
    assert kept_ceilings(CUDA)[0].ceilings == known == ceilings_for(CUDA)


def test_what_is_shown_makes_what_is_used(again):
    """The table is drawn from the readings, and a measurement may be better in one limit and worse in another."""
    again.readings = [replace(found, work=(1.1 if found.limit == "fma" else 0.8) * found.work) for found in OK]
    raised = raise_cuda_ceilings(ceilings_for(CUDA), CUDA)
    kept, _ = kept_ceilings(CUDA)
    assert assemble(kept.readings, "h200", 90)[0] == kept.ceilings == raised
    assert raised.vector_flops_per_s == pytest.approx(66e12) and raised.hbm_bytes_per_s == pytest.approx(4.2e12)


def test_of_each_limit_the_better_measurement_stays_whole():
    first = [reading("fma", "flop", 50e12), reading("fma", "flop", 60e12), reading("launch cupti", "launch", 0.0)]
    second = [reading("fma", "flop", 55e12), reading("launch cupti", "launch", 0.0, seconds=(1e-3, 2e-3))]
    assert better(first, second) == [*first[:2], second[1]] == better(second, first)
    failed = replace(second[0], status="INVALID")
    assert better(first, [failed]) == first and better([], [failed]) == [failed]


def test_a_budget_that_is_not_spent_is_said(again, rooflab):  # noqa: F811
    status, _, err = rooflab("--budget", "7")
    assert status == 0 and "budget: not spent, because what was measured before still counts" in err
    assert "not spent" not in rooflab()[2] + rooflab("--budget", "7", "--refresh")[2]


def test_clocks_that_were_set_while_measuring_are_said(again, rooflab, environment):  # noqa: F811
    assert "clocks set by the user" not in rooflab()[1]
    held = [replace(found, clocks={"throttle_reasons": 0x2 | 0x4}) for found in OK]
    keep(environment, held, *assemble(held, "h200", 90))
    assert kept_ceilings(CUDA)[0].clocks_were_set and "clocks set by the user" in rooflab()[1]


@pytest.mark.parametrize("where", ["probe", "clock"])
def test_an_error_that_the_device_reports_late_is_a_reading(monkeypatch, where):
    """CUDA reports what a launch did wrong to whoever waits for the device next."""
    lost = RuntimeError("CUDA error: an illegal memory access was encountered\nadvice")
    world = World()

    def clock_hz():
        raise lost

    def time(functions, **options):
        if where == "probe" and "probe" in functions:
            raise lost
        return World.time(world, functions, **options)

    world.time = time
    broken = world.kernel("fma", **({"clock_hz": clock_hz} if where == "clock" else {}))
    hbm = world.kernel("hbm_read", fixed_repeats=2)  # asks for no probe
    first, second = measure(world, monkeypatch, Group("fma", [broken]), Group("hbm_read", [hbm]))
    assert (first.status, first.reason) == ("RUNTIME_ERROR", "CUDA error: an illegal memory access was encountered")
    assert second.status == "OK", "the others are asked all the same"


@pytest.mark.parametrize("free", [calls.free_bytes, lambda device: ceilings_cuda.card_of(device).free_bytes])
def test_memory_that_torch_holds_for_nobody_is_free(monkeypatch, free):
    properties = type("Properties", (), {"multi_processor_count": 132, "L2_cache_size": 60 * 2**20})
    for name, value in {
        "mem_get_info": (10, 100),
        "memory_reserved": 70,
        "memory_allocated": 20,
        "get_device_properties": properties,
        "get_device_capability": (9, 0),
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert free(CUDA) == 60.0
