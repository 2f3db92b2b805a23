"""Draws the README's figure: the naive, the library and the best kernel of each op, as a share of the roof.

    make lab && python results/lab/make.py results/local/TIME --out results/lab/ops.svg

Each point is a record of one run; an op's case is the one whose library kernel takes longest.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from matplotlib.figure import Figure

from rooflab.bench.core import record_files as files
from rooflab.bench.core.record import Record
from rooflab.roofline.plot import with_own_settings

OPS = (
    "gemm flash_attention paged_attention rmsnorm fused_add_rmsnorm silu_and_mul rope kv_cache_write rope_and_cache "
    "embedding sample"
).split()
MARKS = {"naive": ("v", "#8a8a8a"), "library": ("s", "#d55e00"), "best kernel of Rooflab": ("o", "#0072b2")}


def chosen(records: Iterable[Record]) -> dict[str, dict[str, Record]]:
    """By op, the naive, the library and the best optimized kernel on the op's longest case."""
    timed = [r for r in records if r.stands_alone and r.status == "OK" and r.bound_fraction and r.op in OPS]
    found: dict[str, dict[str, Record]] = {}
    for op in OPS:
        own = [record for record in timed if record.op == op]
        first = [record for record in own if record.role == "library"] or own
        if not first:
            continue
        longest = max(first, key=lambda record: record.latency_median_ms or 0.0)
        same = [one for one in own if (one.case_id, one.scheme) == (longest.case_id, longest.scheme)]
        kinds = {"naive": "naive", "library": "library", "optimized": "best kernel of Rooflab"}
        for record in sorted(same, key=lambda one: one.bound_fraction or 0.0):  # the best kernel of a role comes last
            if record.role in kinds:
                found.setdefault(op, {})[kinds[record.role]] = record
    return found


@with_own_settings
def drawn(found: dict[str, dict[str, Record]]) -> Figure:
    """Draws a row for each op and a point for each kernel; the roof is at 100%."""
    figure = Figure(figsize=(5.6, 0.34 * len(found) + 1.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for row, kernels in enumerate(found.values()):
        shares = {name: 100 * (record.bound_fraction or 0.0) for name, record in kernels.items()}
        axes.plot([min(shares.values()), max(shares.values())], [row, row], color="#d8d8d8", zorder=1)
        for name, share in shares.items():
            mark, colour = MARKS[name]
            axes.scatter(share, row, s=42, marker=mark, color=colour, zorder=2, label=name)
        if best := kernels.get("best kernel of Rooflab"):
            axes.annotate(
                str(best.kernel),
                (shares["best kernel of Rooflab"], row),
                (0, 5),
                fontsize=8,
                ha="center" if shares["best kernel of Rooflab"] < 70 else "right",  # the frame is there
                textcoords="offset points",
                color=MARKS["best kernel of Rooflab"][1],
            )
    axes.set_xscale("log")
    axes.axvline(100, color="black", linewidth=1)
    axes.set_yticks(range(len(found)), list(found))
    axes.invert_yaxis()
    axes.grid(axis="x", color="#e4e4e4", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}%")
    first = next(iter(next(iter(found.values())).values()))
    place = first.environment
    axes.set_xlabel(
        f"share of the measured roof; {first.scheme}, a cold cache\n{place['cores']} cores of {place['cpu']}"
    )
    here = "measured, on a CPU; no kernel has run on a GPU yet" if first.device == "cpu" else "measured"
    figure.suptitle(here, fontsize=11, x=0.01, ha="left")
    handles, labels = axes.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    names = [name for name in MARKS if name in once]
    figure.legend([once[name] for name in names], names, loc="outside lower center", ncols=3, frameon=False)
    return figure


def main() -> None:
    """Draws the figure from the records that the command line names."""
    parser = argparse.ArgumentParser(description="The README's figure, from records of a run.")
    parser.add_argument("records", type=Path, help="a folder of records, such as one of make lab")
    parser.add_argument("--out", type=Path, default=Path("results/lab/ops.svg"))
    given = parser.parse_args()
    drawn(chosen(files.read_all(given.records))).savefig(
        given.out, metadata={"Date": None} if given.out.suffix == ".svg" else None
    )


if __name__ == "__main__":
    main()
