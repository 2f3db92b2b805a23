"""`rooflab emulate`, `rooflab golden`, and `rooflab check` with no GPU: compiled kernels run, and faults are named."""

import json
import re

import pytest
import torch
from op_kernels import own_registry  # noqa: F401

from rooflab.bench.compile.cases import KernelCase
from rooflab.bench.core.record_files import read
from rooflab.bench.emulate import golden
from rooflab.kernels import registry
from rooflab.reference.spec import get_scheme

RMSNORM = "T=8,H=256,eps=1e-06"
CASE = ("--case", RMSNORM, "--scheme", "bf16")
MINE = """
import torch, triton
import triton.language as tl
from rooflab.kernels.registry import register

@triton.jit
def scaled(x, weight, out, H: tl.constexpr, WIDTH: tl.constexpr, FACTOR: tl.constexpr, SHIFT: tl.constexpr):
    columns = tl.arange(0, WIDTH)  # no mask
    row = tl.load(x + tl.program_id(0) * H + columns + SHIFT).to(tl.float32)
    scale = tl.rsqrt(tl.sum(row * row, 0) / H + 1e-6) * FACTOR
    value = row * scale * tl.load(weight + columns).to(tl.float32)
    tl.store(out + tl.program_id(0) * ROWS * H + columns, value.to(out.dtype.element_ty))

@register(op="rmsnorm", name="mine", role="optimized", backend="triton")
def mine(x, weight, eps=1e-6):
    out = torch.empty_like(x)
    width = triton.next_power_of_2(x.shape[1])
    scaled[(x.shape[0],)](x, weight, out, H=x.shape[1], WIDTH=width, FACTOR=F, SHIFT=S)
    return out
"""


pytestmark = pytest.mark.usefixtures("own_registry")


def mine(tmp_path, name, rows="1", factor="1.0", shift="0"):
    file = tmp_path / f"{name}.py"
    text = MINE.replace("ROWS", rows).replace("FACTOR=F", f"FACTOR={factor}").replace("SHIFT=S", f"SHIFT={shift}")
    file.write_text(text.replace('"mine"', f'"{name}"'))
    return file


def test_lines_of_the_source_stand_beside_their_counts(rooflab):
    status, out, _ = rooflab("emulate", "rmsnorm", "fused", *CASE, "--lines")
    assert status == 0 and "tl.load(" in out and "tl.store(" in out and "us are predicted" in out


def test_the_bytes_of_a_norm_are_those_counted_by_hand_and_stand_on_the_roofline_of_a_gpu(rooflab, tmp_path):
    status, out, _ = rooflab("emulate", "rmsnorm", "fused", *CASE, "--json", "--out", tmp_path / "records")
    (found,) = json.loads(out)
    moved, read_, written = found["launches"][0]["bytes"], 2 * (8 * 256 + 256), 2 * 8 * 256
    assert status == 0 and found["status"] == "OK" and found["races"] == []
    assert (moved["hbm_read"], moved["hbm_write"]) == (read_, written)
    assert moved["global_read"] == 2 * 2 * 8 * 256, "each row reads the weight again"
    status, out, _ = rooflab("roofline", tmp_path / "records", "--gpu", "h100", "--out", "f", "--json")
    points = {point["label"]: point for point in json.loads(out)["points"]}
    assert status == 0 and list(points) == ["fused"] and points["fused"]["traffic_basis"] == "counted"
    assert points["fused"]["traffic_bytes"] == read_ + written
    assert points["fused"]["case"] == f"{RMSNORM} bf16" and points["fused"]["flops"] > 0


@pytest.mark.parametrize("factor", ["1.5", "float('nan')"])
def test_what_a_few_ctas_wrote_is_judged_nan_included(rooflab, tmp_path, factor):
    file = mine(tmp_path, f"mine_sampled_{len(factor)}", factor=factor)
    status, out, _ = rooflab("emulate", "--kernel", file, *CASE, "--ctas", "1", "--json")
    (found,) = json.loads(out)
    assert status == 11 and found["status"] == "INCORRECT"
    assert found["ran"] == 3 and found["checked_elements"] == 3 * 256


def test_a_few_ctas_that_cannot_be_judged_are_not_right(rooflab, tmp_path):
    again = "scaled[(8,)](out, weight, out, H=256, WIDTH=256, FACTOR=1., SHIFT=0)\n    return out"
    for name, ending, wanted, words in (
        ("elsewhere", "return torch.zeros_like(x)", 11, "the CTAs that ran wrote nothing of the outputs"),
        ("twice", again, 2, "ctas: expected a kernel of one launch"),
    ):
        file = mine(tmp_path, f"mine_{name}")
        file.write_text(file.read_text().replace("return out", ending))
        status, out, err = rooflab("emulate", "--kernel", file, *CASE, "--ctas", "1")
        assert status == wanted and words in " ".join(f"{out} {err}".split())


