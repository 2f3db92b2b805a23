"""Kernels that are wrong on purpose, each in one way that any kernel can be, and right ones beside them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch
from tiny_ops import LENIENT, PROJECT, SCALE, right, wrong

Tensor = torch.Tensor
LATE_S = 0.05


def _exact(x: Tensor, weight: Tensor) -> Tensor:
    return (x.double() @ weight.double()).to(x.dtype)


def _later(write: Callable[[], object]) -> None:
    def work() -> None:
        time.sleep(LATE_S)
        write()

    threading.Thread(target=work).start()


@right(PROJECT)
def plain(x, weight):
    return x @ weight


@right(PROJECT)
def into_out(x, weight, out=None):
    out = torch.empty(x.shape[0], weight.shape[1], dtype=x.dtype, device=x.device) if out is None else out
    return out.copy_(_exact(x, weight))


@right(PROJECT)
def refuses_padding(x, weight):
    for name, tensor in (("weight", weight), ("x", x)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: expected a contiguous tensor, got strides {tensor.stride()}")
    return _exact(x, weight)


@right(PROJECT, prepare=lambda weight: (weight.mT.contiguous(),))
def packed(x, weight):
    return _exact(x, weight[0].mT)


@right(PROJECT, nondeterministic="adds in whatever order the threads arrive")
def declared_nondeterministic(x, weight):
    order = torch.randperm(x.shape[1])
    return x[:, order] @ weight[order]


@wrong(PROJECT, "planted last k")
def drops_a_small_last_k(x, weight):
    last = x[:, -1:].double() @ weight[-1:].double()
    return (x.double() @ weight.double() - torch.where(x[:, -1:].abs() > 16, last, 0)).to(x.dtype)


@wrong(PROJECT, "first data: y: 1 of 35")
def one_nan(x, weight):
    y = _exact(x, weight)
    y[2, 3] = torch.nan
    return y


@wrong(PROJECT, "first data: y: 35 of 35")
def zeros(x, weight):
    return torch.zeros(x.shape[0], weight.shape[1], dtype=x.dtype)


@wrong(PROJECT, "first data: y: 35 of 35")
def writes_nothing(x, weight):
    return torch.empty(x.shape[0], weight.shape[1], dtype=x.dtype)


@wrong(PROJECT, "first data: y: 7 of 35")
def leaves_the_last_row(x, weight):
    y = torch.empty(x.shape[0], weight.shape[1], dtype=x.dtype)
    y[:-1] = _exact(x, weight)[:-1]
    return y


@wrong(PROJECT, "first data again, into out: y: 35 of 35")
def leaves_out_as_it_was(x, weight, out=None):
    return _exact(x, weight) if out is None else out


@wrong(PROJECT, "expected the tensor given as out")
def ignores_out(x, weight, out=None):
    return _exact(x, weight)


@wrong(PROJECT, "into out")
def ignores_the_strides_of_out(x, weight, out=None):
    y = _exact(x, weight)
    return y if out is None else (out.as_strided(y.shape, y.stride(), out.storage_offset()).copy_(y), out)[1]


@wrong(PROJECT, "x: was changed")
def scales_its_input(x, weight):
    y = _exact(x, weight)
    x.mul_(1.0000001)
    return y


@wrong(PROJECT, "first data: y:")
def computes_in_bf16(x, weight):
    return (x.bfloat16() @ weight.bfloat16()).to(x.dtype)


@wrong(PROJECT, "first data: y:")
def accumulates_in_fp16(x, weight):
    y = torch.zeros(x.shape[0], weight.shape[1], dtype=torch.float16)
    for k in range(x.shape[1]):
        y += (x[:, k : k + 1].double() @ weight[k : k + 1].double()).half()
    return y.to(x.dtype)


@wrong(PROJECT, "first data: y: a thread that finishes later")
def still_writing_in_another_thread(x, weight):
    y = torch.empty(x.shape[0], weight.shape[1], dtype=x.dtype)
    answer = _exact(x, weight)
    _later(lambda: y.copy_(answer))
    return y


def one_answer() -> Callable[..., Tensor]:
    """A kernel that computes its first call only."""
    answers: list[Tensor] = []

    def cached_answer(x, weight):
        answers.append(_exact(x, weight))
        return answers[0].clone()

    return cached_answer


def one_buffer() -> Callable[..., Tensor]:
    """A kernel that returns the same memory every time."""
    buffers: list[Tensor] = []

    def shared_buffer(x, weight):
        buffers.append(_exact(x, weight))
        return buffers[0].copy_(buffers[-1])

    return shared_buffer


@wrong(PROJECT, "x: memory outside it was written")
def clears_after_its_input(x, weight):
    y = _exact(x, weight)
    x.as_strided((1,), (1,), x.storage_offset() + x.numel()).zero_()
    return y


@wrong(PROJECT, "first data: y: 35 of 35")
def reads_past_its_input(x, weight):
    longer = x.as_strided((x.shape[0], x.shape[1] + 1), x.stride(), x.storage_offset())
    return longer[:, 1:] @ weight + 0 * longer.as_strided((1,), (1,), x.storage_offset() + x.numel())


@wrong(PROJECT, "out (y): memory outside it was written")
def writes_one_row_more(x, weight, out=None):
    y = _exact(x, weight)
    if out is None:
        return y
    longer = out.as_strided((out.shape[0] + 1, out.shape[1]), out.stride(), out.storage_offset())
    longer.copy_(torch.cat([y, y[:1]]))
    return out


@wrong(PROJECT, "expected shape (5, 7), got (7, 5)")
def wrong_shape(x, weight):
    return _exact(x, weight).mT


@wrong(PROJECT, "expected dtype torch.float32, got torch.float64")
def wrong_dtype(x, weight):
    return x.double() @ weight.double()


@wrong(PROJECT, "expected device cpu, got meta")
def wrong_device(x, weight):
    return _exact(x, weight).to("meta")


@wrong(PROJECT, "returned NoneType")
def returns_nothing(x, weight):
    _exact(x, weight)


@wrong(PROJECT, "returned 2 values")
def returns_too_much(x, weight):
    return _exact(x, weight), x


@wrong(SCALE, "shares memory with the input x")
def returns_its_input(x, factor=1.0):
    return x if factor == 1.0 else x * factor


@wrong(PROJECT, "two runs on the same inputs differ")
def random_order(x, weight):
    order = torch.randperm(x.shape[1])
    return x[:, order] @ weight[order]


@wrong(PROJECT, "other data, padded")
def assumes_contiguous_inputs(x, weight):
    return _exact(x.as_strided(x.shape, (x.shape[1], 1), x.storage_offset()), weight)


@wrong(PROJECT, "other data, padded x:")
def checks_one_argument_only(x, weight):
    if not weight.is_contiguous():
        raise ValueError("weight: expected a contiguous tensor, got another")
    return _exact(x.as_strided(x.shape, (x.shape[1], 1), x.storage_offset()), weight)


@wrong(PROJECT, "prepare: weight was changed", prepare=lambda weight: weight.mul_(2).div(2))
def prepare_changes_the_weight(x, weight):
    return _exact(x, weight)


@wrong(PROJECT, "first data: y:", prepare=lambda weight: weight.bfloat16())
def prepare_loses_bits(x, weight):
    return _exact(x, weight.to(x.dtype))


@wrong(LENIENT, "35 elements not finite where the oracle is")
def infinite(x, weight):
    return torch.full((x.shape[0], weight.shape[1]), torch.inf)
