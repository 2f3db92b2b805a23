"""The modifiers that opcodes are known with: one that is not among them would change what an instruction does.

From the syntax lines of PTX ISA 8.7, section 9.7, of what sm_90a has; one vocabulary for all families.
"""

from __future__ import annotations

import re

_WORDS = frozenset(
    # types
    "pred b1 b8 u8 s8 b16 u16 s16 f16 bf16 f16x2 bf16x2 u16x2 s16x2 b32 u32 s32 f32 tf32 b64 u64 s64 f64 b128 b1024"
    " e4m3 e5m2 e4m3x2 e5m2x2 u2 s2 u4 s4"
    # roundings, and what becomes of values that do not fit
    " rn rz rm rp rna rni rzi rmi rpi ftz noftz sat satfinite relu approx full NaN xorsign abs"
    # parts of products and carries
    " lo hi wide cc"
    # comparisons and logic
    " eq ne lt le gt ge ls hs equ neu ltu leu gtu geu num nan and or xor popc finite infinite number notanumber"
    " normal subnormal"
    # shifts and permutations
    " l r wrap clamp f4e b4e rc8 ecl ecr rc16 shiftamt idx up down bfly any all uni ballot"
    # spaces and addresses
    " global shared local param const entry func to"
    # orders and scopes
    " volatile relaxed acquire release acq_rel sc weak mmio cta cluster gpu gl sys"
    # caches
    " ca cg cs cv lu wb wt nc cache_hint no_allocate evict_first evict_last evict_normal evict_unchanged L1 L2 level"
    " fractional"
    # atomics
    " add min max inc dec exch cas"
    # barriers
    " sync aligned arrive red warp wait init inval arrive_drop expect_tx complete_tx try_wait test_wait parity"
    " noComplete mbarrier mbarrier_init noinc"
    # copies and fences
    " async bulk tensor commit_group wait_group wait_all read bulk_group bytes multicast tile prefetch reduce proxy"
    " alias tensormap generic cp_fenceproxy replace launch_dependents mask"
    " global_address rank box_dim global_dim global_stride element_stride elemtype interleave_layout swizzle_mode"
    " fill_mode"
    # matrices
    " mma_async fence row col trans"
    # conversions
    " pack"
    # driver's calls
    " vprintf __assertfail __cuda_assertfail".split()
)
_PATTERNS = re.compile(r"m\d+n\d+(?:k\d+)?|[1-5]d|x[124]|v[248]|(?:L2::)?(?:64|128|256)B")


def unknown(parts: list[str]) -> str | None:
    """The first part of an opcode, its family left out, that is not known."""
    for part in parts[1:]:
        for word in part.split("::"):
            if word not in _WORDS and not _PATTERNS.fullmatch(word):
                return part
    return None
