"""The command line as a user meets it: one clear sentence for bad input, and the same content as JSON."""

import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from op_kernels import own_registry  # noqa: F401
from test_registry import OUTSIDE
from tiny_model import write_config
from typer.main import get_command

from rooflab.bench.cli.app import app
from rooflab.kernels import registry
from rooflab.kernels._native import compiler


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["check", "gem"], "op: expected one of embedding, .*got 'gem'"),
        (["check", "gemm", "--kernel", "fast"], "--kernel: gemm has naive, library, .*got 'fast'"),
        (["check", "gemm", "--kernel", "none.py"], "kernel: expected a Python file, got 'none.py'"),
        (["check", "gemm", "--case", "M=3"], "--case: gemm takes M=.* with these keys and perhaps residual, got M=3"),
        (["check", "gemm", "--case", "M=x,N=1,K=1,layout=NT,bias=false"], "case: expected M like '32', got 'x'"),
        (["check", "gemm", "--seconds", "0"], "--seconds: expected a number above 0, got 0"),
        (["check", "gemm", "--seconds", "3", "--all"], "seconds: expected none with --all"),
        (["check", "gemm", "--suite", "big"], "suite: expected one of smoke, edge, .*got 'big'"),
        (["check", "gemm", "--scheme", "fp12"], "scheme: expected one of fp32, fp16, bf16.* got 'fp12'"),
        (["bench", "gemm", "--device", "tpu"], "device: expected cpu or cuda, got 'tpu'"),
        (["bench", "gemm", "--choose", "--device", "cpu"], "choose: expected --device cuda; on a CPU the engine times"),
        (["bench", "gemm", "--budget", "0"], "--budget: expected a number above 0, got 0"),
        (["roofline"], "records: no local run yet; run `rooflab bench` first"),
        (["roofline", "--gpu", "h1000"], "gpu: expected one of h100-sxm, .*got 'h1000'"),
        (["estimate", "--model", "llama-9"], "model: expected one of llama-3.1-8b, .*got 'llama-9'"),
        (["estimate", "--model", "llama-3.1-8b", "--batch", "0"], "--batch: expected at least 1, got 0"),
        (["generate", ""], "prompt: expected at least one token, got an empty prompt"),
        (["generate", "caf\udce9"], r"prompt: expected text in UTF-8, got '\\udce9' in it"),
        (["generate", "x", "--top-p", "0"], r"--top-p: expected a number in \(0, 1\], got 0.0"),
        (["generate", "x", "--temperature", "-1"], "--temperature: expected at least 0, got -1"),
        (["generate", "x", "--model", "none.gguf"], "model: 'none.gguf' does not exist"),
        (["generate", "x", "--top-k", "99999999999"], r"--top-k: expected 0 \(off\) to 2\*\*31 - 1, got 99999999999"),
        (["generate", "x", "--max-model-len", "1"], "--max-model-len: expected at least 2, got 1"),
        (["roofline", "--gpu", "h100", "--case", "M=1"], "gpu: expected no --case with it"),
        (["check", "gemm", "--shape", "M=3"], "--shape: gemm takes M=.*, got M=3"),
        (["explain", "gemm", "fast"], "rooflab: kernel: gemm has"),
        (["explain", "gemm", "--gpu", "a100"], "--gpu: expected a Hopper GPU"),
        (["whatif", "--kernel", "rope=0.9x"], "--kernel: expected ops of the step, got rope"),
        (["whatif", "--swap", "gemm=tensor_core"], "--swap: gemm/tensor_core: UNSUPPORTED: needs a CUDA device"),
        (["ledger", "smollm2-135m", "--dummy", "--context", "9999"], "--context: expected at most 8192"),
        (["simulate", "--against", "none"], "trace: expected a file, got 'none'"),
        (["load", "--dataset", "none"], "--dataset: expected a JSON file in ShareGPT's format, got 'none'"),
        (["generate", "x", "--max-tokens", "many"], "Invalid value for '--max-tokens'"),
        (["generate", "x", "--swap", "gemm"], "swap: expected OP=KERNEL, each op once, got 'gemm'"),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(rooflab, arguments, message):
    status, out, err = rooflab(*arguments)
    assert status == 2 and out == ""
    lines = [line for line in err.splitlines() if line.startswith("rooflab: ")]
    assert len(lines) == 1 and "Traceback" not in err
    pytest.raises(ValueError, lambda: (_ for _ in ()).throw(ValueError(lines[0]))).match(message)


