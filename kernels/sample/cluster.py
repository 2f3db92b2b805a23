"""Over bisect: a row lies in the shared memory of a cluster, so it is read from memory once, at any batch.

A search narrows the bracket of a cut with seven thresholds per pass: by interpolation, and after four passes by halving
keys, which always ends.  After two passes over the row each warp holds its tokens of the bracket, and the next passes
read these alone; when they are few, every CTA gets them all and finds the cut exactly.  Sums meet in a warp, a CTA and
a cluster in a fixed order, so two runs agree bit for bit.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rooflab.kernels import _cuda
from rooflab.kernels._tma import address_of
from rooflab.kernels.launcher import kernel
from rooflab.kernels.sample._args import Edit, traffic
from rooflab.kernels.sample._configs import CLUSTER, MAX_CLUSTER, OWN_BYTES, ClusterConfig, share_of
from rooflab.kernels.tuning import SHARED_BYTES_PER_CTA

PARTS = ("_cluster_sums.cu", "_cluster_cut.cu", "cluster.cu")
SOURCE = "\n".join((Path(__file__).parent / part).read_text() for part in PARTS)
MAX_TOP_N = 32
MOST_TOKENS = (SHARED_BYTES_PER_CTA - OWN_BYTES) // 4 // 32 * 32 * MAX_CLUSTER
"""What the shared memory of a cluster holds."""
ELEMENTS = {torch.float32: 4, torch.bfloat16: 2, torch.float16: 1}


def load_bytes(logits: torch.Tensor) -> int:
    """The largest power of two, at most 16, that divides the address of every row."""
    stride = logits.stride(0) if logits.shape[0] > 1 else 0
    bits = 16 | address_of(logits) | stride * logits.element_size()
    return bits & -bits


@kernel(
    backend="cuda", min_sm=90, devices=("cuda",), requires=("cupy",), traffic=traffic,
    limits={"V": MOST_TOKENS, "top_n": MAX_TOP_N}, instead="sample/bisect",
    tuning=CLUSTER,
)  # fmt: skip
def cluster(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seed: Tensor, position: Tensor,
    tokens: Tensor, logprob_ids: Tensor | None, logprobs: Tensor | None, *,
    top_n: int | None, config: ClusterConfig,
    repetition_penalty: Edit, presence_penalty: Edit, frequency_penalty: Edit, edit_offsets: Edit, edit_ids: Edit,
    edit_counts: Edit, edit_bias: Edit, allowed: Edit,
) -> None:  # fmt: skip
    """One launch that reads each logit once, with log-probabilities of up to 32 tokens."""
    B, V = logits.shape
    share = share_of(V, config.cluster)
    edits = repetition_penalty, presence_penalty, frequency_penalty, edit_offsets, edit_ids, edit_counts, edit_bias
    sizes = {
        "CLUSTER": config.cluster,
        "THREADS": config.threads,
        "ELEMENT": ELEMENTS[logits.dtype],
        "BYTES": load_bytes(logits),
        "EDITS": int(any(edit is not None for edit in (*edits, allowed))),
        "TOP_N": -1 if top_n is None else top_n,
    }
    device_kernel = _cuda.load(SOURCE, "sample", options=tuple(f"-D{name}={value}" for name, value in sizes.items()))
    device_kernel(
        (B * config.cluster,), (config.threads,), logits, temperature, top_k, top_p, min_p, seed, position, *edits,
        allowed, tokens, logprob_ids, logprobs, np.int32(V), np.int32(share),
        np.int64(logits.stride(0) if B > 1 else 0), shared_bytes=4 * share,
    )  # fmt: skip
