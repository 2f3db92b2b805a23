"""Runs any command of Rooflab from a source checkout: `python bench/run_from_checkout.py suite --only gemm`.

Rooflab need not be installed, and no network is needed; torch and triton must be installed.  The folder
`build/checkout/rooflab` links to the five source folders.  The wheels in `wheelhouse/` (`make wheelhouse`) are unpacked
into `build/`.  This file uses only the standard library.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE_FOLDERS = ("roofline", "reference", "kernels", "engine", "bench")


def build_folder(root: Path) -> Path:
    """Returns the folder `build/`, which git ignores.  If the checkout is read-only, returns a temporary folder."""
    folder = root / "build"
    with suppress(OSError):  # a checkout on a read-only disk
        folder.mkdir(exist_ok=True)
    return folder if os.access(folder, os.W_OK) else Path(tempfile.mkdtemp(prefix="rooflab-"))


def namespace(root: Path, build: Path) -> Path:
    """Creates a folder with the package `rooflab`: links to the five source folders in `root`.  Returns the folder."""
    checkout_folder = build / "checkout"
    (checkout_folder / "rooflab").mkdir(parents=True, exist_ok=True)
    (checkout_folder / "rooflab" / "__init__.py").touch()  # Python prefers an installed wheel's package to a namespace
    for name in SOURCE_FOLDERS:
        package_link = checkout_folder / "rooflab" / name
        if package_link.is_symlink() and package_link.resolve() == root / name:
            continue
        temporary_link = package_link.with_name(f".{name}.{os.getpid()}")
        temporary_link.symlink_to(os.path.relpath(root / name, package_link.parent.resolve()), target_is_directory=True)
        temporary_link.replace(package_link)  # in one step, so that two commands may start at the same time
    return checkout_folder


def carried(wheelhouse: Path, build: Path) -> Path | None:
    """Unpacks the wheels that the checkout carries in `wheelhouse`, once.  Returns the folder, or None without any."""
    wheels = sorted(wheelhouse.glob("*.whl"))
    if not wheels:
        return None
    names = "\n".join(f"{wheel.name} {wheel.stat().st_size}" for wheel in wheels)
    wheels_folder = build / f"wheels-{hashlib.sha256(names.encode()).hexdigest()[:12]}"
    if wheels_folder.is_dir():
        return wheels_folder
    with tempfile.TemporaryDirectory(dir=build) as folder:
        site_dir = Path(folder) / "site"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
        pip += ["--disable-pip-version-check", "--no-cache-dir", "--root-user-action=ignore", "--target", str(site_dir)]
        pip_process = subprocess.run([*pip, *map(str, wheels)], capture_output=True, text=True)
        if pip_process.returncode:
            raise SystemExit(f"wheelhouse: pip cannot unpack it: {pip_process.stderr.strip()[-500:]}")
        if not wheels_folder.is_dir():
            site_dir.replace(wheels_folder)
    return wheels_folder


def main() -> None:
    """Replaces this process by a Rooflab command that can import `rooflab` and the unpacked wheels."""
    build_dir = build_folder(ROOT)
    import_paths = [namespace(ROOT, build_dir), carried(ROOT / "wheelhouse", build_dir)]
    old_path = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([*(str(folder) for folder in import_paths if folder), *([old_path] if old_path else [])])
    # A new process, because this one's path begins with bench/, whose folders would hide packages of the same name.
    os.execve(
        sys.executable, [sys.executable, "-m", "rooflab.bench", *sys.argv[1:]], {**os.environ, "PYTHONPATH": path}
    )


if __name__ == "__main__":
    main()
