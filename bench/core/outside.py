"""Kernels in child processes: inputs go there and outputs come back through files in shared memory.

Oracle, tolerance and verdict stay in the asking process, and are made after the answer; the child is not told the seed.
A process that ends or hangs has failed; nothing that it prints counts.  In the child, `answer`
serves the requests.
"""

from __future__ import annotations

import math
import mmap
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

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
from rooflab.bench.core.trial import PLAIN, Layout, Runner, Seen
from rooflab.kernels import registry
from rooflab.kernels.registry import Kernel
from rooflab.reference.spec import Inputs, OpSpec, Outputs, Scheme, extent, get_scheme

LATE_S = 10.0
"""A check that began before the limit is ended this many seconds after the limit."""


class Checkers:
    """Makes checks whose kernels run in child processes, on a CPU in one for each core, with one thread each.

    They interpret Triton's kernels if this process does; with `emulators`, a pool of such processes, kernels that have
    compiled code run in the emulator.  A child is ended when a call takes longer than `limit_s` seconds, by default
    its pool's limit, and when `over` is set.  A drawn case with an option that its kernel has refused is checked
    without the option.
    """

    def __init__(self, device: torch.device, emulators: Pool | None = None, limit_s: float | None = None):
        self.device, self.over, self._emulators, self._limit_s = device, threading.Event(), emulators, limit_s
        self._refused: dict[str, set[str]] = {}
        """Options that a kernel has refused with a `ValueError`."""

    @property
    def workers(self) -> int:
        """Most checks at a time."""
        return cores() if self.device.type == "cpu" else 1

    def _pool(self, kernel: Kernel) -> Pool:
        emulated = self._emulators if kernel.has_code else None
        return emulated or Pool.of_kernels(self.device.type == "cpu")

    def start(self, checks: Sequence[CheckTask]) -> None:
        """Starts the processes that these checks take, and waits until they are ready."""
        for pool in {self._pool(task.kernel) for task in checks}:
            pool.start(min(len(checks), self.workers))

    def __call__(self, task: CheckTask) -> CheckResult:
        """Makes one check.

        After a fault its child is ended, because the kernel may have left it in any state; after a wrong answer it
        only runs the same kernel again.  A file that has changed is imported by another child.
        """
        spec, refused = registry.get_op(task.kernel.op), self._refused.setdefault(task.kernel.id, set())
        if task.schemes and refused:
            task = task.taken(spec, refused) or task
        kernel, case, scheme = task.kernel, task.case, task.scheme
        priced = spec.make_inputs(case, scheme, torch.device("meta"), task.seed)
        own = f"{kernel.file} {kernel.file.stat().st_mtime_ns} " if kernel.file else ""
        user, pool = f"{own}{kernel.id} ", self._pool(kernel)
        with pool.child(user) as child:
            limits, bytes_ = (self._limit_s or pool.limit_s, self.over.is_set), input_bytes(priced)
            with closing(Outside(child, limits, bytes_, kernel, spec, scheme, self.device)) as runner:
                result = check_kernel(kernel, spec, case, scheme, self.device, task.seed, task.planted, runner)
            if result.status not in ("OK", "INCORRECT", *NOT_RUN):
                child.stop()
            child.only_for = user if result.status == "INCORRECT" else child.only_for or own
        if result.not_offered:
            refused |= named_in(result.reason, options_on(spec, priced))
        return result

    def each(self, checks: Sequence[CheckTask], limit_s: float = math.inf) -> Iterator[tuple[int, CheckResult]]:
        """Yields each result as it comes, with its index in `checks`; threads of this process judge.

        No check begins after `limit_s` seconds, and those that run then have `LATE_S` more: the other results are left
        out.
        """
        ends, workers = time.monotonic() + limit_s, max(1, min(self.workers, len(checks)))

        def begin(place: int) -> tuple[int, CheckResult] | None:
            return (place, self(checks[place])) if time.monotonic() < ends else None

        one_thread = partial(torch.set_num_threads, 1) if workers > 1 else None  # each judges on a core of its own
        threads = ThreadPoolExecutor(workers, initializer=one_thread)
        futures = [threads.submit(begin, place) for place in range(len(checks))]
        try:
            with suppress(TimeoutError):  # what still runs then is left out
                for future in as_completed(futures, None if limit_s == math.inf else limit_s + LATE_S):
                    if (found := future.result()) is not None:
                        yield found
        finally:
            if any(future.running() for future in futures):
                self.over.set()
            threads.shutdown(cancel_futures=True)


