"""Runs kernels in child processes.  Inputs and outputs are passed through files in shared memory.

The oracle (the reference outputs), the tolerance and the verdict stay in the parent process.  The child does not get
the seed.  If the child ends or hangs, the kernel has failed.  In the child, `answer` handles the requests.
"""

from __future__ import annotations

import math
import pickle
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

import torch

from rooflab.bench.base.plain import Json, JsonObject
from rooflab.bench.base.system_time import time
from rooflab.bench.core.call import input_bytes
from rooflab.bench.core.check import check_kernel
from rooflab.bench.core.check_data import CheckResult, CheckTask, named_in, options_on
from rooflab.bench.core.failed import Failed, LayoutRefused
from rooflab.bench.core.process import Child, ChildFailed, Pool, cores
from rooflab.bench.core.record import NOT_RUN
from rooflab.bench.core.select import file_of
from rooflab.bench.core.timers import tampered
from rooflab.bench.core.trial import DEFAULT_LAYOUT, Layout, Runner
from rooflab.kernels import registry
from rooflab.kernels.registry import Kernel
from rooflab.reference.spec import Inputs, OpSpec, Outputs, Scheme, extent, get_scheme

LATE_S = 10.0
"""A check that still runs at the limit is ended this many seconds later."""


class Checkers:
    """Runs checks of kernels in child processes.  On a CPU there is one child per core, with one thread.

    With the process pool `emulators`, kernels with compiled code run in the emulator.  A check ends after `limit_s`
    seconds (by default the pool's limit), or when the event `over` is set.

    If a kernel refuses an optional argument (`ValueError`), its later checks on random cases omit this argument."""

    def __init__(self, device: torch.device, emulators: Pool | None = None, limit_s: float | None = None):
        self.device, self.over, self._emulators, self._limit_s = device, threading.Event(), emulators, limit_s
        self._refused: dict[str, set[str]] = {}
        """By the id of a kernel, the options that the kernel has refused with a `ValueError`."""

    @property
    def workers(self) -> int:
        """Returns the largest number of checks that run at the same time."""
        return cores() if self.device.type == "cpu" else 1

    def _pool(self, kernel: Kernel) -> Pool:
        emulator_pool = self._emulators if kernel.has_code else None
        return emulator_pool or Pool.of_kernels(self.device.type == "cpu")

    def start(self, checks: Sequence[CheckTask]) -> None:
        """Starts the child processes that `checks` need, and waits until these processes are ready."""
        for child_pool in {self._pool(task.kernel) for task in checks}:
            child_pool.start(min(len(checks), self.workers))

    def __call__(self, task: CheckTask) -> CheckResult:
        """Checks one kernel in a child process.

        A fault ends the child, because the kernel may have damaged it. After a wrong answer, the child checks only the
        same kernel. A kernel file that has changed gets a new child."""
        op_spec, refused_options = registry.get_op(task.kernel.op), self._refused.setdefault(task.kernel.id, set())
        if task.schemes and refused_options:
            task = task.taken(op_spec, refused_options) or task
        kernel, case, scheme = task.kernel, task.case, task.scheme
        meta_inputs = op_spec.make_inputs(case, scheme, torch.device("meta"), task.seed)
        file_version = f"{kernel.file} {kernel.file.stat().st_mtime_ns} " if kernel.file else ""
        child_user, pool = f"{file_version}{kernel.id} ", self._pool(kernel)
        with pool.child(child_user) as child:
            ask_limits, input_byte_count = (self._limit_s or pool.limit_s, self.over.is_set), input_bytes(meta_inputs)
            with closing(Outside(child, ask_limits, input_byte_count, kernel, op_spec, scheme, self.device)) as runner:
                result = check_kernel(kernel, op_spec, case, scheme, self.device, task.seed, task.planted, runner)
            if result.status not in ("OK", "INCORRECT", *NOT_RUN):
                child.stop()
            child.only_for = child_user if result.status == "INCORRECT" else child.only_for or file_version
        if result.not_offered:
            refused_options |= named_in(result.reason, options_on(op_spec, meta_inputs))
        return result

    def each(self, checks: Sequence[CheckTask], limit_s: float = math.inf) -> Iterator[tuple[int, CheckResult]]:
        """Yields each result and its index in `checks`, as soon as it is ready.  Outputs are judged in this process.

        No check begins after `limit_s` seconds.  Checks that run at that time have `LATE_S` seconds more.  A check that
        did not begin or did not end has no result."""
        deadline, workers = time.monotonic() + limit_s, max(1, min(self.workers, len(checks)))

        def begin(place: int) -> tuple[int, CheckResult] | None:
            return (place, self(checks[place])) if time.monotonic() < deadline else None

        thread_setup = partial(torch.set_num_threads, 1) if workers > 1 else None  # each judges on a core of its own
        threads = ThreadPoolExecutor(workers, initializer=thread_setup)
        check_futures = [threads.submit(begin, place) for place in range(len(checks))]
        try:
            with suppress(TimeoutError):  # what still runs then is left out
                for check_run in as_completed(check_futures, None if limit_s == math.inf else limit_s + LATE_S):
                    if (result := check_run.result()) is not None:
                        yield result
        finally:
            if any(check_run.running() for check_run in check_futures):
                self.over.set()
            threads.shutdown(cancel_futures=True)


