"""The same loads on several servers in turn, round by round, and one table of medians.

    python results/load_side_by_side.py ours=http://127.0.0.1:8000 theirs=http://127.0.0.1:8001 \
        --load "--concurrency 1" --load "--rate 0.5" --rounds 3 -- --text --num-prompts 12

What follows `--` goes to every `rooflab load`.  All servers stay up, and only one is asked at a time.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
from typing import Any

from rooflab.bench import show

FIGURES = ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms", "e2e_p50_ms", "output_tokens_per_s")


def run(url: str, load: str, common: list[str], seed: int) -> dict[str, Any]:
    """One load's row.  Raises `ValueError` with its words if it fails, or if an answer did."""
    asked = ["load", "--url", url, "--json", "--no-plots", "--seed", str(seed), *shlex.split(load), *common]
    done = subprocess.run([sys.executable, "-m", "rooflab.bench", *asked], capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{url}: {done.stderr.strip().splitlines()[-1]}")
    (row,) = json.loads(done.stdout)["rows"]
    if row["failed"]:
        raise ValueError(f"{url}: {row['failed']:.0f} of {row['requests']:.0f} answers failed")
    return dict(row)


def main() -> None:
    """The script."""
    parser = argparse.ArgumentParser(description="The same loads on several servers, and one table of medians.")
    parser.add_argument("servers", nargs="+", metavar="NAME=URL")
    parser.add_argument("--load", action="append", required=True, help="options of rooflab load; repeatable")
    parser.add_argument("--rounds", type=int, default=3)
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    arguments, common = parser.parse_args(sys.argv[1:cut]), sys.argv[cut + 1 :]
    servers = dict(text.partition("=")[::2] for text in arguments.servers)
    if len(servers) < len(arguments.servers):
        parser.error("servers: expected another name for each")
    held: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for number in range(arguments.rounds):
        for place, load in enumerate(arguments.load):
            # Each load of each round has prompts of its own, which no cache holds, and rounds begin in turn.
            seed = number * len(arguments.load) + place
            for name in sorted(servers, reverse=bool(number % 2)):
                held.setdefault((load, name), []).append(run(servers[name], load, common, seed))
                print(f"round {number + 1}: {load}: {name}", file=sys.stderr, flush=True)
    rows = [
        {"load": load, "server": name, **{key: statistics.median(row[key] for row in found) for key in FIGURES}}
        for (load, name), found in held.items()
    ]
    show.table(sorted(rows, key=lambda row: arguments.load.index(row["load"])), ("load", "server", *FIGURES))


if __name__ == "__main__":
    main()
