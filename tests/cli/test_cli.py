"""The command line as a user sees it: one clear sentence for bad input, and the same content as JSON."""

import json
import os
import re
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from op_kernels import own_registry  # noqa: F401
from test_records import measured
from tiny_model import write_config
from typer.main import get_command

from rooflab.bench import show
from rooflab.bench.__main__ import main
from rooflab.bench.cli.app import app
from rooflab.bench.compile.static import own_compilers
from rooflab.bench.core.check_data import CheckResult
from rooflab.bench.core.outside import Checkers
from rooflab.bench.core.record_files import read, result_folder, write
from rooflab.kernels import registry

REFUSED = {
    "check gemm --kernel none.py": "kernel: expected a Python file, got 'none.py'",
    "check gemm --shape M=3": "--shape: gemm takes the keys of M=",
    "check gemm --case M=x,N=1,K=1,layout=NT,bias=false": "case: expected M like '32', got 'x'",
    "check gemm --seconds 0": "--seconds: expected seconds above 0, got 0.0",
    "check gemm --suite big": "suite: expected one of smoke, edge, ",
    "check gemm --scheme fp12": "scheme: expected one of fp32, fp16, bf16",
    "roofline": "records: no local run yet; run `rooflab bench` first",
    "roofline --gpu h100 --out x.gif": "out: expected a folder, or a file ",
    "generate caf\udce9": r"prompt: expected text in UTF-8, got '\udce9' in it",
    "generate x --top-p 1.5": "--top-p: expected a number in [0, 1], got 1.5",
    "generate x --top-k 99999999999": "--top-k: expected an integer in ",
    "generate x --swap gemm": "--swap: expected OP=KERNEL, each op once, got 'gemm'",
    "check nosuch": "op: expected one of embedding, ",
    "bench gemm --kernel nosuch": "kernel: gemm has naive, ",
    "emulate nosuch": "op: expected one of embedding, ",
    "emulate gemm nosuch": "kernel: gemm has naive, ",
    "explain rmsnorm nosuch": "kernel: rmsnorm has naive, ",
    "profile gemm nosuch": "kernel: gemm has naive, ",
    "list nosuch": "op: expected one of embedding, ",
    "tune nosuch": "op: expected one of embedding, ",
    "generate x --dummy --swap gemm=nosuch": "--swap: gemm has naive, ",
    "whatif --kernel nosuch=0.9x": "--kernel: the engine uses embedding, ",
    "profile gemm naive --gpu a100": "--gpu: expected a Hopper GPU",
    "ledger --swap gemm=fast": "--swap: gemm has naive, ",
    "ledger smollm2-135m --dummy --context 9999": "--context: expected at most 8192",
    "simulate --gpus 3": "--gpus: expected one of 1, 2, 4, 8",
    "simulate --against none": "trace: expected a file, or a folder with one, got 'none'",
    "list --ladder": "op: expected one with --ladder, got none",
}
WRITING = (
    "bench gemm --out",
    "report --out",
    "lab --out",
    "generate x --out",
    "ab gemm --junit",
    "static --compare HEAD --markdown",
    "export pytest-benchmark x --to",
)
NAMING = ("check", "ab", "emulate", "check gemm --kernel", "history --op", "roofline --gpu", "bench gemm --case")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        *((words.split(), said) for words, said in REFUSED.items()),
        *(([*words.split(), "/proc/no/x"], f"{words.split()[-1].strip('-')}: expected a folder ") for words in WRITING),
        *(([*words.split(), " "], ": expected a name, got an empty text") for words in NAMING),
        (["generate", ""], "prompt: expected at least one token"),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(rooflab, words, said):
    status, out, err = rooflab(*words)
    assert status == 2 and out == "" and "Traceback" not in err
    (line,) = (line for line in err.splitlines() if line.startswith("rooflab: "))
    assert said in line


@pytest.mark.parametrize("words", ["simulate", "load --rate 1", "estimate --model llama-3.1-8b", "history", "ledger"])
def test_a_number_below_its_range_is_refused_by_the_name_of_its_option(rooflab, words):
    command = get_command(app).commands[words.split()[0]]
    kinds = get_type_hints(command.callback)
    numbers = [one for one in command.params if {int, float} & {kinds[one.name], *get_args(kinds[one.name])}]
    for option in {one.opts[0] for one in numbers} - {"--rate", "--concurrency"}:
        status, _, err = rooflab(*words.split(), option, "-1")
        assert status == 2 and re.search(f"rooflab: {option}: |value for '{option}'", err), err


