"""Triton's interpreter mode belongs to the whole process and must be set before triton is first imported."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

if not os.environ.get("ROOFLAB_TEST_ON_GPU"):
    os.environ["TRITON_INTERPRET"] = "1"

import torch  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what needs a GPU, in one place and with its reason."""
    if torch.cuda.is_available() and os.environ.get("ROOFLAB_TEST_ON_GPU"):
        return
    skip = pytest.mark.skip(reason="needs a CUDA device and ROOFLAB_TEST_ON_GPU=1")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(scope="session", autouse=True)
def quiet() -> Iterator[None]:
    """Calls no reading of this process NOISY: the test workers keep each other's processors busy."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("timing.timing", "measure.engine_run"):
            patch.setattr(f"rooflab.bench.{module}.noise", lambda seconds, waiting: "")
        yield


@pytest.fixture(scope="session", autouse=True)
def equal_times(tmp_path_factory) -> Iterator[None]:
    """Times no kernel when an engine is loaded: the first that can run serves, on every machine the same."""
    folder = tmp_path_factory.mktemp("settled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rooflab.engine.settle.folder", lambda: folder)
        patch.setattr("rooflab.engine.settle._time", lambda *of: {kernel.name: 1.0 for kernel in of[3]})
        yield


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


@pytest.fixture
def tool(monkeypatch, tmp_path) -> Callable[[str, str], Path]:
    """Puts stand-ins for NVIDIA's tools on a PATH that holds nothing else; see `fake_tools.py`."""
    from fake_tools import fake_tools

    return fake_tools(monkeypatch, tmp_path)
