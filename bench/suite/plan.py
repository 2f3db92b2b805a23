"""Defines the suite's plan: all entries (one command each), ordered by value.  It runs nothing.

Other files can add entries, such as `results/targets/plan.json`.  Such a file is a JSON list of entries, and `{here}`
in it stands for the file's folder.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rooflab.bench.suite.entries import Entry
from rooflab.bench.suite.state import folder_of
from rooflab.bench.suite.step import step_words
from rooflab.engine.ops import FIRST_ON_CUDA
from rooflab.kernels import registry

MODEL_SUITES = ("llama3_8b", "qwen3_0_6b", "smollm2_135m")
SELF_TEST_BUDGET_S = 60.0
"""The seconds for each of the two rounds of the A/B's self-test: one with identical code, one with slowed code."""
LAB_COMMAND = ("-m", "rooflab.bench")
MODEL_OPTIONS = ("--dummy", "--device", "cuda", "--out", "{out}", "--json")
KERNEL_SWAPS = ("paged_attention=gqa_packed", "rope_and_cache=naive", "fused_add_rmsnorm=fused", "sample=naive")
LATENCY_ENTRIES: tuple[tuple[str, str, tuple[str, ...], float], ...] = (
    ("decode", "a decode step of Llama-3.1-8B, op by op", ("ledger", "llama-3.1-8b", "--batch", "16"), 60),
    ("prefill", "the step of a prompt, op by op", ("ledger", "llama-3.1-8b", "--prefill", "--context", "2048"), 60),
    (
        "swaps",
        "other kernels in the engine: change of TTFT and ITL, predicted and measured",
        ("whatif", "llama-3.1-8b", "--batch", "16", "--context", "1024", *(f"--swap={swap}" for swap in KERNEL_SWAPS)),
        150,
    ),
    (
        "studies",
        "six claims about LLM inference, predicted and measured",
        ("study", "--all", "--model", "llama-3.1-8b"),
        400,
    ),
)
SPAWN_S = 8.0
"""The seconds that a process needs to start and import, unless it starts while another process still works."""


def make_plan(only: Sequence[str] = (), files: Sequence[Path] = (), trust: Path | None = None) -> list[Entry]:
    """Returns the suite's entries (one command each), the most valuable first, but after their prerequisites.

    `files` are paths of files with more entries. `trust` is a folder with records of an earlier run. A kernel's first
    check is not repeated if it passed there.

    `only` selects entries, and adds their prerequisites. It names an op, a word in the ops' names such as `attention`,
    an entry's id, or the id's first word.

    Raises `ValueError` on a name that matches nothing, an invalid file, or two entries with one folder."""
    ops = list(registry.ops())
    all_entries = [*card_entries(ops, trust), *(entry for op in ops for entry in op_entries(op)), *latency_entries()]
    all_entries += [entry for file in files for entry in read_plan(file)]
    entry_by_id = {entry.id: entry for entry in all_entries}
    folders = Counter(folder_of(Path(), entry.id).name for entry in all_entries)
    if repeated_names := [name for name, num_entries in folders.items() if num_entries > 1]:
        raise ValueError(f"plan: expected each entry once, got {repeated_names[0]} {folders[repeated_names[0]]} times")
    chosen_ids = set(entry_by_id)
    if only:
        named_ids = {entry_id for name in only for entry_id in _named(name, all_entries)}
        chosen_ids = named_ids | {prior_id for entry_id in named_ids for prior_id in _before(entry_id, entry_by_id)}
        if any(entry_by_id[name].launches for name in chosen_ids):
            chosen_ids.add("ahead")
        if "first" not in named_ids:  # only the chosen ops
            named_ops = sorted({op for name in named_ids for op in (*entry_by_id[name].ops, *entry_by_id[name].checks)})
            entry_by_id |= {entry.id: entry for entry in card_entries(named_ops, trust)}
    return _ordered([entry_by_id[name] for name in entry_by_id if name in chosen_ids])


