"""The kernel `native`, for the CPU: C++ finds the largest logits if all rows are greedy and no logits are edited.
Otherwise the kernel `prefilter` does all the work.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rooflab.kernels._native import DTYPE_CODES, built, sizes
from rooflab.kernels.launcher import kernel
from rooflab.kernels.sample._args import EditTensor, check_rows, edited_rows
from rooflab.kernels.sample.prefilter import draw_rows, fill_logprobs
from rooflab.reference.sample import SPEC
from rooflab.reference.sample_rules import Edits
from rooflab.reference.spec import Arguments

SOURCE = Path(__file__).with_suffix(".cpp")


def shape(of: Arguments) -> Any:
    """Returns the numbers that the C++ function gets: sizes, the stride of rows and the number of threads."""
    return sizes(*of.logits.shape, of.logits.stride(0), torch.get_num_threads())


@kernel(
    backend="cpp",
    devices=("cpu",),
    traffic=SPEC.least,
    bind=shape,
    over="prefilter",
    holds={"logits[1] == 1 or V <= 1": "stride 1 along V"},
    shows={
        "B=2,V=300,temperature=0.0,top_k=0,top_p=1.0,min_p=0.0": (
            '"argmax" in calls("prefilter").names and "argmax" not in calls("native").names'
        )
    },
)
def native(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
    tokens: Tensor,
    logprob_ids: Tensor | None,
    logprobs: Tensor | None,
    *,
    top_n: int | None,
    bound: Any,
    **edits: EditTensor,
) -> None:
    """Draws tokens as the kernel `prefilter` does.  Raises `ValueError` on a row without a finite largest logit."""
    logit_edits = Edits(**edits)
    if logit_edits.tensors or any(temperature.tolist()):
        draw_rows(edited_rows(logits, logit_edits), (temperature, top_k, top_p, min_p), seed, position, tokens)
    elif built(SOURCE, "ippp")(DTYPE_CODES[logits.dtype], logits.data_ptr(), tokens.data_ptr(), bound):
        check_rows(logits.float().amax(1))
    if logprob_ids is not None and logprobs is not None:
        fill_logprobs(logits, tokens, logprob_ids, logprobs)
