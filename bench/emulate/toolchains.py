"""Runs a kernel with several versions of Triton, and compares values, findings and machine code with the first version.

Each version lies in a folder of its own in Rooflab's cache, where pip puts it once.  The processes that emulate and
compile find this folder first on their path.  All other packages stay.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

import torch

from rooflab.bench.compile.cases import KernelCase
from rooflab.bench.compile.static import COMPILE_LIMIT_S, WORKER_MODULE, CompileFailure, compile_in
from rooflab.bench.core import FunctionOp, Pool
from rooflab.bench.emulate import emulators, pool
from rooflab.bench.emulate.calls import ask, request_of
from rooflab.kernels._folders import cache_folder, check_writable
from rooflab.roofline.numbers import counted

SAME, ROUNDED, OTHER = "the same", "within rounding", "other values"
"""What the values of a version are, beside those of the first version."""
CODE = ("registers", "spills", "wgmma", "barriers", "fences")
COLUMNS = ("triton", "status", "reference", "values", "findings", *CODE)
_COMPILED = ("OK", "INCORRECT", "RUNTIME_ERROR")
"""The statuses of a call whose kernels were compiled."""
_VERSION = re.compile(r"\d+(\.\d+)+((rc|\.post|\.dev)\d+)?")


@dataclass(frozen=True)
class Row:
    """What came of a kernel with one version of Triton.  The counts are those of the machine code of all launches."""

    triton: str
    status: str
    reason: str
    reference: str | None = None
    """`right` or `wrong`; None if nothing was compared with a reference."""
    values: str | None = None
    """`SAME`, `ROUNDED` or `OTHER`, beside the first version; None for the first version, and without values."""
    findings: tuple[str, ...] = ()
    """Races, and the fault that ended the call or the compilation."""
    notes: tuple[str, ...] = ()
    registers: int | None = None
    """Registers per thread of the launch with the most.  None, as in the next fields: there is no machine code."""
    spills: int | None = None
    """Stack bytes per thread of the launch with the most, as in `rooflab static`."""
    wgmma: int | None = None
    barriers: int | None = None
    """Instructions of the family `barrier` in `rooflab static`."""
    fences: int | None = None
    """Instructions FENCE (of the async proxy) and MEMBAR."""
    bad: tuple[str, ...] = ()
    """One sentence for each way in which this version is wrong, or worse than the first."""


@dataclass(frozen=True)
class KernelByVersion:
    """The rows of one kernel, one for each version of Triton, in the order of the versions."""

    kernel: str
    rows: tuple[Row, ...]

    @property
    def first_other(self) -> dict[str, str]:
        """Returns, by column, the first version that differs from the first one of all."""
        rows = self.table()
        others = {
            name: [str(row["triton"]) for row in rows[1:] if row[name] not in (rows[0][name], SAME, ROUNDED)]
            for name in COLUMNS[1:]
        }
        unknown = {name for name in CODE if rows[0][name] is None}
        return {name: versions[0] for name, versions in others.items() if versions and name not in unknown}

    @property
    def is_worse(self) -> bool:
        """Whether a version after the first one is wrong, or worse than the first."""
        return any(row.bad for row in self.rows[1:])

    def to_json(self) -> dict[str, Any]:
        """Returns the fields of this object as JSON values."""
        return {"kernel": self.kernel, "rows": [asdict(row) for row in self.rows], "first_other": self.first_other}

    def table(self) -> list[dict[str, Any]]:
        """Returns one table row per version, with the keys of `COLUMNS`."""
        return [{name: getattr(row, name) for name in COLUMNS} | {"findings": len(row.findings)} for row in self.rows]


def versions_of(text: str) -> list[str]:
    """Splits a text such as `3.6.0,3.9.0` into versions.  Raises `ValueError` unless there are two, and none twice."""
    versions = [word.strip() for word in text.split(",")]
    if len(versions) < 2 or len(set(versions)) < len(versions) or not all(map(_VERSION.fullmatch, versions)):
        raise ValueError(f"triton: expected two or more versions, each once, as 3.6.0,3.9.0, got {text!r}")
    return versions


def folder_of(version: str) -> Path | None:
    """Returns the folder with this version of Triton, and installs it if it is not there; None if it is Rooflab's own.

    Raises `ValueError` if pip cannot install the version."""
    if version == installed_version("triton"):
        return None
    folder = cache_folder() / "triton" / version
    if folder.is_dir():
        return folder
    check_writable("ROOFLAB_CACHE", folder.parent)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temp_folder:
        new_folder = Path(temp_folder) / version
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-compile", "--target", str(new_folder)]
        installed = subprocess.run([*pip, f"triton=={version}"], capture_output=True, text=True, check=False)
        if installed.returncode:
            last_line = (installed.stderr.strip() or f"it ended with {installed.returncode}").splitlines()[-1]
            raise ValueError(f"triton: expected versions that pip can install, got {version}: {last_line}")
        if not folder.is_dir():  # else another process has installed it in the meantime
            new_folder.replace(folder)
    return folder


@contextmanager
def _pools(version: str) -> Iterator[tuple[Pool, Pool]]:
    """Yields two pools of processes with this version of Triton: one that emulates, and one that compiles."""
    folder, old_path = folder_of(version), os.environ.get("PYTHONPATH")
    # A cache for each version, because two of them may give the same name to different code.
    environment: dict[str, str | None] = {"TRITON_CACHE_DIR": str(cache_folder() / "triton" / f"cache-{version}")}
    if folder is not None:
        environment["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [old_path])])
    compilers = Pool(WORKER_MODULE, environment={"TRITON_INTERPRET": None, **environment}, limit_s=COMPILE_LIMIT_S)
    pools = (pool(environment), compilers)
    try:
        yield pools
    finally:
        for each in pools:
            each.stop()


def compare(targets: Sequence[KernelCase], versions: Sequence[str], **options: Any) -> list[KernelByVersion]:
    """Runs each of `targets` with each version of Triton.  `options` are those of `calls.request_of`.

    Raises `ValueError` if no version can run a kernel: then the request is wrong."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(emulators().size) as threads:
        run = partial(_rows_of, targets, Path(folder), options)
        by_version = list(threads.map(run, versions))
        return [
            KernelByVersion(target.label, compared(rows, [_values(Path(folder), row.triton, number) for row in rows]))
            for number, (target, rows) in enumerate(zip(targets, zip(*by_version, strict=True), strict=True))
        ]


