"""Tensors pass between processes with their strides, alignment and bits."""

import torch

from rooflab.bench.core.outside import read, written

CPU = torch.device("cpu")
X = torch.arange(24.0).reshape(4, 6)


def test_a_tensor_keeps_strides_alignment_and_bits_and_what_is_read_is_a_copy(tmp_path):
    given = (X, X.mT, X[:, 1:4], X[0, 1], X[:1].expand(3, 6), X[:0], X[1:].to(torch.float8_e4m3fn), X > 3)
    value = {"inputs": dict(zip("abcdefgh", given, strict=True)), "rest": (1, 2.5, None, "text", True, torch.bfloat16)}
    for _ in range(2):  # the second time in the same file
        path = written(value, tmp_path / "value.pt")
        found = read(path, CPU)
        assert found["rest"] == value["rest"]
        for one, other in zip(given, found["inputs"].values(), strict=True):
            assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
            assert not one.numel() or one.data_ptr() % 64 == other.data_ptr() % 64
            assert torch.equal(one.float(), other.float())
        found["inputs"]["a"].zero_()
        assert torch.equal(read(path, CPU)["inputs"]["a"], X) and len(list(tmp_path.iterdir())) == 1
