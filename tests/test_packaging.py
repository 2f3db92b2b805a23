"""The wheel holds the tree, and installing or running us breaks nobody's `import kernels`."""

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("roofline", "reference", "kernels", "engine", "bench")


def test_wheel_equals_tree(tmp_path):
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
    ]
    # A copy, because setuptools leaves a build folder behind whose stale files would get into the next wheel.
    source = tmp_path / "source"
    source.mkdir()
    tracked = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    for name in tracked:
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_file():
            target.write_bytes((ROOT / name).read_bytes())
    subprocess.run([*command, str(source)], check=True, capture_output=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        packed = {name.removeprefix("rooflab/") for name in wheel.namelist() if name.startswith("rooflab/")}
    wanted = {
        name
        for name in tracked
        if name.split("/")[0] in FOLDERS and Path(name).suffix in (".py", ".cu", ".json", ".html", ".typed")
    }
    assert packed == wanted


def test_import_kernels_from_the_root_is_not_ours():
    code = """
import importlib.util
spec = importlib.util.find_spec("kernels")
print(spec is not None and spec.origin is not None and "rooflab" in open(spec.origin).read())
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    # A folder without __init__.py is only a namespace portion: any real package of that name wins over it.
    assert result.stdout.strip() == "False"


def test_every_folder_imports_as_rooflab_from_elsewhere(tmp_path):
    code = "import rooflab.roofline.model, rooflab.reference.spec, rooflab.kernels.registry; print('ok')"
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "ok"
