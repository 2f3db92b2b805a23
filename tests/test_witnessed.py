"""A kernel cannot end a command as a success: the status is what the command wrote before its end, and no other."""

import signal
import subprocess
import sys

import pytest
from test_child_processes import assert_gone

WITNESS = """
import os, sys
from rooflab.bench.processes.witnessed import witness
sys.exit(witness(sys.argv[1:], os.environ))
"""
COMMAND = """
import atexit, os, signal, sys, time
from rooflab.bench.processes.witnessed import with_verdict
def run():
    BODY
with_verdict(run)
"""
KERNEL = """
import os
import torch
from rooflab.kernels.registry import register

@register(op="rmsnorm", name="ends_it", role="optimized", backend="torch")
def ends_it(x, weight, eps=1e-6):
    os._exit(0)
"""


def witnessed(body):
    command = [sys.executable, "-c", COMMAND.replace("BODY", body)]
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", WITNESS, *command], stdout=pipe, stderr=pipe, text=True)


@pytest.mark.parametrize(
    "body, status, words",
    [
        ("sys.exit()", 0, ""),
        ("sys.exit('a sentence')", 1, "a sentence"),
        ("atexit.register(os._exit, 0); sys.exit(13)", 13, ""),
        ("os._exit(0)", 11, "ended with status 0 before its verdict"),
        (
            "[os.write(n, b'OK') for n in range(3, 9) if os.path.exists(f'/proc/self/fd/{n}')]; os._exit(0)",
            11,
            "before",
        ),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 11, "ended with signal SIGSEGV before its verdict"),
    ],
)
def test_the_status_is_what_was_written_at_the_regular_end(body, status, words):
    with witnessed(body) as process:
        _, said = process.communicate(timeout=60)
    assert process.returncode == status and words in said and bool(said) == bool(words)


@pytest.mark.parametrize("number, status", [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_signal_to_the_witness_ends_the_command(number, status):
    with witnessed("print(os.getpid(), flush=True); time.sleep(600)") as process:
        child = int(process.stdout.readline())
        process.send_signal(number)
        assert process.wait(timeout=60) == status
        assert_gone(child)


@pytest.mark.more
def test_a_kernel_that_ends_the_bench_is_no_success(tmp_path):
    (tmp_path / "ends_it.py").write_text(KERNEL)
    words = f"bench rmsnorm --case T=8,H=64,eps=1e-05 --kernel {tmp_path}/ends_it.py --out {tmp_path}".split()
    done = subprocess.run([sys.executable, "-m", "rooflab.bench", *words], capture_output=True, text=True)
    assert done.returncode == 11 and "before its verdict" in done.stderr
