"""Writes the data of `rooflab learn`: OMP_NUM_THREADS=1 python results/learn/make.py [TOPIC ...]

A topic is a script beside this one, whose function `files()` returns the contents of its data files by their names.
"""

import gzip
import json
import sys
from datetime import UTC, datetime
from importlib import import_module
from typing import Any

from rooflab.bench.core import Environment
from rooflab.bench.learn.learn_data import DATA_FOLDER
from rooflab.kernels._files import write_whole


def origin() -> dict[str, Any]:
    """Returns what each data file says of its origin: the command, and the commit, machine, date and software."""
    now = Environment.now()
    made = {"commit": now.commit, "machine": f"{now.cpu}, threads: {now.threads}"}
    made |= {"date": f"{datetime.now(UTC):%Y-%m-%d}", "software": f"torch {now.torch}"}
    return {"command": "OMP_NUM_THREADS=1 python results/learn/make.py", "made": made}


if __name__ == "__main__":
    for topic in sys.argv[1:] or ("inside", "levels", "serving"):
        for file, content in import_module(topic).files().items():
            whole = {**origin(), **content}
            raw = json.dumps(whole, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
            path = write_whole(DATA_FOLDER / file, gzip.compress(raw, 9, mtime=0) if file.endswith(".gz") else raw)
            print(f"{file}: {path.stat().st_size / 1e3:.0f} kB")
