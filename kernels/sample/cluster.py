"""The kernel `cluster` improves on `bisect`.  The shared memory of a cluster holds a row, so HBM is read once.

A search finds the least logit that top-k or top-p keeps.  Each pass compares the tokens with seven thresholds, which
narrow an interval of logits.  From the fifth pass on, they cut it into eight equal parts, so the search always ends.
When few tokens are in the interval, each warp lists them, and later passes read only this list.  Sums are added in a
fixed order, so two runs agree bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from torch import Tensor

from rooflab.kernels import _cuda
from rooflab.kernels._device import HOPPER_SMS
from rooflab.kernels._sizes import cdiv
from rooflab.kernels._tma import address_of
from rooflab.kernels.launcher import kernel
from rooflab.kernels.sample._args import EditTensor
from rooflab.kernels.tuning import BF16, Footprint, Tuning, space
from rooflab.reference.sample import SPEC
from rooflab.reference.sample_rules import Edits
from rooflab.reference.spec import Case, Scheme
from rooflab.roofline.occupancy import HOPPER

SOURCE = Path(__file__).with_suffix(".cu").read_text()
THREADS = 512
SMALL_CTA_THREADS = 128
"""The number of threads for a part of at most `SMALL_PART_TOKENS` tokens, so that fewer sums are added."""
SMALL_PART_TOKENS = 2048
STATIC_SHARED_BYTES = 12 * 1024
"""The bytes of static shared memory, for sums and for the tokens at the end of a search."""
MAX_CLUSTER_CTAS = 8
TARGET_CTA_TOKENS = 16 * 1024
"""The number of tokens of a CTA at which two CTAs share an SM; 64 registers per thread allow this.  The SM then loads
one row while it searches another."""
MAX_TOP_N = 32
EDIT_NAMES = tuple(each.name for each in fields(Edits))
"""The names of the edits, in the order of the kernel's arguments."""
MAX_TOKENS = (HOPPER.shared_bytes_per_cta - STATIC_SHARED_BYTES) // 4 // 32 * 32 * MAX_CLUSTER_CTAS
"""The most tokens that the shared memory of a cluster holds."""


@dataclass(frozen=True)
class ClusterConfig:
    """Holds the number of CTAs of a row, and the number of threads of a CTA."""

    cluster: int
    """The number of CTAs that share a row."""
    threads: int
    """The number of threads of a CTA."""


def share_of(V: int, cluster: int) -> int:
    """Returns the number of tokens per CTA.  It is a multiple of 32, for whole vectors, Philox calls and mask words."""
    return int(cdiv(V, 32 * cluster)) * 32


def footprint(config: ClusterConfig, case: Case, scheme: Scheme = BF16) -> Footprint:
    """Returns the resources of a CTA.  Shared memory holds its part of a row.  A thread has 40 registers, for
    thresholds, their sums, and four vectors of the row."""
    shared_bytes = 4 * share_of(int(case["V"]), config.cluster) + STATIC_SHARED_BYTES
    return Footprint(config.threads, 40, shared_bytes, int(case["B"]) * config.cluster)


def few_ctas(case: Case, scheme: Scheme = BF16) -> ClusterConfig:
    """Returns the default: the smallest cluster with which two CTAs fit on an SM, or a larger one if SMs are idle."""
    B, V = int(case["B"]), int(case["V"])
    cluster = 1
    while cluster < MAX_CLUSTER_CTAS and (
        share_of(V, cluster) > TARGET_CTA_TOKENS or (B * cluster < HOPPER_SMS and share_of(V, cluster) > 4 * THREADS)
    ):
        cluster *= 2
    return ClusterConfig(cluster, SMALL_CTA_THREADS if share_of(V, cluster) <= SMALL_PART_TOKENS else THREADS)


CONFIGS = space(ClusterConfig, cluster=(1, 2, 4, 8), threads=(128, 256, 512))
TUNING = Tuning(ClusterConfig, CONFIGS, few_ctas, footprint)
"""The tuning; a config is legal if its shared memory holds the row."""


@kernel(
    backend="cuda",
    min_sm=90,
    devices=("cuda",),
    requires=("cupy",),
    traffic=SPEC.least,
    limits={"V": MAX_TOKENS, "top_n": MAX_TOP_N},
    tuning=TUNING,
    over="bisect",
    shows={
        "": (
            "launched == 1 and STG_E_64 == global_store == 1 and stack_bytes == 0; "
            "grid[0] >= 4 * 16 and UCGABAR_ARV > 0; "
            "LDG__128 == 4 and all(loop.shared_store for loop in loops if loop.LDG)"
        )
    },
)
def cluster(
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
    config: ClusterConfig,
    **edits: EditTensor,
) -> None:
    """Draws tokens in one launch, which reads each logit once.  Also computes log-probabilities of up to 32 tokens."""
    B, V = logits.shape
    cta_tokens = share_of(V, config.cluster)
    values = [edits[name] for name in EDIT_NAMES]
    stride = logits.stride(0) if B > 1 else 0
    align_bits = 16 | address_of(logits) | stride * logits.element_size()  # its lowest bit divides every row's address
    compile_options = _cuda.macros(
        CLUSTER=config.cluster,
        THREADS=config.threads,
        ELEMENT=_cuda.ELEMENT_CODES[logits.dtype],
        BYTES=align_bits & -align_bits,
        EDITS=any(edit_tensor is not None for edit_tensor in values),
        TOP_N=-1 if top_n is None else top_n,
    )
    _cuda.load(SOURCE, "sample", options=compile_options)(
        (B * config.cluster,), (config.threads,), logits, temperature, top_k, top_p, min_p, seed, position, *values,
        tokens, logprob_ids, logprobs, np.int32(V), np.int32(cta_tokens), np.int64(stride), shared_bytes=4 * cta_tokens,
    )  # fmt: skip
