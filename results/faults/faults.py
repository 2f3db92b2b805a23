"""Plants small faults, one at a time, in a copy of the tree, and records which tests see each.

    python results/faults/faults.py check                 # does each snippet stand once in its file, and compile?
    python results/faults/faults.py coverage [--more]     # which tests reach which lines, once for a commit
    python results/faults/faults.py run --limit-s 3600    # the faults that have no result yet
    python results/faults/faults.py again                 # does today's suite see what the tests of then saw?
    python results/faults/faults.py whole                 # the survivors of 20 faults by the whole suite
    python results/faults/faults.py table                 # by group: planted, killed, survived; writes table.md

`coverage`, `run` and `whole` go on where an earlier call ended.  They run with .venv's Python, whose packages must hold
coverage.py: `.venv/bin/python -m pip install coverage`.  README.md beside says what a result means.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from queue import Queue
from typing import Any

from copies import HERE, PLUGIN, ROOT, Outcome, make_tree, restore, run_pytest
from reaching import Fault, Reaching, changed_lines

RESULTS = HERE / "results.ndjson"
AGAIN = HERE / "again.ndjson"
SURVIVORS = HERE / "survivors.ndjson"
"""By fault that no test saw at first: the test that sees it now, or the reason why no test can."""
WHOLE = HERE / "whole.ndjson"  # not `.jsonl`: files of that name under results/ are read as records
TABLE = HERE / "table.md"
SETS = {"test": "not slow and not more", "more": "more and not slow"}
"""By name of a make target, the marks of the tests that it runs."""
BEFORE = "7228ff97"
"""The commit before any test was deleted; results of later commits are those of today's tests."""
FAULT_S = 120.0
"""The longest time of all tests of one fault, in seconds, without the second look at a few failures."""
BATCH_S, WHOLE_S = 3600.0, 7200.0
FILES_AT_ONCE = 8
"""The test files of one traced process, whose findings are kept when it has ended."""
FEW = 3
"""The most failures that are looked at twice: a test that fails only beside other work is no kill."""
DRAWN, SEED = 20, 0
"""The number of faults that the whole suite runs too, and the seed that draws them."""
Json = dict[str, Any]


def all_faults() -> list[Fault]:
    """Every planted fault with its group, which is the name of its file."""
    return [
        {"group": file.stem, **fault} for file in sorted(HERE.glob("*.json")) for fault in json.loads(file.read_text())
    ]


def drawn() -> list[str]:
    """Of the faults that ran before any test was deleted, those whose survivors the whole suite runs too."""
    names = sorted(row["id"] for row in rows_of(RESULTS) if row["commit"].startswith(BEFORE))
    return sorted(random.Random(SEED).sample(names, DRAWN))


