// Products of 64 rows by WGMMA_N columns by wgmma (PTX ISA 8.7, `wgmma.mma_async`), summed in fp32.
//
// A source defines three macros before it includes this file:
//   WGMMA_N       8, 16, 32, 64, 128 or 256
//   WGMMA_TYPES   K of an instruction and the types of a and b: "k16.f32.bf16.bf16"
//   WGMMA_LAYOUT  the operands that are contiguous along M or N, not K: ", 0, 1" means b; "" for types
//                 whose opcode has no such flags
// An instruction's text names each register of the sums, and the outputs of an asm have no loop: macros write both.
#pragma once

#define WGMMA_TEN(t) \
    "%" #t "0, %" #t "1, %" #t "2, %" #t "3, %" #t "4, %" #t "5, %" #t "6, %" #t "7, %" #t "8, %" #t "9, "
#define WGMMA_SIXTY WGMMA_TEN() WGMMA_TEN(1) WGMMA_TEN(2) WGMMA_TEN(3) WGMMA_TEN(4) WGMMA_TEN(5)
#define WGMMA_SUMS_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WGMMA_SUMS_16(i) WGMMA_SUMS_4(i), WGMMA_SUMS_4(i + 4), WGMMA_SUMS_4(i + 8), WGMMA_SUMS_4(i + 12)
#define WGMMA_SUMS_32(i) WGMMA_SUMS_16(i), WGMMA_SUMS_16(i + 16)

// The registers of the sums in the text and as outputs, and after them the numbers of a, b and `keeps`.
#if WGMMA_N == 8
#define WGMMA_REGISTERS "%0, %1, %2, %3"
#define WGMMA_SUMS WGMMA_SUMS_4(0)
#define WGMMA_OPERANDS "%4, %5"
#define WGMMA_KEEPS "%6"
#elif WGMMA_N == 16
#define WGMMA_REGISTERS "%0, %1, %2, %3, %4, %5, %6, %7"
#define WGMMA_SUMS WGMMA_SUMS_4(0), WGMMA_SUMS_4(4)
#define WGMMA_OPERANDS "%8, %9"
#define WGMMA_KEEPS "%10"
#elif WGMMA_N == 32
#define WGMMA_REGISTERS WGMMA_TEN() "%10, %11, %12, %13, %14, %15"
#define WGMMA_SUMS WGMMA_SUMS_16(0)
#define WGMMA_OPERANDS "%16, %17"
#define WGMMA_KEEPS "%18"
#elif WGMMA_N == 64
#define WGMMA_REGISTERS WGMMA_TEN() WGMMA_TEN(1) WGMMA_TEN(2) "%30, %31"
#define WGMMA_SUMS WGMMA_SUMS_32(0)
#define WGMMA_OPERANDS "%32, %33"
#define WGMMA_KEEPS "%34"
#elif WGMMA_N == 128
#define WGMMA_REGISTERS WGMMA_SIXTY "%60, %61, %62, %63"
#define WGMMA_SUMS WGMMA_SUMS_32(0), WGMMA_SUMS_32(32)
#define WGMMA_OPERANDS "%64, %65"
#define WGMMA_KEEPS "%66"
#elif WGMMA_N == 256
#define WGMMA_REGISTERS \
    WGMMA_SIXTY WGMMA_TEN(6) WGMMA_TEN(7) WGMMA_TEN(8) WGMMA_TEN(9) WGMMA_TEN(10) WGMMA_TEN(11) \
    "%120, %121, %122, %123, %124, %125, %126, %127"
#define WGMMA_SUMS WGMMA_SUMS_32(0), WGMMA_SUMS_32(32), WGMMA_SUMS_32(64), WGMMA_SUMS_32(96)
#define WGMMA_OPERANDS "%128, %129"
#define WGMMA_KEEPS "%130"
#else
#error "WGMMA_N: expected 8, 16, 32, 64, 128 or 256"
#endif

// Starts d = a b, or d += a b where `keeps` is not 0; a and b are descriptors of tiles in shared memory.
__device__ __forceinline__ void multiply(float (&d)[WGMMA_N / 2], u64 a, u64 b, int keeps) {
#define WGMMA_TEXT(n) "wgmma.mma_async.sync.aligned.m64n" #n
#define WGMMA_OPCODE(n) WGMMA_TEXT(n)
    asm volatile("{.reg .pred p; setp.ne.s32 p, " WGMMA_KEEPS ", 0; " WGMMA_OPCODE(WGMMA_N) WGMMA_TYPES
                 " {" WGMMA_REGISTERS "}, " WGMMA_OPERANDS ", p, 1, 1" WGMMA_LAYOUT ";}"
                 : WGMMA_SUMS : "l"(a), "l"(b), "r"(keeps));
}

// Waits for all products of this warpgroup, which write d.
__device__ __forceinline__ void settle(float (&d)[WGMMA_N / 2]) {
    asm volatile("wgmma.wait_group.sync.aligned 0;" : WGMMA_SUMS :: "memory");
}
