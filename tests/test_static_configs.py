"""Every legal config of every tunable kernel compiles for Hopper, and spills no more than is written beside this file.

`test_static_configs.json` has the bytes of stack a thread of each config that spills, by kernel and dtype.
`python tests/test_static_configs.py` writes it anew; look at the difference before it is committed.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rooflab.bench.code.cases import select
from rooflab.bench.code.store import Store
from rooflab.bench.static import CompileFailure, Request, compile_kernels
from rooflab.kernels.configs import legal_configs
from rooflab.kernels.registry import Kernel, kernels, ops
from rooflab.reference.spec import SCHEMES

FILE = Path(__file__).with_suffix(".json")
KNOWN: dict[str, dict[str, int]] = json.loads(FILE.read_text())
FMA_OPERANDS = (
    "fp32 products are FMAs, whose operands are held in registers, more than is_legal counts; tuning drops them"
)
KEPT = "8 or 16 bytes that are stored before the loop and read after it (read in the SASS of three of them)"
LOADED = "a tile waits in registers between its load and its store to shared memory, which is_legal does not count"
SEARCH = "values that wait while the cut is sought; four warps hold 128 registers of counts beside them"
REASONS = {
    "flash_attention/online bf16": "128 by 64 at four warps: is_legal counts output and scores, not the latter in bf16",
    "flash_attention/online fp32": FMA_OPERANDS,
    "gemm/pipelined bf16": KEPT,
    "gemm/pipelined fp32": KEPT,
    "gemm/tensor_core bf16": LOADED,
    "paged_attention/gqa_packed bf16": "one or two warps hold a whole tile, which is_legal takes for less",
    "paged_attention/gqa_packed fp32": FMA_OPERANDS,
    "sample/bisect bf16": SEARCH,
    "sample/bisect fp32": SEARCH,
}
"""Why these configs are legal all the same: a config that spills may still be the fastest, and tuning measures it."""
TUNABLE = [kernel for op in ops() for kernel in kernels(op).values() if kernel.takes_config]
SCHEMES_TRIED = ("bf16", "fp32")
"""fp16 takes the same instructions as bf16, of other names."""
ORDER_ONLY = ("group_m",)
"""Fields that only say in which order tiles are visited: of configs that differ in nothing else, one is compiled."""
AT_ONCE = 64


def label(config: Any) -> str:
    """`block_m=64,num_warps=4`."""
    return ",".join(f"{key}={value}" for key, value in dataclasses.asdict(config).items() if key not in ORDER_ONLY)


def stack_bytes(kernel: Kernel, scheme: str) -> dict[str, int]:
    """Bytes of stack a thread of every legal config, at the most work of llama3_8b; none in a dtype not taken."""
    chosen = select(kernel.op, (kernel.name,), ("llama3_8b",), (), (scheme,))
    if not chosen:
        return {}
    (item,) = chosen
    legal = sorted(legal_configs(kernel, item.case, SCHEMES[scheme]), key=dataclasses.astuple)
    configs, found = list({label(config): config for config in legal}.values()), {}
    for start in range(0, len(configs), AT_ONCE):
        part = configs[start : start + AT_ONCE]
        requests = [Request(kernel.op, kernel.name, item.case, item.scheme, None, config) for config in part]
        for config, result in zip(part, compile_kernels(requests, Store()), strict=True):
            assert not isinstance(result, CompileFailure), f"{config}: {result}"
            found[label(config)] = max(info.stack_bytes for info in result)
    return found


def wrong(found: Mapping[str, int], known: Mapping[str, int]) -> list[str]:
    """What spills more than is known, and what is known and no longer true."""
    told = [f"{config}: {size} bytes, known: {known.get(config, 0)}" for config, size in found.items()
            if size > known.get(config, 0)]  # fmt: skip
    return told + [
        f"{config}: {found.get(config, 'no such config')} now, known: {size}"
        for config, size in known.items()
        if found.get(config, -1) < size
    ]


@pytest.mark.slow
@pytest.mark.timeout(3600)  # gemm has a thousand configs, half a second each
@pytest.mark.parametrize("scheme", SCHEMES_TRIED)
@pytest.mark.parametrize("kernel", TUNABLE, ids=lambda kernel: kernel.id)
def test_every_legal_config_compiles_and_spills_nothing_new(kernel, scheme):
    told = wrong(stack_bytes(kernel, scheme), KNOWN.get(f"{kernel.id} {scheme}", {}))
    assert not told, "\n".join(told)


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ({"block=64": 0, "block=128": 8}, []),
        ({"block=64": 4, "block=128": 8}, ["block=64: 4 bytes, known: 0"]),
        ({"block=64": 0, "block=128": 12}, ["block=128: 12 bytes, known: 8"]),
        ({"block=64": 0, "block=128": 4}, ["block=128: 4 now, known: 8"]),
        ({"block=64": 0}, ["block=128: no such config now, known: 8"]),
    ],
)
def test_a_new_spill_and_a_line_that_is_no_longer_true_are_told(found, told):
    assert wrong(found, {"block=128": 8}) == told


def test_every_known_spill_has_a_reason():
    assert set(KNOWN) == set(REASONS)
    assert set(KNOWN) <= {f"{kernel.id} {scheme}" for kernel in TUNABLE for scheme in SCHEMES_TRIED}
    assert all(size > 0 for sizes in KNOWN.values() for size in sizes.values())


def write(path: Path = FILE) -> None:
    """Compiles everything and writes the file anew."""
    found = {}
    for kernel in TUNABLE:
        for scheme in SCHEMES_TRIED:
            spilled = {config: size for config, size in stack_bytes(kernel, scheme).items() if size}
            if spilled:
                found[f"{kernel.id} {scheme}"] = dict(sorted(spilled.items()))
    part = path.with_suffix(".part")
    part.write_text(json.dumps(found, indent=1) + "\n")
    part.replace(path)


if __name__ == "__main__":
    write()
