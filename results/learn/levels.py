"""Counts the bytes of naive kernels and of the rungs above them at each memory level: bench/learn/data/levels.json.

    OMP_NUM_THREADS=1 python results/learn/levels.py             # all ops, about ten minutes
    OMP_NUM_THREADS=1 python results/learn/levels.py --op gemm   # one op; the others stay as they are
"""

from __future__ import annotations

import argparse
import json
import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from rooflab.bench.compile.cases import KernelCase
from rooflab.bench.core import Environment
from rooflab.bench.emulate.calls import ask, request_of
from rooflab.bench.emulator import PtxLaunch, emulate
from rooflab.bench.report.ladders import ladder_rows
from rooflab.bench.report.pictures.levels import METRIC_PREFIX, bytes_of, levels, move
from rooflab.kernels import registry
from rooflab.kernels._files import write_whole
from rooflab.kernels.traffic import calls_of
from rooflab.reference.spec import Case, get_scheme
from rooflab.roofline.device import get_device
from rooflab.roofline.occupancy import HOPPER

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "bench/learn/data/levels.json"
CASES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
STORE = """.version 8.7
.target sm_90a
.address_size 64
.visible .entry column() .reqntid 32
{{ .reg .b32 %r<4>; .shared .align 16 .b8 tile[4224];
   mov.u32 %r0, %tid.x; mov.u32 %r1, 5; {word} shl.b32 %r1, %r1, 2; mov.u32 %r2, tile; add.u32 %r2, %r2, %r1;
   st.shared.u32 [%r2], %r0; ret; }}
"""
"""Each of 32 lanes stores the element of column 5 in its own row of a tile of 32 x 32 words."""
WORDS = {
    "plain": "mad.lo.u32 %r1, %r0, 32, %r1;",
    "padded": "mad.lo.u32 %r1, %r0, 33, %r1;",
    "swizzled": "xor.b32 %r1, %r1, %r0; mad.lo.u32 %r1, %r0, 32, %r1;",
}


def counted(op: str, name: str, case: Case, scheme: str) -> dict[str, Any]:
    """Returns the counts of one kernel: by the emulator, or for a naive kernel of torch calls from their operands."""
    kernel, words = registry.get_kernel(op, name), f"{op} {name} --shape {case.id} --scheme {scheme}"
    if not kernel.has_code:
        (record,) = move(op, [name], case.id, scheme)
        words = f"{op} --kernel {name} --case {case.id} --scheme {scheme}"
        command, metrics = f"rooflab picture bytes {words}", dict(record.metrics)
        return {"basis": "modelled", "command": command, "launches": int(metrics.pop("launches")), **plain(metrics)}
    answer = ask(request_of(KernelCase(op, name, case, get_scheme(scheme)), None, seed=0, schedule=0, races=False))
    if answer["status"] != "OK" or answer["ran"] < answer["of"]:
        raise ValueError(f"{op} {name} at {case.id}: expected a right result of all CTAs, got {answer['reason']}")
    launches = answer["launches"]
    instructions = [item for launch in launches for item in launch["instructions"].items()]
    return {
        "basis": "counted",
        "command": f"rooflab emulate {words}",
        "launches": len(launches),
        "ctas": max(launch["ctas"] for launch in launches),
        **plain(levels([launch["bytes"] for launch in launches])),
        **{n: sum(launch[n] for launch in launches) for n in ("shared_wavefronts", "shared_wavefronts_least")},
        "instructions": sum(threads for _, threads in instructions),
        "barriers": sum(threads for opcode, threads in instructions if opcode.startswith(("bar", "mbarrier"))) // 32,
        "tensor_flops": sum(sum(launch["tensor_flops"].values()) for launch in launches),
    }


def plain(metrics: dict[str, Any]) -> dict[str, int]:
    """Returns the metrics as integers, without the prefix of their names."""
    return {name.removeprefix(METRIC_PREFIX): int(value) for name, value in metrics.items()}


def case_of(op: str, wanted: dict[str, Any]) -> dict[str, Any]:
    """Returns one case of an op: the least bytes that it needs, and the counts of each kernel."""
    spec, scheme = registry.get_op(op), wanted.get("scheme", "bf16")
    case, rows = spec.check_case(Case.parse(wanted["case"])), {row["rung"]: row for row in ladder_rows(op)}
    cost = spec.cost_of(spec.make_inputs(case, get_scheme(scheme), torch.device("meta"), 0))
    kernels = []
    for name in wanted["kernels"]:
        kernel = registry.get_kernel(op, name)
        config = kernel.tuning.heuristic(case, get_scheme(scheme)) if kernel.tuning is not None else None
        known = {"name": name, "role": kernel.role, "config": asdict(config) if config else {}}
        print(op, name, case.id, scheme, flush=True)
        kernels.append({**known, **rows[name], **counted(op, name, case, scheme)})
    needed = {"least_bytes": int(cost.bytes), "flops": int(sum(cost.tensor_flops.values()))}
    return {"case": case.id, "sizes": dict(case), "scheme": scheme, "why": wanted["why"], **needed, "kernels": kernels}


def extras() -> dict[str, Any]:
    """Returns an H100's levels, the wavefronts of one store, and the torch call that a fused norm saves."""
    device, row = get_device("h100"), torch.empty(256, 4096, dtype=torch.bfloat16, device="meta")
    names = "full_name sms hbm_kind hbm_bytes hbm_bytes_per_s l2_bytes smem_bytes_per_sm".split()
    stores = {k: emulate(PtxLaunch(STORE.format(word=word)), (1,), []) for k, word in WORDS.items()}
    found = json.loads((ROOT / "results/found/found.json").read_text())["changed_operand"]
    return {
        "device": {name: getattr(device, name) for name in names}
        | {"registers_bytes_per_sm": 4 * device.registers_per_sm, "smem_bytes_per_cta": HOPPER.shared_bytes_per_cta},
        "banks": {k: result.shared_wavefronts for k, result in stores.items()},
        "fence": {state: [text for _, text in texts] for state, texts in found.items()},
        "add": [bytes_of(call) for call in calls_of(lambda: row + row)],
    }


def main() -> None:
    """Counts, and writes the file after each op."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", choices=list(CASES), action="append", help="count this op alone")
    chosen = parser.parse_args().op or list(CASES)
    own, found = Environment.now(), json.loads(DATA.read_text())["ops"] if DATA.is_file() else {}
    software = f"torch {own.torch}, triton {own.triton}"
    made = {"commit": own.commit, "machine": f"{own.cpu}, {own.threads} thread", "software": software}
    for op in chosen:
        found[op] = [case_of(op, wanted) for wanted in CASES[op]]
        ops = {name: found[name] for name in CASES if name in found}
        whole = {"command": "python results/learn/levels.py", "made": made, **extras(), "ops": ops}
        write_whole(DATA, json.dumps(whole, indent=1, allow_nan=False) + "\n")


if __name__ == "__main__":
    main()
