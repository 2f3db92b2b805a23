"""On a CPU, the kernel that was fastest when it was timed here serves an op; the times are kept per machine."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from tiny_model import prompts, tiny_llm, tokens

from rooflab.engine.choose import choose_kernels
from rooflab.engine.choose.choose_kernels import PROVISIONAL, KeptTimes, time_calls
from rooflab.engine.choose.model_shapes import model_inputs, real
from rooflab.engine.llm import SamplingParams
from rooflab.kernels import registry
from rooflab.kernels._native import compiler

TIME = choose_kernels.time_kernels


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(choose_kernels, "folder", lambda: tmp_path / "settled")
    monkeypatch.setattr(choose_kernels, "waiting_since", lambda began: None)  # the other test workers do not count


@pytest.fixture
def times(monkeypatch):
    """Makes the times of gemm up to 16 rows and above what a test says; of any other op the first kernel is fastest."""

    def times(few, many):
        def table(op, rows, kernels, limits, ends):
            if op != "gemm":
                return {kernel.name: 1.0 for kernel in kernels}
            return few if rows <= 16 else many

        monkeypatch.setattr(choose_kernels, "time_kernels", table)

    return times


def gemms(llm):
    found = {choice.bucket: choice.kernel.name for choice in llm.ops.choices if choice.op == "gemm"}
    assert found["rows:1"] == found["rows:16"] and found["rows:64"] == found["rows:512"]
    return {"few": found["rows:1"], "many": found["rows:64"]}


def test_times_are_taken_once_for_a_machine_a_model_and_the_code(tmp_path, monkeypatch):
    kernels = [registry.get_kernel("rmsnorm", "library")]
    taken = []

    def settled(model="tiny", own=kernels):
        """How often the times had to be taken."""
        before = len(taken)
        one = KeptTimes(model, {"dtype": "float32"}, own)
        assert one.of("rmsnorm", "rows:1", lambda ends: taken.append(1) or {"library": 2.0}) == {"library": 2.0}
        one.keep()
        return len(taken) - before

    assert settled() == 1 and settled() == 0 and settled(model="other") == 1
    assert settled(own=[registry.get_kernel("rmsnorm", "naive")]) == 1, "other code, other times"
    (newest, *_) = choose_kernels.known()
    assert newest["times_us"] == {"rmsnorm": {"rows:1": {"library": 2.0}}} and newest["processor"]


def test_a_start_takes_ten_seconds_and_what_is_provisional_is_timed_on_a_quiet_machine(monkeypatch):
    now = 100.0
    monkeypatch.setattr(choose_kernels, "time", SimpleNamespace(monotonic=lambda: now))

    def start(waited):
        """What is timed, 3 s each, while other processes have the cores for `waited` of each ns; what stays open."""
        monkeypatch.setattr(choose_kernels, "waiting_since", lambda began: waited)
        one, taken = KeptTimes("tiny", {}, []), []

        def take(bucket, ends):
            nonlocal now
            now += 3.0
            taken.append(bucket)
            return {"library": 2.0, "native": 1.0}

        for bucket in "abcdef":
            one.of("rmsnorm", bucket, partial(take, bucket))
        one.keep()
        return "".join(taken), "".join(sorted(bucket for _, bucket in one.provisional)), one

    *found, busy = start(0.5)
    assert found == ["abcd", "abcdef"] and busy.of("rmsnorm", "f", lambda ends: 1 / 0) == {}
    assert [start(waited)[:2] for waited in (0.5, 0.0, 0.0, 0.5)] == [
        ("aef", "abcdef"),
        ("abcd", "ef"),
        ("ef", ""),
        ("", ""),
    ]
    assert time_calls({"slow": [lambda: None]}, ends=now - 1) == {}, "no second call where the time is over"


@pytest.mark.needs("C++ compiler")
def test_a_swap_keeps_the_kernels_of_all_other_ops(tmp_path, monkeypatch):
    def slower(name):
        """Times of which a later start finds the others to be faster."""
        return lambda op, rows, kernels, *rest: {one.name: 2.0 if one.name == name else 1.0 for one in kernels}

    monkeypatch.setattr(choose_kernels, "time_kernels", slower("library"))
    before = tiny_llm(tmp_path).ops.choices
    monkeypatch.setattr(choose_kernels, "time_kernels", slower("native"))
    for op in ("rmsnorm", "gemm"):
        after = tiny_llm(tmp_path, swap={op: "library"}).ops.choices
        assert {choice.kernel.name for choice in after if choice.op == op} == {"library"}
        assert [choice for choice in after if choice.op != op] == [choice for choice in before if choice.op != op]


@pytest.mark.needs("C++ compiler")
def test_a_second_form_of_the_weights_is_kept_only_where_it_wins_and_fits(tmp_path, times, monkeypatch):
    one_row = {"native": 5.0, "packed": 8.0, "library": 9.0}
    many_rows = {"native": 12.0, "packed": 10.0, "library": 99.0}
    times(few=one_row, many={**many_rows, "native": 10.4})
    assert gemms(tiny_llm(tmp_path / "a")) == {"few": "native", "many": "native"}, "4% is not worth a copy"
    for kept in choose_kernels.folder().glob("*.json"):
        kept.unlink()
    times(few=one_row, many=many_rows)
    both = tiny_llm(tmp_path / "b")
    assert gemms(both) == {"few": "native", "many": "packed"}
    greedy = SamplingParams(max_tokens=9, ignore_eos=True)
    plain = tiny_llm(tmp_path / "c", swap={"gemm": "library"})
    assert tokens(both.generate(prompts(), greedy)) == tokens(plain.generate(prompts(), greedy))
    monkeypatch.setattr(choose_kernels, "virtual_memory", lambda: type("Memory", (), {"available": 1000})())
    assert gemms(tiny_llm(tmp_path / "d")) == {"few": "native", "many": "native"}


def test_every_candidate_runs_on_the_inputs_that_it_is_timed_with(tmp_path, monkeypatch):
    taken = {}

    def table(op, bucket, *rest):
        taken[op, bucket] = TIME(op, bucket, *rest)
        return taken[op, bucket]

    monkeypatch.setattr(choose_kernels, "time_kernels", table)
    monkeypatch.setattr(choose_kernels, "SAMPLE_S", 0.0)
    monkeypatch.setattr(choose_kernels, "LIMIT_S", 600.0)
    llm = tiny_llm(tmp_path, max_num_seqs=20, config={"attention_bias": True, "model_type": "qwen2"})
    for (op, _), times in taken.items():
        assert len(times) > 1 and all(us > 0 for us in times.values()), op
    # Without a C++ compiler, of other ops one kernel alone can run.
    assert {op for op, _ in taken} >= ({"gemm", "paged_attention", "rope_and_cache"} if compiler() else {"gemm"})
    four = SamplingParams(max_tokens=4, ignore_eos=True)
    assert all(len(ids) == 4 for ids in tokens(llm.generate(prompts(), four)))
    drawn = real(model_inputs("sample", 1, llm.limits)[0], block_size=16)
    assert [float(drawn[name]) for name in ("temperature", "top_p", "min_p")] == [0, 1, 0], "a greedy draw"


@pytest.mark.needs("C++ compiler")
def test_list_says_what_serves(rooflab, tmp_path, times, monkeypatch, caplog):
    times(few={"native": 1.0, "packed": 3.0, "library": 9.0}, many={"native": 4.0, "packed": 3.0, "library": 9.0})
    tiny_llm(tmp_path)
    _, out, _ = rooflab("list", "gemm")
    text = " ".join(out.split())
    assert "in rows:1 rows:16 " in text and "in rows:64 rows:512" in text
    assert PROVISIONAL not in text + caplog.text
    monkeypatch.setattr(choose_kernels, "waiting_since", lambda began: 0.5)
    tiny_llm(tmp_path, max_num_seqs=3)
    assert f": {PROVISIONAL}" in caplog.text
    assert f"rows:1 rows:16 ({PROVISIONAL})" in " ".join(rooflab("list", "gemm")[1].split())


def test_without_a_compiler_the_calls_of_torch_serve(tmp_path, monkeypatch):
    monkeypatch.setattr("rooflab.kernels._native.compiler", lambda: None)
    llm = tiny_llm(tmp_path)
    assert {choice.kernel.backend for choice in llm.ops.choices} == {"torch"}
    refusal = registry.get_kernel("rmsnorm", "native").why_not_here(torch.device("cpu"))
    assert str(refusal) == "UNSUPPORTED: needs a C++ compiler (g++, clang++ or $CXX)"
