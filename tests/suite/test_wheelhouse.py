"""What is carried to a machine without a network: what is lacking there, what that needs, and no more than fits."""

import subprocess
from pathlib import Path

import pytest
import wheelhouse
from wheelhouse import download, lacking, target_options

PRESENT = {"never": ["torch"], "never_prefix": ["nvidia-"], "present": ["numpy", "Markdown_It.py", "pytest-benchmark"]}
RESOLVED = {
    "numpy": "2.4.6", "plotly": "7.1.0", "narwhals": "2.0", "pytest-benchmark": "5.3.1", "py-cpuinfo": "9.0",
    "nvidia-ml-py": "13", "torch": "2.13.0", "markdown-it-py": "4.0",
}  # fmt: skip


def test_what_is_lacking_is_carried_and_what_is_there_where_another_version_would_not_do():
    found = lacking(["plotly>=6", "numpy>=2", "pytest-benchmark>=5", "torch==2.13.0"], RESOLVED, PRESENT)
    assert found == {"narwhals": "2.0", "plotly": "7.1.0", "py-cpuinfo": "9.0"}, "torch and CUDA are never carried"
    assert lacking(["pytest-benchmark==5.3.1"], RESOLVED, PRESENT)["pytest-benchmark"] == "5.3.1"
    also = PRESENT | {"also": ["nvidia-ml-py>=13"]}
    assert lacking([], RESOLVED, also)["nvidia-ml-py"] == "13", "it tells a throttled card"


def test_wheels_are_for_the_machine_and_replace_the_old_ones_if_they_fit(tmp_path, monkeypatch):
    asked = []

    def pip(words, **options):
        asked.extend(words)
        folder = Path(words[words.index("-d") + 1])
        (folder / "plotly-7.1.0-py3-none-any.whl").write_bytes(b"x" * 1000)
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(subprocess, "run", pip)
    house = tmp_path / "wheelhouse"
    house.mkdir()
    (house / "plotly-6.0.0-py3-none-any.whl").write_text("old")
    with monkeypatch.context() as small, pytest.raises(ValueError, match="wheelhouse: expected at most 0 MiB"):
        small.setattr(wheelhouse, "LIMIT_BYTES", 999)
        download({"plotly": "7.1.0"}, house)
    assert [file.name for file in house.iterdir()] == ["plotly-6.0.0-py3-none-any.whl"]
    assert download({"plotly": "7.1.0"}, house) == [house / "plotly-7.1.0-py3-none-any.whl"]
    assert [file.name for file in house.iterdir()] == ["plotly-7.1.0-py3-none-any.whl"], "two versions stop pip"
    assert "plotly==7.1.0" in asked and "--no-deps" in asked and set(target_options()) <= set(asked)
    assert "--only-binary=:all:" in asked and asked[asked.index("--python-version") + 1] == "3.12"
    assert [file.name for file in tmp_path.iterdir()] == ["wheelhouse"], "no half of a download stays"