def test_a_number_below_its_range_is_refused_by_the_name_of_its_option():
    named = get_command(app).commands
    for name, command in {**named, **named["picture"].commands}.items():
        if command is named["picture"]:
            continue
        kinds = get_type_hints(command.callback)
        numbers = [one for one in command.params if {int, float} & {kinds[one.name], *get_args(kinds[one.name])}]
        for option in {one.opts[0] for one in numbers} - {"--ttft", "--itl", "--percentile"}:  # refused by the command
            with pytest.raises(ValueError, match=f"({option}: expected|'{option}')"):
                command.make_context(name, [option, "-1"])


AT_ONCE = {
    "": (2, ""),
    "--help": (0, ""),
    "--version": (0, ""),
    "check --help": (0, ""),
    "chec": (2, "No such command 'chec'"),
    "check nosuch": (2, "rooflab: op: expected one of embedding, .* got 'nosuch'"),
    "check --kernel fast gemm": (2, "--kernel: gemm has .*naive, .* got 'fast'"),
    "explain gemm fast": (2, "rooflab: kernel: gemm has .* got 'fast'"),
    "ab nosuch": (2, "op: expected one of"),
    "check gemm --device tpu": (2, "--device: expected cpu or cuda, got 'tpu'"),
    "static --gpu h1000": (2, "--gpu: expected one of h100-sxm"),
    "estimate --model nosuch": (2, "--model: expected one of"),
    "simulate nosuch": (2, "model: expected one of"),
    "generate x --model nosuch": (2, "--model: 'nosuch' does not exist"),
    "generate x --model odd.gguf": (2, "--model: expected a GGUF of llama, qwen2, qwen3, gemma, got 'mamba'"),
    "serve nosuch --dummy": (2, "model: expected one of"),
    "ledger --swap gemm=fast": (2, "--swap: gemm has .* got 'fast'"),
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
    (tmp_path / "odd.gguf").write_bytes(
        b"GGUF" + struct.pack("<IQQQ20sIQ5s", 3, 9**9, 9, 20, b"general.architecture", 8, 5, b"mamba")
    )
    path = str(Path(__file__).parent)
    told = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *AT_ONCE],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    for words, (status, err, torch) in json.loads(told.stdout).items():
        assert not torch and status == AT_ONCE[words][0] and re.search(AT_ONCE[words][1], err), (words, status, err)


def test_an_unknown_command_or_option_is_status_2(rooflab):
    for arguments in (["chec"], ["check", "--fast"]):
        status, out, err = rooflab(*arguments)
        assert status == 2 and "Traceback" not in err and "No such" in err


def test_list_has_every_kernel(rooflab):
    status, out, _ = rooflab("list", "--json")
    rows = json.loads(out)
    assert status == 0 and {"op", "name", "role", "backend", "available", "reason"} == set(rows[0])
    found = {(row["op"], row["name"]) for row in rows}
    assert found >= {(op, name) for op in registry.ops() for name in registry.kernels(op)}
    assert all(row["available"] or row["reason"] for row in rows)
    _, text, _ = rooflab("list", "rmsnorm")
    assert all(word in text for word in ("naive", "library", "fused", "interpreted")) and "gemm" not in text


