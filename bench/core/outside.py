"""A kernel in a process of its own: inputs go there and outputs come back through files in shared memory.

Oracle, tolerance and verdict stay in the asking process, and are made after the answer; the child is not told the seed.
A process that ends or hangs has failed; nothing that it prints counts.  In the child, `answer`
serves the requests.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from rooflab.bench.core.failed import Failed, LayoutRefused
from rooflab.bench.core.process import Child, ChildFailed, TimedOut
from rooflab.bench.core.select import file_of
from rooflab.bench.core.shared import Reader, Writer, shared_folder
from rooflab.bench.core.timers import tampered
from rooflab.bench.core.trial import PLAIN, Layout, Runner, Seen
from rooflab.kernels import registry
from rooflab.kernels.registry import Kernel
from rooflab.reference.spec import Inputs, OpSpec, Outputs, Scheme, get_scheme


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
