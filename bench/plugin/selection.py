"""Whether a test that a baseline names was left out of a run on purpose, by the command line."""

from __future__ import annotations

import fnmatch
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from rooflab.bench.plugin.private import keywords_hold


def left_out(config: pytest.Config, name: str) -> bool:
    """Whether the command line leaves out the test `name` (`bench/bench_mine.py::test_it[x]`), which was not found.

    By paths and node ids, `--deselect`, `--ignore`, `--ignore-glob` or `-k`.  Of a test that is not there nothing tells
    its markers: `-m` leaves out only tests that are there.
    """
    file = config.rootpath / name.partition("::")[0]
    option = config.getoption
    ignored = [_absolute(config, path) for path in option("ignore", None) or ()]
    globs = [str(_absolute(config, path)) for path in option("ignore_glob", None) or ()]
    return (
        not any(_covers(config, argument, file, name) for argument in config.args)
        or any(path == file or path in file.parents for path in ignored)
        or any(fnmatch.fnmatch(str(part), glob) for glob in globs for part in (file, *file.parents))
        or any(name.startswith(prefix) for prefix in option("deselect", None) or ())
        or not _has_keywords(option("keyword", "") or "", name)
    )


def _absolute(config: pytest.Config, path: str | Path) -> Path:
    return (config.invocation_params.dir / path).resolve()


def _covers(config: pytest.Config, argument: str, file: Path, name: str) -> bool:
    """Whether the path, node id or module that was asked for has `file` in it and, where it names a test, `name`."""
    text, *tests = argument.partition("[")[0].split("::")
    parameters = argument[argument.index("[") :] if "[" in argument else ""
    path = _absolute(config, text)
    if config.getoption("pyargs", False) and not path.exists():
        found = find_spec(text)
        if found is None or found.origin is None:
            return True  # not known: nothing is taken for left out
        path = Path(found.origin).parent if found.submodule_search_locations else Path(found.origin)
    if path != file.resolve() and path not in file.resolve().parents:
        return False
    own = name.partition("::")[2]
    wanted = "::".join(tests) + parameters
    return own == wanted or not tests or own.startswith((f"{wanted}::", f"{wanted}["))


def _has_keywords(expression: str, name: str) -> bool:
    """Whether `-k` with `expression` takes the test `name`: words are searched in its parts, whatever their case."""
    # `benchmark` is the marker that such a test may have had.
    parts = ["benchmark", *(part.lower() for part in re.split(r"::|/", name))]
    return not expression or keywords_hold(expression, lambda word: any(word.lower() in part for part in parts))