def test_check_passes_and_says_so(rooflab):
    status, out, _ = rooflab("check", "rmsnorm", "--suite", "smoke", "--scheme", "bf16", "--json")
    rows = json.loads(out)
    assert status == 0 and {row["status"] for row in rows if row["kernel"] in ("naive", "library", "fused")} == {"OK"}
    assert {row["status"] for row in rows} <= {"OK", "UNSUPPORTED", "UNAVAILABLE"}, "peers need a GPU"
    native = {"cpu"} if compiler() else set()
    assert {row["checked_by"] for row in rows if row["status"] == "OK"} == {"torch", "emulator"} | native


def test_a_check_ends_in_time_and_says_what_it_left_out(rooflab):
    status, out, err = rooflab("check", "rmsnorm", "--kernel", "naive", "--seconds", "0.001", "--seed", "3")
    assert err.startswith("seed 3\n") and "rmsnorm/naive T=8,H=64,eps=1e-05 fp32: OK: out: error at most" in err
    left_out, asked = map(int, re.search(r"left out after 0.001 s: (\d+) of (\d+) checks; --all", err).groups())
    assert status == 0 and asked > 30 and 0 < left_out < asked and f"{asked - left_out} checks: " in out


@pytest.mark.more
@pytest.mark.usefixtures("own_registry")
def test_a_fault_far_from_the_op_s_own_cases_is_found_and_made_small(rooflab, tmp_path):
    """The command that is printed shows the fault again."""
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\nfrom rooflab.kernels.registry import register\n"
        "from rooflab.kernels.rmsnorm.naive import rmsnorm as right\n"
        "@register(op='rmsnorm', name='cli_narrow', role='optimized', backend='torch')\n"
        "def narrow(x, weight, eps=1e-6):\n    out = right(x, weight, eps)\n    out[2048:] = 0\n    return out\n"
    )
    status, _, err = rooflab("check", "--kernel", file, "--seed", "5", "--scheme", "fp32")
    assert status == 11 and "rmsnorm/cli_narrow T=8,H=64,eps=1e-05 fp32: OK" in err
    (command,) = (line.split()[2:] for line in err.splitlines() if line.startswith("again: rooflab"))
    case = dict(part.split("=") for part in command[command.index("--case") + 1].split(","))
    assert int(case["T"]) == 2049 and case["H"] == "1"
    registry._kernels["rmsnorm"].pop("cli_narrow")
    assert rooflab(*command)[0] == 11


@pytest.mark.usefixtures("own_registry")
def test_a_wrong_kernel_from_a_file_is_found_and_not_timed(rooflab, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(OUTSIDE.replace("outside_relu", "cli_relu").replace("return x.relu()", "return x.relu() + 1"))
    status, out, _ = rooflab("check", "--kernel", file, "--suite", "smoke", "--json")
    assert status == 11 and {row["status"] for row in json.loads(out)} == {"INCORRECT"}


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


def test_an_out_that_cannot_be_a_folder_is_refused_before_any_work(rooflab, tmp_path):
    (tmp_path / "file").write_text("")
    commands = (["check", "gemm"], ["bench", "gemm"], ["roofline", "--gpu", "h100"], ["generate", "x"], ["lab"])
    for command in commands:
        for place in ("file", "file/inside"):
            status, out, err = rooflab(*command, "--out", tmp_path / place)
            assert status == 2 and out == "" and "out: expected a folder" in err and "Traceback" not in err


@pytest.mark.parametrize(
    "text, message",
    [
        ("def (", "SyntaxError"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        (
            "from rooflab.kernels.registry import register\n"
            "@register(op='rmsnorm', name='mine', role='optimized', backend='torch')\ndef f(x): return x\n",
            "TypeError: rmsnorm/mine: misses the argument 'weight'",
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


def test_an_unusable_cache_is_one_sentence(rooflab, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ROOFLAB_CACHE", str(tmp_path / "file"))
    status, _, err = rooflab("generate", "hello")
    assert status == 2 and "model: the cache folder" in err and "Traceback" not in err


def test_the_answer_is_printed_as_it_is(capfd):
    from rooflab.bench import show

    show.piece("a\tb :smile: [bold]c[/]\r\n")
    assert capfd.readouterr().out == "a\tb :smile: [bold]c[/]\r\n"
