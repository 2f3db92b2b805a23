"""The rules of the house that a program can check: the direction of imports, sizes, and what must not be there."""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import chain
from pathlib import Path

import pytest

from rooflab.bench import core

ROOT = Path(__file__).parents[2]
LAYERS = ("roofline", "reference", "kernels", "engine", "bench")
ROOMS = (
    "base core show.py revisions compile emulator predict emulate tune checks ab "
    "suite report plugin exchange engine load latency watch commands.py lab.py cli __main__.py bench_kernels.py "
    "run_from_checkout.py"
).split()
"""What lies in bench/; each imports only what stands above it in this list."""
TEST_FILES = sorted((ROOT / "tests").rglob("*.py"))


@cache
def files() -> dict[str, ast.Module]:
    """Every file of the layers by its path; parsing them takes two seconds, which collecting the tests must not."""
    paths = (file for layer in LAYERS for file in sorted((ROOT / layer).rglob("*.py")))
    return {file.relative_to(ROOT).as_posix(): ast.parse(file.read_text()) for file in paths}


@cache
def by_kind() -> Mapping[type[ast.AST], list[tuple[str, ast.AST]]]:
    """The nodes of all files by kind, each with its file's path."""
    found = defaultdict(list)
    for name, tree in files().items():
        for node in ast.walk(tree):
            found[type(node)].append((name, node))
    return found


def nodes(*kinds: type[ast.AST]) -> Iterator[tuple[str, ast.AST]]:
    """Each node of these kinds in all files, with the file's path."""
    return chain.from_iterable(by_kind()[kind] for kind in kinds)


@cache
def imported_modules(name: str) -> frozenset[str]:
    """The modules that a file imports, and what it imports from them."""
    found = set()
    for node in ast.walk(files()[name]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found)


@cache
def imported_files(name: str) -> frozenset[str]:
    """The files of the tree that a file imports, a package standing for its `__init__.py`."""
    paths = [module.split(".")[1:] for module in imported_modules(name) if module.startswith("rooflab.")]
    found = {f"{'/'.join(path)}.py" for path in paths} | {f"{'/'.join(path)}/__init__.py" for path in paths}
    return frozenset(found & files().keys() - {name})


def packages(name: str) -> set[str]:
    """The top packages that a file imports."""
    return {module.split(".")[0] for module in imported_modules(name)}


def circles(edges: Mapping[str, frozenset[str]]) -> set[str]:
    """What is left of a graph once everything that imports nothing of the rest has been taken away, from both ends."""
    left = set(edges)
    while leaves := {name for name in left if not edges[name] & left}:
        left -= leaves
    while roots := {name for name in left if not any(name in edges[other] for other in left)}:
        left -= roots
    return left


def test_imports_run_down_the_layers_and_the_rooms_of_bench():
    assert {name.split("/")[0] for name in files()} == set(LAYERS)
    for name in files():
        layer, room, *_ = name.split("/")
        assert layer != "bench" or room in ROOMS, f"{name}: {room} has no place in the order of rooms"
        for module in imported_modules(name):
            own = re.match(r"rooflab\.(\w+)", module)
            assert module not in LAYERS and (own is None or own[1] in LAYERS), f"{name} imports {module}"
        for other in imported_files(name):
            above = other.split("/")
            assert LAYERS.index(above[0]) <= LAYERS.index(layer), f"{name} imports {other}, which is above it"
            if layer == above[0] == "bench":
                assert ROOMS.index(above[1]) <= ROOMS.index(room), f"{name} imports {other}, whose room comes later"


def test_no_files_import_each_other_in_a_circle():
    assert not circles({name: imported_files(name) for name in files()})
    assert circles({"a": frozenset("b"), "b": frozenset("ac"), "c": frozenset(), "d": frozenset("a")}) == {"a", "b"}