def rows_of(file: Path) -> list[Json]:
    """The rows that were appended to the file so far."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def append(file: Path, row: Json) -> None:
    """Appends a row at once, so that nothing is lost when the run ends."""
    with file.open("a") as opened:
        opened.write(json.dumps(row) + "\n")


def why_unfit(tree: Path, fault: Fault) -> str:
    """The reason why a fault cannot be planted in a tree; empty if it can."""
    file = tree / fault["file"]
    if not file.is_file():
        return "the file is gone"
    text = file.read_text()
    if (count := text.count(fault["old"])) != 1:
        return f"`old` stands {count} times in the file"
    if fault["old"] == fault["new"]:
        return "`new` is `old`"
    if file.suffix == ".py":
        try:
            compile(text.replace(fault["old"], fault["new"]), fault["file"], "exec")
        except SyntaxError as error:
            return f"the changed file does not compile: {error}"
    return ""


def check() -> int:
    """Prints the faults that do not fit the checkout; returns their number."""
    faults = all_faults()
    names = [fault["id"] for fault in faults]
    found = {fault["id"]: why for fault in faults if (why := why_unfit(ROOT, fault))}
    found |= {name: "another fault has this id" for name in names if names.count(name) > 1}
    for name, why in found.items():
        print(f"{name}: {why}")
    print(f"{len(faults)} faults, {len(found)} do not fit")
    return len(found)


def test_files(tree: Path) -> list[str]:
    """The files of the tree that hold tests."""
    found = [*(tree / "tests").rglob("test_*.py"), *(tree / "bench").rglob("bench_*.py")]
    return sorted(file.relative_to(tree).as_posix() for file in found)


def coverage(folder: Path, which: str, limit_s: float) -> None:
    """Runs the test files of a set, and keeps the lines that each test reached, and its seconds."""
    began, tree, data, kept = time.monotonic(), make_tree(folder, 0), folder / "data", folder / "tests.jsonl"
    boot, call = tree / "bench" / "core" / "boot.py", "answer(json.loads(request_line))"
    restore(tree)
    assert call in boot.read_text(), "the children's program has changed: trace its requests in another way"
    boot.write_text(boot.read_text().replace(call, f"__import__('{PLUGIN}').asked(answer, json.loads(request_line))"))
    done = {name for row in rows_of(kept) if row["set"] == which for name in row["files"]}
    left = [name for name in test_files(tree) if name not in done]
    while left and time.monotonic() - began < limit_s:
        files, left = left[:FILES_AT_ONCE], left[FILES_AT_ONCE:]
        data.mkdir(exist_ok=True)
        (data / "now").write_text("")
        traced = run_pytest(tree, files, BATCH_S, marks=SETS[which], data=data)
        again = run_pytest(tree, files, BATCH_S, names=traced.failed) if traced.failed else Outcome()
        seconds = {name: round(traced.seconds[name], 2) for name in sorted(traced.passed | again.passed)}
        lines = import_module("coverage").Coverage(data_file=str(folder / "lines"), config_file=False, messages=False)
        lines.load()
        lines.combine([str(data)])  # `combine` removes the files
        lines.save()
        failed = sorted(set(traced.failed) - again.passed)
        append(kept, {"set": which, "files": files, "seconds": seconds, "failed": failed})
        print(f"{len(seconds)} tests of {' '.join(files)}; failed: {' '.join(failed) or 'none'}", flush=True)
        if traced.why_not or traced.ended:
            print(traced.why_not or f"ended after {BATCH_S:.0f} s")
    restore(tree)
    print(f"{len(left)} files are left")


def run_one(tree: Path, reaching: Reaching, fault: Fault, before: Json) -> Json:
    """Plants a fault and runs tests that may see it: those that reach it; else the rest of their files; else `more`."""
    began, text = time.monotonic(), (tree / fault["file"]).read_text()
    near, beside = reaching.tests(fault)
    sets = [which for which in reaching.sets if which not in before["sets"]]
    rounds = [(which, reaching.ordered(tests, which)) for which in sets for tests in (near, beside)]
    found: Json = before | {"id": fault["id"], "file": fault["file"], "reached": len(near), "sets": reaching.sets}
    (tree / fault["file"]).write_text(text.replace(fault["old"], fault["new"]))
    try:
        for which, names in rounds:
            left_s = FAULT_S - (time.monotonic() - began)
            if found["failed"] or not names:
                continue
            if left_s < 1:
                found["left"] += len(names)
                continue
            outcome = see(tree, names, left_s)
            found["ran"][which] = found["ran"].get(which, 0) + len(outcome.seconds)
            found["left"] += max(0, len(names) - len(outcome.seconds))
            if outcome.failed:
                found["failed"][which] = outcome.failed
            if outcome.why_not:
                found["failed"].setdefault(which, ["the run itself"])
                found["why"] = outcome.why_not[-500:]
    finally:
        restore(tree)
    return found | {"lines": list(changed_lines(text, fault)), "seconds": round(time.monotonic() - began, 1)}


def see(tree: Path, names: Sequence[str], limit_s: float) -> Outcome:
    """Runs tests; if only a few fail, a failure counts if it comes again."""
    began = time.monotonic()
    outcome = run_pytest(tree, sorted({name.partition("::")[0] for name in names}), limit_s, names=names)
    if 0 < len(outcome.failed) <= FEW and not outcome.why_not:
        spent = time.monotonic() - began
        files = sorted({name.partition("::")[0] for name in outcome.failed})
        again = run_pytest(tree, files, max(spent, limit_s - spent), names=outcome.failed)
        outcome.failed = [name for name in outcome.failed if name not in again.passed]
    return outcome


def run(folder: Path, limit_s: float, jobs: int, only: Sequence[str]) -> None:
    """Runs the faults that have no result, in an order that mixes the groups."""
    began = time.monotonic()
    trees: Queue[Path] = Queue()
    for place in range(1, jobs + 1):  # no fault is planted in the copy whose lines were traced
        trees.put(make_tree(folder, place))
    reaching = Reaching(folder, make_tree(folder, 0))
    commit = (folder / "commit").read_text()
    known = {row["id"]: row for row in rows_of(RESULTS)}
    ended = {name for name, row in known.items() if row["failed"] or row["sets"] == reaching.sets}
    left = [fault for fault in all_faults() if fault["id"] not in ended and (not only or fault["id"] in only)]
    random.Random(SEED).shuffle(left)

    def next_one(fault: Fault) -> None:
        if time.monotonic() - began > limit_s:
            return
        tree = trees.get()
        try:
            if why := why_unfit(tree, fault):
                print(f"{fault['id']}: {why}", flush=True)
                return
            nothing: Json = {"sets": [], "ran": {}, "failed": {}, "left": 0}
            found = run_one(tree, reaching, fault, known.get(fault["id"], nothing)) | {"commit": commit}
            append(RESULTS, found)
            failed = sum(map(len, found["failed"].values()))
            print(f"{fault['id']}: {failed} of {sum(found['ran'].values())} failed, {found['seconds']} s", flush=True)
        finally:
            trees.put(tree)

    with ThreadPoolExecutor(jobs) as threads:
        list(threads.map(next_one, left))


def again(folder: Path, jobs: int, only: Sequence[str]) -> None:
    """Plants the faults that were killed in the commit of `folder`, and runs the tests that saw them then, if they
    still exist, or else the files of the same names, to find the test that is now the first to see each fault."""
    trees: Queue[Path] = Queue()
    for place in range(jobs):
        trees.put(make_tree(folder, place))
    commit, faults = (folder / "commit").read_text(), {fault["id"]: fault for fault in all_faults()}
    ended = {row["id"] for row in rows_of(AGAIN) if row["commit"] == commit}
    killed = {row["id"]: row["failed"] for row in rows_of(RESULTS) if row["failed"]}
    killed |= {row["id"]: {row["set"]: [row["by"]]} for row in rows_of(SURVIVORS) if "by" in row}
    last = {row["id"]: row["by"] for row in rows_of(AGAIN) if "::" in "".join(row["by"])}
    killed |= {name: {"more" if "test" not in killed[name] else "test": by} for name, by in last.items()}
    left = [name for name in killed if name in faults and name not in ended and (not only or name in only)]

    def next_one(name: str) -> None:
        tree, fault, began = trees.get(), faults[name], time.monotonic()
        then = [test for tests in killed[name].values() for test in tests]
        marks = SETS["test" if "test" in killed[name] else "more"]
        stems = {Path(test.partition("::")[0]).stem for test in then}
        functions = {test.partition("::")[2].partition("[")[0] for test in then}
        files = [file for file in test_files(tree) if Path(file).stem in stems]
        text = (tree / fault["file"]).read_text() if (tree / fault["file"]).is_file() else ""
        outcome = Outcome()
        try:
            if why := why_unfit(tree, fault):
                print(f"{name}: {why}", flush=True)
                return
            (tree / fault["file"]).write_text(text.replace(fault["old"], fault["new"]))
            for some in (" or ".join(sorted(functions - {""})), ""):
                if files and not outcome.failed and not outcome.why_not:
                    outcome = run_pytest(tree, files, 2 * FAULT_S, marks=marks, keywords=some, first=True)
        finally:
            restore(tree)
            trees.put(tree)
        by = outcome.failed or (["the run itself"] if outcome.why_not else [])
        append(AGAIN, {"id": name, "by": by, "commit": commit})
        print(f"{name}: {' '.join(by) or 'LOST'}, {time.monotonic() - began:.0f} s", flush=True)

    with ThreadPoolExecutor(jobs) as threads:
        list(threads.map(next_one, left))


def whole(folder: Path, names: Sequence[str], jobs: int) -> None:
    """Runs the whole suite on the faults of `names` that their tests did not see, all planted at once: the failures
    show what the choice of tests missed.  A fault that was seen needs no such run.  A failure counts if the test passes
    without the faults and fails a second time with them."""
    tree = make_tree(folder, 1)
    seen = {row["id"] for row in rows_of(RESULTS) if row["failed"]}
    faults = [fault for fault in all_faults() if fault["id"] in set(names) - seen]

    def run_with(planted: Sequence[Fault], **options: Any) -> Outcome:
        restore(tree)
        for fault in planted:
            if why := why_unfit(tree, fault):
                raise SystemExit(f"{fault['id']}: {why}")
            file = tree / fault["file"]
            file.write_text(file.read_text().replace(fault["old"], fault["new"]))
        try:
            return run_pytest(tree, test_files(tree), WHOLE_S, **options)
        finally:
            restore(tree)

    for which, marks in SETS.items():
        outcome = run_with(faults, marks=marks, workers=jobs if jobs > 1 else 0)
        failed = outcome.failed
        if failed:
            failed = sorted(run_with((), names=failed).passed)
        if failed:
            failed = run_with(faults, names=failed).failed
        row = {"ids": [fault["id"] for fault in faults], "set": which, "failed": failed}
        append(WHOLE, row | {"ran": len(outcome.seconds), "commit": (folder / "commit").read_text()})
        print(f"{which}: {len(failed)} of {len(outcome.seconds)} tests failed because of them", flush=True)


def table() -> str:
    """By group, the number of faults killed by the tests of that commit and by the newest tests; and the end of each
    fault that survived."""
    faults = {fault["id"]: fault for fault in all_faults()}
    found = {row["id"]: row for row in rows_of(RESULTS) if row["id"] in faults}
    survivors = {row["id"]: row for row in rows_of(SURVIVORS)}
    now = {name: row["failed"] for name, row in found.items() if not row["commit"].startswith(BEFORE)}
    now |= {name: [row["by"]] for name, row in survivors.items() if "by" in row}
    now |= {row["id"]: row["by"] for row in rows_of(AGAIN)}
    lines = ["| group | planted | run | killed then | killed now | argued | survive |", "|---|--:|--:|--:|--:|--:|--:|"]
    groups = [*dict.fromkeys(fault["group"] for fault in faults.values()), "all"]
    for group in groups:
        own = {fault["id"] for fault in faults.values() if group in (fault["group"], "all")}
        run = own & found.keys()
        then, kills = {name for name in run if found[name]["failed"]}, {name for name in run if now.get(name)}
        argued = {name for name in run - kills if "argued" in survivors.get(name, ())}
        numbers = [len(own), len(run), len(then), len(kills), len(argued), len(run - kills - argued)]
        lines.append(f"| {group} | {' | '.join(map(str, numbers))} |")
    lines += ["", "Survived then:", ""]
    for name, row in sorted(found.items()):
        if not row["failed"]:
            fault = faults[name]
            ran = f"{sum(row['ran'].values())} tests ran" if row["reached"] else "no test reached it"
            ran += f", {row['left']} did not fit the time" if row["left"] else ""
            answer = survivors.get(name, {}).get("argued") or f"now {' '.join(now.get(name) or ['nothing sees it'])}"
            lines.append(f"- {name}, `{fault['file']}` ({fault['kind']}): {ran}; {answer}")
    for row in rows_of(WHOLE):
        lines += [
            "",
            f"By all of `{row['set']}`, planted at once: {', '.join(row['ids'])}; of {row['ran']} tests failed:",
        ]
        lines += ["", *(f"- {test}" for test in row["failed"] or ["none"])]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Runs the subcommand that the command line names."""
    parser = argparse.ArgumentParser(description="Which planted faults the tests see.")
    parser.add_argument("command", choices=["check", "coverage", "run", "again", "whole", "table"])
    parser.add_argument("ids", nargs="*", help="faults; without any, all")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "rooflab-faults")
    parser.add_argument("--more", action="store_true", help="of `coverage`: the tests of make test-more")
    parser.add_argument("--limit-s", type=float, default=12 * 3600.0, help="begins nothing new after so many seconds")
    parser.add_argument(
        "--jobs", type=int, default=1, help="of `run`, faults at once, each in its own copy; of `whole`, workers"
    )
    given = parser.parse_args()
    if given.command == "check":
        sys.exit(check() > 0)
    elif given.command == "coverage":
        coverage(given.folder, "more" if given.more else "test", given.limit_s)
    elif given.command == "run":
        run(given.folder, given.limit_s, given.jobs, given.ids)
    elif given.command == "again":
        again(given.folder, given.jobs, given.ids)
    elif given.command == "whole":
        whole(given.folder, given.ids or drawn(), given.jobs)
    else:
        TABLE.write_text(table())
        print(table(), end="")


if __name__ == "__main__":
    main()
