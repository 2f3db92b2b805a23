"""`small.py OP KERNEL`: one call of a kernel on the first case that it takes, for a tool that watches the process."""

from __future__ import annotations

import json
import sys

from rooflab.bench.predict.launch_once import main
from rooflab.bench.suite.passed import first_taken
from rooflab.kernels.registry import get_kernel

if __name__ == "__main__":
    kernel = get_kernel(*sys.argv[1:3])
    taken = first_taken(kernel, "bf16")
    assert taken is not None, f"{kernel.id} takes no small case"
    case, scheme = taken
    target = {"op": kernel.op, "kernel": kernel.name, "case": dict(case), "scheme": scheme.name, "file": None}
    main(json.dumps({**target, "seed": 0, "warm_up": 0}))