def test_the_emulator_is_a_house_of_its_own_with_one_door():
    """It takes from the lab what compiles a kernel; the lab takes from it what its public file names."""
    inside = {name for name in files() if name.startswith("bench/emulator/")}
    for name in inside:
        assert all(other.startswith("bench/compile/") for other in imported_files(name) - inside), name
    for name in files().keys() - inside:
        assert imported_files(name) & inside <= {"bench/emulator/__init__.py"}, name


def test_the_core_has_one_face():
    """Other rooms import what `core/__init__.py` names, and each name is used."""
    used: set[str] = set()
    for name, node in nodes(ast.ImportFrom):
        others = name.startswith("bench/") and not name.startswith("bench/core/")
        if others and (node.module or "").startswith("rooflab.bench.core"):
            assert node.module == "rooflab.bench.core", f"{name} imports {node.module}"
            used |= {alias.name for alias in node.names}
    assert used == set(core.__all__) - {"read_all"} and len(core.__all__) <= 41


@pytest.mark.parametrize(
    ("package", "allowed"),
    [
        ("typer", ("bench/cli/", "bench/show.py")),
        ("rich", ("bench/cli/", "bench/show.py")),
        ("transformers", ("engine/load/tokenizer.py", "engine/load/gguf_tokenizer.py", "bench/engine/doctor.py")),
        ("multiprocessing", ("engine/", "kernels/", "bench/core/process.py")),
    ],
)
def test_a_package_is_imported_where_it_belongs(package, allowed):
    """The terminal is drawn by the command line, and only the doctor compares with another tokenizer."""
    assert [name for name in files() if package in packages(name) and not name.startswith(allowed)] == []


def test_the_roofline_needs_matplotlib_alone_and_that_for_its_plots():
    for name in (name for name in files() if name.startswith("roofline/")):
        drawn = {"matplotlib"} if name.startswith("roofline/plot") else set()
        assert packages(name) - sys.stdlib_module_names <= {"rooflab", *drawn}, name


def test_only_one_room_starts_python_processes():
    """Tools such as git and nvcc are run by `subprocess.run`; whatever answers requests is a `Child`."""
    starts = {"Popen", "fork", "ProcessPoolExecutor"}
    found = {name for name, node in nodes(ast.Call) if getattr(node.func, "attr", "") in starts}
    assert {name for name in found if name.startswith("bench/")} <= {"bench/core/process.py"}


def test_a_class_name_stands_once():
    """In `kernels` each rung has its own `Config`."""
    classes = [(name, node.name) for name, node in nodes(ast.ClassDef)]
    names = Counter(own for name, own in classes if not (name.startswith("kernels/") and own == "Config"))
    assert [name for name, count in names.items() if count > 1] == []


def test_no_init_directly_in_a_top_folder():
    """With one, the folder in the working directory would shadow another package of that name."""
    assert not [layer for layer in LAYERS if (ROOT / layer / "__init__.py").exists()]


def test_files_are_small():
    for file in (*(ROOT / name for name in files()), *TEST_FILES):
        lines = len(file.read_text().splitlines())
        assert lines <= 400, f"{file.relative_to(ROOT)}: {lines} lines"


def is_device_code(node: ast.AST) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in getattr(node, "decorator_list", ()))


def test_functions_are_small():
    for name, node in nodes(ast.FunctionDef):
        body = node.body[1:] if ast.get_docstring(node) and node.body[1:] else node.body
        length = (node.end_lineno or 0) - body[0].lineno + 1  # signature and docstring do not make it long
        assert length <= (120 if is_device_code(node) else 50), f"{name}: {node.name}: {length} lines"


def test_files_and_what_they_offer_are_documented():
    for name, tree in files().items():
        offered = [item for item in tree.body if isinstance(item, ast.FunctionDef | ast.ClassDef)]
        public = [item for item in offered if not item.name.startswith("_") and not is_device_code(item)]
        lacking = [getattr(item, "name", "module") for item in (tree, *public) if not ast.get_docstring(item)]
        assert not lacking, f"{name}: {lacking}"