class Outside(Runner):
    """A `Runner` in the process `child`; `limits` of each call are those of `Child.ask`.  `close` frees the memory."""

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
        self._writer, self._reader = Writer(self._folder.name), Reader()

    def close(self) -> None:
        self._folder.cleanup()

    def begin(self) -> None:
        if tampering := tampered():  # by the import of its file
            raise Failed("INVALID", f"{tampering}, before the check began")
        file = file_of(self.kernel)
        words = self.spec.name, self.kernel.name, str(file) if file else None, self.scheme.name, str(self.device)
        self._ask("begin", *words)

    def load(self, name: str, inputs: Inputs, packed_in: str | None = None) -> bool:
        return bool(self._ask("load", name, inputs, packed_in))

    def run(self, name: str, layout: Layout = PLAIN) -> Outputs:
        forms = tuple((shape, str(dtype).removeprefix("torch.")) for shape, dtype in layout.forms)
        return cast(Outputs, self._ask("run", name, {**vars(layout), "forms": forms}))

    def settle(self) -> None:
        self._ask("settle")

    def seen(self) -> Seen:
        return Seen("none") if self._child.ended else Seen(*cast(Iterable[Any], self._ask("seen")))

    def _ask(self, name: str, *arguments: object) -> object:
        """The result of a method of the child's `Runner`.  Raises as that does, and `Failed` without an answer."""
        try:
            request = {"call": name, "arguments": self._writer.write(arguments)}
        except OSError as full:
            raise Failed("OUT_OF_MEMORY", f"for the inputs in shared memory: {full}") from full
        try:
            reply = self._child.ask(request, *self._limits)
        except ChildFailed as failed:
            if failed.limit_s is not None:
                why = f"no answer within {failed.limit_s:g} s: a loop or a barrier without an end"
                raise Failed("TIMEOUT", why) from failed
            raise Failed("RUNTIME_ERROR", str(failed)) from failed
        if "failed" in reply:
            raise Failed(*reply["failed"])
        if "refused" in reply:
            raise LayoutRefused(reply["refused"])
        return self._reader.read(reply["done"], self.device)


class Serving:
    """The child's side: it holds the `Runner` of the kernel that was begun last."""

    def __init__(self, make: Callable[[Kernel, OpSpec, Scheme, torch.device], Runner] = Runner):
        self._make = make
        self._runner: Runner | None = None

    @staticmethod
    def kernel(op: str, name: str, file: str | None) -> Kernel:
        """The kernel of that name, which `file` registers.  Raises `ValueError` on an unknown name."""
        known = op in registry.ops() and name in registry.kernels(op)
        if file and not known:
            registry.load_file(Path(file))
        return registry.get_kernel(op, name)

    def answer(self, request: JsonObject) -> Json:
        """`done` with the result, or the fault."""
        name, device = request["call"], self._runner.device if self._runner else torch.device("cpu")
        if name == "begin":
            self._reader, self._writer = Reader(), Writer(os.path.dirname(request["arguments"]["file"]))
        arguments = cast("tuple[Any, ...]", self._reader.read(request["arguments"], device))
        try:
            return {"done": self._writer.write(self._call(name, arguments))}
        except Failed as failed:
            return {"failed": [failed.status, failed.reason]}
        except LayoutRefused as refused:
            return {"refused": str(refused)}

    def _call(self, name: str, arguments: tuple[Json, ...]) -> object:
        if name == "begin":
            op, kernel, file, scheme, device = arguments
            try:
                found = self.kernel(op, kernel, file)
            except (ValueError, ImportError, OSError) as error:
                raise Failed("RUNTIME_ERROR", str(error)) from error
            self._runner = self._make(found, registry.get_op(op), get_scheme(scheme), torch.device(device))
            arguments = ()
        assert self._runner is not None, "the first request is `begin`"
        if name == "run":
            forms = tuple((torch.Size(shape), getattr(torch, dtype)) for shape, dtype in arguments[1]["forms"])
            arguments = arguments[0], Layout(**{**arguments[1], "forms": forms})
        with self._runner.around():
            result = getattr(self._runner, name)(*arguments)
        return (result.by, result.races, result.bytes) if isinstance(result, Seen) else result


