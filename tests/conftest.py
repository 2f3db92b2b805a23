"""Triton's interpreter mode belongs to the whole process and must be set before triton is first imported."""

import os

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
