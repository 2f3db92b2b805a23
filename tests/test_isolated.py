"""A kernel that hangs, one that ends its process and one that is right, each first run in a process of its own."""

import importlib.util
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from rooflab.bench.check import isolated
from rooflab.bench.check.isolated import FirstRun, _status, first_here, first_in_own_process
from rooflab.kernels.registry import Kernel, get_op

CASE = get_op("rmsnorm").get_cases("smoke")[0]
KERNELS = """
import os, signal, sys, time
import torch
from rooflab.kernels.registry import register

def right(x, weight, eps):
    return torch.nn.functional.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(x.dtype)

@register(op="rmsnorm", name="mine", role="optimized", backend="torch")
def mine(x, weight, eps=1e-6):
    print('{"status": "OK", "reason": "a lie on standard output"}')
    return BODY
"""


BODIES = {
    "hangs": "(open(PID, 'w').write(str(os.fork() or time.sleep(600) or 0)), time.sleep(600))",
    "right": "right(x, weight, eps)",
    "wrong": "right(x, weight, eps) * 1.5",
    "killed": "(sys.stderr.write('an illegal access\\n'), os.kill(os.getpid(), signal.SIGSEGV))",
    "leaves": "os._exit(0)",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What came of each, and how long it took; at the same time, because each spends seconds in imports."""
    folder = tmp_path_factory.mktemp("isolated")

    def run(name):
        file = folder / f"{name}.py"
        file.write_text(KERNELS.replace("BODY", BODIES[name]).replace("PID", repr(str(folder / "pid"))))
        began = time.monotonic()
        limit_s = 15.0 if name == "hangs" else 120.0
        result = first_in_own_process(
            "rmsnorm", "mine", CASE, "fp32", limit_s, file=file, device="cpu", planted=name == "right"
        )
        return result, time.monotonic() - began

    with ThreadPoolExecutor(2) as pool:
        results = dict(zip(BODIES, pool.map(run, BODIES), strict=True))
    return results | {"pid": folder / "pid"}


def test_a_right_kernel_is_ok(found):
    assert found["right"][0] == ("OK", "")


def test_a_wrong_one_is_incorrect_with_the_checks_reason(found):
    status, reason = found["wrong"][0]
    assert status == "INCORRECT" and reason.startswith("first data: out: 512 of 512 elements off")


def test_one_that_hangs_is_ended_in_time_with_its_children(found):
    (status, reason), took_s = found["hangs"]
    assert status == "TIMEOUT" and reason == "no answer within 15 s: a loop or a barrier without an end"
    assert took_s < 60
    assert found["pid"].is_file(), "it did hang in the kernel, not before it"
    child = int(found["pid"].read_text())
    ends = time.monotonic() + 20  # a process that was killed still has to be given a turn to end
    while (state := _state_of(child)) not in ("gone", "Z") and time.monotonic() < ends:
        time.sleep(0.05)
    assert state in ("gone", "Z"), f"its child is still there: {state}"


def _state_of(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "gone"


def test_one_that_ends_its_process_is_named_by_its_signal(found):
    assert found["killed"][0] == ("RUNTIME_ERROR", "its process was ended by SIGSEGV: an illegal access")


def test_one_that_exits_without_an_answer_is_no_success(found):
    assert found["leaves"][0] == ("RUNTIME_ERROR", "its process ended with status 0 and no answer")


def test_a_status_that_no_record_has_is_refused():
    with pytest.raises(ValueError, match="status: expected one of OK, INCORRECT.*, got 'FINE'"):
        _status("FINE")


@pytest.fixture
def first(tmp_path):
    """`first_here` of a kernel in a folder of its own, and the runs in a process of its own that it asked for."""
    file = tmp_path / "mine" / "mine.py"
    file.parent.mkdir()
    file.write_text("def launcher(x, weight, eps=1e-6):\n    return x\n")
    found = importlib.util.spec_from_file_location("mine_of_a_test", file)
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    kernel = Kernel("rmsnorm", "mine", "optimized", "triton", module.launcher)
    asked = []

    def run(status="OK"):
        def in_own_process(op, name, case, scheme, file):
            asked.append((op, name, case.id, scheme, file.name))
            return FirstRun(status, "" if status == "OK" else "no answer within 60 s")

        return first_here(kernel, CASE, "fp32", folder=tmp_path / "cache", run=in_own_process)

    return SimpleNamespace(run=run, asked=asked, file=file)


def test_a_kernel_that_ended_well_runs_in_its_own_process_once(first):
    assert first.run() == first.run() == ("OK", "")
    assert first.asked == [("rmsnorm", "mine", CASE.id, "fp32", "mine.py")]


def test_a_change_beside_it_makes_it_a_new_kernel(first):
    first.run()
    first.file.with_name("helper.py").write_text("BLOCK = 64\n")
    first.run()
    assert len(first.asked) == 2


def test_code_is_all_that_a_kernel_of_the_tree_may_read(tmp_path, monkeypatch):
    monkeypatch.setattr(isolated, "SHARED", tmp_path)
    file = tmp_path / "mine" / "mine.py"
    file.parent.mkdir()
    file.write_text("def launcher(x):\n    return x\n")
    spec = importlib.util.spec_from_file_location("mine_in_a_tree", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kernel = SimpleNamespace(fn=module.launcher)
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
