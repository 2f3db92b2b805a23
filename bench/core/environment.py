"""Describes the environment of a result: machine, software, threads, commit; no host name, user name or path."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType

import psutil
import torch

from rooflab.bench.base.git import ROOT, git_says, top_of
from rooflab.bench.base.plain import Json
from rooflab.bench.core.record import Kind, Record, Status, new_run_id
from rooflab.bench.core.select import file_of
from rooflab.kernels.precision import matmul_precision
from rooflab.kernels.registry import Kernel
from rooflab.reference.spec import Case

_CPU_FOLDER = Path("/sys/devices/system/cpu")
SOURCE_FOLDERS = ("roofline", "reference", "kernels", "engine", "bench")
COMMIT_VARIABLE = "ROOFLAB_COMMIT"


@dataclass(frozen=True)
class Gpu:
    """A GPU of this machine.  Values that only NVML reports are None if the package `nvidia-ml-py` is missing."""

    name: str
    uuid: str
    memory_bytes: int
    sms: int
    l2_bytes: int
    driver: str | None = None
    max_sm_clock_mhz: int | None = None
    max_memory_clock_mhz: int | None = None
    power_limit_w: float | None = None
    ecc: bool | None = None
    mig: bool | None = None


@dataclass(frozen=True)
class Environment:
    """Describes the machine and its software at one moment."""

    machine_key: str
    """Names this kind of machine.  The key is the same after a reboot, and on other machines with the same parts."""
    cpu: str
    cores: int
    """Logical processors that this process may use."""
    memory_gib: int
    cache_bytes: int
    """Total size of all last-level caches."""
    os: str
    python: str
    torch: str
    triton: str | None
    numpy: str | None
    threads: int
    """Number of torch's threads within an op."""
    matmul_precision: str
    """torch's precision setting for matrix products."""
    gpu: Gpu | None
    commit: str | None
    dirty: bool | None

    @classmethod
    def now(cls, gpu_index: int = 0) -> Environment:
        """Returns the present environment.  `gpu_index` is torch's index of the GPU in use."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        memory_gib = round(psutil.virtual_memory().total / 2**30)
        gpu = _gpu(gpu_index)
        commit, dirty = own_state()
        return cls(
            machine_key=machine_key(_cpu_model(), cores, gpu),
            cpu=_cpu_model(),
            cores=cores,
            memory_gib=memory_gib,
            cache_bytes=last_level_cache_bytes(),
            os=f"{platform.system()} {platform.machine()}",
            python=platform.python_version(),
            torch=torch.__version__,
            triton=_version("triton"),
            numpy=_version("numpy"),
            threads=torch.get_num_threads(),
            matmul_precision=matmul_precision(),
            gpu=gpu,
            commit=commit,
            dirty=dirty,
        )

    @staticmethod
    def tree(root: Path | None = None, folders: Sequence[str] = SOURCE_FOLDERS) -> str:
        """Returns a hash of the sources in `folders` of the tree `root`, or of this program if `root` is None."""
        return tree_hash(root, folders) if root else _source_hash()

    def to_dict(self) -> dict[str, Json]:
        """Returns the environment as JSON values."""
        return asdict(self)

    def record_fields(self) -> dict[str, Json]:
        """Returns the fields of a record that describe the environment."""
        return {"environment": self.to_dict(), "commit": self.commit, "dirty": self.dirty}

    def record(
        self,
        kind: Kind,
        kernel: Kernel,
        case: Case,
        scheme: str,
        run_id: str | None = None,
        status: Status = "OK",
        reason: str = "",
    ) -> Record:
        """Makes a record of the kernel, its inputs and the environment.  The caller adds other fields with `replace`.

        Without `run_id`, the record gets a new run id.  The field `commit` is the git commit of the kernel's
        repository.  For a kernel outside of Rooflab, the environment also has Rooflab's version and a hash of the
        kernel's file.  If Rooflab's own commit is unknown, the environment has a hash of its source files (`tree`)."""
        environment, (commit, dirty) = self.to_dict(), (self.commit, self.dirty)
        if kernel_file := file_of(kernel):
            environment["kernel_file_sha256"] = hashlib.sha256(kernel_file.read_bytes()).hexdigest()
            environment["rooflab"], (commit, dirty) = _version("rooflab"), git_state(kernel_file)
        if self.commit is None or self.dirty is None:
            environment["tree"] = Environment.tree()
        return Record(
            kind=kind,
            run_id=run_id or new_run_id(),
            status=status,
            reason=reason,
            environment=environment,
            commit=commit,
            dirty=dirty,
            op=kernel.op,
            kernel=kernel.name,
            role=kernel.role,
            backend=kernel.backend,
            case_id=case.id,
            case=dict(case),
            scheme=scheme,
        )


def machine_key(cpu: str, cores: int, gpu: Gpu | None) -> str:
    """Returns a key such as `amd-epyc-2c-1a2b3c4d`: a readable name, and a hash of the parts that decide the speed.

    The hash omits the GPU's uuid and the size of the host's memory: both differ between machines of one kind."""
    name = gpu.name if gpu else cpu
    hardware = (cpu, cores, gpu and (gpu.name, gpu.memory_bytes, gpu.sms, gpu.power_limit_w))
    name_slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return f"{name_slug}-{cores}c-{hashlib.sha256(repr(hardware).encode()).hexdigest()[:8]}"


@cache
def last_level_cache_bytes(folder: Path = _CPU_FOLDER) -> int:
    """Returns the total bytes of all last-level data caches, read from sysfs; 32 MiB if sysfs lists no cache."""
    bytes_by_cache: dict[tuple[int, str], int] = {}
    for index_folder in folder.glob("cpu[0-9]*/cache/index[0-9]*"):
        if (index_folder / "type").read_text().strip() != "Instruction":
            cache_level = int((index_folder / "level").read_text())
            shared_cpus = (index_folder / "shared_cpu_list").read_text().strip()
            bytes_by_cache[cache_level, shared_cpus] = _size((index_folder / "size").read_text().strip())
    if not bytes_by_cache:
        return 32 * 2**20
    last_level = max(cache_level for cache_level, _ in bytes_by_cache)
    return sum(cache_bytes for (cache_level, _), cache_bytes in bytes_by_cache.items() if cache_level == last_level)


def _size(text: str) -> int:
    unit_bytes = {"K": 2**10, "M": 2**20, "G": 2**30}
    return int(text[:-1]) * unit_bytes[text[-1]] if text[-1] in unit_bytes else int(text)


@cache
def _cpu_model() -> str:
    cpu_info_file = Path("/proc/cpuinfo")
    if cpu_info_file.is_file():
        for info_line in cpu_info_file.read_text().splitlines():
            field_name, _, field_value = info_line.partition(":")
            if field_name.strip() == "model name":
                return field_value.strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    # Reads the metadata and does not import: triton's first import fixes the mode of its interpreter.
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def git_state(path: Path) -> tuple[str | None, bool | None]:
    """Returns the git commit at `path`, and whether files have changed since; `(None, None)` without git.

    For the folder of a checkout, changes in results/ do not count.  For a file, changes of any committed file count.  A
    new file counts as a change.  A file that git ignores gives `(None, None)`."""
    return file_state(path) if path.is_file() else _folder_state(path)


def _folder_state(root: Path) -> tuple[str | None, bool | None]:
    # A package that is installed inside another project's checkout must not report that checkout's commit.
    if top_of(root) != root.resolve():
        return None, None
    commit = git_says(root, "rev-parse", "--verify", "HEAD")
    # Ignores results/: a run writes its own records there, and runs no code from there.
    changed_files = git_says(root, "status", "--porcelain", "--untracked-files=normal", "--", ".", ":!results")
    return commit, None if commit is None or changed_files is None else bool(changed_files)


def own_state() -> tuple[str | None, bool | None]:
    """Returns the git commit of this program, and whether its files have changed.

    For a copy without git, the variable `ROOFLAB_COMMIT` holds COMMIT or COMMIT:TREE, where TREE is a hash of the
    unchanged files.  Without TREE the second result is None.  Raises `ValueError` if the variable has another form."""
    program_state = git_state(ROOT)
    variable_text = os.environ.get(COMMIT_VARIABLE, "")
    if program_state[0] is not None or not variable_text:
        return program_state
    commit, _, tree_text = variable_text.partition(":")
    if not re.fullmatch("[0-9a-f]{40}", commit) or (
        ":" in variable_text and not re.fullmatch("[0-9a-f]{16}", tree_text)
    ):
        raise ValueError(
            f"{COMMIT_VARIABLE}: expected a commit's 40 hex digits, and :TREE with 16 or nothing; got {variable_text!r}"
        )
    return commit, tree_text != Environment.tree() if tree_text else None


def gpu_uuid(device: torch.device | int) -> str:
    """Returns the uuid that names a CUDA device in NVML, because NVML's GPU indices ignore CUDA_VISIBLE_DEVICES."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def _gpu(index: int) -> Gpu | None:
    if not torch.cuda.is_available():
        return None
    device, uuid = torch.cuda.get_device_properties(index), gpu_uuid(index)
    gpu_properties = (device.name, uuid, device.total_memory, device.multi_processor_count, device.L2_cache_size)
    with nvml_of(uuid) as nvml_connection:
        if nvml_connection is None:
            return Gpu(*gpu_properties)
        nvml, gpu_handle = nvml_connection
        power_limit_mw = ask(nvml, "nvmlDeviceGetEnforcedPowerLimit", gpu_handle)
        ecc = ask(nvml, "nvmlDeviceGetEccMode", gpu_handle)
        mig = ask(nvml, "nvmlDeviceGetMigMode", gpu_handle)
        return Gpu(
            *gpu_properties,
            driver=ask(nvml, "nvmlSystemGetDriverVersion"),
            max_sm_clock_mhz=ask(nvml, "nvmlDeviceGetMaxClockInfo", gpu_handle, nvml.NVML_CLOCK_SM),
            max_memory_clock_mhz=ask(nvml, "nvmlDeviceGetMaxClockInfo", gpu_handle, nvml.NVML_CLOCK_MEM),
            power_limit_w=None if power_limit_mw is None else power_limit_mw / 1000,
            ecc=None if ecc is None else bool(ecc[0]),
            mig=None if mig is None else bool(mig[0]),
        )


