"""Apple's cut cross entropy: the loss of a vocabulary's logits that are never stored."""

from __future__ import annotations

from torch.nn import functional as F

from compatibility.entries import Entry, Project
from compatibility.sources import Source

SOURCE = Source("Cut Cross Entropy", "cut-cross-entropy==25.1.1", "cut_cross_entropy/")
_of = SOURCE.below("cut_cross_entropy")
ENTRIES = (
    Entry(
        "linear_cross_entropy",
        "e=37x64:bf16,c=99x64:bf16,y=37:i64<99",
        lambda e, c, y: _of("cce").cce_linear_cross_entropy(e, c, y, filter_eps=None),
        lambda e, c, y: F.cross_entropy(e @ c.T, y),
        "e,c",
        16,
    ),
)
PROJECT = Project(SOURCE, ENTRIES)
