"""Imports a user's file by its path.  The file can import other files of its folder and of its package."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

IMPORT_ERRORS = (
    *(ImportError, SyntaxError, NameError, AttributeError, TypeError, ValueError, LookupError, ArithmeticError),
    *(AssertionError, OSError, RuntimeError, MemoryError, Warning, SystemExit),
)
"""The errors that the import of foreign code may raise."""
MODULE_PREFIX = "rooflab_files_"
"""The first part of the module name of each user's file."""
_user_folders: set[Path] = set()
"""The folders of the user's files imported so far.  They are on `sys.path`."""


def import_file(path: Path) -> ModuleType:
    """Runs a Python file as a new module and returns the module. Does not catch the errors of the file.

    The module belongs to a package with a unique name for each folder. So relative imports work, and two files with the
    same name do not collide."""
    path = path.resolve()
    package_root = path.parent
    while (package_root / "__init__.py").is_file() and package_root != package_root.parent:
        package_root = package_root.parent
    folder_package = f"{MODULE_PREFIX}{abs(hash(package_root))}"
    if folder_package not in sys.modules:
        package_spec = ModuleSpec(folder_package, None, is_package=True)
        package_spec.submodule_search_locations = [str(package_root)]
        sys.modules[folder_package] = importlib.util.module_from_spec(package_spec)
    for folder in (package_root, path.parent):
        _put_first(folder)
    inner_package = ".".join((folder_package, *path.parent.relative_to(package_root).parts))
    importlib.import_module(inner_package)
    module_name = f"{inner_package}.{path.stem.replace('.', '_')}"
    module_spec = importlib.util.spec_from_file_location(module_name, path)
    assert module_spec is not None and module_spec.loader is not None, "a .py file always has a loader"
    user_module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_name] = user_module  # Triton reads a kernel's source through its module
    try:
        module_spec.loader.exec_module(user_module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return user_module


def _put_first(folder: Path) -> None:
    """Puts `folder` first on `sys.path`.  Unloads a module of another user folder if `folder` has a module of the same
    name."""
    if str(folder) in sys.path:
        sys.path.remove(str(folder))
    sys.path.insert(0, str(folder))
    for name, loaded_module in list(sys.modules.items()):
        module_file = Path(getattr(loaded_module, "__file__", None) or "")
        module_folder = module_file.parent.parent if module_file.name == "__init__.py" else module_file.parent
        if "." not in name and module_folder != folder and module_folder in _user_folders and _has(folder, name):
            for unloaded_name in [loaded_name for loaded_name in sys.modules if loaded_name.partition(".")[0] == name]:
                del sys.modules[unloaded_name]
    _user_folders.add(folder)


def _has(folder: Path, name: str) -> bool:
    return (folder / f"{name}.py").is_file() or (folder / name / "__init__.py").is_file()


def first_line(error: BaseException) -> str:
    """Returns the type of `error` and the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
