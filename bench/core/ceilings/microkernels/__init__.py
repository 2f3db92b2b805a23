"""Microkernels in CUDA C++.  Each keeps one part of a GPU busy, to measure the limit of that part.

`memory` streams through HBM and L2.  `arithmetic` uses the fp32 pipe and the special-function unit; `wgmma` and
`mma_sync` use the tensor cores.  `floors` holds an empty kernel and one that waits for memory.  Each one checks its
result, to find work that a compiler removed.  They include no header, so they compile wherever NVRTC is installed.
"""
