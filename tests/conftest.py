"""Sets Triton's interpreter mode, which belongs to the whole process, before triton is first imported."""

import gc
import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest

if not os.environ.get("ROOFLAB_TEST_ON_GPU"):
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from needs import ALLOWED, browser, skip_without

SEED = int(os.environ.get("ROOFLAB_TEST_SEED", "0"))
"""The seed that draws which cases of a long list `make test` runs."""


def pytest_configure() -> None:
    """Collects no garbage until all tests are collected: it takes 1 s of 13."""
    gc.disable()


@pytest.hookimpl(tryfirst=True)
def pytest_ignore_collect(collection_path, config):
    """Leaves out a file without a mark that `-m` asks for: `-m gpu` runs where other files' imports may be missing, and
    `make test-more` would import 150 files in vain."""
    marks = {"gpu": ("gpu",), "more and not slow": ("more", "sampled")}.get(config.option.markexpr)
    if marks is None or collection_path.suffix != ".py":
        return None
    text = collection_path.read_text()
    return None if any(f"mark.{mark}" in text for mark in marks) else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """For a test marked `sampled(n, m)`, the seed draws n cases; m others, or all, are `more`, and the rest `slow`."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("slow"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, own in cases.items():
        count, more = (*own[0].get_closest_marker("sampled").args, len(own))[:2]
        for place, item in enumerate(random.Random(f"{SEED} {name}").sample(own, len(own))):
            if place >= count:
                item.add_marker("more" if place < count + more else "slow")


def pytest_collection_finish() -> None:
    """Freezes all tests and modules, so that no full garbage collection visits these objects again."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips a test that needs what this machine does not have."""
    if item.get_closest_marker("gpu") and not (torch.cuda.is_available() and os.environ.get("ROOFLAB_TEST_ON_GPU")):
        pytest.skip("needs a CUDA device and ROOFLAB_TEST_ON_GPU=1")
    for marker in item.iter_markers("needs"):
        for name in marker.args:
            skip_without(name)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """With ROOFLAB_NO_SKIPS=1, fails a test that is skipped for a reason that is not allowed."""
    report = yield
    if os.environ.get("ROOFLAB_NO_SKIPS") and report.skipped and skip_reason(report) not in ALLOWED:
        report.outcome = "failed"
        report.longrepr = f"skipped, and tests/skips_allowed.txt does not have the reason: {skip_reason(report)}"
    return report


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the seed, and counts the skipped tests by reason."""
    terminalreporter.write_line(f"seed of the sampled cases: {SEED} (ROOFLAB_TEST_SEED)")
    counts = Counter(map(skip_reason, terminalreporter.stats.get("skipped", ())))
    for reason, count in counts.most_common():
        terminalreporter.write_line(f"skipped {count}: {reason}")


def skip_reason(report: Any) -> str:
    return str(report.longrepr[2]).removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else ""


@pytest.fixture(scope="session", autouse=True)
def quiet() -> Iterator[None]:
    """Lets no reading of this process be NOISY, because the test workers keep each other's processors busy.

    Before a sample only a part of the cache is flushed, because the whole flush takes 0.1 s.
    """
    with pytest.MonkeyPatch.context() as patch:
        for module in ("core.timers.timing", "engine.runs", "core.ceilings.cpu_limits"):
            patch.setattr(f"rooflab.bench.{module}.why_noisy", lambda seconds, waiting: "")
        patch.setattr("rooflab.bench.core.timers.timing.few", lambda samples, room: "")
        patch.setattr("rooflab.bench.core.timers.cpu.last_level_cache_bytes", lambda: 2**20)
        yield


@pytest.fixture(scope="session", autouse=True)
def one_child_a_worker() -> Iterator[None]:
    """Lets each pool of this process have one child: the test workers already keep every core busy, and a child takes
    three seconds to import torch and the kernels."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("process", "outside"):
            patch.setattr(f"rooflab.bench.core.{module}.cores", lambda: 1)
        yield


@pytest.fixture(scope="session", autouse=True)
def equal_times(tmp_path_factory) -> Iterator[None]:
    """Times no kernel when an engine is loaded: the first kernel that can run serves, the same on every machine."""
    from rooflab.engine.choose import choose_kernels

    folder = tmp_path_factory.mktemp("times")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose_kernels, "folder", lambda: folder)
        patch.setattr(choose_kernels, "time_kernels", lambda *of: {kernel.name: 1.0 for kernel in of[2]})
        yield


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Returns a function that sets the number of torch's threads, which is restored when the test has ended."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def rooflab(monkeypatch, capfd, tmp_path) -> Callable[..., tuple[int, str, str]]:
    """Runs a command in an empty folder and gives its exit status, output and errors."""
    from rooflab.bench.cli.app import run

    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["rooflab", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            run()
        captured = capfd.readouterr()
        return stopped.value.code or 0, captured.out, captured.err

    return call


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A browser for one file of tests: Playwright's loop must end before the next file starts its own."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=browser(), args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def open_file(chromium) -> Iterator[Callable[..., Any]]:
    """Opens a file in a context of its own with the network off.  No page may send a request or a message."""
    opened, heard = set(), []

    def call(path, **options):
        page = chromium.new_context(offline=True, **options).new_page()
        page.on("request", lambda request: heard.append(request.url))
        page.on("console", lambda message: heard.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: heard.append(f"error: {error}"))
        opened.add(path.as_uri())
        page.goto(path.as_uri())
        return page

    yield call
    assert [what for what in heard if what not in opened and not what.startswith("data:")] == []
