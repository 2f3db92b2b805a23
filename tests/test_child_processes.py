"""What is ended at its limit is ended with everything that it started, in sessions of its own too."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil
import pytest

from rooflab.bench.predict import ncu
from rooflab.bench.processes.child import kill_whole, run_whole

# As the tools do it: the program that runs the kernel is a child, and may lead a session.
PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(child.pid, file=open(sys.argv[1], "w"), flush=True)
child.wait()
"""


def gone(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie"


@pytest.mark.parametrize("run", [lambda line: run_whole(line, 5.0, {}), lambda line: ncu._run(line, 5.0)])
def test_a_child_that_holds_the_pipes_is_ended_too(tmp_path, run):
    began = time.monotonic()
    with pytest.raises((subprocess.TimeoutExpired, ValueError)):
        run([sys.executable, "-c", PARENT, str(tmp_path / "pid")])
    assert time.monotonic() - began < 60
    child = int((tmp_path / "pid").read_text())
    ends = time.monotonic() + 10
    while not gone(child):
        assert time.monotonic() < ends, "the child outlived it"
        time.sleep(0.05)


def test_what_ends_by_itself_says_what_it_printed():
    found = run_whole([sys.executable, "-c", "import sys; print('out'); sys.exit('err')"], 60.0, {})
    assert (found.stdout, found.stderr, found.returncode) == ("out\n", "err\n", 1)


def test_a_process_that_is_gone_is_no_error():
    process = subprocess.Popen([sys.executable, "-c", ""], start_new_session=True)
    process.wait()
    kill_whole(process.pid)