answer = Serving().answer


SHARED_MEMORY = Path("/dev/shm")
ALIGNMENT = 64
"""Bytes; a tensor keeps its own place behind a multiple of them, because kernels specialise on alignment."""
SPARE = 2
"""A new file has room for this many times the bytes that are asked for."""


class Writer:
    """Copies tensors into a file of `folder`, and into a larger one if they do not fit."""

    def __init__(self, folder: str):
        self._folder = folder
        self._path = ""
        self._room = torch.empty(0, dtype=torch.uint8)

    def write(self, value: object) -> Json:
        """`value` as JSON values, for `Reader.read`; sequences become tuples.  Raises `OSError` if the disk is full."""
        tensors: list[torch.Tensor] = []
        plain = _without_tensors(value, tensors)
        flat = [_flat(tensor) for tensor in tensors]
        places, end = [], 0
        for tensor, values in zip(tensors, flat, strict=True):
            places.append(end + tensor.data_ptr() % ALIGNMENT)
            end = -(-(places[-1] + values.nbytes) // ALIGNMENT) * ALIGNMENT
        if end > self._room.numel() or not self._path:
            self._make_room(SPARE * end)
        described = []
        for tensor, values, place in zip(tensors, flat, places, strict=True):
            self._room[place : place + values.nbytes].copy_(values)
            dtype = str(tensor.dtype).removeprefix("torch.")
            described.append([dtype, list(tensor.shape), list(tensor.stride()), place, values.nbytes])
        return {"file": self._path, "values": plain, "tensors": described}

    def _make_room(self, size: int) -> None:
        if self._path:
            Path(self._path).unlink(missing_ok=True)
        descriptor, self._path = tempfile.mkstemp(dir=self._folder)
        with open(descriptor, "r+b") as file:
            # A place on a full disk that was not allocated would end the process when it is written.
            os.posix_fallocate(file.fileno(), 0, max(size, mmap.PAGESIZE))
            self._room = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)


class Reader:
    """Reads what a `Writer` wrote."""

    def __init__(self) -> None:
        self._path = ""
        self._room = torch.empty(0, dtype=torch.uint8)

    def read(self, message: Json, device: torch.device) -> object:
        """The value of a message; its tensors are copies on `device` with the same strides and alignment."""
        if message["file"] != self._path:
            self._path = message["file"]
            with open(self._path, "r+b") as file:
                self._room = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
        tensors = []
        for dtype, shape, stride, place, nbytes in message["tensors"]:
            own = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8, device=device)
            skew = (place - own.data_ptr()) % ALIGNMENT
            own[skew : skew + nbytes].copy_(self._room[place : place + nbytes])
            flat = own[skew : skew + nbytes].view(getattr(torch, dtype))
            tensors.append(flat.as_strided(shape, stride, flat.storage_offset()))
        return _with_tensors(message["values"], tensors)


def shared_folder(bytes_: int) -> tempfile.TemporaryDirectory[str]:
    """A folder in shared memory, or on the disk if shared memory has too little room for the bytes."""
    there = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > 8 * bytes_
    return tempfile.TemporaryDirectory(prefix="rooflab-", dir=SHARED_MEMORY if there else None)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of the memory between a tensor's first and last element."""
    count = extent(tensor.shape, tensor.stride())
    return tensor.detach().as_strided((count,), (1,)).view(torch.uint8)


def _without_tensors(value: object, tensors: list[torch.Tensor]) -> Json:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if isinstance(value, Mapping):
        return {"mapping": {name: _without_tensors(item, tensors) for name, item in value.items()}}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_without_tensors(item, tensors) for item in value]
    return value


def _with_tensors(value: Json, tensors: Sequence[torch.Tensor]) -> object:
    if isinstance(value, list):
        return tuple(_with_tensors(item, tensors) for item in value)
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensors[value["tensor"]]
    return {name: _with_tensors(item, tensors) for name, item in value["mapping"].items()}
