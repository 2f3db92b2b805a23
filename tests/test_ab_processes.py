"""What comes of a fresh process that hangs, dies or leaves others behind, by scripts in the place of the real one."""

import time
from pathlib import Path

import pytest

from rooflab.bench.ab import processes
from rooflab.bench.ab.processes import ProcessFailed, Runner, _lines
from rooflab.bench.ab.run import Settings, run
from rooflab.bench.ab.sides import Comparison, Job, Side, Target

KERNELS = Path(__file__).parent / "ab_kernels.py"
JOB = Job("check", "cpu", 0, 0.1)
SAY = """
import json, os, sys, time
def say(line):
    print(json.dumps(line), flush=True)
"""
FORKS = """
child = os.fork()
if child == 0:
    time.sleep(600)  # and holds the output open
say({"child": child})
"""


@pytest.fixture
def process(tmp_path, monkeypatch):
    """Runs a script as the fresh process, and gives its answers."""

    def start(script, limit_s=60.0):
        file = tmp_path / "boot.py"
        file.write_text(SAY + script)
        monkeypatch.setattr(processes, "BOOT", file)
        return _lines(Side("mine", {}), JOB, limit_s)

    return start


def is_alive(pid):
    """Whether a process is there a second after it was killed; a zombie is not."""
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return False
        except FileNotFoundError:
            return False
        time.sleep(0.01)
    return True


def test_a_process_that_leaves_another_behind_has_ended_with_its_last_answer(process):
    began = time.monotonic()
    answers = list(process(FORKS + "say({'end': True})\n"))
    assert answers[-1] == {"end": True} and time.monotonic() - began < 30
    assert not is_alive(answers[0]["child"])


def test_one_that_hangs_is_ended_with_what_it_has_started(process):
    answers = []
    with pytest.raises(ProcessFailed, match="^took longer than 1 s, and was ended$"):
        answers.extend(process(FORKS + "time.sleep(600)\n", 1.0))
    answers = process(FORKS + "time.sleep(600)\n", 1.0)
    child = next(answers)["child"]
    with pytest.raises(ProcessFailed):
        next(answers)
    assert not is_alive(child)


def test_one_that_died_is_known_by_its_status_though_a_child_holds_its_output(process):
    with pytest.raises(ProcessFailed, match="^its process ended with status 7"):
        list(process(FORKS + "os._exit(7)\n", 1.0))


def test_an_answer_that_was_cut_short_is_the_end_of_its_process(process):
    with pytest.raises(ProcessFailed, match="^its process ended with status 3: a last word$"):
        list(process("sys.stderr.write('a last word')\nprint('{\"key\": \"gem', end='', flush=True)\nos._exit(3)\n"))


def test_silence_at_the_start_is_said_with_the_seconds_that_were_waited(process, monkeypatch):
    monkeypatch.setattr(processes, "START_S", 1.0)
    with pytest.raises(ProcessFailed, match="^took longer than 1 s"):
        list(process("time.sleep(600)\n", 77.0))


def target(name):
    return Target("rmsnorm", name, "T=4,H=32,eps=1e-06", "fp32")


def test_a_kernel_that_dies_while_it_is_timed_costs_no_other_its_reading():
    names = ("dies", "honest", "noisy")
    side = Side("A", {name: target(name) for name in names}, files=(KERNELS,))
    found = run(Comparison(side, side, names), Settings(pairs=1, kernel_s=0.05), checked=True)
    verdicts = {outcome.key: outcome for outcome in found.outcomes}
    assert verdicts["dies"].verdict == "FAILED" and "status 7" in verdicts["dies"].reason
    for name in ("honest", "noisy"):
        assert verdicts[name].verdict == "UNRESOLVED" and verdicts[name].pairs == 1, verdicts[name].reason


def test_what_a_crash_left_to_a_second_process_is_judged_there_too(monkeypatch):
    asked = []

    def answers(side, job, limit_s):
        asked.append((list(job.targets), job.judge))
        yield {"start": next(iter(job.targets))}
        if "dies" in job.targets:
            raise ProcessFailed("its process ended with status 7: it said nothing")
        for key in job.targets:
            yield {"key": key, "reading": {"status": "OK", "seconds": [1.0], "median_s": 1.0, "device_kernels": []}}

    monkeypatch.setattr(processes, "_lines", answers)
    side = Side("A", {name: target(name) for name in ("dies", "honest")})
    runner = Runner(Comparison(side, side, ("dies", "honest")))
    assert {key: reading.status for key, reading in runner.measure("A", ("dies", "honest")).items()} == {
        "dies": "RUNTIME_ERROR",
        "honest": "OK",
    }
    runner.measure("A", ("honest",))
    assert asked == [(["dies", "honest"], True), (["honest"], True), (["honest"], False)]
