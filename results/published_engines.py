"""Sums of published kernel times (`roofline/step_times.py`) beside published times of whole engines under load.

    python results/published_engines.py aiconfigurator_core-0.12.0-*.whl

The package's table `silicon_sample.csv` gives the mean time between tokens for a number of requests in flight, with the
lengths of prompt and output.  Every row of Llama-3.1-8B and 70B on an H100 or H200 is taken, up to 128 requests, whose
settings are stated.  It writes `end_to_end.csv` and, with the sums, `end_to_end.md` to `results/published`.
"""

from __future__ import annotations

import argparse
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd

from rooflab.bench.base.plain import markdown_table
from rooflab.kernels._files import write_whole
from rooflab.roofline.architecture import get_architecture
from rooflab.roofline.device import get_device
from rooflab.roofline.published import FOLDER
from rooflab.roofline.step_times import loaded_itl_ms

FILE = "end_to_end.csv"
SAMPLE = "aiconfigurator_core/systems/silicon_sample.csv"
MODELS = {"meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b", "meta-llama/Llama-3.1-70B": "llama-3.1-70b"}
GPUS = {"h100_sxm": "h100-sxm", "h200_sxm": "h200"}
MOST_REQUESTS = 128
GROUP = ["model", "gpu", "gpus", "dtype", "engine"]
CLOSE = 0.15


def read_sample(wheel: Path) -> pd.DataFrame:
    """The rows with settings of ours.  Raises `ValueError` on a wheel without the table or one of its columns."""
    try:
        with zipfile.ZipFile(wheel) as package, package.open(SAMPLE) as file:
            table = pd.read_csv(file, dtype=str, keep_default_na=False)
        table = table[table.model_path.isin(list(MODELS)) & table.system.isin(list(GPUS)) & (table["mode"] == "agg")]
        rows = pd.DataFrame(
            {
                "model": table.model_path.map(MODELS),
                "gpu": table.system.map(GPUS),
                "gpus": table.tp_size.astype(int),
                "dtype": ["fp8_e4m3" if precision == "fp8" else "bf16" for precision in table.precision],
                "engine": (table.backend + " " + table.backend_version).str.strip(),
                "requests": [int(re.findall(r"concurrency=(\d+)", text)[0]) for text in table.silicon_data_source],
                "prompt": table.isl.astype(int),
                "output": table.osl.astype(int),
                "itl_ms": table.silicon_tpot_ms.astype(float).round(3),
                "ttft_ms": table.silicon_ttft_ms.astype(float).round(3),
            }
        )
    except (OSError, KeyError, AttributeError, IndexError, zipfile.BadZipFile) as error:
        raise ValueError(f"wheel: expected {SAMPLE} of aiconfigurator-core 0.12.0 in {wheel}: {error}") from error
    return rows[rows.requests <= MOST_REQUESTS].sort_values(list(rows.columns)).reset_index(drop=True)


def with_sums(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with `sum_ms`, what published kernel times add up to, and `ratio` of this sum to the published time."""
    sums: list[Any] = []
    for row in rows.to_dict("records"):
        arch, device = get_architecture(row["model"]), get_device(row["gpu"])
        load = (row["requests"], row["prompt"], row["output"])
        sums.append(loaded_itl_ms(arch, device, *load, weight_dtype=row["dtype"], gpus=row["gpus"]))
    return rows.assign(sum_ms=sums, ratio=pd.Series(sums, rows.index) / rows.itl_ms)


def page(rows: pd.DataFrame) -> str:
    """The comparison as Markdown: one line for each model, GPU, number of GPUs, dtype and engine."""
    lines = [
        "# Sums of published kernel times beside published times of whole engines",
        "",
        "Nothing here was measured by Rooflab. Published: mean time between tokens under a constant number of requests "
        "(1 to 128), from `silicon_sample.csv` of aiconfigurator-core 0.12.0 (Apache-2.0); its rows are in "
        f"`{FILE}`. Sum: one decode step and the share of the prefills between two tokens (`loaded_itl_ms`), from "
        "times of vLLM 0.24.0's kernels, without any time of the host. The source names no dtype of the KV cache, "
        "which is bf16 here, and none of the 8B model's weights under TensorRT-LLM, which are bf16 here.",
        "",
    ]
    columns = ("model", "GPU", "GPUs:", "dtype", "engine", "rows:", "prompt + output", "requests",
               "sum / published, median:", "median error:", "nine in ten:", f"within {CLOSE:.0%}:")  # fmt: skip
    cells = []
    for key, own in rows.groupby(GROUP):
        error = (own.ratio - 1).abs()
        lengths = f"{own.prompt.min()} to {own.prompt.max()} + {own.output.min()} to {own.output.max()}"
        cells.append([
            *key, len(own), lengths, f"{own.requests.min()} to {own.requests.max()}", f"{median(own.ratio):.2f}",
            f"{median(error):.1%}", f"{error.quantile(0.9):.0%}", f"{(error <= CLOSE).sum()} of {len(own)}",
        ])  # fmt: skip
    return "\n".join([*lines, *markdown_table(columns, cells)]) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """The script."""
    parser = argparse.ArgumentParser(description="Sums of published kernel times beside times of whole engines.")
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--out", type=Path, default=FOLDER)
    asked = parser.parse_args(arguments)
    rows = read_sample(asked.wheel)
    text = page(with_sums(rows))
    write_whole(asked.out / FILE, rows.to_csv(index=False, lineterminator="\n"))
    write_whole(asked.out / "end_to_end.md", text)
    print(text)


if __name__ == "__main__":
    main()
