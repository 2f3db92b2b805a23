"""The lock of a card: a second run waits until the first ends."""

import subprocess
import sys
import tempfile
from dataclasses import replace

import torch

from rooflab.bench.core.environment import Environment, Gpu
from rooflab.bench.core.timers import card as module

HOLDS = """
import fcntl, os, sys
handle = os.open(sys.argv[1], os.O_RDWR)
fcntl.flock(handle, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_run_waits_for_the_first_and_says_so_once(monkeypatch, tmp_path):
    card = Gpu("NVIDIA H100 80GB HBM3", "GPU-1", 85 * 10**9, 132, 50 * 2**20)
    here = Environment.now()
    monkeypatch.setattr(module.Environment, "now", lambda index: replace(here, gpu=card))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    said = []
    with module.card_lock(torch.device("cuda"), said.append):
        pass
    (file,) = tmp_path.iterdir()
    assert said == [] and file.name == "rooflab-GPU-1.lock" and file.stat().st_mode & 0o777 == 0o666
    other = subprocess.Popen([sys.executable, "-c", HOLDS, str(file)], stdin=-1, stdout=-1)
    assert other.stdout.readline() == b"held\n"

    def ends(text):
        said.append(text)
        other.kill()

    with module.card_lock(torch.device("cuda"), ends):
        assert other.wait() and said == [f"waiting for another run on {card.name} ({file})"]
