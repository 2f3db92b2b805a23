"""A definition's inputs, and the outputs of its own reference, which runs in a process of its own."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from rooflab.bench.exchange.flashinfer_families import Family, Given
from rooflab.bench.exchange.flashinfer_files import DTYPES, Definition, Workload
from rooflab.bench.processes.child import Child, ChildFailed

WORKER = Path(__file__).with_name("_reference_worker.py")
MARGIN_S = 60.0
"""Longest that the process may take beside a reference's own time limit, which it watches itself."""
KEPT = ("PATH", "LANG", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "CUDA_HOME", "OMP_NUM_THREADS", "SYSTEMROOT")
"""All of the environment that a reference sees: nothing with a secret in it, and no path of ours."""


def make_inputs(
    definition: Definition, workload: Workload, family: Family, root: Path, seed: int
) -> dict[str, torch.Tensor | float]:
    """The workload's inputs on the CPU, in the definition's order: read, given, or drawn from `seed`.

    Large random tensors are standard normal, as flashinfer-bench draws them.  Raises `ValueError` with the reason on
    a file that is not there or holds something else, and on an axis without a size.
    """
    generator = torch.Generator().manual_seed(seed)
    shapes = {name: definition.shape(name, workload.axes) for name in definition.inputs}
    sizes = {name: shape for name, shape in shapes.items() if shape is not None}
    left = {name for name in shapes if workload.inputs.get(name, {"type": "random"})["type"] == "random"}
    meant = family.random(definition, sizes, generator) if left else {}
    found: dict[str, torch.Tensor | float] = {}
    for name, shape in shapes.items():
        source = workload.inputs.get(name, {"type": "random"})
        if source["type"] == "scalar":
            found[name] = source["value"]
        elif source["type"] == "safetensors":
            found[name] = _stored(root, source, name, shape, DTYPES[definition.inputs[name].dtype])
        elif shape is None:
            if name != "sm_scale":
                raise ValueError(f"{name}: a scalar that the workload leaves to chance")
            found[name] = float(sizes["q"][-1]) ** -0.5
        else:
            dtype = DTYPES[definition.inputs[name].dtype]
            if name not in meant and not dtype.is_floating_point:
                raise ValueError(f"{name}: integers that the workload leaves to chance and that must mean something")
            value = meant[name] if name in meant else torch.randn(shape, generator=generator)
            found[name] = value.to(dtype)
    return found


def _stored(
    root: Path, source: Mapping[str, Any], name: str, shape: tuple[int, ...] | None, dtype: torch.dtype
) -> torch.Tensor:
    path = (root / source["path"]).resolve()
    if not path.is_relative_to(root.resolve()):
        raise ValueError(f"{name}: {source['path']} lies outside of the data set")
    if not path.is_file():
        raise ValueError(f"{name}: {source['path']} is not there")
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{name}: {source['path']} is no safetensors file: {error}") from error
    if source["tensor_key"] not in tensors:
        raise ValueError(f"{name}: {source['path']} holds no {source['tensor_key']!r}")
    value: torch.Tensor = tensors[source["tensor_key"]]
    if tuple(value.shape) != shape or value.dtype != dtype:
        raise ValueError(f"{name}: expected {shape} of {dtype}, got {tuple(value.shape)} of {value.dtype}")
    return value


class References:
    """Runs the references of definitions, inside `with`; what each gives is on the CPU, by output.

    Each definition has a process of its own, in an empty folder, without our environment and in Python's isolated
    mode, which is ended with all that it started after `timeout_s` seconds.  That keeps its mistakes from this process
    and from the next definition's.  It is no sandbox: the code can do what the user can.
    """

    def __init__(self, device: str, seed: int, timeout_s: float):
        self._device, self._seed, self._timeout_s = device, seed, timeout_s
        self._open = ExitStack()
        self._child: Child | None = None
        self._home = Path()

    def __enter__(self) -> References:
        self._home = Path(self._open.enter_context(tempfile.TemporaryDirectory(prefix="rooflab-reference-")))
        return self

    def __exit__(self, *exception: object) -> None:
        if self._child is not None:
            self._child.stop()
            self._child = None
        self._open.close()

    def run(self, definition: Definition, inputs: Sequence[Given]) -> list[dict[str, torch.Tensor] | str]:
        """What the definition's `run` gives for each set of inputs; a text where it fails."""
        with tempfile.TemporaryDirectory(dir=self._home) as name:
            folder = Path(name)
            for number, given in enumerate(inputs):
                tensors = {key: value.contiguous() for key, value in given.items() if isinstance(value, torch.Tensor)}
                save_file(tensors, folder / f"{number}.inputs")
            scalars = [
                {key: value for key, value in given.items() if not isinstance(value, torch.Tensor)} for given in inputs
            ]
            job = {"reference": definition.reference, "device": self._device, "seed": self._seed, "scalars": scalars}
            job |= {"inputs": list(definition.inputs), "outputs": list(definition.outputs)}
            (folder / "job.json").write_text(json.dumps(job))
            ending = self._ask({"folder": str(folder), "timeout_s": self._timeout_s})
            return [_result(folder, number, ending) for number in range(len(inputs))]

    def _ask(self, job: Mapping[str, Any]) -> str:
        """How a job ended: empty where it ended well."""
        if self._child is None:
            environment = {name: os.environ[name] for name in KEPT if name in os.environ}
            environment |= {"HOME": str(self._home), "TMPDIR": str(self._home)}
            command = [sys.executable, "-I", "-W", "ignore", str(WORKER)]
            self._child = Child(command, environment, folder=self._home)
        try:
            return str(self._child.ask(job, self._timeout_s + MARGIN_S))
        except ChildFailed as failed:
            self._child = None
            return f"the process that runs references: {failed}"


def _result(folder: Path, number: int, ending: str) -> dict[str, torch.Tensor] | str:
    fault = folder / f"{number}.fault"
    if fault.is_file():
        return f"its reference failed: {fault.read_text()}"
    outputs = folder / f"{number}.outputs"
    return load_file(outputs) if outputs.is_file() else ending or "its reference left no outputs"