class Outside(Runner):
    """Runs a kernel in the process `child`, and gets the results from there.

    `limits` holds the longest time of a run in seconds, and a function that returns True to end the child early.
    `close` frees the memory that both processes share."""

    def __init__(
        self,
        child: Child,
        limits: tuple[float, Callable[[], bool]],
        bytes_: int,
        kernel: Kernel,
        spec: OpSpec,
        scheme: Scheme,
        device: torch.device,
    ):
        super().__init__(kernel, spec, scheme, device)
        self._child, self._limits = child, limits
        self._folder = shared_folder(bytes_)
        self._file = Path(self._folder.name) / "request.pt"

    def close(self) -> None:
        self._folder.cleanup()

    def begin(self) -> None:
        if tampering_fault := tampered():  # by the import of its file
            raise Failed("INVALID", f"{tampering_fault}, before the check began")
        file = file_of(self.kernel)
        arguments = self.spec.name, self.kernel.name, str(file) if file else None, self.scheme.name, str(self.device)
        self._ask("begin", *arguments)

    def load(self, name: str, inputs: Inputs, packed_in: str | None = None) -> bool:
        return bool(self._ask("load", name, inputs, packed_in))

    def run(self, name: str, layout: Layout = DEFAULT_LAYOUT) -> Outputs:
        return cast(Outputs, self._ask("run", name, vars(layout)))

    def settle(self) -> None:
        self._ask("settle")

    def seen(self) -> dict[str, Any]:
        return {"checked_by": "none"} if self._child.ended else cast("dict[str, Any]", self._ask("seen"))

    def _ask(self, name: str, *arguments: object) -> object:
        """Calls a method of the `Runner` in a child process. Raises its errors, and `Failed` if no answer comes."""
        try:
            request = {"call": name, "arguments": written(arguments, self._file)}
        except OSError as full:
            raise Failed("OUT_OF_MEMORY", f"for the inputs in shared memory: {full}") from full
        try:
            child_reply = self._child.ask(request, *self._limits)
        except ChildFailed as failed:
            if failed.limit_s is not None:
                timeout_reason = f"no answer within {failed.limit_s:g} s: a loop or a barrier without an end"
                raise Failed("TIMEOUT", timeout_reason) from failed
            raise Failed("RUNTIME_ERROR", str(failed)) from failed
        if "failed" in child_reply:
            raise Failed(*child_reply["failed"])
        if "refused" in child_reply:
            raise LayoutRefused(child_reply["refused"])
        return cast(object, read(child_reply["done"], self.device))


