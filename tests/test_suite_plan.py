"""The plan is data: complete, in an order that makes sense, within its time, and every entry of it can be called."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace

import pytest
import torch
import typer
from tiny_model import write_config

from rooflab.bench.cli.app import app
from rooflab.bench.suite.entries import Context, Entry, plan_hash
from rooflab.bench.suite.plan import BESIDE, _ordered, is_of, make_plan
from rooflab.bench.suite.serving import serving
from rooflab.bench.suite.state import Identity
from rooflab.bench.suite.worker import find
from rooflab.kernels import registry
from rooflab.reference.spec import SCHEMES, Case

PLAN = make_plan()
BY_ID = {entry.id: entry for entry in PLAN}
BARS = [entry for entry in PLAN if entry.id.startswith("bar:")]
FAMILIES = sorted({*BESIDE, *(word for op in registry.ops() for word in (op, op.split("_")[-1]))})
EIGHT_MINUTES_S = 480


def cases_of(entry):
    """Every case that an entry's arguments name."""
    least = entry.arguments.get("least")
    found = [*entry.arguments.get("cases", ()), *(least if isinstance(least, dict) else ())]
    return found + [entry.arguments[name] for name in ("case", "even", "ragged") if name in entry.arguments]


def test_every_op_is_checked_timed_and_tuned():
    for op, kernels in ((op, registry.kernels(op).values()) for op in registry.ops()):
        assert {f"check:{op}", f"bench:{op}"} <= BY_ID.keys()
        assert (f"tune:{op}" in BY_ID) == any(kernel.takes_config for kernel in kernels)
    assert set(BY_ID["first"].arguments["ops"]) == set(registry.ops())


def test_every_gpu_bar_of_kernels_that_are_there_is_an_entry():
    assert {entry.id for entry in BARS} >= {
        "bar:gemm.bf16_large", "bar:gemm.bf16_skinny", "bar:gemm_fp8.large", "bar:gemm_w4a16.gemv",
        "bar:gemm_w8a16.gemv", "bar:gemm_silu_and_mul.fused", "bar:flash_attention.prefill_d128",
        "bar:flash_attention.prefill_d64", "bar:flash_attention.prefill_d256", "bar:paged_attention.decode",
        "bar:paged_attention.ragged", "bar:ab.false_alarms",
    }  # fmt: skip
    engine = make_plan(["engine"])
    assert {entry.id for entry in engine if "engine" in entry.id} == {
        "engine:qwen3-0.6b", "engine:llama-3.1-8b", "bar:engine.llama-3.1-8b",
    }  # fmt: skip
    assert engine[1].id == "first"
    assert set(engine[1].arguments["ops"]) == {"paged_attention", "rope_and_cache", "sample"}
    assert {"ceilings", "flush", "self-test", "engine:llama-3.1-8b", "engine:qwen3-0.6b"} <= BY_ID.keys()


def test_the_most_valuable_comes_first_and_nothing_before_what_it_needs():
    places = {entry.id: place for place, entry in enumerate(PLAN)}
    for entry in PLAN:
        assert all(places[name] < places[entry.id] for name in (*entry.needs, *entry.after)), entry.id
    assert [entry.id for entry in PLAN[:3]] == ["environment", "first", "ceilings"]
    free = [entry.value for entry in PLAN if entry.id not in {name for other in PLAN for name in other.needs}]
    assert free == sorted(free, reverse=True)
    poor = Entry("poor", "", "m:f", value=1.0)
    rich = Entry("rich", "", "m:f", value=99.0, needs=("poor",))
    middle = Entry("middle", "", "m:f", value=50.0)
    assert [entry.id for entry in _ordered([middle, rich, poor])] == ["poor", "rich", "middle"]


def test_ten_minutes_answer_eight_bars_and_three_times_ten_all_that_fit():
    """Twenty A/A repeats of six kernels alone take longer."""
    ends = {entry.id: sum(before.cost_s for before in PLAN[: place + 1]) for place, entry in enumerate(PLAN)}
    bars = [entry.id for entry in BARS if entry.id != "bar:ab.false_alarms"]
    assert sum(ends[name] <= 570 for name in bars) >= 8
    late = {name: ends[name] for name in (*bars, "again") if ends[name] > 3 * 570}
    assert not late, late


def test_the_bars_of_a_family_are_measured_in_eight_minutes():
    """With what they need; the checks of every case, the ladders on models' shapes and the search come after them."""
    for family in FAMILIES:
        plan = make_plan([family])
        last = max((place for place, entry in enumerate(plan) if entry.id.startswith("bar:")), default=1)
        measuring = plan[: last + 1]
        assert sum(entry.cost_s for entry in measuring) <= EIGHT_MINUTES_S, [(e.id, e.cost_s) for e in measuring]
        about, ids = {op for op in registry.ops() if is_of(op, family)}, {entry.id for entry in plan}
        assert about <= {op for entry in plan for op in entry.ops}, family
        assert all(about & set(entry.ops) for entry in plan if entry.ops), "a bar may take in an op of another family"
        assert {"environment", "first"} <= ids
        assert {entry.id for entry in BARS if entry.ops and set(entry.ops) <= about} <= ids, family


