"""A user's file of kernels imports what lies beside it, wherever the command runs."""

import pytest
import torch
from op_kernels import own_registry  # noqa: F401

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


def test_an_import_that_fails_is_one_error(tmp_path):
    (tmp_path / "mine.py").write_text("import nothing_of_this_name\n")
    with pytest.raises(
        ValueError, match=r"^kernel: mine.py cannot be imported: ModuleNotFoundError: .*nothing_of_this"
    ):
        registry.load_file(tmp_path / "mine.py")
