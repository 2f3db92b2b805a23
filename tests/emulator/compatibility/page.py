"""Runs each entry in a fresh process, keeps a line of JSON for each entry, and writes the page.

    PYTHONPATH=tests/emulator python -m compatibility.page --out results/compatibility/README.md [--only fla] [--keep]

Sources are fetched into the cache at the first run.  Beside the page are the records (`kernels.json`) from which it is
made: with `--only` other records stay as they are, and `--keep` runs only entries that have no right record yet.  The
committed times were taken with `OMP_NUM_THREADS=1 taskset -c 0`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from compatibility.faults import FAULTS
from compatibility.own import OWN
from compatibility.worker import projects
from rooflab.bench.base.plain import Marked, markdown_cell, markdown_code, markdown_table
from rooflab.bench.core.process import Child, ChildFailed
from rooflab.kernels._files import write_whole

TESTS = Path(__file__).resolve().parents[1]
LIMIT_S = 240.0
"""Longest run of an entry."""
Record = dict[str, Any]


def run(project: str, entry: str, fault: str = "") -> Record:
    """The record of one entry, run in a fresh process with an empty cache of Triton's; `fault` is one to plant."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {"TRITON_INTERPRET": None, "TRITON_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
        with Child(f"{__package__}.worker", environment=environment, folder=Path(cache)) as child:
            record = {"project": project, "entry": entry, "triton": version("triton")}
            try:
                answer: Record = child.ask({"project": project, "entry": entry, "fault": fault}, LIMIT_S)
                return record | answer
            except ChildFailed as failed:
                words = failed.words.strip().splitlines()[-1] if failed.words else ""
                return record | {"kernels": [], "failed": words or str(failed)}


def is_right(record: Record) -> bool:
    """Whether its values are right."""
    return not record.get("failed") and not record.get("refused") and not record["wrong"]


def rows_of(records: Iterable[Record]) -> list[Record]:
    """One row per distinct kernel: of several entries the first with right values."""
    found: dict[tuple[str, str, str], Record] = {}
    for record in records:
        common = {name: value for name, value in record.items() if name != "kernels"}
        for kernel in record["kernels"]:
            key = record["project"], kernel["file"], kernel["kernel"]
            if key not in found or (is_right(record) and not is_right(found[key])):
                found[key] = common | kernel
    return list(found.values())


def found_by(record: Record) -> str:
    """What found a planted fault; empty where nothing did."""
    races = [text for kernel in record["kernels"] for text in kernel["races"]]
    found = record.get("said"), record.get("refused"), *races, *record.get("wrong", [])
    return str(next(filter(None, found), ""))


def page_of(records: list[Record], faults: list[Record]) -> str:
    """The page in Markdown."""
    known, rows = projects() | OWN, rows_of(records)
    right = [row for row in rows if is_right(row)]
    stuck = [record for record in records if not is_right(record)]
    times = sorted(row["seconds"] for row in rows)
    compilers = ", ".join(sorted({record["triton"] for record in records}))
    racing = [row for row in rows if row["races"]]
    lines = [
        "# Other projects' kernels in the emulator",
        "",
        f"{len(rows)} distinct kernels of {len({row['project'] for row in rows})} projects, in Triton, Gluon and CUDA"
        f" C++, compiled for sm_90a by Triton {compilers} or NVRTC and run on the CPU on small ragged shapes with all"
        f" checks. The values of {len(right)} are right against fp64 references; {len(racing)}"
        f" {'has' if len(racing) == 1 else 'have'} a race. The median kernel takes"
        f" {statistics.median(times):.1f} s, compile included and with races on, on one core of a busy"
        f" machine; the slowest takes {times[-1]:.1f} s.",
        "",
        "An error is the largest of all outputs of the call that launched the kernel, gradients included, as a multiple"
        " of what is allowed: 64 roundings of fp32, 4 of a dtype of 16 bits, relative to the larger of the element and"
        " the root mean square of its tensor, times `allowed` where the kernel rounds operands inside; integers must"
        " be equal. The first kernel of a call bears the start of the compiler and of the emulator, about 1.5 s.",
        "",
        "Made by `PYTHONPATH=tests/emulator python -m compatibility.page --out results/compatibility/README.md`; the"
        " entries are in `tests/emulator/compatibility/`, the sources are fetched at these versions, and none is part"
        " of this repository. Triton's and Gluon's tutorials are in no source release on PyPI, so they are not here;"
        " nor are matmul templates of torch.compile, which only its search on a GPU would write.",
    ]
    for name in dict.fromkeys(row["project"] for row in rows):
        source = known[name].source
        mine = [row for row in rows if row["project"] == name]
        lines += ["", f"## {source.project}: `{source.pinned}`", "", f"{len(mine)} kernels.", ""]
        columns = ("kernel", "call", "shape", "error / allowed", "races:", "notes:", "s:")
        lines += markdown_table(columns, [_cells(row, known[name].entries) for row in mine])
    lines += ["", "## Not right", ""]
    lines += [f"- {known[each['project']].source.project}, {each['entry']}: {_why(each)}" for each in stuck] or [
        "None."
    ]
    lines += ["", "## Races and notes", ""]
    lines += [
        f"- {row['kernel']} ({known[row['project']].source.project}, {row['entry']}): {kind}: {text}"
        for row in rows
        for kind, texts in (("race", row["races"]), ("note", row["notes"]))
        for text in texts[:2]
    ] or ["None."]
    lines += ["", "## Planted faults", ""]
    lines += [
        f"In {len(faults)} trials one barrier, fence, wait, mask, store, address or branch of a kernel's PTX, or a wait"
        " of a stream, was taken out or changed, where the shape needs it."
        f" {sum(bool(each['rule']) for each in faults)} were found under the name of a rule that they break;"
        f" {sum(each['names_line'] for each in faults)} name the changed line. Rooflab's kernels have none unedited.",
        "",
    ]
    rows = [
        (
            _planted(each["planted"]),
            f"{known[each['project']].source.project}, {each['entry']}",
            each["rule"],
            "yes" if each["names_line"] else "",
            found_by(each)[:160],
        )
        for each in faults
    ]
    lines += markdown_table(("kernel", "call", "rule", "line", "found by"), rows)
    return "\n".join(lines) + "\n"


