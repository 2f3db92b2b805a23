"""`rooflab emulate -- pytest ...` and `-- python ...`: programs written for a GPU, unchanged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SUITE = """
import pytest, torch, triton, triton.language as tl
from torch.library import Library, custom_op, triton_op, wrap_triton

assert torch.cuda.is_available(), "a whole suite may ask when it is imported"

@triton.jit
def _add(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=at < n) + 1, mask=at < n)

def add(x, out=None):
    assert x.is_cuda and x.device.type == "cuda", "the launcher is for a GPU"
    out = torch.empty_like(x) if out is None else out
    _add[(triton.cdiv(x.numel(), 64),)](x, out, x.numel(), BLOCK=64)
    return out

def test_active_device():
    driver = triton.runtime.driver.active
    x = torch.zeros(100, device=driver.get_active_torch_device())
    assert driver.utils.get_device_properties(x.device.index)["multiprocessor_count"] == 132
    assert driver.get_current_target().backend == "cuda" and driver.get_device_interface() is torch.cuda
    assert torch.equal(add(x), x + 1)

@triton.jit
def _product(x_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in range(0, 2 * BLOCK, BLOCK):
        a = tl.load(x_ptr + at[:, None] * 2 * BLOCK + k + at[None, :])
        b = tl.load(x_ptr + (at[:, None] + k) * BLOCK + at[None, :])
        total = tl.dot(a, b, total)
    tl.store(out_ptr + at[:, None] * BLOCK + at[None, :], total)

CONFIGS = [triton.Config({"BLOCK": 128}, num_stages=5), triton.Config({"BLOCK": 16})]  # the first needs 256 KiB

class Tuner(triton.runtime.Autotuner):
    def run(self, *args, **kwargs):
        self.nargs = dict(zip(self.arg_names, args))
        times = {config: self._bench(*args, config=config, **kwargs) for config in self.configs}
        best = min(times, key=times.get)
        return self.fn.run(*args, **kwargs, **best.all_kwargs())

@pytest.mark.parametrize("tuner", [triton.runtime.Autotuner, Tuner])
def test_first_config_does_not_compile(tuner):
    tuned = tuner(_product, _product.arg_names, CONFIGS, [], None, None)
    x, out = torch.randn(16 * 32, device="cuda").half(), torch.empty(16, 16, device="cuda")
    tuned[(1,)](x, out)
    assert torch.allclose(out, x.view(16, 32).float() @ x.view(32, 16).float(), atol=1e-2)
    assert tuner is Tuner or tuned.best_config is CONFIGS[1]

def test_do_bench():
    x, out = torch.zeros(64, device="cuda"), torch.zeros(64, device="cuda")
    assert triton.testing.do_bench(lambda: add(x, out), quantiles=[0.5, 0.2]) == [1.0, 1.0] and out.all()

class Pointer:
    def __init__(self, tensor):
        self.tensor, self.dtype = tensor, tensor.dtype

    def data_ptr(self):
        return self.tensor.data_ptr()

def test_argument_with_data_ptr_alone():
    x = torch.zeros(64, device="cuda")
    _add[(1,)](Pointer(x), Pointer(x), 64, BLOCK=64)
    assert x.all()

def test_accelerator():
    assert torch.accelerator.is_available() and torch.accelerator.device_count() == 1
    assert torch.accelerator.current_accelerator().type == "cuda"
    torch.accelerator.synchronize()

@custom_op("mine::add", mutates_args=(), device_types="cuda")
def add_op(x: torch.Tensor) -> torch.Tensor:
    return add(x)

def backward_op(ctx, grad):
    return add(grad.contiguous())

add_op.register_autograd(backward_op)

@triton_op("mine::add_triton", mutates_args={})
def add_triton(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    wrap_triton(_add)[(1,)](x, out, x.numel(), 64)
    return out

library = Library("mine", "FRAGMENT")
library.define("add_library(Tensor x) -> Tensor")
library.impl("add_library", add, "CUDA")

class AddFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return add(x)

    @staticmethod
    def backward(ctx, grad):
        return add(grad.contiguous())

def test_operators_and_backward():
    for call in (add_op, AddFunction.apply):
        x = torch.zeros(64, device="cuda", requires_grad=True)
        (call(x) * 2).sum().backward()
        assert torch.equal(x.grad, torch.full_like(x, 3))
        (grad,) = torch.autograd.grad(call(x).sum(), [x])
        assert torch.equal(grad, torch.full_like(x, 2))
    x = torch.zeros(64, device="cuda")
    assert add_triton(x).all() and torch.ops.mine.add_library(x).all()

def test_guards():
    with torch.cuda._DeviceGuard(0), torch.cuda.device(torch.zeros(1).device), torch.cuda.device(0):
        assert add(torch.zeros(64, device=0)).all()

def test_seeds_and_generators():
    torch.cuda.manual_seed(7)
    x = torch.randn(9, device="cuda")
    torch.cuda.manual_seed_all(7)
    assert torch.equal(torch.randn(9, device="cuda"), x)
    generator = torch.Generator(device="cuda")
    y = torch.rand(9, device="cuda", generator=generator.manual_seed(3))
    assert torch.equal(torch.rand(9, device="cuda", generator=generator.manual_seed(3)), y)
    assert isinstance(generator, torch.Generator)
    state = torch.cuda.get_rng_state()
    torch.cuda.set_rng_state(state)

def test_streams_and_nvtx():
    stream, event, x = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True), torch.zeros(64, device="cuda")
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.cuda.nvtx.range("mine"):
        torch.cuda.nvtx.range_push("inside")
        out = add(x)
        torch.cuda.nvtx.range_pop()
        event.record(stream)
    out.record_stream(torch.cuda.current_stream())
    event.wait()
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="the emulator has no times"):
        event.elapsed_time(event)

