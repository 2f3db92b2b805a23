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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rooflab.bench.core.call import input_bytes
from rooflab.bench.core.check import check_kernel
from rooflab.bench.core.check_data import CheckResult
from rooflab.bench.core.failed import Failed, LayoutRefused
from rooflab.bench.core.inputs import Planted, named_in, options_on, taken
from rooflab.bench.core.process import Child, ChildFailed, TimedOut, emulators, kernel_processes
from rooflab.bench.core.record import NOT_RUN
from rooflab.bench.core.select import file_of
from rooflab.bench.core.system_time import time
from rooflab.bench.core.timers import tampered
from rooflab.bench.core.trial import PLAIN, Layout, Runner, Seen
from rooflab.kernels import registry
from rooflab.kernels.registry import Kernel
from rooflab.reference.spec import Case, Inputs, OpSpec, Outputs, Scheme, get_scheme

LATE_S = 10.0
"""A check that began before the limit is ended this many seconds after the limit."""


class CheckTask(NamedTuple):
    """One check to make."""

    kernel: Kernel
    case: Case
    scheme: Scheme
    seed: int = 0
    planted: Planted = True
    principle: str = ""
    """What it was drawn for: one of `inputs.PRINCIPLES`, or an empty text."""
    schemes: tuple[Scheme, ...] = ()
    """Of a drawn check: its scheme, and then those to which it may go if the kernel refuses an option of it."""


def check_outside(
    item: CheckTask,
    device: torch.device,
    *,
    emulate: bool = False,
    limit_s: float | None = None,
    hangs: Callable[[], bool] = lambda: False,
) -> CheckResult:
    """Makes a check whose kernel runs in a child process; on a CPU with one thread.

    It interprets Triton's kernels if this process does; with `emulate`, kernels that have compiled code run in the
    emulator.  The child is ended when a call takes longer than `limit_s` seconds, by default the pool's limit, or when
    `hangs` says so.  After a fault it is ended too, because the kernel may have left it in any state; after a wrong
    answer it only runs the same kernel again.
    """
    spec, file = registry.get_op(item.kernel.op), item.kernel.file
    pool = emulators() if emulate and item.kernel.has_code else kernel_processes(device.type == "cpu")
    # A file that has changed is imported by another child.
    own = f"{file} {file.stat().st_mtime_ns} " if file else ""
    user = f"{own}{item.kernel.id} "
    with pool.child(user) as child:
        priced = spec.make_inputs(item.case, item.scheme, torch.device("meta"), item.seed)
        limits, bytes_ = (limit_s or pool.limit_s, hangs), input_bytes(priced)
        with closing(Outside(child, limits, bytes_, item.kernel, spec, item.scheme, device)) as runner:
            result = check_kernel(item.kernel, spec, item.case, item.scheme, device, item.seed, item.planted, runner)
        if result.status not in ("OK", "INCORRECT", *NOT_RUN):
            child.stop()
        child.only_for = user if result.status == "INCORRECT" else child.only_for or own
    return result


class Checkers:
    """Makes checks by `check_outside`.  When `over` is set, the checks that are being made fail.

    A drawn case with an option that its kernel has refused is checked without the option.
    """

    def __init__(self, device: torch.device, emulate: bool = False):
        self.device, self.over, self._emulate = device, threading.Event(), emulate
        self._refused: dict[str, set[str]] = {}
        """Options that a kernel has refused with a `ValueError`."""

    def start(self, checks: Sequence[CheckTask], workers: int) -> None:
        """Starts the processes for `workers` checks at a time, and waits until they are ready."""
        kinds = {self._emulate and item.kernel.has_code for item in checks}
        for emulated in kinds:
            pool = emulators() if emulated else kernel_processes(self.device.type == "cpu")
            pool.start(min(len(checks), workers))

    def __call__(self, item: CheckTask) -> CheckResult:
        spec, refused = registry.get_op(item.kernel.op), self._refused.setdefault(item.kernel.id, set())
        if item.schemes and refused:
            case, scheme = taken(item.kernel, spec, item.case, item.schemes, refused) or (item.case, item.scheme)
            item = item._replace(case=case, scheme=scheme)
        found = check_outside(item, self.device, emulate=self._emulate, hangs=self.over.is_set)
        if found.not_offered:
            inputs = spec.make_inputs(item.case, item.scheme, torch.device("meta"), item.seed)
            refused |= named_in(found.reason, options_on(spec, inputs))
        return found


