"""The plan: every entry, in order of value.  Data only; this module runs nothing."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path

from rooflab.bench.suite import again, bars, worst
from rooflab.bench.suite.entries import Entry
from rooflab.engine.ops import FIRST_ON_CUDA
from rooflab.kernels import registry

TASKS = "rooflab.bench.suite.tasks"
ENGINE = "rooflab.bench.suite.bars.engine:engine"
MODEL_SUITES = ("llama3_8b", "qwen3_0_6b", "smollm2_135m")
AB_IS_LONG = "pairs of fresh processes take minutes; the tests of the A/B hold it on a CPU"
SELF_TEST_ROUND_S = 60.0
"""Seconds for each of the two rounds of the A/B's self-test: identical code, and slowed code."""
FAMILIES = {
    **dict.fromkeys(("engine", "serving", "latency"), tuple(FIRST_ON_CUDA)),
    **dict.fromkeys(("again", "counted"), ("gemm", "gemm_fp8", "gemm_silu_and_mul", "flash_attention")),
}
"""Entries by the first word of their names, with the ops whose first checks they need."""
BESIDE = {
    "attention": ("kv_cache_write", "mla_decode", "rope_and_cache"),
    "memory-bound": (
        *("rmsnorm", "fused_add_rmsnorm", "layernorm", "softmax", "silu_and_mul", "gelu_and_mul"),
        *("embedding", "rope_and_cache"),
    ),
    "sampling": ("sample", "speculative_verify"),
}
"""Ops of a family whose names do not contain the family's word."""
LATENCY_IS_LONG = "it loads a model; the tests of the ledger, of swaps and of the studies hold it on a CPU"
LLAMA = ("--dummy", "--device", "cuda", "--out", "{out}")
SWAPS = ("paged_attention=chunked", "rope_and_cache=naive", "fused_add_rmsnorm=fused", "sample=library")
LATENCY: tuple[tuple[str, str, tuple[str, ...], float], ...] = (
    ("decode", "a decode step of Llama-3.1-8B, op by op", ("ledger", "llama-3.1-8b", "--batch", "16"), 60),
    ("prefill", "the step of a prompt, op by op", ("ledger", "llama-3.1-8b", "--prefill", "--context", "2048"), 60),
    ("swaps", "other kernels in the engine: change of TTFT and ITL, predicted and measured",
     ("whatif", "llama-3.1-8b", "--batch", "16", "--context", "1024", *(f"--swap={swap}" for swap in SWAPS)), 150),
    ("studies", "ten claims about LLM inference, predicted and measured", ("study", "--all", "--model",
     "llama-3.1-8b"), 400),
)  # fmt: skip
START_S = 8.0
"""Seconds that a process needs to start and import, unless it starts while the previous process still works."""


def make_plan(only: Sequence[str] = ()) -> list[Entry]:
    """The entries in order, most valuable first; prerequisites come before the entries that need them.

    `only` names ops, families (`attention` for every op with that word in its name, and those of `BESIDE`) or entries.
    With `only`, entries about the card alone are left out unless a chosen entry needs them.  Raises `ValueError` if a
    name of `only` matches nothing.
    """
    ops = list(registry.ops())
    every = [*card_entries(ops), *(entry for op in ops for entry in op_entries(op)), *bar_entries()]
    by_id = {entry.id: entry for entry in every}
    wanted = {entry.id for entry in every}
    if only:
        named = {entry_id for name in only for entry_id in _named(name, every)}
        wanted = named | {before for entry_id in named for before in _before(entry_id, by_id)}
        if "first" not in named:  # only of the chosen ops
            about = sorted({op for name in named for op in (*by_id[name].ops, *FAMILIES.get(_family(name), ()))})
            by_id |= {entry.id: entry for entry in card_entries(about)}
    return _ordered([by_id[entry.id] for entry in every if entry.id in wanted])


def _named(name: str, entries: Sequence[Entry]) -> set[str]:
    own = {
        entry.id for entry in entries if entry.ops and entry.id != "first" and any(is_of(op, name) for op in entry.ops)
    }
    exact = {entry.id for entry in entries if name in (entry.id, entry.id.removeprefix("bar:"), _family(entry.id))}
    if not own | exact:
        words = {word for entry in entries for op in entry.ops for word in (op, op.split("_")[-1])}
        families = sorted(words | {*BESIDE})
        raise ValueError(
            f"only: expected an op, a family or an entry of the plan, such as {', '.join(families)}; got {name!r}"
        )
    return own | exact


def _family(entry_id: str) -> str:
    """`engine` of `engine:qwen3-0.6b` and `bar:engine.llama-3.1-8b`; empty for an entry about ops."""
    family = entry_id.removeprefix("bar:").replace(":", ".").partition(".")[0]
    return family if family in FAMILIES else ""


def is_of(op: str, family: str) -> bool:
    """Whether `family` is the op's own name or a family of the op."""
    return family == op or family in op.split("_") or op in BESIDE.get(family, ())


def _before(entry_id: str, by_id: dict[str, Entry]) -> set[str]:
    """Everything that must run before an entry, with the prerequisites of each."""
    found: set[str] = set()
    for name in (*by_id[entry_id].needs, *by_id[entry_id].after):
        found |= {name} | _before(name, by_id)
    return found


