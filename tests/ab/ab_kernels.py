"""Kernels of rmsnorm for the tests of the A/B: one is right, and each of the others is wrong in a different way."""

import os
import time

import torch

from rooflab.kernels.registry import register

calls = 0
checked = False


def right(x, weight, eps):
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)


@register(op="rmsnorm", name="honest", role="optimized", backend="torch")
def honest(x, weight, eps=1e-6):
    print("what a kernel prints must not end up among the answers")
    return right(x, weight, eps)


@register(op="rmsnorm", name="wrong", role="optimized", backend="torch")
def wrong(x, weight, eps=1e-6):
    return right(x, weight, eps) * 1.05


@register(op="rmsnorm", name="dies", role="optimized", backend="torch")
def dies(x, weight, eps=1e-6):
    os._exit(7)


@register(op="rmsnorm", name="dies_later", role="optimized", backend="torch")
def dies_later(x, weight, eps=1e-6):
    """Right where it is checked, on the op's small case first; ends the process that times it on this one alone."""
    global checked
    checked |= x.shape[-1] != 32
    if not checked:
        os._exit(7)
    return right(x, weight, eps)


@register(op="rmsnorm", name="hangs", role="optimized", backend="torch")
def hangs(x, weight, eps=1e-6):
    time.sleep(3600)


def why_not_taken(inputs):
    return None if inputs.x.shape[0] == 9 else "takes 9 rows"


@register(op="rmsnorm", name="picky", role="optimized", backend="torch", unsupported=why_not_taken)
def picky(x, weight, eps=1e-6):
    return right(x, weight, eps)


@register(op="rmsnorm", name="wrong_later", role="optimized", backend="torch")
def wrong_later(x, weight, eps=1e-6):
    """Right while it is checked, and wrong once it is timed."""
    global calls
    calls += 1
    return right(x, weight, eps) * (1.0 if calls < 6 else 1.05)
