"""`quick.py OUT.jsonl`: our best rungs beside every rival on one card, by CUDA events, with as little code as it takes.

It needs kernels/, reference/ and two files of bench/, so that it gives times where the suite fails.  Each group is a
process; a kernel that hangs or breaks its process is named, and the group begins again without it.  A row is written as
soon as it is known.  Of a kernel's result it says how far it is from the library's (`rel`, |a - b| / |b| in fp32);
whether it is right is for the first checks to say.  A time is the median of calls with a cold L2, kernels interleaved.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

PREFILL = "B={B},T={T},S={T},H={H},H_kv={K},D={D},causal=true"
DECODE = "B={B},context={C},H=32,H_kv=8,D=128,block_size=16,ragged=false"
GEMM = "M={},N={},K={},layout=NT,bias=false"
FP8 = "M={},N={},K={},scales=tensor,bias=false"
SAMPLE = "B={B},V=128256,temperature=1.0,top_k={k},top_p={p},min_p=0.0,sigma=2.5"
VALUES = 2**26


class Group(NamedTuple):
    """Kernels of an op that are timed beside each other on some cases; `library` comes first."""

    op: str
    kernels: tuple[str, ...]
    cases: tuple[str, ...]
    scheme: str = "bf16"
    limit_s: float = 60.0
    sustained_s: float = 0.0
    """The seconds for which each kernel runs without a pause, in place of single calls: the card then gets warm."""


def heads(T: int, D: int, B: int, H: int, K: int) -> str:
    """The text of a case of causal prefill."""
    return PREFILL.format(B=B, T=T, H=H, K=K, D=D)


SQUARE = GEMM.format(8192, 8192, 8192)
LARGE = (SQUARE, *(GEMM.format(*s) for s in ((4096, 4096, 4096), (2048, 28672, 4096), (8192, 8192, 512))))
LAYERS = ((4096, 4096), (28672, 4096), (4096, 14336))
ROWS = (1024, 4096, 32768)
GROUPS = {
    "gemm": Group("gemm", ("library", "persistent", "tma", "warp_specialized", "cooperative", "multicast"),
                  LARGE),
    "skinny": Group("gemm", ("library", "split_k", "stream_k", "gemv", "swap_ab"),
                    tuple(GEMM.format(m, *layer) for m in (1, 16, 64) for layer in LAYERS)),
    "fa128": Group("flash_attention", ("library", "sdpa_cudnn", "flash_attention_3", "tma", "persistent", "ping_pong"),
                   tuple(heads(t, 128, b, 16, k) for b, t in ((16, 1024), (4, 4096), (1, 16384)) for k in (16, 2))),
    "decode": Group("paged_attention", ("library", "flash_attention_3", "torch_varlen", "flex", "gqa_packed",
                                        "split_kv", "tma_pages"),
                    tuple(DECODE.format(B=b, C=c) for b, c in ((64, 1024), (64, 4096), (64, 8192), (1, 65536))),
                    limit_s=90.0),
    "fp8": Group("gemm_fp8", ("library", "promoted", "promoted_ws", "multicast"),
                 (FP8.format(8192, 8192, 8192), FP8.format(2048, 28672, 4096)), "fp8_e4m3"),
    "w4": Group("gemm_w4a16", ("library", "gemv"), ("M=1,N=8192,K=8192,zeros=false,bias=false",), "w4a16_g128"),
    "fa64": Group("flash_attention", ("library", "sdpa_cudnn", "flash_attention_3", "tma", "ping_pong"),
                  tuple(heads(t, 64, b, 32, 32) for b, t in ((16, 1024), (4, 4096), (1, 16384)))),
    "rmsnorm": Group("rmsnorm", ("library", "compiled", "liger", "fused", "cluster"),
                     (*(f"T={VALUES // h},H={h},eps=1e-05" for h in ROWS), "T=1,H=4096,eps=1e-05"), limit_s=90.0),
    "add": Group("fused_add_rmsnorm", ("library", "compiled", "fused", "cluster"),
                 tuple(f"T={VALUES // h},H={h},eps=1e-05" for h in ROWS), limit_s=90.0),
    "silu": Group("silu_and_mul", ("library", "compiled", "fused", "cluster"),
                  tuple(f"T={VALUES // i},I={i}" for i in ROWS), limit_s=90.0),
    "sample": Group("sample", ("library", "bisect", "cluster"),
                    tuple(SAMPLE.format(B=b, k=k, p=p) for b in (1, 512) for k, p in ((50, 1.0), (0, 0.95))), "fp32"),
    "warm": Group("gemm", ("library", "cooperative"), (SQUARE,), sustained_s=2.0),
}  # fmt: skip
"""Groups in order of value.  Within a group, kernels that wait at barriers come last.  `kernel:field=value` is the
kernel in its own config except for one field, to compare the change with the config that it would replace."""
WARM_S = 60.0
"""The seconds for the pass that compiles all groups at once; the timed pass finds the compiled code in the caches."""
STALL_S = 40.0
"""The seconds without output after which a group's process counts as hung: torch.compile takes ten or twenty."""
KERNEL_S, ROUNDS, WARM_ROUNDS = 0.35, (8, 60), 3
"""The seconds for a kernel on a case, the least and the most rounds, and the first rounds that are not kept."""
BACKLOG_CYCLES = 600_000
"""The cycles for which the card waits before a sample: 0.3 ms, in which the host launches the whole sample."""
REDUCED = "library, torch's own math mode"
"""cuBLAS in torch's default mode, with bf16 reductions; the lab's `library` has fp32 reductions.  Both are rivals."""
FAR = 0.1
"""The largest distance from the library's result, relative to its norm, at which a kernel's time counts."""


