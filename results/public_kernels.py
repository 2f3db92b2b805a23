"""Public Triton kernels of which times are published: compiles them for sm_90a, predicts them, and writes both times.

    python results/public_kernels.py FOLDER --out results/published/predictions.csv

FOLDER holds what `pip download --no-deps sglang==0.5.14 liger-kernel==0.5.2 aiconfigurator-core==0.12.0` downloads, and
`h100_all_benchmark_data.csv` of Liger-Kernel's repository at commit 3534d446.  The kernels' code is unpacked to the
cache and run from there; nothing of it is part of this repository.  `held_out.py` reads the written file.

Left out: attention over more keys than its window, because the published shapes do not say which keys were read; and
Liger's SwiGLU, of which the times are those of a whole MLP with its products.
"""

from __future__ import annotations

import argparse
import importlib
import io
import json
import math
import sys
import types
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import triton

from rooflab.bench.compile.capture import Launch, recording_triton
from rooflab.bench.compile.cases import SM, properties
from rooflab.bench.compile.static import CompiledInfo, info_of
from rooflab.bench.compile.worker import describe
from rooflab.bench.predict.model import LAUNCH, LEAST, SUSTAINED, predict
from rooflab.bench.predict.public import Kind, PublishedTime, write
from rooflab.kernels._folders import cache_folder
from rooflab.roofline.device import get_device
from rooflab.roofline.model import Cost, Traffic
from rooflab.roofline.published import committed
from rooflab.roofline.steps import decode_attention_cost, prefill_attention_cost

SHAPES = 60
"""Most shapes of one kernel: every n-th of the published ones, in the order of their times."""
EVENTS, GRAPH = "events", "graph"
KV_SPLITS = 8
"""SGLang's default number of parts of each sequence's keys."""
_SGLANG = "sglang.srt.layers"
_ATTENTION = f"{_SGLANG}.attention.triton_ops"
_MOE = f"{_SGLANG}.moe.moe_runner.triton_utils"
_STUBS = (
    "sglang.srt.utils", "sglang.srt.batch_invariant_ops", f"{_SGLANG}.moe.utils", f"{_SGLANG}.quantization.fp8_kernel",
    f"{_SGLANG}.quantization.int8_kernel",
)  # fmt: skip


@dataclass(frozen=True)
class Part:
    """One launcher's call of a published time; without `call` a part of whose code nothing is read."""

    cost: Cost
    call: Callable[[], Any] | None = None
    traffic: Traffic | None = None


@dataclass(frozen=True)
class Timed:
    """One published time of a public kernel."""

    kernel: str
    kind: Kind
    shape: str
    timing: str
    published_us: dict[str, float]
    """By GPU."""
    parts: tuple[Part, ...]


class _Stub(types.ModuleType):
    """Stands for a module that a kernel's file imports and the launch does not need: each of its functions is false."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *arguments, **options: False


def unpack(folder: Path) -> Path:
    """Unpacks the Python files and configs of the kernels' wheels to the cache.  Raises `ValueError` without them."""
    place = cache_folder() / "public_kernels"
    for pattern, prefix in (
        ("sglang-0.5.14-*.whl", "sglang/srt/layers/"),
        ("liger_kernel-0.5.2-*.whl", "liger_kernel/"),
    ):
        with zipfile.ZipFile(_only(folder, pattern)) as wheel:
            names = [name for name in wheel.namelist() if name.startswith(prefix) and name.endswith((".py", ".json"))]
            wheel.extractall(place, names)
    return place