def _why(record: Record) -> str:
    return str(record.get("failed") or record.get("refused") or "; ".join(record["wrong"]))[:400].replace("\n", " ")


def _planted(text: str) -> Marked:
    name, _, line = text.partition(": without ")
    return Marked(f"{markdown_cell(name)}: without {markdown_code(' '.join(line.strip('`').split()))}")


def _cells(row: Record, entries: Iterable[Any]) -> tuple[Any, ...]:
    entry = next(each for each in entries if each.name == row["entry"])
    allowed = f" (allowed {entry.allowed:g})" if entry.allowed != 1 else ""
    error = f"{row['error']:.2g}{allowed}" if is_right(row) else Marked("**wrong**")
    return (
        markdown_code(row["kernel"]), row["entry"], markdown_code(str(entry.inputs)),
        error, len(row["races"]) or None, len(row["notes"]) or None, f"{row['seconds']:.1f}",
    )  # fmt: skip


def read(path: Path) -> list[Record]:
    """The records beside a page, in the order of the entries; those of entries that are gone are left out."""
    found = json.loads(path.read_text()) if path.is_file() else []
    held = {(each["project"], each["entry"]): each for each in found}
    order = [(name, entry.name) for name, project in projects().items() for entry in project.entries]
    return [held[key] for key in order if key in held]


def main() -> None:
    """The script."""
    parser = argparse.ArgumentParser(description="Runs other projects' kernels in the emulator.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--faults", action="store_true", help="plants the faults instead")
    arguments = parser.parse_args()
    kept, planted = beside(arguments.out)
    if arguments.faults:
        runs: list[Record] = json.loads(planted.read_text()) if arguments.keep else []
        for fault in FAULTS[len(runs) :]:
            runs.append(run(*fault))
            _write(planted, runs)
    for name, project in projects().items():
        if arguments.faults or (arguments.only and name not in arguments.only):
            continue
        project.source.fetched()
        for entry in project.entries:
            before = read(kept)
            if arguments.keep and any((name, entry.name) == (x["project"], x["entry"]) and is_right(x) for x in before):
                continue
            record = run(name, entry.name)
            _write(kept, [*before, record])
            print(f"{'right' if is_right(record) else _why(record)}: {name}, {entry.name}", flush=True)
    write_whole(arguments.out, page_of(read(kept), json.loads(planted.read_text()) if planted.is_file() else []))


def beside(page: Path) -> tuple[Path, Path]:
    """The files of the records of a page: of the kernels, and of the planted faults."""
    return page.with_name("kernels.json"), page.with_name("faults.json")


def _write(path: Path, records: list[Record]) -> None:
    write_whole(path, "[\n" + ",\n".join(json.dumps(each, allow_nan=False) for each in records) + "\n]\n")


if __name__ == "__main__":
    main()