def test_what_is_wrong_with_a_users_kernel_is_named(rooflab, tmp_path):
    file = mine(tmp_path, "mine_racing", rows="0")
    status, out, _ = rooflab("emulate", "--kernel", file, *CASE)
    words = ("error [race]: scaled: write-write race on global memory", "mine_racing.py:12 (st.global", "race: Nothing")
    assert status == 11 and all(word in " ".join(out.split()) for word in words), out
    file = mine(tmp_path, "mine_reaching", shift="2048")
    status, out, _ = rooflab("emulate", "--kernel", file, *CASE, "--json")
    (found,) = json.loads(out)
    (fault,) = found["findings"]
    assert status == 11 and found["status"] == "RUNTIME_ERROR"
    assert found["reason"] == f"[out-of-bounds] scaled: {fault['text']}" and "into x of 4096" in fault["text"]
    # Triton's cache may hold the same source with the path of an earlier run.
    assert (fault["rule"], fault["line"]) == ("out-of-bounds", 9) and fault["file"].endswith(f"/{file.name}")
    assert fault["command"].startswith("rooflab ") and fault["section"] == "State Spaces"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["emulate"], "op: expected an op, or a file"),
        (["emulate", "rmsnorm", "library"], "kernel: expected one with compiled code .*got library"),
        (["emulate", "rmsnorm", "fused", "--ctas", "-1"], "ctas: expected 0 or more, got -1"),
        (["emulate", "rmsnorm", "fused", "--gpu", "abacus"], "abacus"),
        (["roofline", ".", "--gpu", "h100"], "records: expected records of the emulator, or benchmarks"),
        (["check", "rmsnorm", "--by", "magic"], "by: expected emulator or interpreter, got 'magic'"),
    ],
)
def test_bad_input_is_one_sentence(rooflab, arguments, message):
    status, _, err = rooflab(*arguments)
    assert status == 2 and re.search(message, " ".join(err.split())), err


def other_file(tmp_path, name, text):
    """A file that registers `name` for the same op: the head of the one above, and other code."""
    file = tmp_path / f"{name}.py"
    head = MINE[: MINE.index("@triton.jit")]
    file.write_text(head + text.replace("NAME", name))
    return file


REGISTERED = """
@register(op="rmsnorm", name="NAME", role="optimized", backend="triton")
def NAME(x, weight, eps=1e-6):
"""
TORCH = (
    REGISTERED
    + """
    h = x.float()
    return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)
"""
)
ADDS = (
    """
@triton.jit
def add_to(x, out, H: tl.constexpr, factor: tl.float16, other: tl.bfloat16, whole: tl.float32):
    place = tl.program_id(0) * H + tl.arange(0, H)
    tl.store(out + place, tl.load(x + place) * (factor - other + whole).to(tl.float32) + tl.load(out + place))
"""
    + REGISTERED
    + """
    h = x.float()
    normed = (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps) * weight.float())
    out = MAKE
    add_to[(x.shape[0],)](normed, out, x.shape[1], 0.5, 0.5, 1)
    return out.to(x.dtype)
"""
)


def test_without_a_case_the_sizes_are_ragged_so_that_a_missing_mask_shows(rooflab, tmp_path):
    status, out, _ = rooflab("emulate", "--kernel", mine(tmp_path, "mine_unmasked"), "--scheme", "bf16")
    assert status == 11 and "T=3,H=33" in out and "RUNTIME_ERROR" in out


@pytest.mark.more
def test_a_launch_that_stores_less_than_the_outputs_is_told_beside_the_verdict(rooflab, tmp_path):
    text = ADDS.replace("MAKE", "torch.zeros(1, x.shape[1])").replace("[(x.shape[0],)]", "[(1,)]")
    file = other_file(tmp_path, "torch_mostly", text.replace("return out.to(", "return normed.to("))
    status, out, _ = rooflab("emulate", "--kernel", file, *CASE)
    words = " ".join(out.split())
    assert status == 0 and "torch wrote a part of the outputs: kernels stored 1024 of their 4096 bytes" in words


