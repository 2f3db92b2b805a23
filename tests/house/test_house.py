"""The rules of the house that a program can check: which way imports run, sizes, and what must not be there."""

from __future__ import annotations

import ast
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from rooflab.bench import core

ROOT = Path(__file__).parents[2]
LAYERS = ("roofline", "reference", "kernels", "engine", "bench")
ROOMS = (
    "base core records show.py revisions compile emulator predict emulate tune checks ab "
    "suite report plugin exchange engine load latency commands.py lab.py cli __main__.py bench_kernels.py "
    "bench_sampling.py run_from_checkout.py"
).split()
"""What lies in bench/; each imports only what stands above it in this list."""
TEST_FILES = sorted((ROOT / "tests").rglob("*.py"))


@cache
def files() -> dict[str, ast.Module]:
    """Every file of the layers by its path; parsing them takes two seconds, which collecting the tests must not."""
    paths = (file for layer in LAYERS for file in sorted((ROOT / layer).rglob("*.py")))
    return {file.relative_to(ROOT).as_posix(): ast.parse(file.read_text()) for file in paths}


def imported_modules(tree: ast.Module) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def top_packages(name: str) -> set[str]:
    return {module.split(".")[0] for module in imported_modules(files()[name])}


@cache
def imported_files(name: str) -> frozenset[str]:
    """The files of the tree that a file imports, a package standing for its `__init__.py`."""
    paths = [module.split(".")[1:] for module in imported_modules(files()[name]) if module.startswith("rooflab.")]
    found = {f"{'/'.join(path)}.py" for path in paths} | {f"{'/'.join(path)}/__init__.py" for path in paths}
    return frozenset(found & files().keys() - {name})


def circles(edges: Mapping[str, frozenset[str]]) -> set[str]:
    """What is left of a graph once everything that imports nothing of the rest has been taken away, from both ends."""
    left = set(edges)
    while leaves := {name for name in left if not edges[name] & left}:
        left -= leaves
    while roots := {name for name in left if not any(name in edges[other] for other in left)}:
        left -= roots
    return left


def test_there_are_files_to_check():
    assert {name.split("/")[0] for name in files()} == set(LAYERS)


def test_imports_run_one_way():
    for name, tree in files().items():
        own = LAYERS.index(name.split("/")[0])
        for module in imported_modules(tree):
            parts = module.split(".")
            if parts[0] == "rooflab" and len(parts) > 1:
                assert parts[1] in LAYERS, f"{module}: unknown layer"
                assert LAYERS.index(parts[1]) <= own, f"{name} imports {module}, which is above it"
            assert parts[0] not in LAYERS, f"{name} imports top-level {module}; say rooflab.{module}"


def test_imports_run_down_the_rooms_of_bench():
    for name in files():
        layer, room, *_ = name.split("/")
        if layer != "bench":
            continue
        assert room in ROOMS, f"{name}: {room} has no place in the order of rooms"
        for other in imported_files(name):
            if other.startswith("bench/"):
                above = ROOMS.index(other.split("/")[1])
                assert above <= ROOMS.index(room), f"{name} imports {other}, whose room comes later"


def test_no_chain_of_rooms_is_long():
    imports: dict[str, set[str]] = {room: set() for room in ROOMS}
    for name in files():
        if name.startswith("bench/"):
            room = name.split("/")[1]
            imports[room] |= {other.split("/")[1] for other in imported_files(name) if other.startswith("bench/")}

    @cache
    def chain(room: str) -> int:
        here = not room.endswith(".py")  # a file beside the rooms is no room
        return here + max((chain(other) for other in imports[room] - {room}), default=0)

    assert max(map(chain, ROOMS)) <= 12


def test_the_emulator_is_a_house_of_its_own_with_one_door():
    """It takes from the lab what compiles a kernel; the lab takes from it what its public file names."""
    inside = {name for name in files() if name.startswith("bench/emulator/")}
    for name in inside:
        others = {other for other in imported_files(name) if not other.startswith("bench/emulator/")}
        assert all(other.startswith("bench/compile/") for other in others), f"{name}: {sorted(others)}"
    for name in files().keys() - inside:
        taken = imported_files(name) & inside
        assert taken <= {"bench/emulator/__init__.py"}, f"{name}: {sorted(taken)}"


def test_the_core_has_one_face():
    """Other rooms import what `core/__init__.py` names, and each name is used; `records` has the old places."""
    names = core.__all__
    used: set[str] = set()
    for name, tree in files().items():
        if name.startswith("bench/") and not name.startswith(("bench/core/", "bench/records/")):
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rooflab.bench.core"):
                    assert node.module == "rooflab.bench.core", f"{name} imports {node.module}"
                    used |= {alias.name for alias in node.names}
    assert used <= set(names) and set(names) - used == {"read_all"}, set(names) ^ used
    assert len(names) <= 41 and all(getattr(core, name) for name in names)


