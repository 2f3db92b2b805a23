"""Shared-memory layouts that Gluon's tensor maps name.  To make one takes 9 us on the host, so each is made once."""

from __future__ import annotations

from functools import cache

from triton.experimental.gluon import language as gl

HEADS = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
"""Of 64 columns of 16 bits in four dimensions, as attention loads them."""
PAGES = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=5)
"""The same in five dimensions, as attention loads pages."""


@cache
def layout_of(box: tuple[int, ...], kind: gl.dtype) -> gl.NVMMASharedLayout:
    """The widest swizzle that a box of this shape and dtype takes."""
    return gl.NVMMASharedLayout.get_default_for(list(box), kind)
