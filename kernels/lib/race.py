"""Computes the log of an exponential random number E, for a race that draws tokens.  Each token has its own E.  The
token with the largest `log(weight) - log(E)` wins.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def log_exponential(word):
    """Computes `log(-log1p(-u))` for a random u in (0, 1) that the random integer `word` gives.

    For a small u, `1 - u` would lose digits.  So `u < 1/4` takes the series of `2 * atanh(u / (2 - u))`, whose first
    omitted term is below `2**-29` of the value.  On sm_90, tl.log is exact to an ulp: it is libdevice's polynomial, not
    lg2.approx (read in the PTX)."""
    u = tl.minimum(word.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10, 0.999999940395355224609375)
    z = u / (2.0 - u)
    z_squared = z * z
    series_sum = 1.0 / 9.0
    series_sum = series_sum * z_squared + 1.0 / 7.0
    series_sum = series_sum * z_squared + 1.0 / 5.0
    series_sum = series_sum * z_squared + 1.0 / 3.0
    series_value = 2.0 * z + 2.0 * z * z_squared * series_sum
    return tl.log(tl.where(u < 0.25, series_value, -tl.log(1.0 - u)))