def _rows_of(targets: Sequence[KernelCase], folder: Path, options: Mapping[str, Any], version: str) -> list[Row]:
    with _pools(version) as (emulating, compiling):
        rows = []
        for number, target in enumerate(targets):
            request = request_of(target, _path(folder, version, number), **options)
            try:
                row = _row(version, ask(request, emulating), not target.is_launcher or bool(request["reference"]))
            except ValueError as error:  # this version cannot import or call the user's function
                row = Row(version, "INVALID", str(error), findings=(str(error),))
            rows.append(_with_code(row, target, compiling) if row.status in _COMPILED else row)
        return rows


def _row(version: str, answer: Mapping[str, Any], has_reference: bool) -> Row:
    errors, notes = (
        tuple(
            f"[{finding['rule']}] {finding['kernel']}: {finding['text']}"
            for finding in answer.get("findings", ())
            if finding["severity"] == severity
        )
        for severity in ("error", "note")
    )
    status, reason = answer["status"], answer["reason"]
    faults = errors if errors or status in ("OK", "INCORRECT") else (reason,)
    verdict = {"OK": "right", "INCORRECT": None if errors else "wrong"}.get(status) if has_reference else None
    return Row(version, status, reason, verdict, findings=faults, notes=notes)


def _with_code(row: Row, target: KernelCase, compilers: Pool) -> Row:
    (code,) = compile_in(compilers, [{"do": "compile", **target.to_json()}], [False], tree="")
    if isinstance(code, CompileFailure):
        return replace(row, findings=tuple(dict.fromkeys((*row.findings, str(code)))))
    launched = [info for info in code if info.tried == 0]  # the emulator runs an autotuner's first config
    return replace(
        row,
        registers=max(info.registers for info in launched),
        spills=max(info.stack_bytes for info in launched),
        wgmma=sum(info.counts["wgmma"] for info in launched),
        barriers=sum(info.counts["barrier"] for info in launched),
        fences=sum(info.count("FENCE", "MEMBAR") for info in launched),
    )


def _path(folder: Path, version: str, number: int) -> Path:
    return folder / f"{version}-{number}.pt"


def _values(folder: Path, version: str, number: int) -> list[torch.Tensor] | None:
    path = _path(folder, version, number)
    return list(torch.load(path)) if path.is_file() else None


def compared(rows: Sequence[Row], values: Sequence[list[torch.Tensor] | None]) -> tuple[Row, ...]:
    """Returns the rows with what their values and findings are beside those of the first row."""
    first, first_values = rows[0], values[0]
    if all(row.status == "INVALID" for row in rows):
        raise ValueError(first.reason)
    judged = []
    for row, own_values in zip(rows, values, strict=True):
        if row is not first and own_values is not None and first_values is not None:
            row = replace(row, values=_beside(own_values, first_values))
        judged.append(replace(row, bad=tuple(_bad(row, first))))
    return tuple(judged)


def _bad(row: Row, first: Row) -> Iterator[str]:
    if row.reference == "wrong":
        yield "its values are not those of the reference"
    elif row.values == OTHER and row.reference != "right":
        yield f"its values are not those of {first.triton}"
    if len(row.findings) > len(first.findings):
        yield f"it has {counted(len(row.findings), 'finding')}, and {first.triton} {len(first.findings)}"
    if row.spills is not None and first.spills is not None and row.spills > first.spills:
        yield f"it spills {row.spills} bytes a thread, and {first.triton} {first.spills}"


def _beside(values: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> str:
    if [(value.shape, value.dtype) for value in values] != [(value.shape, value.dtype) for value in wanted]:
        return OTHER
    found = SAME
    for value, right in zip(values, wanted, strict=True):
        new, old = value, right
        if value.is_floating_point():
            both_nan = value.isnan() & right.isnan()  # also what neither of them wrote
            new, old = (each.double().masked_fill(both_nan, 0).to(each.dtype) for each in (value, right))
        if not torch.equal(new, old):
            if not FunctionOp.judge(new, old)[0].passed:
                return OTHER
            found = ROUNDED
    return found
