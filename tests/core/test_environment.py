import getpass
import json
import os
import socket
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from git_repository import git

from rooflab.bench.core import environment as nvml_module
from rooflab.bench.core.environment import Environment, Gpu, git_state, last_level_cache_bytes, machine_key
from rooflab.kernels.precision import pin_matmul_precision

GPU = Gpu("NVIDIA H200", "GPU-1", 141 * 10**9, 132, 60 * 2**20, power_limit_w=700.0)


def test_a_snapshot_names_versions_and_threads_and_no_persons_and_places():
    text = json.dumps(Environment.now().to_dict())
    found = json.loads(text)
    assert (found["torch"], found["threads"]) == (torch.__version__, torch.get_num_threads())
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["triton"] and found["numpy"] and found["memory_gib"] >= 1
    user = [getpass.getuser()] if getpass.getuser() != "root" else []
    for private in (socket.gethostname(), str(Path.home()), str(Path.cwd()), *user):
        assert private not in text


def test_the_machine_key_is_stable_and_tells_machines_apart():
    key = machine_key("AMD EPYC 9B45", 2, None)
    assert key == machine_key("AMD EPYC 9B45", 2, None) and key.startswith("amd-epyc-9b45-2c-")
    assert len({key, machine_key("AMD EPYC 9B45", 4, None), machine_key("AMD EPYC 9B45", 2, GPU)}) == 3
    assert machine_key("x", 2, GPU) == machine_key("x", 2, replace(GPU, uuid="GPU-2", driver="1.2"))
    assert machine_key("x", 2, GPU) != machine_key("x", 2, replace(GPU, power_limit_w=500.0))


def test_last_level_caches_are_added_up_once_each(tmp_path):
    for cpu, shared in ((0, "0-1"), (1, "0-1"), (2, "2-3"), (3, "2-3")):
        caches = [(1, "Data", "48K", cpu), (4, "Instruction", "1G", cpu), (3, "Unified", "32768K", shared)]
        for index, values in enumerate(caches):
            place = tmp_path / f"cpu{cpu}" / "cache" / f"index{index}"
            place.mkdir(parents=True)
            for name, value in zip(("level", "type", "size", "shared_cpu_list"), values, strict=True):
                (place / name).write_text(f"{value}\n")
    assert last_level_cache_bytes(tmp_path) == 2 * 32 * 2**20
    assert last_level_cache_bytes(tmp_path / "none") == 32 * 2**20


def test_commit_and_changes_of_a_checkout_are_found(tmp_path):
    git(tmp_path, "init", "--quiet")
    assert git_state(tmp_path) == (None, None)
    (tmp_path / "a").write_text("1")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "--quiet", "-m", "a")
    commit, dirty = git_state(tmp_path)
    assert commit and len(commit) == 40 and dirty is False
    for folder, changed in (("results", False), ("site-packages", True)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.py").write_text("")
        assert git_state(tmp_path) == (commit, changed), "a run's own records do not make it dirty"
    assert git_state(tmp_path / "site-packages") == (None, None), "a package below somebody else's checkout"
    assert git_state(tmp_path / "none") == (None, None)


class FakeNvml:
    """NVML as `nvidia-ml-py` wraps it: answers by question, of which this card refuses those of `refuses`."""

    class NVMLError(Exception):
        pass

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    def __init__(self):
        self.open, self.pids = 0, [os.getpid()]
        self.refuses = {"DeviceGetFieldValues": "function not found"}
        self.answers = {
            "SystemGetDriverVersion": lambda: "580.1",
            "DeviceGetHandleByUUID": lambda uuid: "handle" if uuid == "GPU-1" else self._refuse("not found"),
            "DeviceGetMaxClockInfo": lambda handle, kind: {1: 1980, 2: 3201}[kind],
            "DeviceGetEnforcedPowerLimit": lambda handle: 700_000,
            "DeviceGetEccMode": lambda handle: [1, 1],
            "DeviceGetMigMode": lambda handle: [0, 0],
            "DeviceGetPowerUsage": lambda handle: 650_000,
            "DeviceGetTemperature": lambda handle, sensor: 61,
            "DeviceGetComputeRunningProcesses": lambda handle: [SimpleNamespace(pid=pid) for pid in self.pids],
        }

    def _refuse(self, why):
        raise self.NVMLError(why)

    def nvmlInit(self):
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def __getattr__(self, name):
        question = name.removeprefix("nvml")
        if question in self.refuses:
            return lambda *arguments: self._refuse(self.refuses[question])
        if question == name or question not in self.answers:
            raise AttributeError(name)
        return self.answers[question]


def install(monkeypatch, fake):
    """Puts it in the place of pynvml."""
    fake.__spec__ = SimpleNamespace(name="pynvml")
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(nvml_module.importlib.util, "find_spec", lambda name: fake.__spec__)
    return fake


@pytest.fixture
def nvml(monkeypatch):
    properties = SimpleNamespace(
        name="NVIDIA H200", uuid="1", total_memory=141, multi_processor_count=132, L2_cache_size=60
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    return install(monkeypatch, FakeNvml())


def test_a_gpu_is_described_as_far_as_it_is_known(nvml, monkeypatch):
    known = Gpu("NVIDIA H200", "GPU-1", 141, 132, 60, "580.1", 1980, 3201, 700.0, True, False)
    assert Environment.now().gpu == known and nvml.open == 0
    nvml.refuses["DeviceGetMigMode"] = "not supported"
    assert Environment.now().gpu == replace(known, mig=None)
    monkeypatch.setattr(nvml_module.importlib.util, "find_spec", lambda name: None)
    assert Environment.now().gpu == Gpu("NVIDIA H200", "GPU-1", 141, 132, 60)


def test_matmul_precision_is_pinned_and_recorded():
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    assert Environment.now().matmul_precision == "high+16-bit reductions"
    pin_matmul_precision()
    assert Environment.now().matmul_precision == "highest"


def test_a_copy_without_git_names_the_commit_that_it_is_told_and_its_tree_shows_changes(monkeypatch):
    monkeypatch.setattr(nvml_module, "git_state", lambda root: (None, None))
    commit, tree = "0123456789" * 4, nvml_module.tree_hash()
    for told, state in (
        ("", (None, None)),
        (commit, (commit, None)),
        (f"{commit}:{tree}", (commit, False)),
        (f"{commit}:{'0' * 16}", (commit, True)),
    ):
        monkeypatch.setenv("ROOFLAB_COMMIT", told)
        assert nvml_module.own_state() == state
    for wrong in ("main", commit[:12], f"{commit}:", f"{commit}:dirty"):
        monkeypatch.setenv("ROOFLAB_COMMIT", wrong)
        with pytest.raises(ValueError, match="ROOFLAB_COMMIT: expected a commit's 40 hex digits"):
            nvml_module.own_state()
