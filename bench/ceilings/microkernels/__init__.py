"""Microkernels in CUDA C++ that each keep one part of a GPU busy, to measure its limit.

`memory` streams through HBM and L2, `arithmetic` keeps the fp32 pipe and the special-function unit busy, `wgmma` and
`mma_sync` the tensor cores; `floors` are empty or wait for memory.  Each checks its own result, so that work
which a compiler left out is found.  They include no header, so that they compile wherever NVRTC is.
"""
