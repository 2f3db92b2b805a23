"""The client's own error, against a server that puts the time of each write into its payload.

    python results/load_accuracy.py --rate 200 --tokens 64

Both are processes of this host, whose `perf_counter` is one clock.  The error of a time to first token is how much
later than its write a token's time was taken; that of an inter-token latency is the gap here less the gap there.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from rooflab.bench.load.client import Endpoint, Shot, body_of, open_loop, undisturbed


def written_and_read(shot: Shot) -> Iterator[tuple[float, float]]:
    """For each token of an answer, when the server wrote it and when its last byte was read here."""
    ends = list(accumulate(len(data) for _, data in shot.pieces))
    at, read = 0, 0
    for event in b"".join(data for _, data in shot.pieces).split(b"\n\n")[:-1]:
        read += len(event) + 2
        while ends[at] < read:
            at += 1
        if b'"written_s"' in event:
            yield json.loads(event[6:])["written_s"], shot.pieces[at][0]


def errors_of(shots: Sequence[Shot]) -> dict[str, np.ndarray]:
    """Milliseconds by which each TTFT and each ITL is wrong, and by which each request was sent late."""
    ttft, itl, late = [], [], []
    for shot in shots:
        assert not shot.error and shot.sent_s is not None, shot.error
        written, read = np.array(list(written_and_read(shot))).T
        ttft.append(read[0] - written[0])
        itl.append(np.diff(read) - np.diff(written))
        late.append(shot.sent_s - shot.scheduled_s)
    named = {"ttft_ms": np.array(ttft), "itl_ms": np.abs(np.concatenate(itl)), "late_ms": np.array(late)}
    return {name: 1e3 * values for name, values in named.items()}


def measure(rate: float, tokens: int, seconds: float, seed: int) -> dict[str, np.ndarray]:
    """`errors_of` a run with Poisson arrivals at `rate` requests a second of `tokens` tokens."""
    import uvloop

    command = [sys.executable, str(Path(__file__).with_name("load_stub.py"))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None, "Popen was given PIPE"
            target = Endpoint(f"http://127.0.0.1:{int(server.stdout.readline())}", "/v1/completions")
            gaps = np.random.default_rng(seed).exponential(1 / rate, max(1, round(rate * seconds)))
            fields: dict[str, Any] = {"model": "stub", "prompt": [1] * 32, "max_tokens": tokens, "stream": True}
            shots = [Shot(index, body_of(fields), 32, tokens) for index in range(len(gaps))]

            async def run() -> None:
                with undisturbed():
                    await open_loop(target, shots, np.cumsum(gaps).tolist(), None)
                target.close()

            uvloop.run(run())
        finally:
            server.kill()
    return errors_of(shots)


def main() -> None:
    """The script."""
    parser = argparse.ArgumentParser(description="The load client's own error.")
    parser.add_argument("--rate", type=float, default=200.0, help="requests a second")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    found = measure(given.rate, given.tokens, given.seconds, given.seed)
    print(json.dumps({
        name: {"median": round(float(np.median(values)), 4), "p99": round(float(np.percentile(values, 99)), 4)}
        for name, values in found.items()
    }, indent=2, allow_nan=False))  # fmt: skip


if __name__ == "__main__":
    main()