def test_a_class_name_stands_once():
    """In `kernels` each rung has its own `Config`."""
    names = Counter(
        node.name
        for name, tree in files().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and not (name.startswith("kernels/") and node.name == "Config")
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_no_files_import_each_other_in_a_circle():
    assert not circles({name: imported_files(name) for name in files()})
    assert circles({"a": frozenset("b"), "b": frozenset("ac"), "c": frozenset(), "d": frozenset("a")}) == {"a", "b"}


def test_bench_has_few_files_at_its_top():
    assert len(list((ROOT / "bench").glob("*.py"))) <= 8


def test_the_roofline_needs_no_third_party_package():
    for name in files():
        if name.startswith("roofline/"):
            foreign = top_packages(name) - {"rooflab"} - sys.stdlib_module_names
            assert foreign <= ({"matplotlib"} if name.startswith("roofline/plot") else set()), f"{name}: {foreign}"


def test_only_one_room_starts_python_processes():
    """Tools such as git and nvcc are run by `subprocess.run`; whatever answers requests is a `Child`."""
    starts = {"Popen", "fork", "ProcessPoolExecutor"}
    for name, tree in files().items():
        if name.startswith("bench/") and name != "bench/core/process.py":
            called = {node.func.attr for node in ast.walk(tree)
                      if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)}  # fmt: skip
            assert not called & starts and "multiprocessing" not in top_packages(name), name


def test_only_the_command_line_draws_on_the_terminal():
    users = {name for name in files() if top_packages(name) & {"typer", "rich"}}
    assert {user for user in users if not user.startswith("bench/cli/")} == {"bench/show.py"}


def test_only_tokenizers_import_transformers():
    users = {name for name in files() if "transformers" in top_packages(name)}
    # The doctor compares with it.
    assert users <= {"engine/tokenizer.py", "engine/gguf_tokenizer.py", "bench/engine/doctor.py"}


def test_no_init_directly_in_a_top_folder():
    # With one, the folder in the working directory would shadow another package of that name.
    assert not [layer for layer in LAYERS if (ROOT / layer / "__init__.py").exists()]
    assert not (ROOT / "bench" / "kernels.py").exists()


def test_files_are_small():
    for file in (*(ROOT / name for name in files()), *TEST_FILES):
        lines = len(file.read_text().splitlines())
        assert lines <= (500 if file in TEST_FILES else 400), f"{file.relative_to(ROOT)}: {lines} lines"


def _is_device_code(node: ast.FunctionDef) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)


def test_functions_are_small_and_public_ones_documented():
    for name, tree in files().items():
        assert ast.get_docstring(tree), f"{name}: no module docstring"
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                body = node.body[1:] if ast.get_docstring(node) and node.body[1:] else node.body
                length = (node.end_lineno or 0) - body[0].lineno + 1  # signature and docstring do not make it long
                assert length <= (120 if _is_device_code(node) else 50), f"{name}: {node.name}: {length} lines"
        for item in tree.body:
            if isinstance(item, ast.FunctionDef | ast.ClassDef) and not item.name.startswith("_"):
                device_code = isinstance(item, ast.FunctionDef) and _is_device_code(item)
                assert device_code or ast.get_docstring(item), f"{name}: {item.name} has no docstring"


def test_nothing_is_caught_blindly_or_left_undone():
    for name, tree in files().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ExceptHandler):
                assert node.type is not None, f"{name}: bare except"
                caught = {found.id for found in ast.walk(node.type) if isinstance(found, ast.Name)}
                assert "Exception" not in caught, f"{name}:{node.lineno}: catches Exception"
            if isinstance(node, ast.Raise) and node.exc is not None:
                assert "NotImplementedError" not in ast.unparse(node.exc), f"{name}:{node.lineno}"
        with (ROOT / name).open("rb") as handle:
            comments = [one.string for one in tokenize.tokenize(handle.readline) if one.type == tokenize.COMMENT]
        undone = [text for text in comments if any(word in text for word in ("TODO", "FIXME", "XXX"))]
        assert not undone, f"{name}: {undone}"


def test_nothing_is_imported_to_be_passed_on():
    """`import x as x` marks a re-export: a name is imported from the file that defines it."""
    for name, tree in files().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                passed_on = [alias.name for alias in node.names if alias.asname == alias.name]
                assert not passed_on, f"{name}:{node.lineno} passes on {passed_on}"


def test_outputs_are_written_whole():
    """Other writes are of scratch files for NVIDIA's tools, and of notes and caches that are renamed into place."""
    others = {"bench/core/running.py", "engine/settle.py"}
    others |= {f"bench/{name}.py" for name in ("emulator/mended", "compile/worker", "compile/capture")}
    cut = [name for name in files() if re.search(r"\.write_(text|bytes)\(", (ROOT / name).read_text())]
    assert set(cut) <= others