POWER_FIELD_ID, NVML_SUCCESS = 186, 0
"""`NVML_FI_DEV_POWER_INSTANT` and `NVML_SUCCESS` (nvml.h); older packages lack the first name."""


@contextmanager
def nvml_of(uuid: str) -> Iterator[tuple[ModuleType, object] | None]:
    """Yields NVML and its handle of the GPU; None if the package, the driver, or a GPU with this uuid is missing."""
    if importlib.util.find_spec("pynvml") is None:
        yield None
        return
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        gpu_handle = ask(pynvml, "nvmlDeviceGetHandleByUUID", uuid)
        yield None if gpu_handle is None else (pynvml, gpu_handle)
    finally:
        pynvml.nvmlShutdown()


def ask(nvml: ModuleType, function: str, *arguments: object) -> Json:
    """Returns NVML's answer to a query; None if this card or driver does not support the query."""
    try:
        return getattr(nvml, function)(*arguments)
    except nvml.NVMLError:
        return None


def power_w(nvml: ModuleType, handle: object) -> float | None:
    """Returns the present power draw in watts; None if this card does not report it.

    The query `nvmlDeviceGetPowerUsage` is not used: it averages over 1 s on most cards, far longer than a kernel runs.
    """
    fields = ask(nvml, "nvmlDeviceGetFieldValues", handle, [POWER_FIELD_ID])
    return int(fields[0].value.uiVal) / 1000 if fields is not None and fields[0].nvmlReturn == NVML_SUCCESS else None


