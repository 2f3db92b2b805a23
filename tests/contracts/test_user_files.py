"""A user's file: its ops and kernels work like ours, and it imports the files beside it from any working folder."""

from dataclasses import replace

import pytest
import torch
from op_kernels import own_registry  # noqa: F401

from rooflab.bench.core.select import file_of
from rooflab.kernels import registry
from rooflab.kernels._user_files import import_file

KERNEL = """
import torch
from rooflab.kernels.registry import register

{imports}

@register(op="softmax", name="{name}", role="optimized", backend="torch")
def {name}(x):
    return torch.softmax(x.float(), -1).to(x.dtype) * SCALE
"""


@pytest.mark.usefixtures("own_registry")
@pytest.mark.parametrize(
    ("folder", "imports"),
    [
        ("", "from beside import SCALE"),
        ("", "from .beside import SCALE"),
        ("package/inner", "from ..beside import SCALE"),
    ],
)
def test_it_finds_the_files_beside_it(tmp_path, folder, imports):
    place = tmp_path / folder
    place.mkdir(parents=True, exist_ok=True)
    for package in [place, *place.parents] if folder else []:
        if package != tmp_path and tmp_path in package.parents:
            (package / "__init__.py").touch()
    (place.parent if folder else place).joinpath("beside.py").write_text("SCALE = 3.0\n")
    (place / "mine.py").write_text(KERNEL.format(imports=imports, name="mine"))
    (kernel,) = registry.load_file(place / "mine.py")
    assert kernel.fn(torch.ones(1, 2)).tolist() == [[1.5, 1.5]]


def test_two_folders_have_their_own_files(tmp_path):
    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "beside.py").write_text(f"NAME = {folder!r}\n")
        (tmp_path / folder / "mine.py").write_text("import beside\nNAME = beside.NAME\n")
    assert [import_file(tmp_path / folder / "mine.py").NAME for folder in ("one", "other")] == ["one", "other"]


@pytest.mark.usefixtures("own_registry")
def test_an_object_that_is_called_is_known_by_the_file_that_registers_it(tmp_path):
    file, head = tmp_path / "mine.py", "from rooflab.kernels.registry import register"
    words = "register(op='softmax', name='object', role='optimized', backend='torch')(Made())"
    file.write_text(f"{head}\nclass Made:\n    def __call__(self, x):\n        return x.softmax(-1)\n{words}\n")
    (kernel,) = registry.load_file(file)
    assert file_of(kernel) == file.resolve() == file_of(replace(kernel, file=None))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1\n", "mine.py registers no kernel"),
        (None, "expected a Python file, got"),
        ("import nothing_of_this_name\n", "mine.py cannot be imported: ModuleNotFoundError: .*nothing_of_this"),
    ],
)
def test_a_file_that_is_not_one_or_registers_nothing_or_fails_is_refused(tmp_path, text, words):
    if text is not None:
        (tmp_path / "mine.py").write_text(text)
    with pytest.raises(ValueError, match=words):
        registry.load_file(tmp_path / "mine.py")