def read_plan(path: Path) -> list[Entry]:
    """Reads the suite entries in a file.  Raises `ValueError` if the file is not a list of entries."""
    try:
        json_entries = json.loads(path.read_text().replace("{here}", str(path.resolve().parent)))
        return [Entry.from_json(entry_fields) for entry_fields in json_entries]
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"PLAN: expected a file with a list of entries, got {str(path)!r}: {error}") from error


def _named(name: str, entries: Sequence[Entry]) -> set[str]:
    ids_of_op = {
        entry.id for entry in entries if entry.id != "first" and any(name in (op, *op.split("_")) for op in entry.ops)
    }
    ids_of_name = {entry.id for entry in entries if name in (entry.id, entry.id.removeprefix("bar:"), _word(entry.id))}
    if not ids_of_op | ids_of_name:
        op_words = sorted({op_word for entry in entries for op in entry.ops for op_word in (op, op.split("_")[-1])})
        raise ValueError(f"only: expected an op or an entry of the plan, such as {', '.join(op_words)}; got {name!r}")
    return ids_of_op | ids_of_name


def _word(entry_id: str) -> str:
    """Returns an entry id's first word: `engine` for `bar:engine.llama-3.1-8b`, without `bar:` (performance target)."""
    return entry_id.removeprefix("bar:").replace(":", ".").partition(".")[0]


def _before(entry_id: str, by_id: dict[str, Entry]) -> set[str]:
    """Returns the ids of all entries that must run before an entry, directly or indirectly."""
    needed_ids_before: set[str] = set()
    for name in (*by_id[entry_id].needs, *by_id[entry_id].after):
        needed_ids_before |= {name} | _before(name, by_id)
    return needed_ids_before


def _ordered(entries: Sequence[Entry]) -> list[Entry]:
    """Sorts the entries by value, the most valuable first, and prerequisites before the entries that need them. A
    prerequisite has at least the value of those entries."""
    entries_by_id = {entry.id: entry for entry in entries}
    entry_values = {entry.id: entry.value for entry in entries}
    for entry in entries:
        for name in _before(entry.id, entries_by_id) & entry_values.keys():
            entry_values[name] = max(entry_values[name], entry.value)
    sorted_entries: dict[str, Entry] = {}

    def place(entry: Entry) -> None:
        for name in (*entry.needs, *entry.after):
            if name in entries_by_id and name not in sorted_entries:
                place(entries_by_id[name])
        sorted_entries.setdefault(entry.id, entry)

    for entry in sorted(entries, key=lambda entry: -entry_values[entry.id]):
        place(entry)
    return list(sorted_entries.values())


def card_entries(ops: Sequence[str], trust: Path | None = None) -> list[Entry]:
    """Returns the suite's entries (one command each) that serve all ops. They test the machine, compile kernels for
    later entries, and check each kernel once. They also measure the GPU's ceilings, and test the A/B comparison."""
    # Calls of torch itself neither hang nor write out of bounds.
    safe_backends = registry.CPU_BACKENDS
    kernels = [kernel for op in ops for kernel in registry.kernels(op).values() if kernel.backend not in safe_backends]
    card_command, checks = ("-m", "rooflab.bench.suite.card_answers"), ("-m", "rooflab.bench.suite.first", *ops)
    trust_args = ("--trust", str(trust)) if trust else ()
    return [
        Entry("environment", "the machine, its software, and whether the device answers", step_words(card_command),
              SPAWN_S + 4, 100.0, step_words(card_command, dry=True), needs=()),
        Entry("ahead", "compiles what later entries launch, on cores that they leave idle",
              ("-m", "rooflab.bench.suite.ahead", "{run}/plan.json"), 1.0, 99.0, needs=("environment",), beside=True),
        Entry("first", "each kernel's first check on this card, in a process of its own with a time limit",
              step_words((*checks, *trust_args)), SPAWN_S + 12 + 1.5 * len(kernels), 95.0, step_words(checks, dry=True),
              needs=("environment",), ops=tuple(ops), whole=True),
        Entry("ceilings", "ceilings measured on this card by our own microkernels",
              (*LAB_COMMAND, "ceilings", "--refresh", "--out", "{out}", "--json"), SPAWN_S + 65, 90.0,
              (*LAB_COMMAND, "ceilings", "--refresh", "--budget", "0.5", "--device", "cpu", "--json"), ("environment",),
              launches=({"microkernels": True},), of_card=True),
        Entry("self-test", "the A/B against identical code and an injected 5% slowdown",
              (*LAB_COMMAND, "ab", "rmsnorm", "gemm", "--self-test", "--budget", str(SELF_TEST_BUDGET_S),
               "--out", "{out}", "--json"), SPAWN_S + 2 * SELF_TEST_BUDGET_S, 50.0, checks=("rmsnorm", "gemm")),
    ]  # fmt: skip


