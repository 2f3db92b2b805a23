"""A kernel in a child process: it may end its process or be wrong; and a kernel that passed is remembered."""

import runpy

import pytest
import torch
from op_kernels import own_registry  # noqa: F401

from rooflab.bench.core.check_data import CheckTask
from rooflab.bench.core.environment import Environment
from rooflab.bench.core.outside import Checkers
from rooflab.bench.suite import passed
from rooflab.kernels import registry
from rooflab.kernels.registry import Kernel, get_op
from rooflab.reference.spec import SCHEMES

CASE = get_op("rmsnorm").get_cases("smoke")[0]
KERNEL = """
import os
import torch
from rooflab.kernels.registry import register

@register(op="rmsnorm", name="mine", role="optimized", backend="torch")
def mine(x, weight, eps=1e-6):
    print('"done"')
    right = torch.nn.functional.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(x.dtype)
    return BODY
"""


@pytest.fixture
def first_of(tmp_path, own_registry):  # noqa: F811
    """The first run, without planted inputs, of a kernel that returns what a text says."""

    def first_of(body):
        (tmp_path / "mine.py").write_text(KERNEL.replace("BODY", body))
        (kernel,) = registry.load_file(tmp_path / "mine.py")
        task = CheckTask(kernel, CASE, SCHEMES["fp32"], planted=False)
        result = Checkers(torch.device("cpu"), limit_s=60.0)(task)
        return result.status, result.reason

    return first_of


SPEC = "object.__setattr__(__import__('rooflab.kernels.registry').kernels.registry.get_op('rmsnorm'), "


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "body",
    (
        "setattr(__import__('rooflab.reference.spec').reference.spec.OpSpec, 'judge', lambda *a: []) or x * 0",
        SPEC + "'tolerance', lambda inputs, oracle, scheme: (oracle[0] + torch.inf,)) or x * 0",
        SPEC + "'reference', lambda x, weight, eps=1e-6: x.double() * 0) or x * 0",
    ),
)
def test_the_judge_is_in_another_process(first_of, body):
    status, reason = first_of(body)
    assert status == "INCORRECT" and "512 of 512 elements off" in reason, reason


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("body", "words"),
    (
        ("os._exit(0)", "first data: its process ended with status 0"),
        ("exec('class Own(Exception): pass\\nraise Own(7)')", "Own: 7"),
    ),
)
def test_a_process_that_does_not_answer_is_no_success(first_of, body, words):
    status, reason = first_of(body)
    assert status == "RUNTIME_ERROR" and words in reason, reason


def launcher_in(file):
    """A launcher in a file that is written for it."""
    file.parent.mkdir()
    file.write_text("def launcher(x, weight, eps=1e-6):\n    return x\n")
    return runpy.run_path(str(file))["launcher"]


def test_code_that_has_passed_is_known_until_it_or_what_lies_beside_it_changes(tmp_path):
    file = tmp_path / "mine" / "mine.py"
    kernel = Kernel("rmsnorm", "mine", "optimized", "triton", launcher_in(file))
    known = passed.Passed(Environment.now(), tmp_path / "cache")
    assert not known.holds(kernel)
    known.keep({kernel.id: known.code(kernel)})
    assert known.holds(kernel) and passed.Passed(Environment.now(), tmp_path / "cache").holds(kernel)
    file.with_name("helper.py").write_text("BLOCK = 64\n")
    assert not known.holds(kernel)
