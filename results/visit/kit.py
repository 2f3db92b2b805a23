"""`make visit`: packs what a visit to a card takes along, and prints its commands.

The commit must be clean, since it is written into every record there.  With `--paged`, FlashAttention-3 with pages goes
along, whose wheel is too large for one transfer beside the others: it goes in halves.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rooflab.bench.records.environment import COMMIT, git_state, tree_hash
from rooflab.bench.suite.wheelhouse import ROOT, download, fill

LIGER = "liger-kernel==0.8.5"
FA3 = ("fa3-fwd", "0.0.3")
"""FlashAttention-3's forward pass for CUDA 13 and sm_90a, on torch's stable interface: bf16 and fp8, no pages."""
FA3_PAGED = ("tokenspeed-fa3", "3.0.0.post20260810")
"""The same with pages, splits and fp16."""
SECOND_S = 195
"""Seconds for the second command: of 900, a machine's start takes up to 120 and the first command 580."""


def halves(wheel: Path, other: Path) -> str:
    """Leaves one half of a wheel beside it and the other in `other`; the shell words that join them there."""
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
    options = parser.parse_args()
    commit, dirty = git_state(ROOT)
    if commit is None or dirty:
        raise SystemExit("visit: expected a committed tree, whose commit the records can name; commit first")
    try:
        wheels = fill([LIGER] if options.paged else [LIGER, "==".join(FA3)])
        join = ""
        if options.paged:
            (large,) = download(dict([FA3_PAGED]), ROOT / "build" / "large")
            join = halves(large.replace(ROOT / "wheelhouse" / large.name), ROOT / "wheelhouse-1")
    except ValueError as error:
        raise SystemExit(str(error)) from error
    total = sum(path.stat().st_size for path in (ROOT / "wheelhouse").iterdir())
    print(f"{len(wheels)} wheels and {'half a large one' if join else 'no other'}, {total / 2**20:.1f} MiB\n")
    if join:
        print(f"take wheelhouse-1/ along:  cp wheelhouse-1/* /tmp/   (limit 20 s)")
    named = f"{COMMIT}={commit}:{tree_hash()}"
    print(f"take wheelhouse/ along:  {join}{named} python3 results/visit/visit.py first --limit 575   (limit 585 s)")
    print(f"at once behind it:  {named} python3 results/visit/visit.py second --limit {SECOND_S}   (limit {SECOND_S + 10} s)")


if __name__ == "__main__":
    main()