def in_turn(
    checks: Sequence[CheckTask], make: Checkers, workers: int, limit_s: float = math.inf
) -> Iterator[tuple[int, CheckResult]]:
    """Yields each result as it comes, with its index in `checks`; threads of this process judge.

    No check begins after `limit_s` seconds, and those that run then have `LATE_S` more: the other results are left out.
    """
    ends = time.monotonic() + limit_s

    def begin(place: int) -> tuple[int, CheckResult] | None:
        return (place, make(checks[place])) if time.monotonic() < ends else None

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
            make.over.set()
        threads.shutdown(cancel_futures=True)


class Outside(Runner):
    """A `Runner` in the process `child`; `limits` of each call are those of `Child.ask`.  `close` frees the memory."""

    def __init__(self, child: Child, limits: tuple[float, Callable[[], bool]], bytes_: int, *kernel: Any):
        super().__init__(*kernel)
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
        read: Outputs = self._ask("run", name, {**vars(layout), "forms": forms})
        return read

    def settle(self) -> None:
        self._ask("settle")

    def seen(self) -> Seen:
        return Seen("none") if self._child.ended else Seen(*self._ask("seen"))

    def _ask(self, name: str, *arguments: Any) -> Any:
        """The result of a method of the child's `Runner`.  Raises as that does, and `Failed` without an answer."""
        try:
            request = {"call": name, "arguments": self._writer.write(arguments)}
        except OSError as full:
            raise Failed("OUT_OF_MEMORY", f"for the inputs in shared memory: {full}") from full
        try:
            reply = self._child.ask(request, *self._limits)
        except TimedOut as late:
            why = f"no answer within {late.limit_s:g} s: a loop or a barrier without an end"
            raise Failed("TIMEOUT", why) from late
        except ChildFailed as failed:
            raise Failed("RUNTIME_ERROR", str(failed)) from failed
        if "failed" in reply:
            raise Failed(*reply["failed"])
        if "refused" in reply:
            raise LayoutRefused(reply["refused"])
        return self._reader.read(reply["done"], self.device)


def kernel_of(op: str, name: str, file: str | None) -> Kernel:
    """The kernel of that name, which `file` registers.  Raises `ValueError` on an unknown name."""
    known = op in registry.ops() and name in registry.kernels(op)
    if file and not known:
        registry.load_file(Path(file))
    return registry.get_kernel(op, name)


class Serving:
    """The child's side: it holds the `Runner` of the kernel that was begun last."""

    def __init__(self, make: Callable[[Kernel, OpSpec, Scheme, torch.device], Runner] = Runner):
        self._make = make
        self._runner: Runner | None = None

    def answer(self, request: Mapping[str, Any]) -> Any:
        """`done` with the result, or the fault."""
        name, device = request["call"], self._runner.device if self._runner else torch.device("cpu")
        if name == "begin":
            self._reader, self._writer = Reader(), Writer(os.path.dirname(request["arguments"]["file"]))
        arguments = self._reader.read(request["arguments"], device)
        try:
            return {"done": self._writer.write(self._call(name, arguments))}
        except Failed as failed:
            return {"failed": [failed.status, failed.reason]}
        except LayoutRefused as refused:
            return {"refused": str(refused)}

    def _call(self, name: str, arguments: tuple[Any, ...]) -> Any:
        if name == "begin":
            op, kernel, file, scheme, device = arguments
            try:
                found = kernel_of(op, kernel, file)
            except (ValueError, ImportError, OSError) as error:
                raise Failed("RUNTIME_ERROR", str(error)) from error
            self._runner = self._make(found, registry.get_op(op), get_scheme(scheme), torch.device(device))
            return self._runner.begin()
        assert self._runner is not None, "the first request is `begin`"
        if name == "run":
            forms = tuple((torch.Size(shape), getattr(torch, dtype)) for shape, dtype in arguments[1]["forms"])
            layout = {**arguments[1], "forms": forms}
            return self._runner.run(arguments[0], Layout(**layout))
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

    def write(self, value: Any) -> Any:
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

    def read(self, message: Any, device: torch.device) -> Any:
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
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    extent = 1 + sum((size - 1) * stride for size, stride in pairs) if tensor.numel() else 0
    return tensor.detach().as_strided((extent,), (1,)).view(torch.uint8)


def _without_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if isinstance(value, Mapping):
        return {"mapping": {name: _without_tensors(item, tensors) for name, item in value.items()}}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_without_tensors(item, tensors) for item in value]
    return value


def _with_tensors(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if isinstance(value, list):
        return tuple(_with_tensors(item, tensors) for item in value)
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensors[value["tensor"]]
    return {name: _with_tensors(item, tensors) for name, item in value["mapping"].items()}