UNDONE = "TODO|FIXME|XXX"


def test_nothing_is_caught_blindly_or_left_undone():
    for name, node in nodes(ast.ExceptHandler, ast.Raise):
        if isinstance(node, ast.ExceptHandler):
            caught = {found.id for found in ast.walk(node.type or node) if isinstance(found, ast.Name)}
            assert node.type is not None and "Exception" not in caught, f"{name}:{node.lineno} catches all"
        else:
            assert node.exc is None or "NotImplementedError" not in ast.unparse(node.exc), f"{name}:{node.lineno}"
    for name in files():
        text = (ROOT / name).read_text()
        if re.search(UNDONE, text):  # few files: to read the tokens of all takes two seconds
            tokens = tokenize.generate_tokens(io.StringIO(text).readline)
            assert not [one for one in tokens if one.type == tokenize.COMMENT and re.search(UNDONE, one.string)], name


def test_nothing_is_imported_to_be_passed_on():
    """`import x as x` marks a re-export: a name is imported from the file that defines it."""
    for name, node in nodes(ast.ImportFrom):
        passed_on = [alias.name for alias in node.names if alias.asname == alias.name]
        assert not passed_on, f"{name}:{node.lineno} passes on {passed_on}"


def test_outputs_are_written_whole():
    """Other writes are of scratch files for NVIDIA's tools, and of notes and caches that are renamed into place."""
    others = {"bench/core/running.py", "engine/choose/choose_kernels.py"}
    others |= {f"bench/{name}.py" for name in ("emulator/mended", "compile/compile_worker", "compile/capture")}
    assert {name for name in files() if re.search(r"\.write_(text|bytes)\(", (ROOT / name).read_text())} <= others


def test_json_holds_no_nan():
    """The others are for this package alone: keys of caches and its own processes."""
    others = {f"bench/{name}.py" for name in ("tune/choose", "tune/bucket", "load/client", "core/timers/activity")}
    others |= {f"bench/{name}.py" for name in ("core/boot", "core/process", "core/running", "compile/store")}
    others |= {f"bench/{name}.py" for name in ("report/trends/points", "predict/launch_once", "suite/passed")}
    written = [(name, node) for name, node in nodes(ast.Call) if getattr(node.func, "attr", "") == "dumps"]
    loose = {
        name
        for name, node in written
        if "allow_nan" not in {word.arg for word in node.keywords}
        and ast.unparse(node.func) in ("json.dumps", "json_text.dumps")
    }
    assert loose <= others | {"engine/choose/choose_kernels.py"}


def test_a_test_s_file_lies_in_a_folder_and_its_name_stands_once():
    names = Counter(file.name for file in TEST_FILES if file.name.startswith("test_"))
    assert [name for name, count in names.items() if count > 1] == []
    assert not list((ROOT / "tests").glob("test_*.py"))


MOST_LINES_OF_RESULTS = 5067
"""The most lines of all scripts of results/, without the kernels of strangers, which `results/check/make.py` checks."""


def test_results_have_a_folder_with_a_page_for_each_topic_and_few_scripts():
    root = ROOT / "results"
    assert [path.name for path in root.iterdir() if path.is_file()] == ["README.md"]
    scripts = [*root.glob("*/*.py")]
    assert len(scripts) > 20 and all(script.with_name("README.md").is_file() for script in scripts)
    assert sum(script.read_text().count("\n") for script in scripts) <= MOST_LINES_OF_RESULTS


def test_a_file_of_bench_is_named_once_and_few_lines_escape_the_formatter():
    files = [file for file in (ROOT / "bench").rglob("*.py") if file.name != "__init__.py"]
    assert [name for name, count in Counter(file.name for file in files).items() if count > 1] == []
    ours = chain(*((ROOT / folder).rglob("*.py") for folder in (*LAYERS, "tests", "results")))
    assert sum(file.read_text().count("# fmt: " + "skip") for file in ours) <= 200


