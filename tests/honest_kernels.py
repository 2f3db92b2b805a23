"""Honest kernels that keep something between calls, or look otherwise like a cheat, made anew by a factory each."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from cheating_kernels import project
from tiny_ops import PROJECT, kernel
from torch.utils.weak import WeakIdKeyDictionary

from rooflab.kernels.registry import Kernel

HONEST: dict[str, Callable[[], Kernel]] = {}


def honest(make: Callable[[], Callable[..., Any]]) -> Callable[[], Callable[..., Any]]:
    """Adds what the decorated factory makes to those that must pass."""
    HONEST[make.__name__] = lambda: kernel(PROJECT, make())
    return make


@honest
def compiles_once():
    """Keeps a compiled kernel for each shape; `compile` stands for any compiler."""
    compiled: dict[Any, Any] = {}

    def launcher(x, weight, out=None):
        if x.shape not in compiled:
            torch.ones(8).cumsum(0).sort()  # an autotuner's trial
            compiled[x.shape] = eval(compile("lambda x, w: (x.double() @ w.double()).to(x.dtype)", "generated", "eval"))
        y = compiled[x.shape](x, weight)
        return y if out is None else out.copy_(y)

    return launcher


@honest
def packs_a_weight_once():
    """Keeps a packed weight for as long as the weight is there."""
    packed = WeakIdKeyDictionary()

    def launcher(x, weight):
        if weight not in packed:
            packed[weight] = weight.double().mT.contiguous()
        return (x.double() @ packed[weight].mT).to(x.dtype)

    return launcher


@honest
def keeps_a_workspace():
    """Keeps memory between calls, and an output of its own for none."""
    workspace: dict[Any, torch.Tensor] = {}

    def launcher(x, weight):
        shape = (x.shape[0], weight.shape[1])
        scratch = workspace.setdefault(shape, torch.empty(shape, dtype=torch.float64))
        return torch.mm(x.double(), weight.double(), out=scratch).to(x.dtype)

    return launcher


@honest
def works_in_a_pool():
    """Splits rows over threads, and waits for them; their workers stay."""
    pool = ThreadPoolExecutor(2)

    def launcher(x, weight):
        y = torch.empty(x.shape[0], weight.shape[1], dtype=x.dtype)
        list(pool.map(lambda row: y[row].copy_(project(x[row : row + 1], weight)[0]), range(x.shape[0])))
        return y

    return launcher


@honest
def goes_by_the_data():
    """Another path for other values, as an early exit takes."""

    def launcher(x, weight):
        if x.sum() > 0:
            return project(x, weight)
        return torch.einsum("tk,kn->tn", x.double(), weight.double()).to(x.dtype)

    return launcher


@honest
def takes_another_path_into_out():
    def launcher(x, weight, out=None):
        return x @ weight if out is None else torch.addmm(torch.zeros_like(out), x, weight, out=out)

    return launcher


@honest
def is_torchs_own():
    return lambda x, weight, out=None: torch.mm(x, weight, out=out)