def test_results_are_shown_by_one_function_each():
    texts = {name: (ROOT / name).read_text() for name in files()}
    texts |= {f"results/{file.name}": file.read_text() for file in (ROOT / "results").glob("*.py")}
    by_hand = [name for name, text in texts.items() if re.search(r"[\"']\|[ :]*---", text)]
    assert not by_hand, "markdown_table writes tables"
    asking = [name for name, text in texts.items() if "/cli/" in name and re.search(r"\b(if|not) json\b", text)]
    assert not asking, "show.result, show.table and show.line know what is seen"


def test_json_holds_no_nan():
    """The others are for this package alone: keys of caches and its own processes."""
    others = {f"bench/{name}.py" for name in ("tune/choose", "tune/bucket", "load/client", "core/timers/cupti")}
    others |= {f"bench/{name}.py" for name in ("core/boot", "core/process", "core/running", "compile/store")}
    others |= {f"bench/{name}.py" for name in ("report/trends/points", "predict/launch_once", "suite/passed")}
    loose = {
        name
        for name, tree in files().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("json.dumps", "json_text.dumps")
        if "allow_nan" not in {word.arg for word in node.keywords}
    }
    assert loose <= others | {"engine/settle.py"}


def test_a_test_s_file_lies_in_a_folder_and_its_name_stands_once():
    names = [file.name for file in TEST_FILES if file.name.startswith("test_")]
    assert [name for name, count in Counter(names).items() if count > 1] == []
    assert not list((ROOT / "tests").glob("test_*.py"))


MOST_PRIVATE = 55
"""How often tests use private names of the package.  It only falls: a module offers to tests what it offers to all."""
OF_TENSORS = "_version"
"""torch's count of the writes to a tensor; a file of the package has a function of this name."""


@cache
def private_names() -> frozenset[str]:
    """What the files define as `_name`, at any depth."""
    found = set()
    for node in (node for tree in files().values() for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return frozenset(name for name in found if re.match("_[A-Za-z]", name) and name != OF_TENSORS)


def replaced_names(tree: ast.Module) -> list[str]:
    """The names that a test replaces; all texts of a function in which a variable has the name."""

    def texts_in(*nodes: ast.AST) -> list[ast.Constant]:
        inner = (inner for node in nodes for inner in ast.walk(node))
        return [one for one in inner if isinstance(one, ast.Constant) and isinstance(one.value, str)]

    def patches_in(node: ast.AST) -> list[ast.Call]:
        calls = (one for one in ast.walk(node) if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute))
        return [call for call in calls if call.func.attr in ("setattr", "delattr", "setitem")]

    found = {text for call in patches_in(tree) for text in texts_in(*call.args[:2])}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and not all(texts_in(*call.args[:2]) for call in patches_in(node)):
            found |= set(texts_in(node))
    return [str(text.value).rpartition(".")[2] for text in found]


def private_uses(tree: ast.Module) -> list[str]:
    """The private names that a test imports, reads or replaces, once for each place.

    A module of `kernels` that begins with an underscore is no private name: its users in the package import it whole.
    Nor is an attribute of the test's own classes, or of what is not of this package.
    """
    found = replaced_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rooflab."):
            folder = "/".join(str(node.module).split(".")[1:])
            found += [alias.name for alias in node.names if f"{folder}/{alias.name}.py" not in files()]
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls"):
            found.append(node.attr)
    return [name for name in found if name in private_names()]


def test_tests_use_few_private_names():
    counts = {file.name: len(private_uses(ast.parse(file.read_text()))) for file in TEST_FILES}
    assert sum(counts.values()) <= MOST_PRIVATE, {name: count for name, count in counts.items() if count}
    found = """
from rooflab.bench.ab.worker import _cycles
from rooflab.kernels import _cuda
def test(monkeypatch):
    monkeypatch.setattr(worker, "_cycles", worker._cycles)
    monkeypatch.setattr("rooflab.bench.ab.worker._cycles", self._cycles)
def fixture(monkeypatch):
    for name, fake in {"_cycles": 1, "cycles": 2}.items():
        monkeypatch.setattr(worker, name, fake)
"""
    assert private_uses(ast.parse(found)) == ["_cycles"] * 5


def test_an_op_has_the_same_name_in_every_folder():
    references = {file.stem for file in (ROOT / "reference").glob("*.py") if "\nSPEC = " in file.read_text()}
    folders = {path.parent.name for path in (ROOT / "kernels").glob("*/__init__.py")}
    tests = "".join(file.read_text() for room in ("ops", "contracts") for file in (ROOT / "tests" / room).glob("*.py"))
    assert references == folders
    assert all(f'"{op}"' in tests for op in references), "a family of ops may share a file of tests"
