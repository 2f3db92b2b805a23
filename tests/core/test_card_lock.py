"""The lock of a card: a second run waits until the first ends."""

import fcntl
import os
import tempfile
from dataclasses import replace

import torch

from rooflab.bench.core.environment import Environment, Gpu
from rooflab.bench.core.timers import card as module


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
    held = os.open(file, os.O_RDWR)
    fcntl.flock(held, fcntl.LOCK_EX)

    def ends(text):
        said.append(text)
        os.close(held)

    with module.card_lock(torch.device("cuda"), ends):
        assert said == [f"waiting for another run on {card.name} ({file})"]