class Serving:
    """Answers requests from a parent process, in the process that runs kernels for it.  The request `begin` names a
    kernel, and later requests run this kernel."""

    def __init__(self, make: Callable[[Kernel, OpSpec, Scheme, torch.device], Runner] = Runner):
        self._make = make
        self._runner: Runner | None = None

    @staticmethod
    def kernel(op: str, name: str, file: str | None) -> Kernel:
        """Returns a kernel; an unregistered one is loaded from `file`.  Raises `ValueError` on an unknown name."""
        is_registered = op in registry.ops() and name in registry.kernels(op)
        if file and not is_registered:
            registry.load_file(Path(file))
        return registry.get_kernel(op, name)

    def answer(self, request: JsonObject) -> Json:
        """Handles a request.  Returns `done` and the result, `failed` and the fault, or `refused`."""
        name, device = request["call"], self._runner.device if self._runner else torch.device("cpu")
        arguments = read(request["arguments"], device)
        try:
            return {"done": written(self._call(name, arguments), Path(request["arguments"]).with_name("answer.pt"))}
        except Failed as failed:
            return {"failed": [failed.status, failed.reason]}
        except LayoutRefused as refused:
            return {"refused": str(refused)}

    def _call(self, name: str, arguments: tuple[Json, ...]) -> object:
        if name == "begin":
            op, kernel, file, scheme, device = arguments
            try:
                loaded_kernel = self.kernel(op, kernel, file)
            except (ValueError, ImportError, OSError) as error:
                raise Failed("RUNTIME_ERROR", str(error)) from error
            self._runner = self._make(loaded_kernel, registry.get_op(op), get_scheme(scheme), torch.device(device))
            arguments = ()
        assert self._runner is not None, "the first request is `begin`"
        if name == "run":
            arguments = arguments[0], Layout(**arguments[1])
        with self._runner.around():
            return getattr(self._runner, name)(*arguments)


answer = Serving().answer


SHARED_MEMORY_FOLDER = Path("/dev/shm")


def shared_folder(bytes_: int) -> tempfile.TemporaryDirectory[str]:
    """Returns a temporary folder in shared memory, or on disk if shared memory has too little space for `bytes_`."""
    fits_in_memory = SHARED_MEMORY_FOLDER.is_dir() and shutil.disk_usage(SHARED_MEMORY_FOLDER).free > 8 * bytes_
    return tempfile.TemporaryDirectory(prefix="rooflab-", dir=SHARED_MEMORY_FOLDER if fits_in_memory else None)


ALIGNMENT = 64
"""A copied tensor keeps its address modulo this number of bytes, because kernels specialise on alignment."""


class _Writer(pickle.Pickler):
    """Pickles a tensor as its bytes, from the first to the last element, with its strides and alignment."""

    def persistent_id(self, value: object) -> object:
        if not isinstance(value, torch.Tensor):
            return None
        flat_bytes = value.detach().as_strided((extent(value.shape, value.stride()),), (1,)).view(torch.uint8).cpu()
        address_offset = value.data_ptr() % ALIGNMENT
        return value.dtype, tuple(value.shape), value.stride(), address_offset, bytearray(flat_bytes.numpy())


class _Reader(pickle.Unpickler):
    """Reads the output of a `_Writer`, with tensors on `device`.  Refuses pickled code, such as classes."""

    def __init__(self, file: IO[bytes], device: torch.device):
        super().__init__(file)
        self._device = device

    def persistent_load(self, saved: Any) -> torch.Tensor:
        dtype, shape, stride, address_offset, tensor_bytes = saved
        aligned_buffer = torch.empty(len(tensor_bytes) + ALIGNMENT, dtype=torch.uint8, device=self._device)
        offset = (address_offset - aligned_buffer.data_ptr()) % ALIGNMENT
        if tensor_bytes:
            aligned_buffer[offset : offset + len(tensor_bytes)].copy_(torch.frombuffer(tensor_bytes, dtype=torch.uint8))
        flat_tensor = aligned_buffer[offset : offset + len(tensor_bytes)].view(dtype)
        return flat_tensor.as_strided(shape, stride, flat_tensor.storage_offset())

    def find_class(self, module: str, name: str) -> Any:
        torch_attribute = getattr(torch, name, None) if module == "torch" else None
        if torch_attribute is not torch.Size and not isinstance(torch_attribute, torch.dtype):
            raise pickle.UnpicklingError(f"expected tensors and plain values, got {module}.{name}")
        return torch_attribute


def written(value: object, file: Path) -> str:
    """Writes tensors and plain values to `file`, and returns the path.  Raises `OSError` on a full disk."""
    with file.open("wb") as out_file:
        _Writer(out_file, protocol=5).dump(value)
    return str(file)


def read(path: str, device: torch.device) -> Any:
    """Returns the value that `written` wrote to `path`, with its tensors on `device`."""
    with open(path, "rb") as file:
        return _Reader(file, device).load()
