"""Launches that may run at the same time: a dependent launch before its wait, and two streams without an order."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import pytest
import torch
from ptx_lines import SHARED, TEXT
from torch._subclasses.fake_tensor import FakeTensorMode

from rooflab.bench.compile.pretended import pretended_gpu
from rooflab.bench.emulator import Launches, PtxLaunch
from rooflab.bench.emulator.launch_streams import ordered_streams

READ, WAIT, BEGIN = "ld.global.u32 %r1, [%d2+128];", "griddepcontrol.wait;", "griddepcontrol.launch_dependents;"
COPY = "mov.u32 %r1, 1; cp.async.ca.shared.global [s], [%d2+128], 4; {} cp.async.wait_all;"
WRITE = "mov.u32 %r1, 1;"
DEPENDENT = True


def kernel(body: str, dependent: bool = False) -> PtxLaunch:
    """Writes the first 32 elements of its tensor; `READ` also reads the 32 elements after them."""
    text = TEXT.format(outer="", declared=SHARED, block=32, body=body)
    return PtxLaunch(text, "k", (32, 1, 1), dependent=dependent)


def rules(launches: Launches) -> list[str]:
    return [finding.rule for finding in launches.findings]


@pytest.mark.parametrize(
    ("steps", "fault"),
    [
        ([(BEGIN + WRITE, 32), (READ, 0)], "reads byte 128 of to, which an earlier launch of k wrote"),
        ([(BEGIN + WRITE, 32), (READ + WAIT, 0)], "reads byte 128"),
        ([(BEGIN + WRITE, 32), (COPY.format(WAIT), 0)], "reads byte 128"),
        ([(BEGIN + READ, 0), (WRITE, 32)], "writes byte 128 of to, which an earlier launch of k read"),
        ([(BEGIN + WRITE, 32), (WRITE, 32)], "writes byte 128 of to, which an earlier launch of k wrote"),
        ([(BEGIN + WRITE, 32), (BEGIN + WRITE, 64), (WAIT + READ, 0)], "reads byte 128"),
        ([(BEGIN + WRITE, 32), (BEGIN + WAIT + WRITE, 64), (READ, 0)], "reads byte 128"),
        ([(BEGIN + WRITE, 32), (WAIT + READ, 0)], ""),
        ([(BEGIN + WRITE, 32), (WAIT + COPY.format(""), 0)], ""),
        ([(BEGIN + READ, 0), (WAIT + WRITE, 32)], ""),
        ([(BEGIN + WRITE, 32), (WRITE, 0)], ""),
        ([(WRITE, 32), (READ, 0)], ""),
        ([(BEGIN + WRITE, 32), (WAIT + BEGIN + WRITE, 64), (READ, 0)], ""),
        ([(BEGIN + WRITE, 32), (BEGIN + WAIT + WRITE, 64), (WAIT + READ, 0)], ""),
    ],
)
def test_a_dependent_launch_waits_before_it_uses_what_the_one_before_uses(
    steps: list[tuple[str, int]], fault: str
) -> None:
    launches, memory = Launches(), torch.zeros(128, dtype=torch.int32)
    for number, (body, at) in enumerate(steps):
        launches.run(kernel(body, dependent=number > 0), (1,), [memory[at:]])
    assert rules(launches) == ["dependent-launch"] * bool(fault)
    assert all(fault in finding.text for finding in launches.findings)


def test_a_launch_that_is_not_dependent_and_an_operator_of_torch_wait_by_themselves() -> None:
    launches, memory = Launches(), torch.zeros(128, dtype=torch.int32)
    launches.run(kernel(BEGIN + WRITE), (1,), [memory[32:]])
    launches.run(kernel(READ), (1,), [memory])
    with launches.fresh:
        launches.run(kernel(BEGIN + WRITE), (1,), [memory[32:]])
        torch.zeros(3).add_(1)
        launches.run(kernel(READ, DEPENDENT), (1,), [memory])
    assert rules(launches) == []


Step = Callable[[Launches, torch.Tensor, torch.cuda.Stream], object]


def writes(run: Launches, memory: torch.Tensor) -> None:
    run.run(kernel(WRITE), (1,), [memory[32:]])


def reads(run: Launches, memory: torch.Tensor) -> None:
    run.run(kernel(READ), (1,), [memory])


def on(stream: torch.cuda.Stream, step: Callable[..., object], *arguments: object) -> None:
    with torch.cuda.stream(stream):
        step(*arguments)


ORDERS: list[tuple[str, Step]] = [
    ("", lambda run, memory, side: None),
    ("wait_stream", lambda run, memory, side: side.wait_stream(torch.cuda.current_stream())),
    ("event", lambda run, memory, side: side.wait_event(torch.cuda.current_stream().record_event())),
    ("early event", lambda run, memory, side: side.wait_event(EARLY[0])),
    ("other way", lambda run, memory, side: torch.cuda.current_stream().wait_stream(side)),
    ("synchronize", lambda run, memory, side: torch.cuda.synchronize()),
    ("host read", lambda run, memory, side: memory.cpu()),
    ("value", lambda run, memory, side: int(memory.sum())),
]
EARLY: list[torch.cuda.Event] = []
RIGHT = {"wait_stream", "event", "synchronize", "host read", "value"}


@pytest.mark.parametrize("second", ["read", "write", "torch read", "torch write", "elsewhere"])
@pytest.mark.parametrize(("name", "order"), ORDERS, ids=[name or "none" for name, _ in ORDERS])
def test_an_event_or_a_wait_orders_two_streams(name: str, order: Step, second: str) -> None:
    launches, memory = Launches(), torch.zeros(128, dtype=torch.int32)
    with ExitStack() as stack:
        stack.enter_context(ordered_streams(launches.fresh.order, stack.enter_context(pretended_gpu())))
        stack.enter_context(launches.fresh)
        side, event = torch.cuda.Stream(), torch.cuda.Event()
        event.record()
        EARLY[:] = [event]
        writes(launches, memory)
        order(launches, memory, side)
        with torch.cuda.stream(side):
            if second == "read":
                reads(launches, memory)
            elif second == "write":
                writes(launches, memory)
            elif second == "torch read":
                memory[40:50] + 1
            elif second == "torch write":
                memory[32:64].zero_()
            else:
                launches.run(kernel(READ), (1,), [memory[64:]])
    assert rules(launches) == ["stream-order"] * (name not in RIGHT and second != "elsewhere")


def test_an_address_is_known_while_a_compiler_computes_with_fake_tensors() -> None:
    x = torch.ones(4)
    with pretended_gpu() as gpu, FakeTensorMode():
        assert x.data_ptr() in gpu.addressed
