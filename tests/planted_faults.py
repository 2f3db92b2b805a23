"""Plants one-line faults in a copy of the tree and asks which test finds each: `python tests/planted_faults.py --help`.

The faults are drawn by a seed over kernels, references, checker, timer, verdicts, engine and emulator: a comparison
turned, a sum made a difference, a number off by one, a condition negated, a minimum made a maximum. Each is planted
alone. The short suite (`make test` and `make test-more`) is asked first, the tests of the fault's place before the
others; where it finds nothing the long suite is asked. A run keeps a line for each fault in `planted_faults.jsonl`
beside this file. `--again` plants the table's faults as the tree stands now, and asks first the test that found each.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TABLE = Path(__file__).with_suffix(".jsonl")
LAYERS = ("roofline", "reference", "kernels", "engine", "bench")
AREAS = {
    "kernels": ("kernels",),
    "references": ("reference",),
    "checker": ("bench/check",),
    "timer": ("bench/timing",),
    "verdicts": ("bench/ab",),
    "engine": ("engine",),
    "emulator": ("bench/emulator",),
}
"""Where faults are drawn, and from which folders."""
TESTS = {
    "checker": ("check", "cheats", "tamper", "spread", "isolated", "emulate.", "pytest_plugin"),
    "timer": ("timing", "timed", "cuda", "clocks", "flush", "pinning", "plausible", "reading", "activity", "measure"),
    "verdicts": ("ab_", "bisect", "compare"),
    "engine": ("engine", "llm", "scheduler", "model", "weights", "tokenizer", "metrics", "quantization"),
    "emulator": ("ptx", "emulate"),
}
"""What the names of an area's own tests begin with; those of an op's kernels and reference have its name."""
OF_EVERY_OP = tuple(
    f"tests/test_{name}.py" for name in ("kernels", "emulated_registry", "compare", "configs", "registry", "compile")
)
TURNED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
CALLED = {"min": "max", "max": "min", "any": "all", "all": "any", "minimum": "maximum", "maximum": "minimum"}


@dataclass(frozen=True)
class Fault:
    """One line of one file, and what stands there instead."""

    area: str
    file: str
    line: int
    right: str
    wrong: str


@dataclass(frozen=True)
class Found:
    """The first test that failed with a fault in place, of the short suite or else of the long one; empty for none."""

    short: str
    long: str


def faults_of(area: str, file: Path) -> Iterator[Fault]:
    """Every fault that can be planted in a file, each as its whole line before and after."""
    text = file.read_text()
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        changed = _changed(node)
        line = getattr(node, "lineno", 0)
        if changed is None or line != getattr(node, "end_lineno", 0):
            continue
        right = lines[line - 1]
        start, end = (len(right.encode()[:column].decode()) for column in (node.col_offset, node.end_col_offset))
        if ast.get_source_segment(text, node) != right[start:end] or not _stands_for(right[start:end], node):
            continue  # inside an f-string, whose parts Python 3.11 places wrongly
        yield Fault(area, file.relative_to(ROOT).as_posix(), line, right, right[:start] + changed + right[end:])


def _stands_for(text: str, node: ast.AST) -> bool:
    try:
        return ast.dump(ast.parse(text, mode="eval").body) == ast.dump(node)
    except SyntaxError:
        return False


def _changed(node: ast.AST) -> str | None:
    """The source of a node with one thing wrong in it; None where this file knows none."""
    copy = deepcopy(node)
    if isinstance(copy, ast.Compare) and type(copy.ops[0]) in TURNED:
        copy.ops[0] = TURNED[type(copy.ops[0])]()
    elif isinstance(copy, ast.BinOp | ast.BoolOp) and type(copy.op) in TURNED:
        copy.op = TURNED[type(copy.op)]()
    elif isinstance(copy, ast.UnaryOp) and isinstance(copy.op, ast.Not):
        copy = copy.operand
    elif isinstance(copy, ast.Constant) and isinstance(copy.value, bool):
        copy.value = not copy.value
    elif isinstance(copy, ast.Constant) and isinstance(copy.value, int) and 0 <= copy.value < 64:
        copy.value += 1
    elif isinstance(copy, ast.Call) and isinstance(copy.func, ast.Name) and copy.func.id in CALLED:
        copy.func.id = CALLED[copy.func.id]
    elif isinstance(copy, ast.Call) and isinstance(copy.func, ast.Attribute) and copy.func.attr in CALLED:
        copy.func.attr = CALLED[copy.func.attr]
    else:
        return None
    return f"({ast.unparse(copy)})" if isinstance(copy, ast.Compare | ast.BinOp | ast.BoolOp) else ast.unparse(copy)


def draw(count: int, seed: int) -> list[Fault]:
    """`count` faults, as many of each area as of the others, a file having the same chance as any other of its area."""
    random_state = random.Random(seed)
    files = {
        area: sorted(f for folder in folders for f in (ROOT / folder).rglob("*.py")) for area, folders in AREAS.items()
    }
    drawn: list[Fault] = []
    while len(drawn) < count:
        area = list(AREAS)[len(drawn) % len(AREAS)]
        file = random_state.choice(files[area])
        possible = [fault for fault in faults_of(area, file) if fault not in drawn]
        if possible:
            drawn.append(random_state.choice(possible))
    return drawn


def op_of(fault: Fault) -> str:
    """The op that a fault of a kernel or a reference belongs to."""
    return Path(fault.file).stem if fault.area == "references" else Path(fault.file).parts[1]


def own_tests(fault: Fault) -> list[str]:
    """The test files about the place of a fault: by their names, or because they name the faulty module."""
    files = sorted((ROOT / "tests").glob("test_*.py"))
    module = Path(fault.file).stem
    begins = tuple(f"test_{word}" for word in TESTS.get(fault.area) or (op_of(fault),))
    chosen = [path for path in files if path.name.startswith(begins) or re.search(rf"\b{module}\b", path.read_text())]
    own = [f"tests/{path.name}" for path in chosen]
    return own if fault.area in TESTS else list(dict.fromkeys((*own, *OF_EVERY_OP)))


def first_failure(tree: Path, tests: Sequence[str], long: bool, chosen: str = "") -> str:
    """The first test that fails in `tree`, or that cannot be collected; empty where all pass.

    `chosen` is pytest's `-k`.
    """
    path = tree / ".ns"
    workers = "0" if "::" in tests[0] else "2"  # for one test the start of workers takes longest
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", workers, "-p", "no:cacheprovider", "--tb=no", "-rfE"]
    command += [] if long else ["-m", "not slow"]
    command += ["-k", chosen] if chosen else []
    environment = {**os.environ, "PYTHONPATH": str(path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *tests], cwd=tree, env=environment, capture_output=True, text=True)
    failed = [line.split(" - ")[0] for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if done.returncode and not failed:
        return f"pytest ended with {done.returncode}: {(done.stdout + done.stderr).strip().splitlines()[-1]}"
    return failed[0] if failed else ""


def again(line: dict[str, Any], seed: int) -> tuple[Fault, str]:
    """The table's fault where its line stands now, and the test that found it.

    If that line is gone: another fault of its file, or else of its area.
    """
    found_by = line["short"].partition(" ")[2]
    fault = Fault(**{name: line[name] for name in Fault.__dataclass_fields__})
    file = ROOT / fault.file
    lines = file.read_text().splitlines() if file.is_file() else []
    places = [number for number, text in enumerate(lines, 1) if text == fault.right]
    if places:
        return replace(fault, line=min(places, key=lambda number: abs(number - fault.line))), found_by
    files = [file] if lines else sorted(f for folder in AREAS[fault.area] for f in (ROOT / folder).rglob("*.py"))
    possible = [other for file in files for other in faults_of(fault.area, file)]
    return random.Random(f"{seed} {line['number']}").choice(possible), ""


def find(fault: Fault, tree: Path, own_alone: bool, long: bool, first: str = "") -> Found:
    """Plants a fault in `tree`, asks the tests, `first` before all others, and takes it out again."""
    file = tree / fault.file
    text = file.read_text()
    lines = text.splitlines(keepends=True)
    assert lines[fault.line - 1].rstrip("\n") == fault.right, f"{fault.file} has changed"
    file.write_text("".join([*lines[: fault.line - 1], fault.wrong + "\n", *lines[fault.line :]]))
    try:
        if first and (short := first_failure(tree, [first], False)):
            return Found(short, "")
        tests = own_tests(fault)
        chosen = "" if fault.area in TESTS else f"not test_kernel[ or {op_of(fault)}/"
        short = first_failure(tree, tests, False, chosen)
        if not short and not own_alone:
            short = first_failure(tree, ["tests"], False)
        if short or not long:
            return Found(short, "")
        by_own = first_failure(tree, tests, True, chosen)
        return Found("", by_own if by_own or own_alone else first_failure(tree, ["tests"], True))
    finally:
        file.write_text(text)


def copy_of_the_tree(folder: Path) -> Path:
    """The committed tree in `folder`, with a namespace that imports it in place of an installed one."""
    tree = folder / "tree"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(tree)], check=True)
    (tree / ".ns" / "rooflab").mkdir(parents=True)
    for layer in LAYERS:
        (tree / ".ns" / "rooflab" / layer).symlink_to(tree / layer)
    return tree


def keep(line: dict[str, Any]) -> None:
    """Puts a line into the table, in place of the one of the same number."""
    lines = [json.loads(text) for text in TABLE.read_text().splitlines()] if TABLE.exists() else []
    others = [other for other in lines if other["number"] != line["number"]]
    kept = sorted([*others, line], key=lambda each: each["number"])
    TABLE.write_text("".join(json.dumps(each) + "\n" for each in kept))


def main() -> None:
    """Draws the faults, asks for each, and keeps a line for each in the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=42)
    parser.add_argument("--seed", type=int, default=14)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the faults to ask for; all without it")
    parser.add_argument("--own", action="store_true", help="ask the tests of a fault's place alone: a first pass")
    parser.add_argument("--long", action="store_true", help="ask the long suite for what the short one does not find")
    parser.add_argument("--again", action="store_true", help="plant the faults of the table, and draw none")
    parser.add_argument("--list", action="store_true", help="print the faults and plant none")
    options = parser.parse_args()
    if options.again:
        faults = [again(json.loads(line), options.seed) for line in TABLE.read_text().splitlines()]
    else:
        faults = [(fault, "") for fault in draw(options.count, options.seed)]
    with tempfile.TemporaryDirectory() as folder:
        tree = None if options.list else copy_of_the_tree(Path(folder))
        for number, (fault, first) in enumerate(faults):
            if options.only is not None and number not in options.only:
                continue
            found = find(fault, tree, options.own, options.long, first) if tree is not None else None
            line = {"number": number, **asdict(fault), **(asdict(found) if found else {})}
            print(json.dumps(line), flush=True)
            if found is not None:
                keep(line)


if __name__ == "__main__":
    main()
