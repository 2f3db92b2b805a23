"""A kernel's first run in a process of its own: it may hang, end its process or be wrong."""

import json
import runpy
from types import SimpleNamespace

import pytest
from test_child_processes import assert_gone

from rooflab.bench.core import isolated
from rooflab.bench.core.isolated import first_here, first_in_own_process
from rooflab.kernels import registry
from rooflab.kernels.registry import Kernel, get_op
from rooflab.reference.spec import SCHEMES

CASE = get_op("rmsnorm").get_cases("smoke")[0]
KERNEL = """
import os, time
import torch
from rooflab.kernels.registry import register

@register(op="rmsnorm", name="mine", role="optimized", backend="torch")
def mine(x, weight, eps=1e-6):
    print('"done"')
    right = torch.nn.functional.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(x.dtype)
    return BODY
"""


@pytest.fixture
def first_of(tmp_path, monkeypatch):
    """The first run, without planted inputs, of a kernel that returns what a text says."""
    monkeypatch.setitem(registry._kernels, "rmsnorm", dict(registry.kernels("rmsnorm")))

    def first_of(body, timeout_s=60.0):
        (tmp_path / "mine.py").write_text(KERNEL.replace("BODY", body))
        (kernel,) = registry.load_file(tmp_path / "mine.py")
        result = first_in_own_process(kernel, CASE, SCHEMES["fp32"], timeout_s, device="cpu", planted=False)
        return result.status, result.reason

    return first_of


@pytest.mark.more
def test_a_right_kernel_is_ok_whatever_it_prints(first_of):
    assert first_of("right") == ("OK", "")


@pytest.mark.more
def test_one_that_hangs_is_ended_in_time_with_its_children(tmp_path, first_of):
    pid = tmp_path / "pid"
    body = f"(open({str(pid)!r}, 'w').write(str(os.fork() or time.sleep(600) or 0)), time.sleep(600))"
    status, reason = first_of(body, 10.0)
    assert (status, reason) == ("TIMEOUT", "first data: no answer within 10 s: a loop or a barrier without an end")
    assert pid.is_file(), "it did hang in the kernel, not before it"
    assert_gone(int(pid.read_text()))


SPEC = "object.__setattr__(__import__('rooflab.kernels.registry').kernels.registry.get_op('rmsnorm'), "


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "body",
    (
        "setattr(__import__('rooflab.reference.spec').reference.spec.OpSpec, 'judge', lambda *a: []) or x * 0",
        SPEC + "'tolerance', lambda inputs, oracle, scheme: (oracle[0] + torch.inf,)) or x * 0",
        SPEC + "'reference', lambda x, weight, eps=1e-6: x.double() * 0) or x * 0",
    ),
)
def test_the_judge_is_in_another_process(first_of, body):
    status, reason = first_of(body)
    assert status == "INCORRECT" and "512 of 512 elements off" in reason, reason


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("body", "words"),
    (
        ("os._exit(0)", "first data: its process ended with status 0"),
        ("exec('class Own(Exception): pass\\nraise Own(7)')", "Own: 7"),
    ),
)
def test_a_process_that_does_not_answer_is_no_success(first_of, body, words):
    status, reason = first_of(body)
    assert status == "RUNTIME_ERROR" and words in reason, reason


def launcher_in(file):
    """A launcher in a file that is written for it."""
    file.parent.mkdir()
    file.write_text("def launcher(x, weight, eps=1e-6):\n    return x\n")
    return runpy.run_path(str(file))["launcher"]


@pytest.fixture
def first(tmp_path):
    """`first_here` of a kernel in a folder of its own, and the runs in a process of its own that it asked for."""
    file = tmp_path / "mine" / "mine.py"
    kernel = Kernel("rmsnorm", "mine", "optimized", "triton", launcher_in(file))
    asked = []

    def run(status="OK"):
        def in_own_process(kernel, case, scheme):
            asked.append((kernel.id, case.id, scheme.name))
            return SimpleNamespace(status=status)

        return first_here(kernel, CASE, SCHEMES["fp32"], folder=tmp_path / "cache", run=in_own_process)

    return SimpleNamespace(run=run, asked=asked, file=file)


def test_a_kernel_that_ended_well_runs_in_its_own_process_once(first):
    assert first.run().status == "OK" and first.run() is None
    assert first.asked == [("rmsnorm/mine", CASE.id, "fp32")]


def test_a_change_beside_it_makes_it_a_new_kernel(first):
    first.run()
    first.file.with_name("helper.py").write_text("BLOCK = 64\n")
    first.run()
    assert len(first.asked) == 2


def test_code_is_all_that_a_kernel_of_the_tree_may_read(tmp_path, monkeypatch):
    monkeypatch.setattr(isolated, "SHARED", tmp_path)
    kernel = SimpleNamespace(fn=launcher_in(tmp_path / "mine" / "mine.py"))
    seen = {isolated._code_of(kernel)}
    for name in ("mine/choices.json", "mine/tile.cu", "_cuda.py", "configs.py"):
        (tmp_path / name).write_text(name)
        seen.add(isolated._code_of(kernel))
    assert len(seen) == 5


def test_what_did_not_end_well_is_not_remembered(first):
    assert first.run("TIMEOUT").status == "TIMEOUT"
    assert first.run("INCORRECT").status == "INCORRECT"
    assert first.run().status == "OK" and len(first.asked) == 3
    first.run()
    assert len(first.asked) == 3


def test_a_memory_that_was_cut_short_is_no_memory(first, tmp_path):
    first.run()
    (memory,) = (tmp_path / "cache" / "checked").glob("*.json")
    memory.write_text('{"rmsnorm/mi')
    first.run()
    assert len(first.asked) == 2 and json.loads(memory.read_text())
