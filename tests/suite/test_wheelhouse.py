"""The wheels for a machine without a network: the packages that it lacks, and their dependencies."""

from visit.wheelhouse import lacking

PRESENT = {"never": ["torch"], "never_prefix": ["nvidia-"], "present": ["numpy", "Markdown_It.py", "pytest-benchmark"]}
RESOLVED = {
    "numpy": "2.4.6",
    "plotly": "7.1.0",
    "narwhals": "2.0",
    "pytest-benchmark": "5.3.1",
    "py-cpuinfo": "9.0",
    "nvidia-ml-py": "13",
    "torch": "2.13.0",
    "markdown-it-py": "4.0",
}


def test_what_is_lacking_is_carried_and_what_is_there_where_another_version_would_not_do():
    found = lacking(["plotly>=6", "numpy>=2", "pytest-benchmark>=5", "torch==2.13.0"], RESOLVED, PRESENT)
    assert found == {"narwhals": "2.0", "plotly": "7.1.0", "py-cpuinfo": "9.0"}, "torch and CUDA are never carried"
    assert lacking(["pytest-benchmark==5.3.1"], RESOLVED, PRESENT)["pytest-benchmark"] == "5.3.1"
    also = PRESENT | {"also": ["nvidia-ml-py>=13"]}
    assert lacking([], RESOLVED, also)["nvidia-ml-py"] == "13", "it tells a throttled card"
