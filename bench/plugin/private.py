"""The one place that knows what pytest-benchmark, and pytest, do not promise: how a session and a fixture are made.

Its hooks, its options and `pedantic` are public. Where a newer one has not got what is needed here, `--benchmark` ends
with one sentence, and nothing is measured in another way than was meant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import pytest

TESTED = ("5.2.3", "5.3.1")
"""Versions of pytest-benchmark that this was run with."""
SESSION = ("benchmarks", "disabled")
FIXTURE = ("disabled", "extra_info", "fullname", "has_error", "pedantic", "stats")
ENTRY = ("fullname", "has_error", "extra_info")


@dataclass(frozen=True)
class Session:
    """What is known of pytest-benchmark's session."""

    disabled: bool
    """Whether it times nothing: under xdist, or with `--benchmark-disable`."""
    measured: frozenset[str]
    """Names of the tests that ended in a measurement so far."""
    extra: Mapping[str, Mapping[str, Any]]
    """By name, what was put beside each measurement's statistics."""


def is_loaded(config: pytest.Config) -> bool:
    """Whether pytest-benchmark takes part in this run."""
    return hasattr(config.option, "benchmark_disable")


def session(config: pytest.Config) -> Session:
    """pytest-benchmark's session, once it is configured.  Raises `UsageError` where it is made otherwise."""
    found: Any = getattr(config, "_benchmarksession", None)
    _require("its session", found, SESSION)
    for entry in found.benchmarks:
        _require("a measurement", entry, ENTRY)
    extra = {str(entry.fullname): entry.extra_info for entry in found.benchmarks if not entry.has_error}
    return Session(bool(found.disabled), frozenset(extra), extra)


def check_fixture(benchmark: Any) -> None:
    """Raises `UsageError` where pytest-benchmark's fixture lacks what is needed."""
    _require("its fixture", benchmark, FIXTURE)


def _require(what: str, found: Any, names: Iterable[str]) -> None:
    missing = [name for name in names if not hasattr(found, name)]
    if missing:
        raise pytest.UsageError(
            f"--benchmark: works with pytest-benchmark {', '.join(TESTED)}; in {installed()} {what} has no "
            f"{missing[0]!r}"
        )


def installed() -> str:
    """The version of pytest-benchmark that is installed."""
    try:
        return version("pytest-benchmark")
    except PackageNotFoundError:
        return "this one"


def why_no_histogram(config: pytest.Config) -> str | None:
    """The sentence for `--benchmark-histogram` where pytest-benchmark could only break off with a traceback."""
    missing = [package for package in ("pygal", "pygaljs") if find_spec(package) is None]
    if not config.getoption("benchmark_histogram", None) or not missing:
        return None
    wanted = " and ".join(missing)
    return f"--benchmark-histogram: needs {wanted}, not installed here: pip install 'pytest-benchmark[histogram]'"


def keywords_hold(expression: str, holds: Callable[[str], bool]) -> bool:
    """Whether `-k EXPRESSION` holds, a word of it where `holds` says so; pytest has parsed it before."""
    from _pytest.mark.expression import Expression

    return bool(Expression.compile(expression).evaluate(lambda word, **_: holds(word)))  # type: ignore[arg-type]
