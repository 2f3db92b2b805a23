"""A visit to a GPU that is there for minutes: `python3 results/visit/visit.py first`, and at once behind it `second`.

Later visits run a line of the card's queue (`results/visit/next_visit.py`): `visit.py suite --only gemm.bf16_large`.

Each command runs its steps one after the other, each a process with a time limit, so that one that hangs or breaks the
card costs its own time alone.  What they print and write is packed into `$OUT/visit.tgz` every 20 seconds and at the
end: a machine that is taken away leaves what was done.  Of packages the machine needs torch and triton; `wheelhouse/`
has what else is used (`make visit` fills it and prints both commands).  This file uses only the standard library.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
import run_from_checkout as checkout  # type: ignore[import-not-found]  # noqa: E402

HERE = Path(__file__).resolve().parent
ROOFLAB = (sys.executable, "-m", "rooflab.bench")
SUITE = (*ROOFLAB, "suite", str(HERE.parent / "targets" / "plan.json"))
PACK_S = 20.0
LAST_S = 6.0
"""The seconds kept for the last packing."""
START_S = 12.0
"""The seconds for the wheels and for the first import."""


class Step(NamedTuple):
    """One process of a visit."""

    name: str
    """The name of the step, whose output is `<name>.txt`; `{out}` in its words is the visit's folder."""
    limit_s: float
    words: tuple[str, ...]


def counted(op: str, kernel: str, case: str, scheme: str = "bf16") -> Step:
    """A step in which Nsight Compute counts one call."""
    words = (*ROOFLAB, "profile", op, kernel, "--case", case, "--scheme", scheme, "--json")
    return Step(f"ncu-{op}-{kernel}", 35, words)


def memcheck(op: str, kernel: str) -> Step:
    """A step in which the memory checker watches one call of the kernel's smallest case."""
    words = ("compute-sanitizer", "--tool", "memcheck", sys.executable, str(HERE / "small.py"), op, kernel)
    return Step(f"memcheck-{op}-{kernel}", 45, words)


VISITS: dict[str, tuple[Step, ...]] = {
    "first": (
        Step("list", 35, (*ROOFLAB, "list", "--json")),
        Step("preflight", 70, (sys.executable, str(HERE / "preflight.py"), "{out}/preflight.json")),
        Step("quick", 230, (sys.executable, str(HERE / "quick.py"), "{out}/quick.jsonl")),
        Step("first", 240, (*SUITE, "--only", "first", "--only", "emulator.golden", "--budget", "215", "--out",
                            "{out}/first")),
    ),
    "second": (
        counted("gemm", "cooperative", "M=8192,N=8192,K=8192,layout=NT,bias=false"),
        counted("flash_attention", "ping_pong", "B=1,T=16384,S=16384,H=16,H_kv=16,D=128,causal=true"),
        counted("paged_attention", "split_kv", "B=64,context=4096,H=32,H_kv=8,D=128,block_size=16,ragged=false"),
        counted("gemm_fp8", "promoted_ws", "M=8192,N=8192,K=8192,scales=tensor,bias=false", "fp8_e4m3"),
        memcheck("gemm", "cooperative"),
        memcheck("paged_attention", "split_kv"),
    ),
}  # fmt: skip
"""The steps of each visit.  The first visit gathers the machine's facts, times from a script that needs little code,
every kernel's first check (kernels that wait at barriers last), and outputs that the emulator must reproduce."""


def suite_steps(options: argparse.Namespace) -> tuple[Step, ...]:
    """The step that runs the suite, in all of the time."""
    only = [word for name in options.only for word in ("--only", name)]
    trusted = ["--trust", str(options.trust)] if options.trust and options.trust.is_dir() else []
    budget = ["--budget", f"{options.limit - START_S - LAST_S:.0f}"]
    return (Step("suite", options.limit, (*SUITE, *only, *trusted, *budget, "--out", "{out}/suite")),)


def pack(folder: Path, archive: Path) -> None:
    """Writes the folder as one archive, which is complete at any moment."""
    part = archive.with_suffix(".part")
    with tarfile.open(part, "w:gz") as file:
        file.add(folder, folder.name)
    part.replace(archive)


def run(step: Step, folder: Path, environment: dict[str, str], limit_s: float) -> str:
    """Runs a step; returns how it ended.  Its process group is ended at the limit."""
    words = [word.replace("{out}", str(folder)) for word in step.words]
    with (folder / f"{step.name}.txt").open("ab") as output:
        try:
            process = subprocess.Popen(words, stdout=output, stderr=output, env=environment, start_new_session=True)
        except OSError as error:
            return f"did not start: {error}"
        try:
            return f"exit status {process.wait(limit_s)}"
        except subprocess.TimeoutExpired:
            return f"ended after {limit_s:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)  # at this signal the suite writes its summary
                with suppress(subprocess.TimeoutExpired):
                    process.wait(3)
            with suppress(ProcessLookupError):  # if all processes of the group have ended
                os.killpg(process.pid, signal.SIGKILL)


def main() -> None:
    """Runs a visit's steps within its limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("visit", choices=[*VISITS, "suite"])
    parser.add_argument("--only", action="append", default=[], help="with suite: an entry of its plan; repeatable")
    parser.add_argument("--trust", type=Path, help="with suite: records of earlier visits")
    parser.add_argument("--limit", type=float, default=575.0, help="seconds for all steps")
    parser.add_argument("--dry-run", action="store_true", help="on a CPU, with small shapes")
    options = parser.parse_args()
    began = time.monotonic()
    place = Path(os.environ.get("VISIT_PLACE") or tempfile.gettempdir())
    folder, archive = place / "visit", Path(os.environ.get("OUT", ".")) / "visit.tgz"
    folder.mkdir(parents=True, exist_ok=True)
    build = checkout.build_folder(ROOT)
    paths, lacks = [checkout.namespace(ROOT, build)], ""
    try:
        paths += filter(None, [checkout.carried(ROOT / "wheelhouse", build)])
    except SystemExit as error:  # a wheel that does not fit must not end the visit
        lacks = f"without wheels: {error}"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "PYTHONUNBUFFERED": "1",
        "ROOFLAB_CACHE": str(place / "rooflab"),
        "TRITON_CACHE_DIR": str(place / "triton"),
    }
    over = threading.Event()
    packing = threading.Lock()

    def keep() -> None:
        with packing:
            pack(folder, archive)

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    def at_times() -> None:
        while not over.wait(PACK_S):
            keep()

    signal.signal(signal.SIGTERM, leave)
    threading.Thread(target=at_times, daemon=True).start()
    told = (folder / f"{options.visit}.log").open("a", buffering=1)

    def say(text: str) -> None:
        line = f"{time.monotonic() - began:6.1f} s  {text}"
        print(line, flush=True)
        print(line, file=told)

    try:
        say(f"{os.environ.get('ROOFLAB_COMMIT') or 'no commit named'} {lacks}".rstrip())
        for step in VISITS.get(options.visit) or suite_steps(options):
            limit_s = min(step.limit_s, options.limit - LAST_S - (time.monotonic() - began))
            words = (*step.words, "--dry-run") if options.dry_run and step.name in DRY else step.words
            how = run(step._replace(words=words), folder, environment, limit_s) if limit_s > 0 else "no time was left"
            say(f"{step.name}: {how}")
            keep()
    finally:
        over.set()
        keep()


DRY = ("quick", "first", "suite")
"""The steps that have a form for a CPU; the other steps print there what they need."""

if __name__ == "__main__":
    main()
