"""The plan is data: complete, in a useful order, within its time, and every entry of it can be called."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
import typer
from targets import judge

from rooflab.bench.cli.app import app
from rooflab.bench.suite.entries import Entry
from rooflab.bench.suite.plan import KERNEL_SWAPS, make_plan
from rooflab.kernels import registry
from rooflab.reference.spec import SCHEMES, Case

FILE = Path(judge.__file__).with_name("plan.json")
PLAN = make_plan(files=[FILE])
BY_ID = {entry.id: entry for entry in PLAN}
TARGETS = [entry for entry in PLAN if entry.id.startswith("bar:")]
WORDS = sorted({word for op in registry.ops() for word in (op, op.split("_")[-1])})


def plan_of(*only):
    return make_plan(only, [FILE])


def ops_of_first(plan):
    return set(next(entry for entry in plan if entry.id == "first").ops)


def test_the_file_of_the_bars_is_what_they_are():
    asked = [json.loads(json.dumps(one.entry.to_json())) for one in judge.EVERY.values()]
    assert json.loads(FILE.read_text()) == asked, "python results/targets/judge.py --plan > results/targets/plan.json"


def test_every_op_is_checked_timed_and_tuned():
    for op, kernels in ((op, registry.kernels(op).values()) for op in registry.ops()):
        assert {f"check:{op}", f"bench:{op}"} <= BY_ID.keys()
        assert (f"tune:{op}" in BY_ID) == any(kernel.tuning is not None for kernel in kernels)
        spec = registry.get_op(op)
        checks = len(kernels) * len(spec.schemes) * (len(spec.cases["smoke"]) + len(spec.cases["edge"]))
        assert BY_ID[f"check:{op}"].cost_s > 0.1 * checks, "every kernel in every dtype on every case"
    assert ops_of_first(PLAN) == set(registry.ops())


def test_the_most_valuable_comes_first_and_nothing_before_what_it_needs(tmp_path):
    places = {entry.id: place for place, entry in enumerate(PLAN)}
    for entry in PLAN:
        assert all(places[name] < places[entry.id] for name in (*entry.needs, *entry.after)), entry.id
    assert [entry.id for entry in PLAN[:4]] == ["environment", "ahead", "first", "ceilings"]
    before = {name for entry in PLAN for name in (*entry.needs, *entry.after)}
    free = [entry.value for entry in PLAN if entry.id not in before]
    assert free == sorted(free, reverse=True)
    poor = Entry("poor", "", (), value=1.0, needs=())
    rich = Entry("rich", "", (), value=99.0, needs=("poor",))
    middle = Entry("middle", "", (), value=50.0, needs=())
    (tmp_path / "plan.json").write_text(json.dumps([entry.to_json() for entry in (middle, rich, poor)]))
    plan = make_plan(["rich", "middle"], [tmp_path / "plan.json"])
    assert [entry.id for entry in plan if entry.id not in BY_ID] == ["poor", "rich", "middle"]


def test_a_word_of_ops_has_their_bars_and_no_other_ones():
    for word in WORDS:
        plan = plan_of(word)
        about, ids = {op for op in registry.ops() if word in (op, *op.split("_"))}, {entry.id for entry in plan}
        assert about <= {op for entry in plan for op in entry.ops}, word
        assert all(about & set(entry.ops) for entry in plan if entry.ops), "a target may take in another op"
        assert {"environment", "first"} <= ids
        assert {entry.id for entry in TARGETS if entry.ops and set(entry.ops) <= about} <= ids, word


def test_only_takes_entries_too_and_names_what_there_is():
    for asked, entries, ops in [
        ("environment", ["environment"], None),
        ("gemm.bf16_large", ["environment", "ahead", "first", "ceilings", "bar:gemm.bf16_large"], {"gemm"}),
        ("first", ["environment", "first"], set(registry.ops())),  # asked for by name, of all
    ]:
        plan = plan_of(asked)
        assert [entry.id for entry in plan] == entries and (ops is None or ops_of_first(plan) == ops)
    assert ops_of_first(plan_of("engine")) == {"paged_attention", "rope_and_cache", "sample"}
    with pytest.raises(ValueError, match="only: expected an op or an entry.*attention.*gemm.*got 'gem'"):
        plan_of("gem")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        *[(text, "PLAN: expected a file with a list of entries, got") for text in ("", "{", '["x"]', None)],
        ('[{"id": "a", "title": "", "words": [], "colour": 1}]', "PLAN: expected a file with a list of entries, got"),
        ('[{"id": "check-gemm", "title": "", "words": []}]', "plan: expected each entry once, got check-gemm 2 times"),
    ],
)
def test_a_file_that_is_no_plan_or_repeats_an_entry_is_refused(tmp_path, text, words):
    if text is not None:
        (tmp_path / "plan.json").write_text(text)
    with pytest.raises(ValueError, match=words):
        make_plan(files=[tmp_path / "plan.json"])


def test_every_entry_is_a_command_that_there_is(tmp_path):
    commands = typer.main.get_command(app).commands
    places = {"{out}": str(tmp_path), "{run}": str(tmp_path), "{seconds}": "1", "{seed}": "0"}
    for entry in PLAN:
        assert Entry.from_json(json.loads(json.dumps(entry.to_json()))) == entry, entry.id
        assert entry.cost_s > 0 and entry.limit_s > entry.cost_s and entry.title, entry.id
        for words in filter(None, (entry.words, entry.dry)):
            first, name, *rest = [places.get(word, word) for word in words]
            if first == "-m" and name == "rooflab.bench":  # parses the command line, and runs nothing
                commands[rest[0]].make_context(rest[0], rest[1:])
            elif first == "-m":
                assert importlib.util.find_spec(name), entry.id
            else:
                assert Path(first) == Path(judge.__file__) and name in judge.EVERY, entry.id


def test_what_an_entry_launches_are_cases_that_an_optimized_kernel_takes():
    own = [entry for entry in PLAN if entry.id in judge.EVERY]
    told = [(entry, launches) for entry in own for launches in entry.launches]
    assert {entry.id for entry, _ in told} == {one.id for one in judge.EVERY.values() if one.cases}
    for entry, launches in told:
        spec, scheme = registry.get_op(launches["op"]), SCHEMES[launches["scheme"]]
        for text in launches["cases"]:
            case = spec.check_case(Case.parse(text))
            inputs = spec.make_inputs(case, scheme, torch.device("meta"), 0)
            rungs = [kernel for kernel in registry.kernels(spec.name).values() if kernel.role == "optimized"]
            of_a_card = [kernel for kernel in rungs if kernel.backend not in registry.CPU_BACKENDS]
            taken = any(kernel.why_not_args(inputs) is None for kernel in of_a_card)
            assert taken, f"{entry.id} {text}: no kernel takes it"
            assert set(launches.get("kernels", ())) <= {kernel.name for kernel in rungs}, entry.id
            assert spec.cost_of(inputs).bytes > 0, entry.id


def test_every_swap_of_the_plan_is_one_that_an_engine_on_a_card_takes(monkeypatch):
    """With the Triton of torch 2.11 too, which compiles some kernels with a race."""
    monkeypatch.setattr(registry, "version", lambda package: "3.6.0")
    cuda = torch.device("cuda")
    for swap in KERNEL_SWAPS:
        kernel = registry.get_kernel(*swap.split("="))
        assert "cuda" in kernel.devices and kernel.why_not_served(cuda) is None, swap
    chunked = registry.get_kernel("paged_attention", "chunked")
    assert chunked.why_not_served(cuda) == "Triton 3.6.0 compiles it with a race; 3.7.1 does not"
    monkeypatch.setattr(registry, "version", lambda package: "3.7.1")
    assert chunked.why_not_served(cuda) is None