WALKS = """
from rooflab.kernels._device import sm_count

@triton.jit
def scaled(x, weight, out, T, H, eps, WIDTH: tl.constexpr):
    columns = tl.arange(0, WIDTH)
    inside = columns < H
    for row in tl.range(tl.program_id(0), ENDS, tl.num_programs(0)):
        values = tl.load(x + row * H + columns, mask=inside, other=0.0).to(tl.float32)
        normed = values * tl.rsqrt(tl.sum(values * values, 0) / H + eps)
        normed *= tl.load(weight + columns, mask=inside).to(tl.float32)
        tl.store(out + row * H + columns, normed.to(out.dtype.element_ty), mask=inside)

@register(op="rmsnorm", name="NAME", role="optimized", backend="triton")
def NAME(x, weight, eps=1e-6):
    T, H = x.shape
    x, weight, out = x.contiguous(), weight.contiguous(), torch.empty(T, H, dtype=x.dtype)
    scaled[(min(T, sm_count(x.device)),)](x, weight, out, T, H, eps, WIDTH=triton.next_power_of_2(H))
    return out
"""


@pytest.mark.more
@pytest.mark.parametrize(("ends", "right"), [("T", True), ("tl.num_programs(0)", False)])
@pytest.mark.parametrize("by", ["emulator", pytest.param("interpreter", marks=pytest.mark.more)])
def test_a_persistent_program_that_leaves_after_its_first_tile_is_wrong(rooflab, tmp_path, by, ends, right):
    """With 132 SMs each row of a check's small cases has a program of its own."""
    file = other_file(tmp_path, f"walks_{by}_{right}", WALKS.replace("ENDS", ends))
    status, out, _ = rooflab("check", "rmsnorm", "--kernel", file, "--case", RMSNORM, "--scheme", "fp32", "--by", by)
    assert (status == 0) == right and by in out
    assert right or "with a grid for 2 SMs, where a CTA takes several tiles" in out


ASKS = """
import torch, triton
CAPABILITY, STREAM = torch.cuda.get_device_capability(), torch.cuda.Stream()
DEVICE = triton.runtime.driver.active.get_active_torch_device()
LIMITS = triton.runtime.driver.active.utils.get_device_properties(DEVICE.index)
SMS = torch.cuda.get_device_properties(DEVICE).multi_processor_count
assert (CAPABILITY, SMS, LIMITS["multiprocessor_count"]) == ((9, 0), 132, 132)

def exact(x, weight):
    return torch.nn.functional.rms_norm(x, weight.shape, weight.to(DEVICE), 1e-6)
"""


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("check rmsnorm {case} --kernel {file}", "asks"),
        pytest.param("emulate {case} --kernel {file}", "asks", marks=pytest.mark.slow),
        pytest.param("static --kernel {file}", "asks", marks=pytest.mark.slow),
        pytest.param(
            "emulate {file}::mine --shape x=8x256,weight=256 --reference {file}::exact",
            ": OK: output 0",
            marks=pytest.mark.more,
        ),
    ],
)
def test_a_file_may_ask_for_the_card_when_it_is_imported(rooflab, tmp_path, command, shown):
    file = mine(tmp_path, "asks")
    made = "torch.empty(x.shape, dtype=x.dtype, device=DEVICE)\n    x, weight = x.contiguous(), weight.contiguous()"
    text = file.read_text().replace("torch.empty_like(x)", made)
    # Behind the registration, which a second try must not find.
    file.write_text(text.replace("@triton.jit", "DEVICE = None\n@triton.jit", 1) + ASKS)
    status, out, err = rooflab(*command.format(case=f"--case {RMSNORM} --scheme fp32", file=file).split())
    assert status == 0 and shown in " ".join(out.split()), out + err


THEIRS = """
    from liger_kernel.ops.rms_norm import rms_norm_forward
    return rms_norm_forward(x.contiguous(), weight.contiguous(), eps, 0.0, "llama", None)[0]
"""


@pytest.mark.more
def test_what_runs_a_kernel_follows_from_its_backend_and_not_from_its_role(rooflab, tmp_path):
    file = other_file(tmp_path, "theirs", REGISTERED.replace("optimized", "peer") + THEIRS)
    status, out, err = rooflab("check", "rmsnorm", "--kernel", file, *CASE, "--json")
    assert status == 0 and {row["checked_by"] for row in json.loads(out)} == {"emulator"}, out + err
    peers = [kernel for op in registry.ops() for kernel in registry.kernels(op).values() if kernel.role == "peer"]
    assert {kernel.name for kernel in peers if kernel.has_code} == {"liger", "theirs"}


