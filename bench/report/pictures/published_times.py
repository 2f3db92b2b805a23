"""A figure of published times: the fraction of its bound that each library reaches, by tokens and by context."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from textwrap import fill

from matplotlib.axes import Axes

from rooflab.bench.report.pictures.canvas import INK, LOST, PALE, READ, WIDTH_IN, WRITTEN, new_figure, note, save
from rooflab.roofline.plot import own_settings
from rooflab.roofline.published import Table, committed

LEAST = 2048
"""The least N and K of the products in the figure: the sizes in a model of some billion parameters."""
HEADS = {"H": 32, "H_kv": 8, "D": 128, "window": 0}
"""The attention in the figure, which is that of Llama-3.1-8B."""
PRODUCTS = {
    "torch.nn.functional.linear": ("cuBLAS bf16", READ),
    "CutlassFP8ScaledMMLinearKernel": ("CUTLASS fp8, a scale a tensor", WRITTEN),
    "DeepGemmFp8BlockScaledMMKernel": ("DeepGEMM fp8, scales of 128 x 128", LOST),
}
NOTE = (
    "Bound: every byte through HBM once, dense peak; above 100% L2 served. fp8: with the quantisation of the "
    "activations from bf16. DeepGEMM was timed without a graph: below 1,024 tokens the host limits it. Attention: with "
    "the write of the cache."
)
DECODE_BATCHES = {1: PALE, 16: WRITTEN, 64: LOST}


@dataclass(frozen=True)
class LibraryCurve:
    """The fractions of the bound that one library reaches."""

    panel: str
    label: str
    colour: str
    points: Mapping[int, tuple[float, float, float]]
    """By tokens or context: the tenth percentile, the median and the ninetieth percentile; equal for a single shape."""

    def fraction(self, x: int) -> str:
        """The median at `x` tokens in percent; an empty text where nothing is published."""
        return f"{self.points[x][1]:.0%}" if x in self.points else ""


def curves(gpu: str) -> list[LibraryCurve]:
    """The curves of a GPU by its name in `roofline/device.py`.  Raises `ValueError` without published times of it."""
    engine = [table for table in committed() if table.framework == "vllm"]
    tables = [table for table in engine if table.gpu == gpu]
    if not tables:
        known = ", ".join(dict.fromkeys(table.gpu for table in engine)) or "none: they are in a checkout's results"
        raise ValueError(f"gpu: expected one with published times ({known}), got {gpu!r}")
    found = [
        LibraryCurve("products", *PRODUCTS[table.kernel], _products(table))
        for table in tables
        if table.op in ("gemm", "gemm_fp8") and table.kernel in PRODUCTS
    ]
    for table in tables:
        if table.op == "flash_attention":
            found.append(LibraryCurve("attention", "FA3 prefill, one prompt", READ, _attention(table, 1)))
        if table.op == "paged_attention" and table.scheme == "bf16":
            for batch, colour in DECODE_BATCHES.items():
                found.append(LibraryCurve("attention", f"FA3 decode, batch {batch}", colour, _attention(table, batch)))
    return found


def _products(table: Table) -> dict[int, tuple[float, float, float]]:
    by_tokens: dict[int, list[float]] = {}
    for (M, N, K), seconds in table.times.items():
        if min(N, K) >= LEAST and (M <= 16 or M % 16 == 0):  # 129 lies beside 128: a line would jump
            by_tokens.setdefault(M, []).append(table.least_s({"M": M, "N": N, "K": K}) / seconds)
    cuts = {M: quantiles(values, n=10) for M, values in sorted(by_tokens.items())}
    return {M: (found[0], median(by_tokens[M]), found[-1]) for M, found in cuts.items()}


def _attention(table: Table, batch: int) -> dict[int, tuple[float, float, float]]:
    found = {}
    for shape, seconds in table.times.items():
        row = dict(zip((*table.exact, *table.axes), shape, strict=True))
        if row["B"] == batch and all(row[name] == value for name, value in HEADS.items()):
            found[row["context"]] = (table.least_s(row) / seconds,) * 3
    return dict(sorted(found.items()))


@own_settings
def draw_published(gpu: str, folder: Path) -> Path:
    """Draws both panels as `published-GPU.png` in `folder`.  Raises `ValueError` as `curves` does."""
    found = curves(gpu)
    figure = new_figure(WIDTH_IN, 8.6)
    upper, lower = figure.subplots(2, 1)
    for axes, panel, label in (
        (upper, "products", f"tokens (M); GEMMs with N and K of {LEAST:,} and more: median, p10 to p90"),
        (lower, "attention", "context, tokens; 32 query heads, 8 KV heads, head dim 128, bf16"),
    ):
        _draw(axes, [curve for curve in found if curve.panel == panel])
        axes.set_xlabel(label, fontsize=9)
        axes.set_ylabel("published: bound over time", fontsize=9)
    source = next(table for table in committed() if table.gpu == gpu and table.framework == "vllm")
    title = f"{source.device}: what published kernels reach of the data sheet's bound"
    figure.suptitle(fill(title, int(9 * WIDTH_IN)), fontsize=11, weight="bold", x=0.01, ha="left")
    name = f"{source.framework} {source.version}, published in {source.source.partition(',')[0]}"
    note(figure, [f"{name} ({source.licence}): {source.timing}.", NOTE])
    return save(figure, folder / f"published-{gpu}.png")


def _draw(axes: Axes, found: list[LibraryCurve]) -> None:
    for curve in found:
        x = list(curve.points)
        low, middle, high = zip(*curve.points.values(), strict=True)
        axes.fill_between(x, low, high, color=curve.colour, alpha=0.15, linewidth=0)
        axes.plot(x, middle, color=curve.colour, marker="o", markersize=3, linewidth=1.4, label=curve.label)
    axes.axhline(1.0, color=INK, linewidth=0.8, linestyle=(0, (6, 3)))
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_ylim(0, 1.55)  # room for the names above the bound
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.grid(color="#e4e4e4", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.legend(fontsize=8.5, loc="upper left")
