"""What `make newest` runs: the wheel in an environment of its own, with the torch and Triton that pip takes today.

    python .ci/newest.py [--triton 3.9.0] [--python python3.13]

No constraint holds there.  `--triton` takes that release in place of the one that torch asks for.  Runs the lab in its
smoke form, the documented commands of an own kernel, every kernel with compiled code in the emulator, and kernels of
another project.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FIRST = "tests/emulator/test_emulated_registry.py::test_every_kernel_is_right_and_races_nowhere_on_its_first_case"
TESTS = (
    *(f"{FIRST}[{op.parent.name}-1]" for op in sorted(ROOT.glob("kernels/*/__init__.py"))),
    "tests/emulator/test_compatibility.py::test_an_entry_runs_as_on_the_page",
    "tests/house/test_pages_commands.py::test_a_line_runs_from_the_wheel_in_a_fresh_repository",
    "tests/house/test_pages_commands.py::test_the_fault_it_shows_is_named_as_it_shows",
    "tests/emulator/test_emulating.py::test_any_launcher_runs_on_cpu_tensors_that_say_they_are_on_a_gpu",
    "tests/emulator/test_printed.py::test_the_command_shows_prints_assertions_and_errors_of_ptxas",
    "tests/emulator/test_ptx_kernels.py::test_a_compiled_kernel_is_right_and_clean[reduce_more_warps_than_rows-0]",
)
NEEDED = ("pytest-xdist", "pytest-timeout", "liger-kernel", "setuptools==84.2.1")
"""What these tests need beside the wheel; the last builds it."""


def run(command, **options):
    """Ends with the command's status, where that is not 0."""
    done = subprocess.run([str(word) for word in command], **options)
    if done.returncode:
        print(f"newest: {' '.join(map(str, command))} ended with {done.returncode}", file=sys.stderr)
        sys.exit(done.returncode)


def installed(folder, python, triton):
    """The programs of a new environment in `folder` with the wheel of this tree."""
    environment = {name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"}
    run([python, "-m", "venv", "--clear", folder / "env"])
    pip = [folder / "env/bin/python", "-m", "pip", "install", "-qq", "--no-compile", "--disable-pip-version-check"]
    # A copy, since pip builds in the folder, where `make types` may build at the same time.
    left_out = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__", "wheelhouse*")
    shutil.rmtree(folder / "source", ignore_errors=True)
    shutil.copytree(ROOT, folder / "source", ignore=left_out)
    run([*pip, f"{folder / 'source'}[cuda]", *NEEDED], env=environment)
    if triton:
        run([*pip, "--no-deps", f"triton=={triton}"], env=environment)
    return folder / "env/bin"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--triton", default="", help="a release of Triton; without it, the one that torch asks for")
    parser.add_argument("--python", default=sys.executable, help="the Python of the environment")
    asked = parser.parse_args()
    folder, begun = ROOT / "build" / "newest", time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    programs = installed(folder, asked.python, asked.triton)
    told = "import torch, triton; print('torch', torch.__version__, 'triton', triton.__version__)"
    run([programs / "python", "-c", told])
    print(f"newest: installed in {time.monotonic() - begun:.0f} s", flush=True)
    # No cache of another release, and no warning that a new release adds becomes an error of the tests.
    environment = os.environ | {"TRITON_CACHE_DIR": str(folder / "triton"), "OMP_NUM_THREADS": "1"}
    pytest = ["python", "-m", "pytest", "-n", "2", "-q", "-p", "no:cacheprovider", *TESTS]
    run([programs / pytest[0], *pytest[1:]], cwd=ROOT, env=environment)
    run([programs / "rooflab", "lab", "--smoke", "--out", folder / "lab"], cwd=folder, env=environment)
    print(f"newest: done after {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
