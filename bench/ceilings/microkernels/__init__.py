"""Microkernels in CUDA C++ that each keep one part of a GPU busy, to find what it can reach.

`memory` streams through HBM and L2, `arithmetic` keeps the fp32 pipe and the special-function unit busy, `wgmma` and
`mma_sync` the tensor cores; those of `floors` do nothing, or wait for memory.  Each checks its own result, so that work
which a compiler left out is found.  None includes a header, so that they compile wherever NVRTC is.
"""