def test_graph():
    x, count = torch.zeros(64, device="cuda"), torch.zeros(1, device="cuda")
    add(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert torch.cuda.is_current_stream_capturing()
        out = add(x * 2) + 1
        count += 1
    assert not torch.cuda.is_current_stream_capturing() and count.item() == 0, "a capture runs nothing"
    for value in (3.0, 4.0):
        x.fill_(value)
        graph.replay()
        assert torch.equal(out, torch.full_like(x, 2 * value + 2))
    assert count.item() == 2

def test_copies():
    x = torch.zeros(64, device="cuda")
    before = x.cpu(), x.to("cpu"), x.to(device=torch.device("cpu"))
    add(x, x)
    assert x.all() and not any(copy.any() for copy in before)

def test_compile():
    assert torch.equal(torch.compile(lambda x: x + 1)(torch.zeros(3, device="cuda")), torch.ones(3))

def test_outside_is_caught():
    with pytest.raises(Exception):
        _add[(2,)](torch.zeros(64, device="cuda"), torch.zeros(64, device="cuda"), 100, BLOCK=64)

@triton.jit
def _racing(x_ptr, BLOCK: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK), tl.program_id(0) + tl.zeros((BLOCK,), tl.float32))

def test_racing():
    _racing[(2,)](torch.zeros(64, device="cuda"), BLOCK=64)

@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.RMSprop])
def test_optimizer(kind):
    weight = torch.ones(4, device="cuda", requires_grad=True)
    steps = kind([weight], lr=0.5)
    add(weight.detach()).sum()
    weight.sum().backward()
    steps.step()
    assert (weight < 1).all()

def test_wrapped_launch():
    x, out = torch.zeros(64, device="cuda", dtype=torch.float32), torch.empty(64, device="cuda")
    torch.library.wrap_triton(_add)[(1,)](x, out, 64, BLOCK=64)
    assert out.all() and torch.zeros(3, pin_memory=True).sum() == 0