def _ordered(entries: Sequence[Entry]) -> list[Entry]:
    """Orders by value; the prerequisites of an entry have at least the entry's value."""
    by_id = {entry.id: entry for entry in entries}
    worth = {entry.id: entry.value for entry in entries}
    for entry in entries:
        for name in _before(entry.id, by_id) & worth.keys():
            worth[name] = max(worth[name], entry.value)
    found: dict[str, Entry] = {}

    def place(entry: Entry) -> None:
        for name in (*entry.needs, *entry.after):
            if name in by_id and name not in found:
                place(by_id[name])
        found.setdefault(entry.id, entry)

    for entry in sorted(entries, key=lambda entry: -worth[entry.id]):
        place(entry)
    return list(found.values())


def card_entries(ops: Sequence[str]) -> list[Entry]:
    """The entries about the card, and the first checks of the kernels of `ops`."""
    # The calls of torch itself neither hang nor write out of bounds.
    safe = registry.CPU_BACKENDS
    risky = [kernel for op in ops for kernel in registry.kernels(op).values() if kernel.backend not in safe]
    return [
        Entry("environment", "the machine, its software, and whether the device answers", f"{TASKS}:environment",
              cost_s=START_S + 4, value=100.0),
        Entry("first", "each kernel's first check on this card, in a process of its own with a time limit",
              f"{TASKS}:first_checks", {"ops": list(ops)}, START_S + 12 + 1.5 * len(risky), 95.0, ("environment",),
              (), tuple(ops), whole=True),
        Entry("ceilings", "ceilings measured on this card by our own microkernels", f"{TASKS}:command",
              {"arguments": ["ceilings", "--refresh", "--out", "{out}", "--json"],
               "dry_arguments": ["ceilings", "--refresh", "--budget", "0.5", "--device", "cpu", "--json"]},
              START_S + 65, 90.0, ("environment",)),
        Entry("flush", "both ways of emptying L2, compared", f"{TASKS}:flush", {}, START_S + 12, 68.0,
              ("environment",)),
        Entry("self-test", "the A/B against identical code and an injected 5% slowdown", f"{TASKS}:command",
              {"arguments": ["ab", "rmsnorm", "gemm", "--self-test", "--budget", str(SELF_TEST_ROUND_S), "--out",
                             "{out}", "--json"],
               "dry_reason": AB_IS_LONG}, START_S + 2 * SELF_TEST_ROUND_S, 50.0, ("environment", "first")),
        Entry("engine:qwen3-0.6b", "TTFT, ITL and throughput of Qwen3-0.6B with random weights, bf16", ENGINE,
              {"model": "qwen3-0.6b", "batches": [1, 8, 64], "contexts": [512, 8192]},
              START_S + 60, 56.0, ("environment", "first")),
        Entry("engine:llama-3.1-8b", "TTFT, ITL and throughput of Llama-3.1-8B with random weights, bf16", ENGINE,
              {"model": "llama-3.1-8b", "batches": [1, 8, 64], "contexts": [512, 8192]},
              START_S + 90, 57.0, ("environment", "first")),
        Entry("serving:llama-3.1-8b", "latency against throughput of a server of Llama-3.1-8B with random weights",
              "rooflab.bench.suite.serving:serving", {"model": "llama-3.1-8b", "rates": [1, 4, 16, 32]},
              START_S + 280, 49.0, ("environment", "first")),
        *(Entry(f"latency:{name}", title, f"{TASKS}:command",
                {"arguments": [*words, *LLAMA, "--json"], "dry_reason": LATENCY_IS_LONG}, START_S + cost, 48.0,
                ("environment", "first"))
          for name, title, words, cost in LATENCY),
    ]  # fmt: skip


def op_entries(op: str) -> list[Entry]:
    """Checks, times and configs of one op."""
    kernels = list(registry.kernels(op).values())
    spec = registry.get_op(op)
    checks = len(kernels) * len(spec.schemes) * sum(len(spec.cases.get(suite, ())) for suite in ("smoke", "edge"))
    times = len(kernels) * sum(len(spec.cases.get(suite, ())) for suite in MODEL_SUITES)
    needs = ("environment", "first")
    found = [
        Entry(f"check:{op}", f"every kernel of {op} on all smoke and edge cases", f"{TASKS}:check", {"op": op},
              START_S + 0.15 * checks, 72.0, needs, (), (op,)),
        Entry(f"bench:{op}", f"every kernel of {op} on models' shapes", f"{TASKS}:bench",
              {"op": op, "suites": list(MODEL_SUITES)}, START_S + 0.6 * times, 60.0, needs, ("ceilings",), (op,)),
    ]  # fmt: skip
    if any(kernel.takes_config for kernel in kernels):
        found.append(
            Entry(f"tune:{op}", f"configs of {op}'s kernels searched", f"{TASKS}:tune", {"op": op}, 90.0, 30.0, needs,
                  ("ceilings", f"bench:{op}"), (op,))
        )  # fmt: skip
    return found


def bar_entries() -> list[Entry]:
    """Every bar."""
    found: list[Entry] = []
    for file in sorted(Path(bars.__file__).parent.glob("*.py")):
        if not file.stem.startswith("_"):
            found += importlib.import_module(f"{bars.__name__}.{file.stem}").BARS
    return [*found, again.entry_for(found), worst.entry_for(found)]
