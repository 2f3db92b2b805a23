"""The command line as a user meets it: one clear sentence for bad input, and the same content as JSON."""

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
from test_load_metrics import TRACE
from test_records import measured
from test_registry import OUTSIDE
from tiny_model import write_config
from typer.main import get_command

from rooflab.bench import show
from rooflab.bench.cli.app import app
from rooflab.bench.compile.static import own_compilers
from rooflab.bench.core.check_data import CheckResult
from rooflab.bench.core.outside import Checkers
from rooflab.bench.core.record_files import read, result_folder, write
from rooflab.kernels import registry
from rooflab.kernels._native import compiler
from rooflab.roofline.numbers import counted


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["check", "gemm", "--kernel", "none.py"], "kernel: expected a Python file, got 'none.py'"),
        (["check", "gemm", "--shape", "M=3"], "--shape: gemm takes the keys of M=.* and perhaps residual, got M=3"),
        (["check", "gemm", "--case", "M=x,N=1,K=1,layout=NT,bias=false"], "case: expected M like '32', got 'x'"),
        (["check", "gemm", "--seconds", "0"], "--seconds: expected seconds above 0, got 0.0"),
        (["check", "gemm", "--seconds", "3", "--all"], "seconds: expected none with --all"),
        (["check", "gemm", "--suite", "big"], "suite: expected one of smoke, edge, .*got 'big'"),
        (["check", "gemm", "--scheme", "fp12"], "scheme: expected one of fp32, fp16, bf16.* got 'fp12'"),
        (["bench", "gemm", "--choose", "--device", "cpu"], "choose: expected --device cuda; on a CPU the engine times"),
        (["bench", "gemm", "--budget", "0"], "--budget: expected seconds above 0, got 0.0"),
        (["roofline"], "records: no local run yet; run `rooflab bench` first"),
        (["estimate", "--model", "llama-3.1-8b", "--batch", "0"], "--batch: expected at least 1, got 0"),
        (["generate", ""], "prompt: expected at least one token, got an empty prompt"),
        (["generate", "caf\udce9"], r"prompt: expected text in UTF-8, got '\\udce9' in it"),
        (["generate", "x", "--top-p", "0"], r"--top-p: expected a number above 0, got 0.0"),
        (["generate", "x", "--temperature", "-1"], "temperature: expected a number in .0, 3.4.*, got -1.0"),
        (["generate", "x", "--top-k", "99999999999"], "--top-k: expected an integer in .0, 2147483647., got 9999"),
        (["generate", "x", "--max-model-len", "1"], "--max-model-len: expected an integer of at least 2, got 1"),
        (["roofline", "--gpu", "h100", "--case", "M=1"], "gpu: expected no --case with it"),
        (["profile", "gemm", "naive", "--gpu", "a100"], "--gpu: expected a Hopper GPU"),
        (["whatif", "--kernel", "rope=0.9x"], "--kernel: the engine uses embedding, .*got 'rope'"),
        (["ledger", "smollm2-135m", "--dummy", "--batch", "0"], "--batch: expected an integer of at least 1, got 0"),
        (["ledger", "smollm2-135m", "--dummy", "--context", "9999"], "--context: expected at most 8192"),
        (["estimate", "--model", "llama-3.1-8b", "--dtype", "x"], "--dtype: expected one of fp32"),
        (["simulate", "--gpus", "3"], "--gpus: expected one of 1, 2, 4, 8"),
        (["simulate", "--against", "none"], "trace: expected a file, or a folder with one, got 'none'"),
        (["load", "--dataset", "none"], "--dataset: expected a JSON file in ShareGPT's format, got 'none'"),
        (["bench", "gemm", "--out", "/proc/no"], "out: expected a folder that can be written to, got '/proc/no' "),
        (["lab", "--out", "/etc/hosts"], "out: expected a folder that can be written to, got '/etc/hosts' "),
        (["generate", "x", "--out", "/etc/hosts/in"], "out: expected a folder .*, got '/etc/hosts/in' "),
        (["sweep", "--out", "/proc/no"], "out: expected a folder that can be written to, got '/proc/no' "),
        (["ab", "gemm", "--junit", "/proc/no/x"], "junit: expected a folder that can be written to, got '/proc/no' "),
        (["ab", "gemm", "--markdown", "."], "markdown: expected a file, got the folder '.'"),
        (["static", "--compare", "HEAD", "--markdown", "/proc/x"], "markdown: .*'/proc' "),
        (["suite", "--archive", "/proc/no/a.tar.gz"], "archive: .*'/proc/no' "),
        (["load", "--vllm-json", "/proc/no/x"], "vllm-json: .*'/proc/no' "),
        (["report", "--out", "/proc/no/x"], "out: .*'/proc/no' "),
        (["roofline", "--gpu", "h100", "--out", "x.gif"], "out: expected a folder, or a file .* .png"),
        (["picture", "schedule", "--out", "x.pdf"], "out: expected a folder, got 'x.pdf'"),
        (["list", "--ladder"], "op: expected one with --ladder, got none"),
        (["export", "csv", "x", "--to", "/proc/no/x"], "to: .*'/proc/no' "),
        (["capture", "--suite", "/proc/no/x.json", "--", "x.py"], "suite: .*'/proc/no' "),
        (["whatif", "--swap", "rope=naive"], "--swap: the engine uses embedding, .*got 'rope'"),
        (["check", "--kernel", "fast", "gemm"], "--kernel: gemm has naive, .* got 'fast'"),
        (["ledger", "--swap", "gemm=fast"], "--swap: gemm has naive, .* got 'fast'"),
        (["generate", "x", "--swap", "gemm"], "--swap: expected OP=KERNEL, each op once, got 'gemm'"),
        *(
            ([*words, empty], "(op|kernel|gpu|case): expected a name, got an empty text")
            for words, empty in (
                (["check"], ""),
                (["bench"], " "),
                (["check", "gemm", "--kernel"], ""),
                (["ab"], ""),
                (["list"], ""),
                (["emulate"], ""),
                (["tune"], ""),
                (["static"], ""),
                (["history", "--op"], ""),
                (["roofline", "--kernel"], ""),
                (["roofline", "--gpu"], ""),
                (["bench", "gemm", "--case"], ""),
            )
        ),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(rooflab, arguments, message):
    status, out, err = rooflab(*arguments)
    assert status == 2 and out == ""
    lines = [line for line in err.splitlines() if line.startswith("rooflab: ")]
    assert len(lines) == 1 and "Traceback" not in err
    pytest.raises(ValueError, lambda: (_ for _ in ()).throw(ValueError(lines[0]))).match(message)


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
    "--version": (0, ""),
    "check --help": (0, ""),
    "chec": (2, "No such command 'chec'"),
    "check --fast": (2, "No such option"),
    "check nosuch": (2, "rooflab: op: expected one of embedding, .* got 'nosuch'"),
    "check gemm --device tpu": (2, "--device: expected cpu or cuda, got 'tpu'"),
    "static --gpu h1000": (2, "--gpu: expected one of h100-sxm, .* got 'h1000'"),
    "estimate --model nosuch": (2, "--model: expected one of llama-3.1-8b, .* got 'nosuch'"),
    "generate x --model nosuch": (2, "--model: 'nosuch' does not exist"),
    "generate x --model odd.gguf": (2, "--model: expected general.architecture to be one of llama, .* got 'mamba'"),
    "serve nosuch --dummy": (2, "model: expected one of"),
    "serve llama-3.1-8b": (2, "model: llama-3.1-8b has no weights here: expected a folder, a .gguf file, or --dummy"),
    "whatif --kernel nosuch=0.9x": (2, "--kernel: expected one of embedding, .* got 'nosuch'"),
    "study magic": (2, "study: expected one of kv-cache"),
}
WITHOUT_TORCH = """
import json, sys
from commands_in_process import run_command
told = {words: [*run_command(words.split())[::2], "torch" in sys.modules] for words in sys.argv[1:]}
print(json.dumps(told))
"""


