"""Tensors pass between processes with their strides, alignment and bits; a fork serves like any other child."""

import os

import pytest
import torch
from test_child_processes import assert_gone

from rooflab.bench.processes.child import Died
from rooflab.bench.processes.forked import Forked
from rooflab.bench.processes.shared import Reader, Writer

CPU = torch.device("cpu")
X = torch.arange(24.0).reshape(4, 6)


def test_a_tensor_keeps_strides_alignment_and_bits(tmp_path):
    writer, reader = Writer(str(tmp_path)), Reader()
    given = (X, X.mT, X[:, 1:4], X[0, 1], X[:1].expand(3, 6), X[:0], X[1:].to(torch.float8_e4m3fn), X > 3)
    value = {"inputs": dict(zip("abcdefgh", given, strict=True)), "rest": [1, 2.5, None, "text", True]}
    for _ in range(2):  # the second time in the same file
        found = reader.read(writer.write(value), CPU)
        assert found["rest"] == (1, 2.5, None, "text", True)
        for one, other in zip(given, found["inputs"].values(), strict=True):
            assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
            assert not one.numel() or one.data_ptr() % 64 == other.data_ptr() % 64
            assert torch.equal(one.float(), other.float())
    large = torch.ones(10**5)
    assert torch.equal(reader.read(writer.write((large,)), CPU)[0], large) and len(list(tmp_path.iterdir())) == 1


def test_what_is_read_is_a_copy(tmp_path):
    writer = Writer(str(tmp_path))
    message = writer.write((X,))
    (first,) = Reader().read(message, CPU)
    first.zero_()
    assert torch.equal(Reader().read(message, CPU)[0], X)


def test_a_fork_answers_and_says_how_it_ended():
    def answer(request):
        if request == "end":
            print("last words", file=os.fdopen(2, "w", closefd=False))
            os._exit(7)
        return [request, os.getpid(), sorted(os.listdir("/proc/self/fd"))[:4]]

    with Forked(answer) as child:
        request, pid, files = child.ask("who", 10.0)
        assert request == "who" and pid != os.getpid() and files == ["0", "1", "2", "3"]
        with pytest.raises(Died, match="status 7: last words"):
            child.ask("end", 10.0)
    assert_gone(pid)
