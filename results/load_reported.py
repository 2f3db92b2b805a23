"""What GuideLLM or AIPerf reports, beside what the X-ray computes by that tool's definitions of the same answers.

    python -m rooflab.bench.load.tap --to http://127.0.0.1:8000 --port 8001 --out trace.ndjson
    guidellm run --backend kind=openai_http,target=http://127.0.0.1:8001,... --output kind=json,path=report.json
    python results/load_reported.py trace.ndjson report.json

`aiperf profile --url http://127.0.0.1:8001 ...` writes `profile_export_aiperf.json`.  The tool's clock is in its own
process, behind one more connection than the tap's.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rooflab.bench import show
from rooflab.bench.load.definitions import xray
from rooflab.bench.load.trace import load_trace


def reported(report: Mapping[str, Any]) -> tuple[str, dict[str, float]]:
    """The tool's name, and its figures under the X-ray's names.  Raises `ValueError` on another tool's report."""
    if "inter_token_latency" in report:
        names = {"ttft": "time_to_first_token", "itl": "inter_token_latency", "e2e": "request_latency"}
        found = {f"{ours}_{q}_ms": report[theirs][q] for ours, theirs in names.items() for q in ("p50", "p99")}
        throughput = report["output_token_throughput"]["avg"]
        return "AIPerf", found | {"itl_mean_ms": report[names["itl"]]["avg"], "output_tokens_per_s": throughput}
    if "benchmarks" not in report:
        raise ValueError("report: expected AIPerf's or GuideLLM's JSON, got another")
    metrics = report["benchmarks"][0]["metrics"]
    names = {"ttft": "time_to_first_token_ms", "itl": "inter_token_latency_ms", "tpot": "time_per_output_token_ms"}
    own = {ours: metrics[theirs]["successful"] for ours, theirs in names.items()}
    found = {f"{ours}_{q}_ms": of["percentiles"][q] for ours, of in own.items() for q in ("p50", "p99")}
    seconds = metrics["request_latency"]["successful"]["percentiles"]
    found |= {f"e2e_{q}_ms": 1e3 * seconds[q] for q in ("p50", "p99")} | {"itl_mean_ms": own["itl"]["mean"]}
    return "GuideLLM", found | {"output_tokens_per_s": metrics["output_tokens_per_second"]["successful"]["mean"]}


def compared(trace: Path, report: Path) -> list[dict[str, Any]]:
    """A row for each figure: the tool's, the X-ray's, and by how many percent the tool's is larger."""
    tool, figures = reported(json.loads(report.read_text()))
    ours = next(row for row in xray(load_trace(trace)) if row["tool"] == tool)
    return [
        {"tool": tool, "figure": name, "reported": theirs, "xray": ours[name], "off_%": 100 * (theirs / ours[name] - 1)}
        for name, theirs in figures.items()
    ]


def main() -> None:
    """The script."""
    parser = argparse.ArgumentParser(description="A tool's report beside the X-ray of the same answers.")
    parser.add_argument("trace", type=Path)
    parser.add_argument("report", type=Path)
    arguments = parser.parse_args()
    show.table(compared(arguments.trace, arguments.report), ("tool", "figure", "reported", "xray", "off_%"))


if __name__ == "__main__":
    main()