def test_help_and_wrong_names_are_answered_before_torch_is_imported(tmp_path):
    kind = struct.pack("<20sIQ5s", b"general.architecture", 8, 5, b"mamba")
    (tmp_path / "odd.gguf").write_bytes(b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 20) + kind)
    there = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}}
    out = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *AT_ONCE], capture_output=True, check=True, **there)
    for words, (status, err, torch) in json.loads(out.stdout).items():
        assert not torch and status == AT_ONCE[words][0] and re.search(AT_ONCE[words][1], err), (words, status, err)
        assert "Traceback" not in err


def test_list_has_every_kernel(rooflab):
    status, out, _ = rooflab("list", "--json")
    rows = json.loads(out)
    assert status == 0 and {"op", "name", "role", "backend", "available", "reason"} == set(rows[0])
    found = {(row["op"], row["name"]) for row in rows}
    assert found >= {(op, name) for op in registry.ops() for name in registry.kernels(op)}
    assert all(row["available"] or row["reason"] for row in rows)
    _, text, _ = rooflab("list", "rmsnorm")
    assert all(word in text for word in ("naive", "library", "fused", "interpreted; `rooflab check` emulates it"))
    assert "needs a CUDA device; `rooflab check` emulates it" in text and "gemm" not in text
    words = " ".join(text.split())
    assert "weight (H) x's dtype, rows contiguous" in words and "returns scale (T) float32, with quantize" in words
    assert "rmsnorm(x, weight, eps=1e-06, *, weight_offset=0.0, round_first=False, quantize=None)" in words


