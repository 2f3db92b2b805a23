"""A kernel in a process of its own: inputs go there and outputs come back through files in shared memory.

Seeds, oracle, tolerance and verdict stay in the asking process, and are made after the answer.  A process that ends,
hangs or answers in another form has failed; nothing that it prints counts.  In the child, `answer` serves the requests.
"""

from __future__ import annotations

import inspect
import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import torch

from rooflab.bench.calls.calls import input_bytes
from rooflab.bench.check.failed import Failed, Refused
from rooflab.bench.check.trial import PLAIN, Layout, Runner, Seen, Trial
from rooflab.bench.processes.child import Child, ChildFailed, TimedOut
from rooflab.bench.records.record import Failure
from rooflab.kernels import registry
from rooflab.kernels.registry import Kernel
from rooflab.reference.spec import Inputs, OpSpec, Scheme, get_scheme

SHARED_MEMORY = Path("/dev/shm")
FAULTS = ("UNSUPPORTED", "UNAVAILABLE", *get_args(Failure))
"""Statuses that a child may give: never OK."""


@contextmanager
def passed_files(bytes_: int) -> Iterator[tuple[str, str]]:
    """Names of a request's file and of its answer's, in shared memory if `bytes_` fit there twice."""
    fits = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > 2 * bytes_
    with tempfile.TemporaryDirectory(prefix="rooflab-", dir=SHARED_MEMORY if fits else None) as folder:
        yield f"{folder}/request", f"{folder}/answer"


class Outside(Runner):
    """A `Runner` in the process `child`, which may take `limit_s` seconds for each run."""

    def __init__(self, child: Child, limit_s: float, *kernel: Any):
        super().__init__(*kernel)
        self._child, self._limit_s = child, limit_s

    def begin(self) -> None:
        file = file_of(self.kernel)
        words = self.spec.name, self.kernel.name, str(file) if file else None, self.scheme.name, str(self.device)
        self._ask("begin", *words)

    def load(self, name: str, inputs: Inputs) -> bool:
        return bool(self._ask("load", name, inputs, bytes_=input_bytes(inputs)))

    def load_packed(self, name: str, inputs: Inputs, as_in: str) -> None:
        self._ask("load_packed", name, inputs, as_in, bytes_=input_bytes(inputs))

    def run(self, name: str, layout: Layout = PLAIN) -> Trial:
        match self._ask("run", name, layout):
            case [tuple(read), list(work)] if all(isinstance(value, torch.Tensor) for value in read):
                return Trial(read, frozenset(work))
        raise self._bad_answer()

    def changes_later(self) -> str | None:
        found = self._ask("changes_later")
        return None if found is None else str(found)

    def end(self) -> None:
        self._ask("end")

    def seen(self) -> Seen:
        if self._child.ended:
            return Seen("none")
        match self._ask("seen"):
            case [str(by), tuple(races), dict() | None as bytes_]:
                return Seen(by, races, bytes_)  # type: ignore[arg-type]  # a word for the record, and no verdict
        raise self._bad_answer()

    def _ask(self, name: str, *arguments: Any, bytes_: int = 0) -> Any:
        """The result of a method of the child's `Runner`.  Raises as that does, and `Failed` without an answer."""
        with passed_files(bytes_) as (request, answer):
            torch.save(arguments, request)
            try:
                reply = self._child.ask({"call": name, "request": request, "answer": answer}, self._limit_s)
                if reply == "done":
                    return torch.load(answer, weights_only=True, map_location=self.device)
            except TimedOut as late:
                why = f"no answer within {late.limit_s:g} s: a loop or a barrier without an end"
                raise Failed("TIMEOUT", why) from late
            except ChildFailed as failed:
                raise Failed("RUNTIME_ERROR", str(failed)) from failed
            except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
                raise self._bad_answer() from error
        match reply:
            case {"failed": [str(status), str(reason)]} if status in FAULTS:
                raise Failed(status, reason)  # type: ignore[arg-type]  # one of them
            case {"refused": str(text)}:
                raise Refused(text)
        raise self._bad_answer()

    def _bad_answer(self) -> Failed:
        self._child.stop()
        return Failed("RUNTIME_ERROR", "its process answered in another form than the checker's")


def file_of(kernel: Kernel) -> Path | None:
    """The file that registers a kernel; None for a kernel of the tree."""
    path = Path(inspect.getfile(inspect.unwrap(kernel.fn))).resolve()
    own = Path(registry.__file__).resolve().parent
    return None if path.is_relative_to(own) else path


def kernel_of(op: str, name: str, file: str | None) -> Kernel:
    """The kernel of that name, which `file` registers.  Raises `ValueError` if there is none."""
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
        """`done` when the answer lies in its file, or the fault."""
        device = self._runner.device if self._runner and request["call"] != "begin" else "cpu"
        # The parent may be trusted; a copy-on-write map leaves its file as it is.
        arguments = torch.load(request["request"], weights_only=False, mmap=True, map_location=device)
        try:
            found = self._call(request["call"], arguments)
        except Failed as failed:
            return {"failed": [failed.status, failed.reason]}
        except Refused as refused:
            return {"refused": str(refused)}
        torch.save(found, request["answer"])
        return "done"

    def _call(self, name: str, arguments: tuple[Any, ...]) -> Any:
        if name == "begin":
            op, kernel, file, scheme, device = arguments
            try:
                found = kernel_of(op, kernel, file)
            except (ValueError, ImportError, OSError) as error:
                raise Failed("RUNTIME_ERROR", str(error)) from error
            self._runner = self._make(found, registry.get_op(op), get_scheme(scheme), torch.device(device))
        assert self._runner is not None, "the first request is `begin`"
        result = getattr(self._runner, name)(*(() if name == "begin" else arguments))
        if isinstance(result, Trial):
            return [result.read, sorted(result.work)]
        return [result.by, result.races, result.bytes] if isinstance(result, Seen) else result


answer = Serving().answer