def say(**row: Any) -> None:
    """Prints one row for the parent process."""
    print("ROW " + json.dumps(row), flush=True)


def card_now(index: int = 0) -> dict[str, Any]:
    """Clock, power, temperature and the number of other processes on the card; empty without NVML."""
    if find_spec("pynvml") is None:
        return {}
    import pynvml

    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        return {
            "sm_clock_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
            "power_w": pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
            "temperature_c": pynvml.nvmlDeviceGetTemperature(handle, 0),
            "other_processes": len(pynvml.nvmlDeviceGetComputeRunningProcesses(handle)) - 1,
        }
    except pynvml.NVMLError as error:
        return {"nvml": str(error)}


class Timer:
    """Times calls on a card by events, with a cold L2; on a CPU by its clock."""

    def __init__(self, device: Any):
        import torch

        self.device, self.torch, self.on_card = device, torch, device.type == "cuda"
        if self.on_card:
            l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
            self.flush = torch.ones(2 * l2_bytes // 4, device=device)

    def start(self, call: Callable[[], Any]) -> Callable[[], float]:
        """Starts a call; the result gives its seconds, once `wait` has returned."""
        if not self.on_card:
            began = time.perf_counter()
            call()
            seconds = time.perf_counter() - began
            return lambda: seconds
        begin, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.torch.cuda._sleep(BACKLOG_CYCLES)
        self.flush.sum()  # by reading: nothing is left to be written back
        begin.record()
        call()
        end.record()
        return lambda: float(begin.elapsed_time(end) * 1e-3)

    def wait(self) -> None:
        """Waits until the card has done all its work."""
        if self.on_card:
            self.torch.cuda.synchronize()

    def sustained(self, call: Callable[[], Any], seconds: float) -> tuple[float, int, dict[str, Any]]:
        """The seconds of a call in a run without a pause, the number of calls, and the card near the run's end."""
        self.wait()
        began, calls, now = time.perf_counter(), 0, dict[str, Any]()
        while (passed := time.perf_counter() - began) < seconds:
            for _ in range(8):
                call()
            calls += 8
            self.wait()
            if passed > 0.7 * seconds and not now:
                now = card_now() if self.on_card else {"cpu": True}
        return (time.perf_counter() - began) / calls, calls, now


def in_reduced_mode(call: Callable[[], Any]) -> Callable[[], Any]:
    """Wraps the call with torch's own setting for cuBLAS."""
    import torch

    def reduced() -> None:
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
        call()
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False

    return reduced


def named(op: str, name: str, case: Any, scheme: Any) -> Any:
    """The kernel with a name of `GROUPS`, or None."""
    from rooflab.kernels import registry
    from rooflab.reference.spec import Case

    base, _, change = name.partition(":")
    kernel = registry.kernels(op).get(base)
    if kernel is None or not change or kernel.tuning is None:
        return kernel
    return kernel.with_config(replace(kernel.tuning.heuristic(case, scheme), **Case.parse(change)))


def rounds_of(timer: Timer, calls: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
    """The seconds of each kernel, run in turn; the order is rotated by one each round."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    ends, names, number = time.monotonic() + KERNEL_S * len(calls), list(calls), 0
    while names and number < ROUNDS[1] and (number < ROUNDS[0] or time.monotonic() < ends):
        place = number % len(names)
        readings = [(name, timer.start(calls[name])) for name in names[place:] + names[:place]]
        timer.wait()
        if number >= WARM_ROUNDS:
            for name, reading in readings:
                times[name].append(reading())
        number += 1
    return times


def child(name: str, without: Sequence[str], files: Sequence[str], warm: bool, dry: bool) -> None:
    """Runs a group's process: prints a row for each kernel on each case."""
    import torch

    from rooflab.bench.core.call import Rotation
    from rooflab.bench.core.failed import Failed
    from rooflab.kernels import registry
    from rooflab.kernels.precision import pin_matmul_precision
    from rooflab.reference.spec import Case, as_tuple, get_scheme

    group, device = GROUPS[name], torch.device("cpu" if dry else "cuda")
    spec = registry.get_op(group.op)
    own = [kernel for file in files for kernel in registry.load_file(Path(file)) if kernel.op == group.op]
    names = [kernel for kernel in (*group.kernels, *(k.name for k in own)) if kernel not in without]
    pin_matmul_precision()
    timer = Timer(device)
    scheme = get_scheme("fp32" if dry and "fp32" in spec.schemes else group.scheme if not dry else spec.schemes[0])
    cases = spec.get_cases("smoke")[:1] if dry else [spec.check_case(Case.parse(text)) for text in group.cases]
    about = {"group": name, "op": group.op, "scheme": scheme.name, "device": "cpu"}
    if not dry:
        about["device"] = torch.cuda.get_device_properties(device).name
    for case in cases:
        inputs = [spec.make_inputs(case, scheme, device, 0)] if warm else Rotation.copies(spec, case, scheme, device, 0)
        cost = spec.cost_of(spec.make_inputs(case, scheme, torch.device("meta"), 0))
        calls: dict[str, Callable[[], Any]] = {}
        results: dict[str, torch.Tensor] = {}
        for one in names:
            row = {**about, "case": case.id, "kernel": one}
            kernel = named(group.op, one, case, scheme)
            why: object = "no such kernel" if kernel is None else kernel.why_not_here(device)
            if kernel is not None and dry and kernel.backend not in registry.CPU_BACKENDS:
                why = "needs a GPU"
            if kernel is None or why or (why := kernel.why_not_args(inputs[0], spec)):
                say(**row, status="NOT_HERE", why=str(why)[:300])
                continue
            say(**row, status="STARTS")
            began = time.monotonic()
            try:
                call = Rotation(kernel, spec, inputs)
                found = call()
                timer.wait()
                first = next(iter(as_tuple(found)), None) if found is not None else None
                if first is not None:
                    results[one] = first.float().clone()
                calls[one] = call
                say(**row, status="RAN", first_s=round(time.monotonic() - began, 2))
            except Failed.errors() as error:
                say(**row, status="ERROR", why=f"{type(error).__name__}: {error}"[:600])
                timer.wait()  # raises where the context is broken: the parent then begins again without this kernel
        if warm:
            continue
        if group.op == "gemm" and "library" in calls and not dry:
            calls[REDUCED] = in_reduced_mode(calls["library"])
        say(**about, case=case.id, kernel="", status="STARTS")
        if group.sustained_s:
            for one, run in calls.items():
                seconds, count, now = timer.sustained(run, 0.1 if dry else group.sustained_s)
                say(
                    **about, case=case.id, kernel=one, status="SUSTAINED", us=seconds * 1e6, calls=count,
                    tflops=cost.flops / seconds / 1e12, **now,
                )  # fmt: skip
            continue
        base = results.get("library")
        for one, times in rounds_of(timer, calls).items():
            seconds, ordered = statistics.median(times), sorted(times)
            rel = None
            if base is not None and one in results and group.op != "sample":
                same = results[one].shape == base.shape
                rel = float((results[one] - base).norm() / base.norm()) if same else float("inf")
            say(
                **about, case=case.id, kernel=one, status="TIMED" if rel is None or rel < FAR else "FAR",
                us=seconds * 1e6, p20_us=ordered[len(ordered) // 5] * 1e6, p80_us=ordered[4 * len(ordered) // 5] * 1e6,
                rel=rel, tflops=cost.flops / seconds / 1e12, gb_per_s=cost.bytes / seconds / 1e9,
                samples_us=[round(one_s * 1e6, 2) for one_s in times], **({} if dry else card_now()),
            )  # fmt: skip
        del inputs, calls, results
        if not dry:
            torch.cuda.empty_cache()


def started(name: str, options: argparse.Namespace, *more: str, **pipes: Any) -> subprocess.Popen[str]:
    """Starts a group's process."""
    command = [sys.executable, "-u", __file__, str(options.out), "--child", name, *more]
    command += [word for file in options.kernels for word in ("--kernels", file)]
    command += ["--dry-run"] if options.dry_run else []
    return subprocess.Popen(command, text=True, **pipes)


def rows_from(process: subprocess.Popen[str], limit_s: float, stall_s: float) -> Iterator[dict[str, Any]]:
    """Yields a process's rows as they come, until it ends, is silent for too long, or its time is over."""
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put("")

    threading.Thread(target=read, daemon=True).start()
    ends = time.monotonic() + limit_s
    while (left := min(stall_s, ends - time.monotonic())) > 0:
        try:
            line = lines.get(timeout=left)
        except queue.Empty:
            return
        if not line:
            return
        if line.startswith("ROW "):
            yield json.loads(line[4:])


def measure(name: str, options: argparse.Namespace, keep: Callable[[dict[str, Any]], None]) -> None:
    """Measures one group; a kernel that breaks or hangs it is left out, and the group begins again."""
    began, without = time.monotonic(), list[str]()
    limit_s = options.group_s or GROUPS[name].limit_s
    while True:
        running = ""
        words = [word for one in without for word in ("--without", one)]
        with options.out.with_suffix(f".{name}.log").open("a") as log:
            process = started(name, options, *words, stdout=subprocess.PIPE, stderr=log)
            for row in rows_from(process, limit_s - (time.monotonic() - began), options.stall_s):
                if row["status"] == "STARTS":
                    running = row["kernel"]
                else:
                    keep(row)
            with suppress(subprocess.TimeoutExpired):
                process.wait(1)
            how = "it hung" if process.poll() is None else f"its process ended with status {process.returncode}"
            process.kill()
            process.wait()
        if process.returncode == 0 and how != "it hung":
            break
        keep({"group": name, "op": GROUPS[name].op, "kernel": running, "status": "BROKE", "why": how})
        without.append(running)
        if not running or limit_s - (time.monotonic() - began) < 5:
            break
    keep({"group": name, "status": "END", "seconds": round(time.monotonic() - began, 1)})


def line_of(row: dict[str, Any]) -> str:
    """A row as a line of text."""
    if row["status"] == "END":
        return f"-- {row['group']}: {row['seconds']:.0f} s"
    head = f"{row['op']:18} {row['kernel']:32}"
    if "us" not in row:
        return f"{head} {row['status']} {row.get('why', '')[:110]}"
    clock = f"{row['sm_clock_mhz']} MHz {row['power_w']:.0f} W" if "power_w" in row else ""
    rate = f"{row['tflops']:7.1f} TFLOP/s {row.get('gb_per_s', 0.0):6.0f} GB/s"
    return f"{head} {row['us']:10.1f} us {rate} {row['status']} rel {row.get('rel')} {clock} {row['case'][:64]}"


def main() -> None:
    """Compiles for all groups at once, then times them in order."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--group", action="append", choices=GROUPS, help="only this group; repeatable")
    parser.add_argument("--kernels", action="append", default=[], help="a file of kernels to time too; repeatable")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, with small shapes")
    parser.add_argument("--stall-s", type=float, default=STALL_S)
    parser.add_argument("--group-s", type=float, help="seconds for each group")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--without", action="append", default=[], help=argparse.SUPPRESS)
    parser.add_argument("--warm", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.without, options.kernels, options.warm, options.dry_run)
        return
    names = options.group or list(GROUPS)
    if not options.dry_run:
        began, quiet = time.monotonic(), {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        warm = [started(name, options, "--warm", **quiet) for name in names]
        while time.monotonic() - began < WARM_S and any(process.poll() is None for process in warm):
            time.sleep(0.2)
        for process in warm:
            process.kill()
        ends = [process.wait() for process in warm]
        print(f"-- compiled for {time.monotonic() - began:.0f} s; exit statuses {ends}", flush=True)
    with options.out.open("a") as file:

        def keep(row: dict[str, Any]) -> None:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
            if row["status"] != "RAN":
                print(line_of(row), flush=True)

        for name in names:
            measure(name, options, keep)


if __name__ == "__main__":
    main()