def test_a_ladder_says_what_each_rung_changes_and_where_its_code_is(rooflab):
    status, out, _ = rooflab("list", "gemm", "--ladder", "--json")
    rungs = {row["rung"]: row for row in json.loads(out)}
    assert status == 0 and set(rungs) == set(registry.kernels("gemm"))
    assert rungs["pipelined"]["line"].startswith("over tensor_core: ")
    assert rungs["pipelined"]["code"] == "kernels/gemm/tensor_core.py", "a switch of that file"


@pytest.mark.more
def test_check_passes_and_says_so(rooflab):
    status, out, _ = rooflab("check", "rmsnorm", "--suite", "smoke", "--scheme", "bf16", "--json")
    rows = json.loads(out)
    assert status == 0 and {row["status"] for row in rows if row["kernel"] in ("naive", "library", "fused")} == {"OK"}
    assert {row["status"] for row in rows} <= {"OK", "UNSUPPORTED", "UNAVAILABLE"}, "peers need a GPU"
    native = {"cpu"} if compiler() else set()
    assert {row["checked_by"] for row in rows if row["status"] == "OK"} == {"torch", "emulator"} | native


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
        ({}, 13, "not checked at all: rmsnorm/naive, rmsnorm/library, rmsnorm/native"),
        ({"naive": "OK", "library": "UNSUPPORTED"}, 12, "not checked at all: rmsnorm/library, rmsnorm/native"),
        ({"naive": "OK", "library": "INVALID"}, 13, "not checked at all: rmsnorm/native"),
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
    assert status == ended and said in err and err.startswith("seed 3\n") and "; first their processes start" in err
    assert (ended in (0, 130)) != bool(
        re.search(r"\d+% of the plan was run; left out after 0.3 s: \d+ of \d+ checks; --all makes them", err)
    )
    rows = {line.split()[1]: line.split()[3:7] for line in out.splitlines() if line.startswith("rmsnorm ")}
    assert list(rows) == ["naive", "library", "native"], "every kernel has a row"
    if ended != 130:  # an interrupt may come before the first check
        assert ("OK" in statuses.values()) == (int(rows["naive"][0]) > 0)
    if ended == 12:
        assert re.search(r"[1-9]\d* not offered by the kernel, 0 could not run here", out)


def test_an_interrupted_bench_shows_what_it_had(rooflab, monkeypatch):
    def some(run, kernels, cases):
        yield measured(op="rmsnorm", run_id=run.run_id, kernel="naive", role="naive")
        raise KeyboardInterrupt

    monkeypatch.setattr("rooflab.bench.commands.Measurement.records", some)
    status, out, err = rooflab("bench", "rmsnorm", "--out", "kept")
    assert status == 130 and re.search("rmsnorm .* naive", out) and len(read(Path("kept"))) == 1
    assert re.search(r"interrupted: \d+ of \d+ results left out", err)