@triton.jit
def _sum_in_fp16(a_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in range(0, 2 * BLOCK, BLOCK):
        a = tl.load(a_ptr + at[:, None] * 2 * BLOCK + k + at[None, :])
        total += tl.dot(a, a, out_dtype=tl.float16)
    tl.store(out_ptr + at[:, None] * BLOCK + at[None, :], total)

def test_accumulators_in_fp16():
    out = torch.empty(64, 64, device="cuda")
    _sum_in_fp16[(1,)](torch.ones(64, 128, device="cuda").half(), out, BLOCK=64)
    assert (out == 128).all()

def test_state_of_the_default_generator():
    generator = torch.cuda.default_generators[0]
    torch.cuda.manual_seed(7)
    seed, offset = generator.get_state().view(torch.int64)
    generator.set_offset(int(offset) + 8)
    assert (seed, generator.get_offset()) == (7, 8)
    drawn = torch.rand(4, device="cuda", generator=generator)
    torch.cuda.manual_seed(7)
    assert torch.equal(drawn, torch.rand(4, device="cuda")) and add(drawn).all()

@pytest.mark.skip
def test_skipped():
    pass
"""
SCRIPT = """
import sys, torch, triton
from test_mine import add

assert sys.argv == ["script.py", "--json", "-x"] and __name__ == "__main__"
x = torch.zeros(64, device="cuda")
print(add(x).sum().item())
sys.exit(3)
"""
WELL = (
    "active_device", "first_config_does_not_compile[Autotuner]", "first_config_does_not_compile[Tuner]", "do_bench",
    "argument_with_data_ptr_alone", "accelerator", "operators_and_backward", "guards", "seeds_and_generators",
    "streams_and_nvtx", "graph", "copies", "compile", "outside_is_caught", "racing", "optimizer[Adam]",
    "optimizer[RMSprop]", "wrapped_launch", "accumulators_in_fp16", "state_of_the_default_generator",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("strangers")
    (made / "test_mine.py").write_text(SUITE)
    (made / "script.py").write_text(SCRIPT)
    return made


def emulated(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rooflab.bench", "emulate", *words]
    return subprocess.run(command, cwd=folder, env=dict(os.environ), capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def suite(folder: Path) -> tuple[dict[str, Any], str, int]:
    """The report of the suite, what pytest printed, and the exit status."""
    done = emulated(folder, "--json", "--", "pytest", "-v", "-p", "no:cacheprovider", "test_mine.py")
    assert done.stdout.startswith("{"), done.stderr
    return json.loads(done.stdout), done.stderr, done.returncode


@pytest.mark.more
@pytest.mark.parametrize("name", WELL)
def test_a_strangers_test_passes(suite: tuple[dict[str, Any], str, int], name: str) -> None:
    """Each name is what a stranger's launcher may need of a GPU."""
    assert f"test_mine.py::test_{name} PASSED" in suite[1], suite[1]


@pytest.mark.more
def test_the_report_names_faults_by_test_and_what_launched_nothing(suite: tuple[dict[str, Any], str, int]) -> None:
    report, printed, status = suite
    parts = {part["name"].removeprefix("test_mine.py::test_"): part for part in report["parts"]}
    assert set(parts) == set(WELL) and "1 skipped" in printed
    assert {name for name in parts if parts[name]["found"]} == {"racing", "outside_is_caught"}
    assert "error [race]: _racing: " in parts["racing"]["errors"][0]
    assert "[out-of-bounds]" in parts["outside_is_caught"]["errors"][0]
    idle = {name for name in parts if not parts[name]["launched"]}
    assert idle == {"accelerator", "seeds_and_generators", "compile"} and parts["graph"]["launched"] == 3
    assert report["status"] == 0 and status == report["exit_status"] == 11, "the tests pass, and kernels have faults"
    assert {mark.split()[0]: count for mark, count in report["marks"].items()} == {
        "triton.testing.do_bench": 1,
        "torch.compile": 1,
    }


@pytest.mark.more
def test_a_script_keeps_its_arguments_its_output_and_its_exit_status(folder: Path) -> None:
    done = emulated(folder, "--", "python", "script.py", "--json", "-x")
    assert done.returncode == 3 and done.stdout.startswith("64.0\n"), done.stdout + done.stderr
    assert "1 launches" in done.stdout.splitlines()[-1] and "exit status is 3" in done.stdout
    (folder / "failing.py").write_text("def fail():\n    assert 2 < 1, 'two'\nfail()\n")
    done = emulated(folder, "--", "python", "failing.py")
    assert done.returncode == 1 and "failing.py: launched no kernel" in done.stdout
    assert done.stderr.splitlines()[0].startswith("Traceback") and "strangers_worker" not in done.stderr


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--", "python", "none.py"], "program: expected pytest ..., python script.py ... or python -m module"),
        (["--", "python", "-m", "no_such_module"], "got no module 'no_such_module'"),
        (["gemm", "--", "pytest"], "op: expected no value with a program after --, got 'gemm'"),
        (["--ctas", "3", "--", "python3", "x.py"], "ctas: expected no value with a program after --, got 3"),
        (["--", "nothing_of_ours"], "nothing_of_ours"),
    ],
)
def test_what_stands_behind_the_dashes_is_read_first(rooflab: Any, words: list[str], text: str) -> None:
    status, out, err = rooflab("emulate", *words)
    assert status == 2 and text in " ".join(err.split()), out + err
