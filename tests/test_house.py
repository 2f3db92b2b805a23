"""The house rules that a program can check: import direction, sizes, and what must not be there."""

import ast
import sys
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = ("roofline", "reference", "kernels", "engine", "bench")
FILES = [file for layer in LAYERS for file in sorted((ROOT / layer).rglob("*.py"))]
TEST_FILES = sorted((ROOT / "tests").rglob("*.py"))


def imported_modules(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def top_packages(file: Path) -> set[str]:
    return {module.split(".")[0] for module in imported_modules(file)}


def layer_of(file: Path) -> str:
    return file.relative_to(ROOT).parts[0]


def by_name(file: Path) -> str:
    return str(file.relative_to(ROOT))


def test_there_are_files_to_check():
    assert {layer_of(file) for file in FILES} == set(LAYERS)


@pytest.mark.parametrize("file", FILES, ids=by_name)
def test_imports_run_one_way(file):
    own = LAYERS.index(layer_of(file))
    for module in imported_modules(file):
        parts = module.split(".")
        if parts[0] == "rooflab" and len(parts) > 1:
            assert parts[1] in LAYERS, f"{module}: unknown layer"
            assert LAYERS.index(parts[1]) <= own, f"{by_name(file)} imports {module}, which is above it"
        assert parts[0] not in LAYERS, f"{by_name(file)} imports top-level {module}; say rooflab.{module}"


def test_the_roofline_needs_no_third_party_package():
    for file in (ROOT / "roofline").glob("*.py"):
        foreign = top_packages(file) - {"rooflab"} - sys.stdlib_module_names
        assert foreign <= ({"matplotlib"} if file.name == "plot.py" else set()), f"{file.name}: {foreign}"


def test_only_the_command_line_draws_on_the_terminal():
    users = {by_name(file) for file in FILES if top_packages(file) & {"typer", "rich"}}
    assert {user for user in users if not user.startswith("bench/cli/")} == {"bench/show.py"}


def test_only_the_tokenizer_imports_transformers():
    users = {by_name(file) for file in FILES if "transformers" in top_packages(file)}
    # The benchmark against transformers is the one other place: it is the thing compared with.
    assert users <= {"engine/tokenizer.py", "bench/measure/engine_vs_transformers.py"}


@pytest.mark.parametrize("layer", LAYERS)
def test_no_init_directly_in_a_top_folder(layer):
    # With one, the folder in the working directory would shadow another package of that name.
    assert not (ROOT / layer / "__init__.py").exists()


def test_no_file_of_bench_shadows_the_kernels():
    assert not (ROOT / "bench" / "kernels.py").exists()


@pytest.mark.parametrize("file", FILES + TEST_FILES, ids=by_name)
def test_files_are_small(file):
    assert len(file.read_text().splitlines()) <= 300


@pytest.mark.parametrize("file", FILES, ids=by_name)
def test_functions_are_small_and_public_ones_documented(file):
    def is_device_code(node):
        return any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)

    tree = ast.parse(file.read_text())
    assert ast.get_docstring(tree), "no module docstring"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            body = node.body[1:] if ast.get_docstring(node) and node.body[1:] else node.body
            length = node.end_lineno - body[0].lineno + 1  # signature and docstring are not what makes it long
            assert length <= (120 if is_device_code(node) else 60), f"{node.name}: {length} lines"
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            assert is_device_code(node) or ast.get_docstring(node), f"{node.name} has no docstring"


@pytest.mark.parametrize("file", FILES, ids=by_name)
def test_nothing_is_caught_blindly_or_left_undone(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, "bare except"
            caught = ast.walk(node.type)
            assert not any(isinstance(name, ast.Name) and name.id == "Exception" for name in caught)
        if isinstance(node, ast.Raise) and node.exc is not None:
            assert "NotImplementedError" not in ast.unparse(node.exc)
    with file.open("rb") as handle:
        comments = [token.string for token in tokenize.tokenize(handle.readline) if token.type == tokenize.COMMENT]
    assert not [comment for comment in comments if any(word in comment for word in ("TODO", "FIXME", "XXX"))]


def test_an_op_has_the_same_name_in_every_folder():
    references = {file.stem for file in (ROOT / "reference").glob("*.py") if "\nSPEC = " in file.read_text()}
    folders = {path.parent.name for path in (ROOT / "kernels").glob("*/__init__.py")}
    tests = {file.stem.removeprefix("test_") for file in (ROOT / "tests").glob("test_*.py")}
    assert references == folders
    assert references <= tests