@pytest.mark.slow  # a minute
@pytest.mark.usefixtures("own_registry")
def test_a_fault_far_from_the_op_s_own_cases_is_found_and_made_small(rooflab, tmp_path):
    """The command that is printed shows the fault again."""
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\nfrom rooflab.kernels.registry import register\n"
        "from rooflab.kernels.rmsnorm.naive import naive as right\n"
        "@register(op='rmsnorm', name='cli_narrow', role='optimized', backend='torch')\n"
        "def narrow(x, weight, eps=1e-6):\n    out = right(x, weight, eps)\n    out[2048:] = 0\n    return out\n"
    )
    status, _, err = rooflab("check", "--kernel", file, "--seed", "5", "--scheme", "fp32")
    assert status == 11 and "rmsnorm/cli_narrow T=8,H=64,eps=1e-05 fp32: OK" in err
    (command,) = (line.split()[2:] for line in err.splitlines() if line.startswith("again: rooflab"))
    case = dict(part.split("=") for part in command[command.index("--case") + 1].split(","))
    assert int(case["T"]) == 2049 and case["H"] == "1"
    file.write_text(file.read_text().replace("cli_narrow", "cli_again"))  # a process registers a name once
    assert rooflab(*command)[0] == 11


@pytest.mark.usefixtures("own_registry")
def test_a_right_kernel_from_a_file_is_checked_timed_and_drawn(rooflab, tmp_path):
    file = tmp_path / "mine2.py"
    file.write_text(OUTSIDE.replace("outside_relu", "cli_relu2"))
    status, out, err = rooflab(
        "bench", "--kernel", file, "--suite", "smoke", "--budget", "0.05", "--out", tmp_path / "out", "--json"
    )
    result = json.loads(out)
    (row,) = result["rows"]
    assert result["folder"] == str(tmp_path / "out") and len(result["files"]) == 2
    assert status == 0 and row["status"] == "OK" and row["latency_ms"] > 0, err
    assert len(list((tmp_path / "out").glob("*.jsonl"))) == 1
    assert {path.suffix for path in (tmp_path / "out").glob("roofline-*")} == {".svg", ".png"}


def test_a_ledger_without_a_batch_is_of_one_sequence(rooflab):
    status, out, _ = rooflab("ledger", "llama-3.1-8b", "--gpu", "h100", "--context", "2048")
    assert status == 0 and "decode of 1 x 2048 tokens" in " ".join(out.split())


def test_estimate_says_which_h100_it_means(rooflab):
    status, out, err = rooflab("estimate", "--model", "llama-3.1-70b", "--gpu", "h100", "--json")
    result = json.loads(out)
    assert status == 0 and result["gpu"] == "h100-sxm" and "h100 is taken as h100-sxm" in err
    assert result["kv_bytes"] == 8192 * result["kv_bytes_per_token"] and result["gpus_needed"] >= 2


def test_roofline_of_a_gpu_that_is_not_here_has_bounds_and_no_times(rooflab, tmp_path):
    status, out, _ = rooflab(
        "roofline", "--gpu", "h200", "--op", "gemm", "--op", "rmsnorm", "--out", tmp_path, "--json"
    )
    result = json.loads(out)
    assert status == 0 and len(result["figures"]) == 2
    assert {point["op"] for point in result["points"]} == {"gemm", "rmsnorm"}
    assert all((point["seconds"] is None) != point["published"] for point in result["points"])
    assert all(point["bound_s"] > 0 for point in result["points"])


def test_generate_with_random_weights(rooflab, tmp_path):
    config = write_config(tmp_path / "tiny")
    command = ("generate", "hello", "--model", config, "--dummy", "--max-tokens", 8, "--ignore-eos", "--device", "cpu")
    status, out, err = rooflab(*command, "--out", tmp_path / "out", "--json")
    result = json.loads(out)
    assert status == 0 and len(result["token_ids"]) == 8 and result["prompt_tokens"] == 5, err
    assert result["ttft_p50_ms"] > 0 and result["itl_p99_ms"] > 0
    (record,) = [json.loads(line) for file in (tmp_path / "out").glob("*.jsonl") for line in file.open()]
    assert record["kind"] == "engine" and record["metrics"]["itl_p50_ms"] == result["itl_p50_ms"]
    _, text, _ = rooflab(*command)
    assert "TTFT" in text and "ITL p50 / p90 / p99" in text
    status, out, err = rooflab(*command, "--max-model-len", 4)
    assert status == 2 and out == "" and "prompt: expected fewer tokens than max_model_len, which is 4, got 5" in err
    status, out, err = rooflab(*command, "--max-model-len", 6, "--json")
    assert status == 0 and len(json.loads(out)["token_ids"]) == 1, err
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