def latency_entries() -> list[Entry]:
    """Returns four suite entries (one command each) for Llama-3.1-8B with random weights. Two entries time a decode and
    a prefill step, op by op. One tries other kernels in the engine. One tests six claims about LLM inference."""
    return [
        Entry(
            f"latency:{name}",
            entry_title,
            (*LAB_COMMAND, *command_words, *MODEL_OPTIONS),
            SPAWN_S + cost_s,
            48.0,
            checks=tuple(FIRST_ON_CUDA),
        )
        for name, entry_title, command_words, cost_s in LATENCY_ENTRIES
    ]


def op_entries(op: str) -> list[Entry]:
    """Returns the entries for one op.  They check its kernels, measure their times, and tune their configs."""
    kernels = list(registry.kernels(op).values())
    spec = registry.get_op(op)
    num_checks = len(kernels) * len(spec.schemes) * sum(len(spec.cases.get(suite, ())) for suite in ("smoke", "edge"))
    num_times = len(kernels) * sum(len(spec.cases.get(suite, ())) for suite in MODEL_SUITES)
    run_options = ("--out", "{out}", "--seed", "{seed}")
    resume_options = ("--seconds", "{seconds}", "--resume", *run_options)
    suites = tuple(option_word for suite in MODEL_SUITES for option_word in ("--suite", suite))
    cpu_options = ("--case", spec.get_cases("smoke")[0].id, "--device", "cpu", "--resume", *run_options)
    # One kernel of each backend, because some rungs take seconds for a case in Triton's interpreter.
    backend_kernels = {kernel.backend: kernel.name for kernel in kernels if kernel.role != "peer"}.values()
    kernel_options = tuple(option_word for name in backend_kernels for option_word in ("--kernel", name))
    entries = [
        Entry(f"check:{op}", f"every kernel of {op} on all smoke and edge cases",
              (*LAB_COMMAND, "check", op, "--suite", "smoke", "--suite", "edge", *resume_options),
              SPAWN_S + 0.15 * num_checks, 72.0,
              (*LAB_COMMAND, "check", op, *kernel_options,
               "--scheme", "fp32" if "fp32" in spec.schemes else spec.schemes[0],
               "--by", "interpreter", *cpu_options),
              ops=(op,), launches=({"op": op, "suites": ["smoke", "edge"], "scheme": "all"},)),
        Entry(f"bench:{op}", f"every kernel of {op} on models' shapes",
              (*LAB_COMMAND, "bench", op, *suites, "--budget", "0.3", *resume_options), SPAWN_S + 0.6 * num_times, 60.0,
              (*LAB_COMMAND, "bench", op, "--budget", "0.02", *cpu_options),
              after=("ceilings",), ops=(op,), launches=({"op": op, "suites": list(MODEL_SUITES)},)),
    ]  # fmt: skip
    if any(kernel.tuning is not None for kernel in kernels):
        entries.append(
            Entry(
                f"tune:{op}",
                f"configs of {op}'s kernels searched",
                (*LAB_COMMAND, "tune", op, "--budget", "{seconds}", *run_options),
                90.0,
                30.0,
                (
                    *LAB_COMMAND,
                    "tune",
                    op,
                    "--case",
                    spec.get_cases("smoke")[0].id,
                    "--dry-run",
                    "--budget",
                    "1",
                    *run_options,
                ),
                after=("ceilings", f"bench:{op}"),
                ops=(op,),
                searches=True,
            )
        )
    return entries