def test_an_op_has_the_same_name_in_every_folder():
    references = {file.stem for file in (ROOT / "reference").glob("*.py") if "\nSPEC = " in file.read_text()}
    assert references == {path.parent.name for path in (ROOT / "kernels").glob("*/__init__.py")}
    tests = "".join(file.read_text() for room in ("ops", "contracts") for file in (ROOT / "tests" / room).glob("*.py"))
    assert all(f'"{op}"' in tests for op in references), "a family of ops may share a file of tests"


MOST_PRIVATE = 7
"""How often tests use private names of the package.  It only falls: a module offers to tests what it offers to all."""
OF_TENSORS = "_version"
"""torch's count of the writes to a tensor; a file of the package has a function of this name."""


@cache
def private_names() -> frozenset[str]:
    """What the files define as `_name`, at any depth."""
    found = {node.name for _, node in nodes(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)}
    stored = (node for _, node in nodes(ast.Name, ast.Attribute) if isinstance(node.ctx, ast.Store))
    found |= {node.id if isinstance(node, ast.Name) else node.attr for node in stored}
    return frozenset(name for name in found if re.match("_[A-Za-z]", name) and name != OF_TENSORS)


def texts_of_patches(tree: ast.Module) -> list[str]:
    """All texts of the functions that replace something, each once: the name may come from a table."""
    patching = [
        function
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        and {"setattr", "delattr", "setitem"} & {getattr(one, "attr", "") for one in ast.walk(function)}
    ]
    inner = {one for function in patching for one in ast.walk(function) if isinstance(one, ast.Constant)}
    return [one.value for one in inner if isinstance(one.value, str)]


def private_uses(tree: ast.Module) -> list[str]:
    """The private names that a test imports, reads or replaces, once for each place.

    A module of `kernels` that begins with an underscore is no private name: its users in the package import it whole.
    Nor is an attribute of the test's own classes, or of what is not of this package.
    """
    found = [text.rpartition(".")[2] for text in texts_of_patches(tree)]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rooflab."):
            folder = "/".join(str(node.module).split(".")[1:])
            found += [alias.name for alias in node.names if f"{folder}/{alias.name}.py" not in files()]
        elif isinstance(node, ast.Attribute) and getattr(node.value, "id", "") not in ("self", "cls"):
            found.append(node.attr)
    return [name for name in found if name in private_names()]


def test_tests_use_few_private_names():
    counts = {file.name: len(private_uses(ast.parse(file.read_text()))) for file in TEST_FILES}
    assert sum(counts.values()) == MOST_PRIVATE, {name: count for name, count in counts.items() if count}


OPENERS = set(
    "After And As At Because Before Behind Between But By For From If In Of On Or So Such Than That Those Through To "
    "When Where Whose With Within Without".split()
)
"""Words with which half a sentence begins; behind a comma, a colon or a semicolon its other half may follow."""


def is_fragment(docstring: str) -> bool:
    """Whether the first sentence has one or two words and names no value, or is half a sentence."""
    first = re.split(r"(?<=[.?!])\s", " ".join(docstring.split()), maxsplit=1)[0]
    few = len(first.split()) <= 2 and not re.search(r"[`*\d\[(]", first)
    return few or (first.split()[0] in OPENERS and not re.search(r"[,:;?]", first))


def test_no_docstring_is_a_fragment():
    assert is_fragment("Of a step that nobody times.") and is_fragment("The newest.") and is_fragment("As `Other`.")
    assert not is_fragment("In bytes, the shared memory of a CTA.") and not is_fragment("The limits of an SM.")
    strings = [
        (f"{name}:{node.lineno}", node.value.value)
        for name, node in nodes(ast.Expr)
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    assert len(strings) > 5_000
    assert [place for place, text in strings if is_fragment(text)] == []