@pytest.mark.parametrize(
    "text, message",
    [
        ("def (", "SyntaxError"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        (
            "from rooflab.kernels.registry import register\n"
            "@register(op='rmsnorm', name='mine', role='optimized', backend='torch')\ndef f(x): return x\n",
            "TypeError: rmsnorm/mine: expected the argument weight, as in rmsnorm(x, weight",
        ),
    ],
)
def test_a_kernel_file_that_does_not_import_is_one_sentence(rooflab, tmp_path, text, message):
    (tmp_path / "mine.py").write_text(text)
    status, out, err = rooflab("check", "--kernel", tmp_path / "mine.py")
    assert status == 2 and f"rooflab: --kernel: mine.py cannot be imported: {message}" in err and "Traceback" not in err


@pytest.mark.parametrize("text, said", [("def (", "mine.py:1: invalid"), ("import no_such", "mine.py:1: No")])
def test_a_file_of_the_tree_that_does_not_import_is_one_sentence(rooflab, monkeypatch, text, said):
    monkeypatch.setattr("rooflab.bench.commands.kernel_rows", lambda ops: exec(compile(text, "mine.py", "exec")))
    status, out, err = rooflab("list")
    assert status == 2 and err.startswith(f"rooflab: {said}") and "Traceback" not in err


TRITON = "TRITON_CACHE_DIR: expected a folder that can be written to, got '/proc/no/.triton/cache'"
CACHE = "ROOFLAB_CACHE: expected a folder that can be written to, got '/proc/no/.cache/rooflab"


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["generate", "hello"], CACHE),
        (["check", "softmax", "--kernel", "naive", "--suite", "smoke"], CACHE),
        (["bench", "softmax"], CACHE),
        (["ceilings", "--device", "cpu", "--refresh"], CACHE),
        (["static", "softmax", "--no-cache"], CACHE),
        (["ab", "softmax", "--kernel", "naive", "--kernel", "library"], CACHE),
        (["static", "softmax"], TRITON),
    ],
)
def test_a_cache_that_cannot_be_written_to_is_one_sentence(rooflab, monkeypatch, tmp_path, arguments, said):
    """And comes before the work."""
    monkeypatch.setenv("HOME", "/proc/no")
    for name in ("ROOFLAB_CACHE", "TRITON_CACHE_DIR", "TRITON_HOME"):
        monkeypatch.delenv(name, raising=False)
    if said != CACHE:
        monkeypatch.setenv("ROOFLAB_CACHE", str(tmp_path))
    own_compilers.cache_clear()
    status, out, err = rooflab(*arguments)
    own_compilers.cache_clear()
    assert status == 2 and out == "" and f"rooflab: {said}" in err and "Traceback" not in err


def test_results_stay_out_of_the_way_of_another_repository(rooflab, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert result_folder().parent == result_folder("local") == Path(".rooflab") and not list(Path().glob("results"))
    assert Path(".rooflab/.gitignore").read_text() == "*\n"
    write(Path(".rooflab/run/a.jsonl"), measured())
    TRACE.save(Path(".rooflab/run/trace.ndjson"))
    for words in (("report",), ("history",), ("xray",), ("xray", ".rooflab/run")):
        status, out, err = rooflab(*words, "--json")
        assert status == 0 and json.loads(out), err
    assert not any(r"\n" in text for text in rooflab("xray")[1:]), "a heading's new line is one"
    monkeypatch.chdir(Path(__file__).parents[2])
    assert result_folder("local") == Path("results/local") and result_folder("kept") == Path("results")
    monkeypatch.chdir("/proc")
    with pytest.raises(ValueError, match="^out: expected a folder that can be written to, got '.rooflab'"):
        result_folder()


def test_one_is_one():
    assert [counted(n, "check") for n in (0, 1, 1234)] == ["0 checks", "1 check", "1,234 checks"]


def test_the_answer_is_printed_as_it_is(capfd):
    show.piece("a\tb :smile: [bold]c[/]\r\n")
    assert capfd.readouterr().out == "a\tb :smile: [bold]c[/]\r\n"