AT_ONCE = {
    "": (2, ""),
    "--help": (0, ""),
    "check --help": (0, ""),
    "chec": (2, "No such command 'chec'"),
    "static --gpu h1000": (2, "--gpu: expected one of h100-sxm, "),
    "estimate --model nosuch": (2, "--model: expected one of llama-3.1-8b, "),
    "generate x --model nosuch": (2, "--model: expected a folder, a .gguf file, or --dummy with one of llama-3.1-8b, "),
    "generate x --model odd.gguf": (2, "--model: expected general.architecture to be one of llama, "),
    "serve llama-3.1-8b": (2, "model: expected a folder, a .gguf file, or --dummy with one of llama-3.1-8b, "),
}
WITHOUT_TORCH = """
import json, sys
from commands_in_process import run_command
told = {words: [*run_command(words.split())[::2], "torch" in sys.modules] for words in sys.argv[1:]}
print(json.dumps(told))
"""


def test_help_and_a_wrong_gpu_or_model_are_answered_before_torch_is_imported(tmp_path):
    kind = struct.pack("<20sIQ5s", b"general.architecture", 8, 5, b"mamba")
    (tmp_path / "odd.gguf").write_bytes(b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 20) + kind)
    there = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}}
    out = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *AT_ONCE], capture_output=True, check=True, **there)
    for words, (status, err, torch) in json.loads(out.stdout).items():
        assert not torch and status == AT_ONCE[words][0] and AT_ONCE[words][1] in err, (words, status, err)
        assert "Traceback" not in err


def test_a_program_finds_what_lies_where_it_is_started_and_not_what_lies_beside_itself(monkeypatch):
    """As a script that pip makes, whose folder Python puts first."""
    monkeypatch.setattr(sys, "argv", ["rooflab", "--help"])
    monkeypatch.setattr(sys, "path", ["/a/bin", "/a/lib"])
    with pytest.raises(SystemExit):
        main()
    assert sys.path == [os.getcwd(), "/a/lib"]


def test_list_has_every_kernel_and_what_an_op_takes(rooflab):
    rows = json.loads(rooflab("list", "--json")[1])
    assert {"op", "name", "role", "backend", "available", "reason"} == set(rows[0])
    found = {(row["op"], row["name"]) for row in rows}
    assert found >= {(op, name) for op in registry.ops() for name in registry.kernels(op)}
    assert all(row["available"] or row["reason"] for row in rows)
    words = " ".join(rooflab("list", "rmsnorm")[1].split())
    for said in (
        "interpreted; `rooflab check` emulates it",
        "needs a CUDA device; `rooflab check` emulates it",
        "weight (H) x's dtype, rows contiguous",
        "rmsnorm(x, weight, eps=1e-06, *, weight_offset=0.0, round_first=False, quantize=None)",
    ):
        assert said in words
    assert "gemm" not in words


def test_a_ladder_says_what_each_rung_changes_and_where_its_code_is(rooflab):
    rungs = {row["rung"]: row for row in json.loads(rooflab("list", "gemm", "--ladder", "--json")[1])}
    assert set(rungs) == set(registry.kernels("gemm"))
    assert rungs["pipelined"]["line"].startswith("over tensor_core: ")
    assert rungs["pipelined"]["code"] == "kernels/gemm/tensor_core.py", "a switch of that file"


