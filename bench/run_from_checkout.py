"""`python bench/run_from_checkout.py suite --only gemm`: any command of Rooflab from a bare source checkout.

Nothing of Rooflab need be installed, and there need be no network: the five folders are put together as `rooflab` in
`build/checkout` (links, on the path of this process and of all that it starts), and the wheels that lie in
`wheelhouse/` (`make wheelhouse`) are unpacked into `build/`.  torch and triton must be there.  Standard library only.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("roofline", "reference", "kernels", "engine", "bench")


def build_folder(root: Path) -> Path:
    """`build/`, which git ignores, or a temporary folder where the checkout cannot be written to."""
    folder = root / "build"
    try:
        folder.mkdir(exist_ok=True)
    except OSError:
        pass  # a checkout on a read-only disk
    return folder if os.access(folder, os.W_OK) else Path(tempfile.mkdtemp(prefix="rooflab-"))


def namespace(root: Path, build: Path) -> Path:
    """A folder in which `rooflab` holds links to the five folders of `root`."""
    found = build / "checkout"
    (found / "rooflab").mkdir(parents=True, exist_ok=True)
    for name in FOLDERS:
        link = found / "rooflab" / name
        if link.is_symlink() and link.resolve() == root / name:
            continue
        fresh = link.with_name(f".{name}.{os.getpid()}")
        fresh.symlink_to(os.path.relpath(root / name, link.parent.resolve()), target_is_directory=True)
        fresh.replace(link)  # at once, so that two commands may start together
    return found


def carried(wheelhouse: Path, build: Path) -> Path | None:
    """A folder with what the wheels of `wheelhouse` hold, unpacked once; None where there is no wheel."""
    wheels = sorted(wheelhouse.glob("*.whl"))
    if not wheels:
        return None
    names = "\n".join(f"{wheel.name} {wheel.stat().st_size}" for wheel in wheels)
    found = build / f"wheels-{hashlib.sha256(names.encode()).hexdigest()[:12]}"
    if found.is_dir():
        return found
    with tempfile.TemporaryDirectory(dir=build) as folder:
        part = Path(folder) / "site"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
        pip += ["--disable-pip-version-check", "--no-cache-dir", "--root-user-action=ignore", "--target", str(part)]
        done = subprocess.run([*pip, *map(str, wheels)], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"wheelhouse: pip cannot unpack it: {done.stderr.strip()[-500:]}")
        if not found.is_dir():
            part.replace(found)
    return found


def main() -> None:
    """Replaces this process by the command, with `rooflab` and the carried packages on its path."""
    build = build_folder(ROOT)
    paths = [namespace(ROOT, build), carried(ROOT / "wheelhouse", build)]
    known = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([*(str(folder) for folder in paths if folder), *([known] if known else [])])
    # A new process: this one's path begins with bench/, whose files would hide packages of their names.
    os.execve(
        sys.executable, [sys.executable, "-m", "rooflab.bench", *sys.argv[1:]], {**os.environ, "PYTHONPATH": path}
    )


if __name__ == "__main__":
    main()