@pytest.mark.more
@pytest.mark.parametrize(
    ("command", "by", "ended"), [("check", "torch", (0, "OK")), ("emulate", "none", (13, "INVALID"))]
)
def test_what_torch_computed_is_not_said_to_be_emulated(rooflab, tmp_path, command, by, ended):
    files = [other_file(tmp_path, f"torch_{command}_{number}", TORCH) for number in range(2)]
    kernels = [part for file in files for part in ("--kernel", file)]
    op = ["rmsnorm"] if command == "check" else []
    code, out, _ = rooflab(command, *op, *kernels, *CASE, "--out", tmp_path / "records")
    found = sorted(read(tmp_path / "records"), key=lambda record: record.kernel)
    assert [record.kernel for record in found] == [file.stem for file in files], "each from its own file"
    for record in found:
        assert (code, record.status, record.checked_by, record.traffic_bytes) == (*ended, by, None)
    assert command == "check" or "torch computed it: no kernel was launched" in " ".join(out.split())


@pytest.mark.parametrize(
    ("line", "status", "words"),
    [
        ("raise TypeError('no such thing')", "RUNTIME_ERROR", "TypeError: no such thing (raising"),
        ("raise ValueError('NO: why')", "RUNTIME_ERROR", "ValueError: NO: why"),
        ("raise ValueError('UNSUPPORTED: it is Sunday')", "UNSUPPORTED", "it is Sunday"),
    ],
)
def test_what_a_kernels_function_raises_is_the_kernels(rooflab, tmp_path, line, status, words):
    file = other_file(tmp_path, f"raising_{abs(hash(line))}", f"{REGISTERED}    {line}\n")
    code, out, err = rooflab("emulate", "--kernel", file, *CASE)
    assert code == (13 if status == "UNSUPPORTED" else 11) and status in out and words in " ".join(out.split()), err


NO_CTAS = "torch.zeros_like(normed)\n    add_to[(0,)](normed, out, x.shape[1], 1, 1.0, 1)"
UNWRITTEN = "a read of byte 0 of out, which nobody has written"


@pytest.mark.parametrize(
    ("name", "make", "wanted", "words"),
    [
        pytest.param("zeros", "torch.zeros_like(normed)", 0, ": OK", marks=pytest.mark.more),
        ("zeroed", "torch.empty_like(normed).zero_()", 0, ": OK"),
        ("no_ctas", NO_CTAS, 0, ": OK"),
        ("empty", "torch.empty_like(normed)", 11, UNWRITTEN),
        ("empty_view", "torch.empty(normed.shape).view(x.shape)", 11, UNWRITTEN),
    ],
)
def test_memory_that_torch_has_written_may_be_read_and_no_other(rooflab, tmp_path, name, make, wanted, words):
    """By a kernel with scalars of 16 bits, and with an integer for a float."""
    file = other_file(tmp_path, f"adds_{name}", ADDS.replace("MAKE", make))
    status, out, _ = rooflab("emulate", "--kernel", file, *CASE)
    assert status == wanted and words in " ".join(out.split()), out


CHOSEN = [
    KernelCase(op, "fused", registry.get_op(op).get_cases("smoke")[0], get_scheme("fp32"))
    for op in ("silu_and_mul", "rope")
]


@pytest.fixture
def kept_outputs(tmp_path):
    golden.write(tmp_path, torch.device("cpu"), CHOSEN)
    return tmp_path


def test_what_was_kept_is_reproduced_and_an_output_that_differs_is_named(kept_outputs):
    found = golden.compare(kept_outputs)
    assert all(item.passed and 0 < item.equal <= item.elements for item in found) and len(found) == 2
    file = kept_outputs / "silu_and_mul-fused-fp32.pt"
    kept = torch.load(file)
    kept[0].view(torch.int32).view(-1)[3] ^= 1 << 30
    torch.save(kept, file)
    right, wrong = sorted(golden.compare(kept_outputs), key=lambda item: item.target)
    assert right.passed and not wrong.passed and "1 of" in wrong.reason


def test_what_has_a_file_is_not_run_again_and_keeps_its_commit(kept_outputs):
    index = kept_outputs / "golden.json"
    kept = json.loads(index.read_text())
    for about in kept["kernels"].values():
        about["commit"] = "an older one"
    index.write_text(json.dumps(kept))
    (kept_outputs / "silu_and_mul-fused-fp32.pt").unlink()
    names = golden.write(kept_outputs, torch.device("cpu"), CHOSEN)
    after = json.loads(index.read_text())["kernels"]
    assert names == ["silu_and_mul-fused-fp32", "rope-fused-fp32"]
    assert [after[name]["commit"] == "an older one" for name in names] == [False, True]


def test_a_folder_without_an_index_is_refused(tmp_path):
    with pytest.raises(ValueError, match="golden: expected a folder"):
        golden.compare(tmp_path)