class Made(Checkers):
    """Makes the checks of the first kernels at once, one after the other, each with its status."""

    statuses: dict = {}
    workers = 1

    def start(self, checks):
        time.sleep(0.4)  # longer than the limit, against which it does not count

    def __call__(self, item):
        found = self.statuses.get(item.kernel.name)
        if found is None:
            self.over.wait(60)
        if isinstance(found, BaseException):
            raise found
        asked = "rmsnorm", item.kernel.name, "torch", item.case, item.scheme.name, "cpu", 0
        return CheckResult(*asked, found, "none", reason=f"rmsnorm/{item.kernel.name} has no 'quantize'")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "statuses, ended, said",
    [
        ({}, 12, "not checked at all: rmsnorm/naive, rmsnorm/library, rmsnorm/native"),
        ({}, 12, "the first check takes longer than 0.3 s; give more --seconds, or --by interpreter"),
        ({"naive": "OK", "library": "UNSUPPORTED"}, 12, "not checked at all: rmsnorm/library, rmsnorm/native"),
        ({"naive": "OK", "library": "INCORRECT"}, 11, "not checked at all: rmsnorm/native"),
        ({"naive": "OK", "library": "UNAVAILABLE", "native": "OK"}, 0, "seed 3"),
        ({"naive": "OK", "library": KeyboardInterrupt()}, 130, "interrupted: "),
    ],
)
def test_what_was_left_out_decides_the_status(rooflab, monkeypatch, statuses, ended, said):
    """A limit of 0.3 s, in which each kernel without a status makes its worker wait to the end."""
    monkeypatch.setattr("rooflab.bench.core.outside.Checkers", Made)
    monkeypatch.setattr("rooflab.bench.checks.checking.smallest_failures", lambda *failures: iter(()))
    monkeypatch.setattr("rooflab.bench.core.outside.LATE_S", 0.1)
    monkeypatch.setattr(Made, "statuses", statuses)
    kernels = [word for name in ("naive", "library", "native") for word in ("--kernel", name)]
    status, out, err = rooflab("check", "rmsnorm", *kernels, "--seconds", "0.3", "--seed", "3")
    assert status == ended and said in err and err.startswith("seed 3\n")
    assert (ended in (0, 130)) != bool(re.search(r"\d+% of the plan was run; left out after 0.3 s: \d+ of \d+", err))
    rows = {line.split()[1]: line.split()[3:] for line in out.splitlines() if line.startswith("rmsnorm ")}
    assert list(rows) == ["naive", "library", "native"], "every kernel has a row"
    assert {row[5] for row in rows.values()} == {"0"}, "no case is weak"
    if ended != 130:  # an interrupt may come before the first check
        assert ("OK" in statuses.values()) == (int(rows["naive"][0]) > 0)


def test_an_interrupted_bench_shows_what_it_had(rooflab, monkeypatch):
    def some(run, kernels, cases):
        yield measured(op="rmsnorm", run_id=run.run_id, kernel="naive", role="naive")
        raise KeyboardInterrupt

    monkeypatch.setattr("rooflab.bench.commands.Measurement.records", some)
    status, out, err = rooflab("bench", "rmsnorm", "--out", "kept")
    assert status == 130 and re.search("rmsnorm .* naive", out) and len(read(Path("kept"))) == 1
    assert re.search(r"interrupted: \d+ of \d+ results left out", err)


OUTSIDE = """
import torch
from rooflab.kernels.registry import add_op, register
from rooflab.reference.spec import Case, OpSpec, randn
from rooflab.roofline.model import Cost

SPEC = add_op(OpSpec(
    name="cli_relu2",
    reference=lambda x: x.double().clamp(min=0),
    make_inputs=lambda case, scheme, device, seed: {
        "x": randn(case["n"], dtype=scheme.activation, device=device, seed=seed)
    },
    cost=lambda args: Cost(args.x.nbytes, args.x.nbytes),
    outputs=("y",),
    cases={"smoke": (Case(n=33),)},
    tolerance=lambda inputs, oracle, scheme: tuple(torch.zeros_like(value) for value in oracle),
))

@register(op="cli_relu2", name="naive", role="naive", backend="torch")
def relu(x):
    return x.relu()
"""


@pytest.mark.usefixtures("own_registry")
def test_a_right_kernel_from_a_file_is_checked_timed_and_drawn(rooflab, tmp_path):
    file, out = tmp_path / "mine2.py", tmp_path / "out"
    file.write_text(OUTSIDE)
    words = ("--suite", "smoke", "--budget", "0.05", "--out", out, "--json")
    status, text, err = rooflab("bench", "--kernel", file, *words)
    (row,) = json.loads(text)["rows"]
    assert status == 0 and row["status"] == "OK" and row["latency_ms"] > 0, err
    assert sorted(path.suffix for path in out.iterdir() if path.suffix) == [".jsonl", ".png", ".svg"]


