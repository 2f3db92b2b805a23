"""`make visit`: packs what a visit to a card takes along, and prints its commands.

The commit must be clean, because every record there names it.  With `--paged`, FlashAttention-3 with pages is packed
too; its wheel is too large for one transfer with the others, so it is sent in halves.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from next_visit import known_in, page
from wheelhouse import ROOT, download, fill

from rooflab.bench.core.environment import COMMIT_VARIABLE, git_state, tree_hash

LIGER = "liger-kernel==0.8.5"
FA3 = ("fa3-fwd", "0.0.3")
"""FlashAttention-3's forward pass for CUDA 13 and sm_90a, on torch's stable interface: bf16 and fp8, no pages."""
FA3_PAGED = ("tokenspeed-fa3", "3.0.0.post20260810")
"""FlashAttention-3 with pages, splits and fp16."""
FIRST_S, SECOND_S = 575, 195
"""The seconds of each command: of fifteen minutes, the machine's start takes up to 120 s, a command ten minutes."""


def halves(wheel: Path, other: Path) -> str:
    """Leaves one half of a wheel beside it and the other in `other`; returns the shell words that join them there."""
    content, first = wheel.read_bytes(), other / f"{wheel.name}.1"
    other.mkdir(exist_ok=True)
    first.write_bytes(content[: len(content) // 2])
    wheel.with_name(f"{wheel.name}.2").write_bytes(content[len(content) // 2 :])
    wheel.unlink()
    return f"cat /tmp/{first.name} wheelhouse/{wheel.name}.2 > wheelhouse/{wheel.name} && "


def main() -> None:
    """Fills `wheelhouse/` and prints the commands."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--paged", action="store_true", help="FlashAttention-3 with pages, in two transfers")
    parser.add_argument("--queue", type=Path, help="a card's folder: print the first line of its queue instead")
    options = parser.parse_args()
    commit, dirty = git_state(ROOT)
    if commit is None or dirty:
        raise SystemExit("visit: expected a committed tree, whose commit the records can name; commit first")
    for half in (ROOT / "wheelhouse").glob("*.whl.2"):
        half.unlink()  # a half of an earlier visit
    try:
        wheels = fill([LIGER] if options.paged else [LIGER, "==".join(FA3)])
        join = ""
        if options.paged:
            (large,) = download(dict([FA3_PAGED]), ROOT / "build" / "large")
            join = halves(large.replace(ROOT / "wheelhouse" / large.name), ROOT / "wheelhouse-1")
    except ValueError as error:
        raise SystemExit(str(error)) from error
    total = sum(path.stat().st_size for path in (ROOT / "wheelhouse").iterdir())
    print(f"wheelhouse/: {total / 2**20:.1f} MiB, with {len(wheels)} wheels")
    visit = f"{COMMIT_VARIABLE}={commit}:{tree_hash()} python3 results/visit/visit.py"
    if join:
        print("wheelhouse-1/ goes along with a command of its own, of some seconds:\n  cp wheelhouse-1/* /tmp/")
    behind = "" if options.queue else " the first, and the second is sent at once behind it, on the same machine"
    print(f"wheelhouse/ goes along with{behind}:")
    if options.queue:
        text = page(options.queue.as_posix(), known_in(options.queue))
        line = next(line for line in text.splitlines() if line.startswith("    python3 "))
        print(f"  {join}{visit} {line.partition('visit.py ')[2]}")
        return
    print(f"  {join}{visit} first --limit {FIRST_S}")
    print(f"  {visit} second --limit {SECOND_S}")


if __name__ == "__main__":
    main()
