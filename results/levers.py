"""Two kernels that a GPU has to judge, each beside what it would replace: values, bytes and predicted times.

    python results/levers.py --out results/predicted/levers.md

Each pair is emulated in full on a small case: values against the oracle in fp64 and against each other, races, bytes
and instructions that are counted.  Times are predicted on the case of a bar.  The page and a record of the same figures
(`levers.json`) are written.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rooflab.bench.base.plain import markdown_table
from rooflab.bench.compile.cases import KernelCase
from rooflab.bench.core.environment import Environment
from rooflab.bench.emulate.run import run
from rooflab.bench.predict.cases import predict_all
from rooflab.kernels._files import write_whole
from rooflab.kernels.registry import get_kernel
from rooflab.reference.spec import Case, get_scheme
from rooflab.roofline.device import Device, get_device

LOW_L2_BYTES = 40
"""Bytes per clock and SM that L2 gives in the second prediction; the model assumes 48.5, and no figure is published."""


@dataclass(frozen=True)
class Side:
    """A kernel, in its own config but for some fields."""

    kernel: str
    changes: Mapping[str, Any]

    @property
    def label(self) -> str:
        """`split_kv bulk=True`."""
        return " ".join([self.kernel, *(f"{name}={value}" for name, value in self.changes.items())])

    def config(self, op: str, case: Case, scheme: str) -> Any:
        """The config of a case."""
        tuning = get_kernel(op, self.kernel).tuning
        assert tuning is not None, f"{op}/{self.kernel} takes no config"
        return replace(tuning.heuristic(case, get_scheme(scheme)), **self.changes)


@dataclass(frozen=True)
class Lever:
    """What is compared: the present form first."""

    op: str
    scheme: str
    sides: tuple[Side, ...]
    small: str
    """The case that is emulated."""
    bars: tuple[str, ...]
    """Cases whose times are predicted."""


LEVERS = (
    Lever("gemm", "bf16", (Side("cooperative", {}), Side("multicast", {})),
          "M=512,N=512,K=1024,layout=NT,bias=false",
          tuple(f"M=8192,N=8192,K={K},layout=NT,bias=false" for K in (8192, 512))),
    Lever("gemm_fp8", "fp8_e4m3", (Side("promoted_ws", {}), Side("multicast", {})),
          "M=768,N=256,K=1024,scales=block,bias=false",
          tuple(f"M=8192,N=8192,K=8192,scales={scales},bias=false" for scales in ("block", "tensor"))),
)  # fmt: skip

NOTE = f"""Nothing here was measured.  `python results/levers.py` writes this page and `levers.json`.