def test_generate_with_random_weights(rooflab, tmp_path):
    config = write_config(tmp_path / "tiny")
    command = ("generate", "hello", "--model", config, "--dummy", "--max-tokens", 8, "--ignore-eos", "--device", "cpu")
    status, out, err = rooflab(*command, "--out", tmp_path / "out", "--json")
    result = json.loads(out)
    assert status == 0 and len(result["token_ids"]) == 8 and result["prompt_tokens"] == 5, err
    (record,) = read(tmp_path / "out")
    assert record.kind == "engine" and record.metrics["itl_p50_ms"] == result["itl_p50_ms"] > 0
    text = rooflab(*command)[1]
    assert "TTFT" in text and "ITL p50 / p90 / p99" in text
    for limit, words in ((4, "fewer tokens than max_model_len, which is 4, got 5"), (6, "")):
        status, out, err = rooflab(*command, "--max-model-len", limit, "--json")
        assert words in err and (status == 2 if words else len(json.loads(out)["token_ids"]) == 1), err
    status, out, err = rooflab(*command, "--swap", "gemm=tensor_core")
    assert status == 2 and out == "" and "gemm/tensor_core: UNSUPPORTED: needs a CUDA device" in err


def test_interpreted_kernels_print_no_times_and_write_no_record(rooflab, tmp_path):
    config = write_config(tmp_path / "tiny")
    status, out, err = rooflab(
        "generate", "hi", "--model", config, "--dummy", "--max-tokens", "2", "--ignore-eos", "--device", "cpu",
        "--swap", "rmsnorm=fused", "--interpret", "--out", tmp_path / "out", "--json",
    )  # fmt: skip
    result = json.loads(out)
    assert status == 0 and result["kernels"]["rmsnorm"] == "fused", err
    assert not [key for key in result if key.endswith("_ms") or "per_s" in key]
    assert not (tmp_path / "out").exists()


def test_a_kernel_file_that_does_not_import_is_one_sentence(rooflab, tmp_path):
    (tmp_path / "mine.py").write_text("def (")
    status, _, err = rooflab("check", "--kernel", tmp_path / "mine.py")
    assert status == 2 and "Traceback" not in err
    assert "rooflab: --kernel: mine.py cannot be imported: SyntaxError" in err


@pytest.mark.parametrize("text, said", [("def (", "mine.py:1: invalid"), ("import no_such", "mine.py:1: No")])
def test_a_file_of_the_tree_that_does_not_import_is_one_sentence(rooflab, monkeypatch, text, said):
    monkeypatch.setattr("rooflab.bench.commands.kernel_rows", lambda ops: exec(compile(text, "mine.py", "exec")))
    status, _, err = rooflab("list")
    assert status == 2 and err.startswith(f"rooflab: {said}") and "Traceback" not in err


@pytest.mark.parametrize(
    "words, variable",
    [
        ("generate hello", "ROOFLAB_CACHE"),
        ("ceilings --device cpu --refresh", "ROOFLAB_CACHE"),
        ("static softmax --no-cache", "ROOFLAB_CACHE"),
        ("ab softmax --kernel naive --kernel library", "ROOFLAB_CACHE"),
        ("static softmax", "TRITON_CACHE_DIR"),
    ],
)
def test_a_cache_that_cannot_be_written_to_is_named_before_the_work(rooflab, monkeypatch, tmp_path, words, variable):
    monkeypatch.setenv("HOME", "/proc/no")
    for name in ("ROOFLAB_CACHE", "TRITON_CACHE_DIR", "TRITON_HOME"):
        monkeypatch.delenv(name, raising=False)
    if variable != "ROOFLAB_CACHE":
        monkeypatch.setenv("ROOFLAB_CACHE", str(tmp_path))
    own_compilers.cache_clear()
    status, out, err = rooflab(*words.split())
    own_compilers.cache_clear()
    assert status == 2 and out == "" and "Traceback" not in err
    assert f"rooflab: {variable}: expected a folder that can be written to, got '/proc/no/." in err


def test_results_stay_out_of_the_way_of_another_repository(rooflab, tmp_path, monkeypatch):
    assert result_folder().parent == result_folder("local") == Path(".rooflab") and not list(Path().glob("results"))
    assert Path(".rooflab/.gitignore").read_text() == "*\n"
    write(Path(".rooflab/run/a.jsonl"), measured())
    for words in (("report",), ("history",)):
        status, out, err = rooflab(*words, "--json")
        assert status == 0 and json.loads(out), err
    monkeypatch.chdir(Path(__file__).parents[2])
    assert result_folder("local") == Path("results/local") and result_folder("kept") == Path("results")
    monkeypatch.chdir("/proc")
    with pytest.raises(ValueError, match="^out: expected a folder that can be written to, got '.rooflab'"):
        result_folder()


def test_the_answer_is_printed_as_it_is(capfd):
    show.piece("a\tb :smile: [bold]c[/]\r\n")
    assert capfd.readouterr().out == "a\tb :smile: [bold]c[/]\r\n"
