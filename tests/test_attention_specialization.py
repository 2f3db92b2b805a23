"""Attention's Triton kernels are not compiled anew where a batch's size, its table's width or its splits change."""

from __future__ import annotations

import os
import subprocess
import sys

KERNELS = """
from rooflab.kernels.merge_attention_states.fused import fused_kernel
from rooflab.kernels.mla_decode.split_kv import split_kv_kernel
from rooflab.kernels.paged_attention._chunked_device import chunked_kernel
from rooflab.kernels.paged_attention._pages_consume import pages_kernel
from rooflab.kernels.paged_attention.gqa_packed import gqa_packed_kernel
for kernel in (gqa_packed_kernel, chunked_kernel, pages_kernel, split_kv_kernel, fused_kernel):
    print(kernel.fn.__name__, *(param.name for param in kernel.params if param.do_not_specialize))
"""


def test_what_changes_from_batch_to_batch_is_not_specialized():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", KERNELS], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "gqa_packed_kernel table_stride",
        "chunked_kernel B tiles window table_stride",
        "pages_kernel B tiles window table_stride",
        "split_kv_kernel splits table_stride lse_stride_p",
        "fused_kernel parts T lses_stride_p",
    ]