def test_the_family_of_attention_holds_the_bars_of_what_feeds_it():
    bars = {entry.id for entry in make_plan(["attention"]) if entry.id.startswith("bar:")}
    assert bars == {
        "bar:flash_attention.prefill_d128", "bar:flash_attention.prefill_d64", "bar:flash_attention.prefill_d256",
        "bar:paged_attention.decode", "bar:paged_attention.ragged", "bar:paged_attention.prefill",
        "bar:rope_and_cache.bandwidth", "bar:rope_and_cache.one_token",
    }  # fmt: skip
    assert {"check:kv_cache_write", "check:mla_decode"} <= {entry.id for entry in make_plan(["attention"])}


def test_only_takes_entries_too_and_names_what_there_is():
    assert [entry.id for entry in make_plan(["environment"])] == ["environment"]
    plan = make_plan(["gemm.bf16_large"])
    assert [entry.id for entry in plan] == ["environment", "first", "ceilings", "bar:gemm.bf16_large"]
    assert plan[1].arguments["ops"] == ["gemm"], "no other op's kernels are checked for it"
    first = make_plan(["first"])
    assert [entry.id for entry in first] == ["environment", "first"]
    assert first[1].arguments["ops"] == list(registry.ops()), "asked for by name, of all"
    with pytest.raises(ValueError, match="only: expected an op, a family or an entry.*attention.*gemm.*got 'gem'"):
        make_plan(["gem"])


def test_every_entry_can_be_called(tmp_path):
    commands = typer.main.get_command(app).commands
    for entry in PLAN:
        assert json.loads(json.dumps(dict(entry.arguments))) == dict(entry.arguments), entry.id
        context = Context(entry.id, tmp_path, "cuda", False, 1.0)
        inspect.signature(find(entry.call)).bind(context, **entry.arguments)
        assert entry.cost_s > 0 and entry.limit_s > entry.cost_s and entry.title, entry.id
        for words in (entry.arguments.get("arguments"), entry.arguments.get("dry_arguments")):
            if words:  # parses the command line, and runs nothing
                shown = [word.replace("{out}", str(tmp_path)) for word in words[1:]]
                commands[words[0]].make_context(words[0], shown)


def test_a_bars_cases_are_ones_that_an_optimized_kernel_takes():
    for entry, text in [(bar, text) for bar in BARS for text in cases_of(bar)]:
        spec = registry.get_op(entry.ops[0])
        case = spec.check_case(Case.parse(text))
        scheme = SCHEMES[entry.arguments.get("scheme", "bf16")]
        inputs = spec.make_inputs(case, scheme, torch.device("meta"), 0)
        rungs = [kernel for kernel in registry.kernels(spec.name).values() if kernel.role == "optimized"]
        of_a_card = [kernel for kernel in rungs if kernel.backend not in registry.CPU_BACKENDS]
        taken = any(kernel.why_not_args(inputs) is None for kernel in of_a_card)
        assert taken, f"{entry.id} {text}: no kernel takes it"
        assert set(entry.arguments.get("rungs", ())) <= {kernel.name for kernel in rungs}, entry.id
        assert spec.cost(**inputs).bytes > 0, entry.id


def test_the_hash_of_a_plan_is_that_of_what_it_does():
    same = plan_hash(PLAN, seed=0)
    assert same == plan_hash(make_plan(), seed=0)
    assert same != plan_hash(PLAN[1:], seed=0) and same != plan_hash(PLAN, seed=1)
    assert same != plan_hash([*PLAN[:-1], replace(PLAN[-1], arguments={"x": 1})], seed=0)
    assert same == plan_hash([replace(entry, cost_s=1.0, title="") for entry in PLAN], seed=0)


def test_a_run_goes_on_only_with_the_same_plan_code_and_machine():
    one = Identity("p", "abc", "tree", "h200-16c")
    assert one.difference(one) is None
    assert one.difference(replace(one, commit=None)) == "the commit was abc and is None"
    assert one.difference(replace(one, machine_key="h100-8c")) == "the machine was h200-16c and is h100-8c"
    assert one.difference(replace(one, tree="other")) == "the source was tree and is other"


def test_the_latency_family_is_ledgers_studies_and_a_server_of_its_own():
    for family, wanted in (("latency", {"decode", "prefill", "swaps", "studies"}), ("serving", {"llama-3.1-8b"})):
        found = {entry.id.partition(":")[2] for entry in make_plan([family]) if entry.id.startswith(f"{family}:")}
        assert found == wanted


@pytest.mark.slow  # 15 s: a server's start, two loads and their figures, which other tests have
def test_a_server_is_loaded_and_leaves_its_records(tmp_path):
    write_config(tmp_path / "tiny")
    context = Context("serving:tiny", tmp_path, "cpu", dry_run=False, seconds=60)
    done = serving(context, str(tmp_path / "tiny"), [40, 80], num_prompts=3, data="random")
    assert done.status == "DONE", done.reason
    (records,) = (name for name in done.files if name.endswith(".jsonl"))
    rates = [json.loads(line)["case"]["rate_requests_per_s"] for line in (tmp_path / records).read_text().splitlines()]
    assert rates == [40, 80] and {"rates.png", "frontier.png"} <= set(done.files)
    assert serving(context, str(tmp_path / "none"), [1]).status == "FAILED"