*err* is the largest error in shares of what is allowed.  *L2 MB* are the bytes that copies ask L2 for, *smem MB* those
that TMA writes into shared memory, *HBM MB* the sectors that are read at least once; *Minstr* are warp instructions.
All are counted in the emulator, on the small case in the first line of each table.  *us* are predicted on an H100 SXM,
uncalibrated; *us, slow L2* with {LOW_L2_BYTES} bytes per clock and SM from L2 instead of the 48.5 that the model
assumes."""


def emulated(lever: Lever, side: Side, folder: Path) -> dict[str, Any]:
    """Status, errors and counts of a side on the small case, in the config of the first bar, and its outputs."""
    case, shown = Case.parse(lever.small), Case.parse(lever.bars[0])
    out = folder / "out.pt"
    request = {
        "op": lever.op, "kernel": side.kernel, "scheme": lever.scheme, "case": dict(case), "seed": 0, "races": True,
        "schedule": 0, "sample": None, "save": str(out), "config": asdict(side.config(lever.op, shown, lever.scheme)),
    }  # fmt: skip
    answer = run(request)
    bytes_, *more = [launch["bytes"] for launch in answer["launches"]]
    assert not more, "each side is one launch"
    (launch,) = answer["launches"]
    return {
        "side": side.label, "config": request["config"], "status": answer["status"], "reason": answer["reason"],
        "races": len(answer["races"]),
        "error_of_allowed": max(error["max_error_over_tolerance"] for error in answer["errors"]),
        "l2_read_bytes": bytes_["copy_read"], "shared_fill_bytes": bytes_["tma_load"] or bytes_["copy_read"],
        "hbm_read_bytes": bytes_["hbm_read"], "hbm_write_bytes": bytes_["hbm_write"],
        "warp_instructions": sum(launch["instructions"].values()) // 32,
        "outputs": torch.load(out),
    }  # fmt: skip


def predicted(lever: Lever, device: Device) -> list[dict[str, Any]]:
    """Microseconds of each side on each case, with L2 as the model assumes it and slower."""
    rows = []
    slow = replace(device.ceilings(), l2_bytes_per_s=LOW_L2_BYTES * device.sms * device.boost_clock_hz)
    for text in lever.bars:
        case = Case.parse(text)
        scheme = get_scheme(lever.scheme)
        targets = [
            KernelCase(lever.op, side.kernel, case, scheme, None, side.config(lever.op, case, lever.scheme))
            for side in lever.sides
        ]
        times = [predict_all(targets, device, ceilings=ceilings) for ceilings in (None, slow)]
        for side, usual, with_slow in zip(lever.sides, *times, strict=True):
            assert usual.prediction is not None and with_slow.prediction is not None, usual.reason
            figures = {"us": usual.prediction.seconds * 1e6, "us_slow_l2": with_slow.prediction.seconds * 1e6}
            rows.append({"side": side.label, "case": text, **figures})
    return rows


def record_of(device: Device) -> dict[str, Any]:
    """All figures."""
    levers = []
    for lever in LEVERS:
        with tempfile.TemporaryDirectory() as folder:
            sides = [emulated(lever, side, Path(folder)) for side in lever.sides]
        outputs = [side.pop("outputs") for side in sides]
        for side, found in zip(sides, outputs, strict=True):
            pairs = zip(found, outputs[0], strict=True)
            side["largest_difference"] = max(float((a.double() - b.double()).abs().max()) for a, b in pairs)
        about = {"op": lever.op, "scheme": lever.scheme, "emulated_case": lever.small}
        levers.append({**about, "sides": sides, "predicted": predicted(lever, device)})
    return {"gpu": device.name, "basis": "predicted", **Environment.now().record_fields(), "levers": levers}


def page_of(record: Mapping[str, Any]) -> str:
    """The page."""
    lines = ["# Two kernels for a GPU to judge", "", NOTE, ""]
    for lever in record["levers"]:
        cases = list(dict.fromkeys(row["case"] for row in lever["predicted"]))
        lines += [f"## {lever['op']}, {lever['scheme']}", "", f"Emulated: `{lever['emulated_case']}`", ""]
        sides = []
        for side in lever["sides"]:
            sides.append([
                side["side"], side["status"], f"{side['error_of_allowed']:.2f}", f"{side['largest_difference']:.2g}",
                *(f"{side[name] / 1e6:.3f}" for name in ("l2_read_bytes", "shared_fill_bytes", "hbm_read_bytes")),
                f"{side['warp_instructions'] / 1e6:.3f}",
            ])  # fmt: skip
        columns = ("kernel", "status", "err:", "from the first:", "L2 MB:", "smem MB:", "HBM MB:", "Minstr:")
        lines += markdown_table(columns, sides)
        for case in cases:
            rows = [row for row in lever["predicted"] if row["case"] == case]
            cells = [(row["side"], f"{row['us']:.1f}", f"{row['us_slow_l2']:.1f}") for row in rows]
            lines += ["", f"Predicted: `{case}`", "", *markdown_table(("kernel", "us:", "us, slow L2:"), cells)]
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """The script."""
    parser = argparse.ArgumentParser(description="Values, bytes and predicted times of two kernels.")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    record = record_of(get_device("h100-sxm"))
    text = page_of(record)
    print(text)
    write_whole(arguments.out, text)
    write_whole(arguments.out.with_suffix(".json"), json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