def _only(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if not found:
        raise ValueError(f"folder: expected {pattern} in {folder}, got none")
    return found[-1]


def _module(place: Path, name: str) -> Any:
    """One file of a package, without the `__init__` of the folders around it, which import whole frameworks."""
    for stub in _STUBS:
        sys.modules.setdefault(stub, _Stub(stub))
    parts = name.split(".")
    for end in range(1, len(parts)):
        package = types.ModuleType(".".join(parts[:end]))
        package.__path__ = [str(place.joinpath(*parts[:end]))]
        sys.modules.setdefault(package.__name__, package)
    return importlib.import_module(name)


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _ints(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return _empty(*shape, dtype=dtype)


def _floats(*shape: int) -> torch.Tensor:
    return _empty(*shape, dtype=torch.float32)


def _every(found: list[Timed]) -> list[Timed]:
    """At most `SHAPES` of them, evenly over their times."""
    ordered = sorted(found, key=lambda entry: max(entry.published_us.values()))
    return ordered[:: math.ceil(len(ordered) / SHAPES)]


def liger(place: Path, folder: Path) -> Iterator[Timed]:
    """Liger-Kernel's forward RMSNorm and RoPE in bf16, and LayerNorm in fp32, on an H100 NVL."""
    modules = {name: _module(place, f"liger_kernel.ops.{name}") for name in ("rms_norm", "rope", "layer_norm")}
    table = pd.read_csv(_only(folder, "h100_all_benchmark_data.csv"))
    table = table[(table.kernel_provider == "liger") & (table.kernel_operation_mode == "forward")]
    table = table[(table.metric_name == "speed") & table.kernel_name.isin(list(modules))]
    seen = set()
    for row in table.to_dict("records"):
        name, x, fixed = row["kernel_name"], int(row["x_value"]), json.loads(row["extra_benchmark_config_str"])
        module = modules[name]
        if name == "rope":
            T, D = fixed.get("seq_len", x), fixed.get("hidden_size", x) // 32
            shape, cost = f"T={T},H=32,H_kv=8,D={D}", Cost(82 * T * D, 80 * T * D)
            heads = (_empty(1, T, count, D).transpose(1, 2) for count in (32, 8))
            call = partial(module.rope_forward, *heads, _empty(1, T, D), _empty(1, T, D))
        elif name == "rms_norm":
            T, H = fixed["M"], x
            shape, cost = f"T={T},H={H}", Cost(2 * T * H + 2 * H, 2 * T * H + 4 * T)
            call = partial(module.rms_norm_forward, _empty(T, H), _empty(H), 1e-6, 0.0, "llama")
        else:
            T, H = fixed["M"], x
            shape, cost = f"T={T},H={H}", Cost(4 * T * H + 8 * H, 4 * T * H + 8 * T)
            call = partial(module.layer_norm_forward, _floats(T, H), _floats(H), _floats(H), 1e-6)
        if (name, shape) not in seen:
            seen.add((name, shape))
            us = {"h100-nvl": row["y_value_50"] * 1e3}
            yield Timed(f"Liger {name}", "memory", shape, EVENTS, us, (Part(cost, call),))


def attention(place: Path) -> Iterator[Timed]:
    """SGLang's decode and extend attention in bf16, from the committed tables."""
    decode, extend = (_module(place, f"{_ATTENTION}.{name}_attention") for name in ("decode", "extend"))
    extend._is_cuda, extend.CUDA_CAPABILITY = True, (9, 0)
    for op, kernel in (("paged_attention", "SGLang decode"), ("flash_attention", "SGLang extend")):
        tables = [table for table in committed() if (table.op, table.framework) == (op, "sglang")]
        for shape in sorted(tables[0].times):
            H, H_kv, D, window, B, S = shape
            us = {table.gpu: table.times[shape] * 1e6 for table in tables if shape in table.times}
            if 64 <= S <= (window or S):
                text = f"B={B},S={S},H={H},H_kv={H_kv},D={D},window={window}"
                make = _decode if op == "paged_attention" else _extend
                part = make(decode if op == "paged_attention" else extend, H, H_kv, D, window, B, S)
                yield Timed(kernel, "attention", text, GRAPH, us, (part,))


def _decode(module: Any, H: int, H_kv: int, D: int, window: int, B: int, S: int) -> Part:
    cost = decode_attention_cost(B, S, H, H_kv, D, window, "bf16", "bf16")
    partials = 4 * B * H * KV_SPLITS * (D + 1)
    q, kv = _empty(B, H, D), _empty(B * S, H_kv, D)
    call = partial(
        module.decode_attention_fwd, q, kv, kv, _empty(B, H, D), _ints(B + 1), _ints(B * S, dtype=torch.int64),
        _floats(B, H, KV_SPLITS, D), _floats(B, H, KV_SPLITS), _ints(B), KV_SPLITS, D**-0.5, 1.0, 1.0,
    )  # fmt: skip
    return Part(cost, call, Traffic(cost.read_bytes + partials, cost.write_bytes + partials, launches=2))


def _extend(module: Any, H: int, H_kv: int, D: int, window: int, B: int, S: int) -> Part:
    q, kv = _empty(B * S, H, D), _empty(B * S, H_kv, D)
    call = partial(
        module.extend_attention_fwd, q, kv, kv, _empty(B * S, H, D), kv, kv, _ints(B + 1), _ints(B + 1),
        _ints(B * S, dtype=torch.int64), None, True, None, S, 1.0, 1.0, D**-0.5, sliding_window_size=window or -1,
    )  # fmt: skip
    return Part(prefill_attention_cost(B, S, H, H_kv, D, window, "bf16"), call)


def experts(place: Path, folder: Path) -> Iterator[Timed]:
    """SGLang's fused experts in bf16 with the configs that it ships: two products, the activation and the sum.

    A published time holds the sort by expert too, of which nothing is predicted.
    """
    module = _module(place, f"{_MOE}.fused_moe_triton_kernels")
    times: dict[tuple[int, ...], dict[str, float]] = {}
    with zipfile.ZipFile(_only(folder, "aiconfigurator_core-0.12.0-*.whl")) as wheel:
        for gpu, name in (("h100-sxm", "h100_sxm"), ("h200", "h200_sxm")):
            path = f"aiconfigurator_core/systems/data/{name}/moe/sglang/0.5.14/moe_perf.parquet"
            table = pd.read_parquet(io.BytesIO(wheel.read(path)))
            table = table[(table.kernel_source == "sglang_fused_moe_triton") & (table.moe_dtype == "bfloat16")]
            table = table[(table.distribution == "balanced") & (table.moe_ep_size == 1)]
            for row in table.to_dict("records"):
                inner = row["inter_size"] // row["moe_tp_size"]
                shape = (row["num_tokens"], row["topk"], row["num_experts"], inner, row["hidden_size"])
                times.setdefault(shape, {})[gpu] = row["latency"] * 1e3
    for (M, k, E, inner, hidden), us in sorted(times.items()):
        if (config := _shipped(place, E, inner, M)) is not None:
            parts = [
                _product(module, M, k, E, 2 * inner, hidden, config, up=True),
                _product(module, M, k, E, hidden, inner, config, up=False),
                Part(Cost(4 * M * k * inner, 2 * M * k * inner)),
                Part(Cost(2 * M * k * hidden, 2 * M * hidden)),
            ]
            text = f"M={M},top_k={k},E={E},N={inner},K={hidden}"
            yield Timed("SGLang experts", "product", text, GRAPH, us, tuple(parts))


def _shipped(place: Path, E: int, N: int, M: int) -> dict[str, Any] | None:
    """The config for the nearest number of tokens, of the newest Triton that has a file for this shape on an H100."""
    name = f"E={E},N={N},device_name=NVIDIA_H100_80GB_HBM3.json"
    files = sorted((place / _MOE.replace(".", "/") / "configs").glob(f"triton_*/{name}"))
    if not files:
        return None
    table = {int(key): value for key, value in json.loads(files[-1].read_text()).items()}
    return dict(table[min(table, key=lambda tokens: abs(tokens - M))])


def _product(module: Any, M: int, k: int, E: int, N: int, K: int, config: dict[str, Any], up: bool) -> Part:
    """One of the two products: its rows are `M * k`, spread evenly over the experts and padded to whole tiles."""
    used, tile = min(E, M * k), config["BLOCK_SIZE_M"]
    rows = used * math.ceil(M * k / used / tile) * tile
    read = 2 * (M if up else M * k) * K + 2 * used * N * K
    cost = Cost(read, 2 * M * k * N, tensor_flops={"bf16": 2.0 * M * k * N * K})
    call = partial(
        module.invoke_fused_moe_kernel, _empty(M if up else M * k, K), _empty(E, N, K), None, _empty(M, k, N),
        None, None, None, _floats(M, k), _ints(M, k), _ints(rows), _ints(rows // tile), _ints(1), not up,
        k if up else 1, config, triton.language.bfloat16, *(False,) * 5,
    )  # fmt: skip
    return Part(cost, call)


def compiled(call: Callable[[], Any]) -> list[CompiledInfo]:
    """Every kernel that a call launches."""
    found: list[Launch] = []
    with recording_triton(SM, properties(), found):
        call()
    return [info_of(answer) for answer in describe(found)]


def readings(timed: Timed) -> list[PublishedTime]:
    """Published and predicted time of one shape on each GPU."""
    code = [compiled(part.call) if part.call else [] for part in timed.parts]
    found = []
    for gpu, us in sorted(timed.published_us.items()):
        predictions = [
            predict(part.cost, part.traffic, own, get_device(gpu)) for part, own in zip(timed.parts, code, strict=True)
        ]
        steps = [step for prediction in predictions for step in prediction.steps]
        launch, sustained, total = (
            1e6 * sum(step.seconds for step in steps if not names or step.name in names)
            for names in ((LAUNCH,), (LEAST, SUSTAINED), ())
        )
        bound = 1e6 * sum(prediction.bound.seconds for prediction in predictions)
        launches = sum(prediction.launches for prediction in predictions)
        named = (timed.kernel, timed.kind, gpu, timed.shape, timed.timing)
        found.append(PublishedTime(*named, us, bound, launches, launch, sustained, total))
    return found


def main() -> None:
    """The script."""
    parser = argparse.ArgumentParser(description="Predicts public Triton kernels of which times are published.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    place = unpack(arguments.folder)
    by_kernel: dict[str, list[Timed]] = {}
    for entry in (*liger(place, arguments.folder), *attention(place), *experts(place, arguments.folder)):
        by_kernel.setdefault(entry.kernel, []).append(entry)
    found = [entry for entries in by_kernel.values() for entry in _every(entries)]
    rows = []
    for number, entry in enumerate(found, 1):
        print(f"{number} of {len(found)}: {entry.kernel} {entry.shape}", flush=True)
        rows += readings(entry)
    write(rows, arguments.out)


if __name__ == "__main__":
    main()
