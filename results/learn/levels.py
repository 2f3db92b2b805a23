"""Counts the bytes of naive kernels and of the rungs above them at each memory level: bench/learn/data/levels.json.

python results/learn/levels.py [OP ...]   # ops that are not named stay as they are; all take about ten minutes
"""

import json
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from rooflab.bench.base.plain import JsonObject
from rooflab.bench.compile.cases import KernelCase
from rooflab.bench.core import Environment
from rooflab.bench.emulate.calls import ask, request_of
from rooflab.bench.emulator import PtxLaunch, emulate
from rooflab.bench.report.ladders import ladder_rows
from rooflab.bench.report.pictures.levels import METRIC_PREFIX, bytes_of, levels
from rooflab.kernels import registry
from rooflab.kernels._files import write_whole
from rooflab.kernels.traffic import calls_of
from rooflab.reference.spec import Case, get_scheme
from rooflab.roofline.device import get_device
from rooflab.roofline.occupancy import HOPPER

HERE = Path(__file__).resolve().parent
DATA = HERE.parents[1] / "bench/learn/data/levels.json"
WANTED = tomllib.loads((HERE / "levels.toml").read_text())
ABOUT = "full_name sms hbm_kind hbm_bytes hbm_bytes_per_s l2_bytes smem_bytes_per_sm registers_per_sm".split()


def counted(target: KernelCase, inputs: Any) -> dict[str, Any]:
    """Returns the counts of one kernel: from the emulator, or from the operands of torch's calls if it has no code."""
    kernel, case = target.registered, f"{target.case.id} --scheme {target.scheme.name}"
    if not kernel.has_code:
        calls = [Counter(bytes_of(call)) for call in calls_of(lambda: kernel(**inputs))]
        command = f"rooflab picture bytes {target.op} --kernel {target.kernel} --case {case}"
        command = command if kernel.role == "naive" else f"python results/learn/levels.py {target.op}"
        return {"basis": "modelled", "command": command, "launches": len(calls), **sum(calls, Counter())}
    answer = ask(request_of(target, None, seed=0, schedule=0, races=False))
    if answer["status"] != "OK" or answer["ran"] < answer["of"]:
        raise ValueError(f"{target.label}: expected a right result of all CTAs, got {answer['reason']}")
    launches, own = answer["launches"], Counter[str]()
    for launch in launches:
        own.update({name: launch[name] for name in ("shared_wavefronts", "shared_wavefronts_least")})
        own["tensor_flops"] += sum(launch["tensor_flops"].values())
        own["instructions"] += sum(launch["instructions"].values())
        met = [n for opcode, n in launch["instructions"].items() if opcode.startswith(("bar", "mbarrier"))]
        own["barriers"] += sum(met) // 32
    moved = levels([launch["bytes"] for launch in launches]).items()
    command = f"rooflab emulate {target.op} {target.kernel} --shape {case}"
    whole = {"basis": "counted", "command": command, "launches": len(launches), **own}
    whole["ctas"] = max(launch["ctas"] for launch in launches)
    return whole | {name.removeprefix(METRIC_PREFIX): int(value) for name, value in moved}


def case_of(op: str, case_text: str, kernels: list[str], why: str, scheme: str = "bf16") -> dict[str, Any]:
    """Returns one case of an op: the least bytes that it needs, and the counts of each kernel."""
    spec, dtypes, counts = registry.get_op(op), get_scheme(scheme), []
    case, rows = spec.check_case(Case.parse(case_text)), {row["rung"]: row for row in ladder_rows(op)}
    inputs = spec.make_inputs(case, dtypes, torch.device("meta"), 0)
    for name in kernels:
        print(op, name, case.id, scheme, flush=True)
        target = KernelCase(op, name, case, dtypes)
        kernel = target.registered
        config = asdict(kernel.tuning.heuristic(case, dtypes)) if kernel.tuning is not None else {}
        about = {"name": name, "role": kernel.role, "config": config}
        counts.append(rows[name] | about | counted(target, inputs))
    words = {"case": case.id, "sizes": dict(case), "scheme": scheme, "why": why}
    return words | {"least_bytes": int(spec.cost_of(inputs).bytes), "kernels": counts}


def files(chosen: Iterable[str] = WANTED) -> dict[str, JsonObject]:
    """Returns the content of the file: new counts of the ops `chosen`, and those that it has of the others."""
    own, device = Environment.now(), get_device("h100")
    found = json.loads(DATA.read_text())["ops"] if DATA.is_file() else {}
    found |= {op: [case_of(op, **wanted) for wanted in WANTED[op]] for op in chosen}
    made = {"commit": own.commit, "machine": f"{own.cpu}, {own.threads} thread", "software": f"triton {own.triton}"}
    faults, store = json.loads((HERE.parent / "found/found.json").read_text()), (HERE / "column.ptx").read_text()
    stores = {name: PtxLaunch(store.replace("PLACE", f"%{name}")) for name in ("plain", "padded", "swizzled")}
    content: JsonObject = {
        "command": "python results/learn/levels.py",
        "made": made | {"date": f"{datetime.now(UTC):%Y-%m-%d}"},
        "device": {name: getattr(device, name) for name in ABOUT} | {"smem_bytes_per_cta": HOPPER.shared_bytes_per_cta},
        "fence": {state: [text for _, text in said] for state, said in faults["changed_operand"].items()},
        "banks": {name: emulate(one, (1,), []).shared_wavefronts for name, one in stores.items()},
        "ops": {op: found[op] for op in WANTED},
    }
    return {DATA.name: content}


if __name__ == "__main__":
    (content,) = files(sys.argv[1:] or WANTED).values()
    write_whole(DATA, json.dumps(content, indent=1, allow_nan=False) + "\n")