def tree_hash(root: Path = ROOT, folders: Sequence[str] = SOURCE_FOLDERS) -> str:
    """Returns a hash of all source files.  It identifies the code without a commit, or after uncommitted changes."""
    source_hash = hashlib.sha256()
    for folder in folders:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".py", ".cu", ".cuh", ".cpp", ".h", ".json") and path.is_file():
                source_hash.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return source_hash.hexdigest()[:16]


_source_hash = cache(tree_hash)


@cache  # as the run begins: its own results change the repository
def file_state(file: Path) -> tuple[str | None, bool | None]:
    """Returns the git commit of a file's repository, and whether its files have changed since.  A new file counts as a
    change.  Returns `(None, None)` without git, or if git ignores the file.

    The first result is cached, because a run itself may change the repository."""
    folder, name = file.absolute().parent, file.name
    known_files = git_says(folder, "ls-files", "--cached", "--others", "--exclude-standard", "--", name)
    commit = git_says(folder, "rev-parse", "--verify", "HEAD") if known_files else None
    if commit is None:
        return None, None
    changed_files = git_says(folder, "status", "--porcelain", "--untracked-files=no")
    file_changes = git_says(folder, "status", "--porcelain", "--untracked-files=all", "--", name)
    return commit, None if changed_files is None or file_changes is None else bool(changed_files or file_changes)
