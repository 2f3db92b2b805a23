// Device code of `split_kv`: every warp streams 16 keys at a time through its own ring, and multiplies by mma.m16n8k16.
// CUDA C++, compiled per config by macros.
//
// A warp has one virtual head: a KV head, or for groups above 16 query heads a KV head with 16 of them.  The warps of a
// CTA have neighbouring virtual heads and the same keys, so together they read whole runs of a page.  No warp waits for
// another one, or with BULK only for the slowest one, a ring behind it: there the CTA has one ring, which a warp of its
// own fills.
//
// All units (16 keys each) form one sequence: by sequence of the batch, then by set of a CTA's heads, then from the first
// visible key to the last.  CTA g takes units g W / G to (g + 1) W / G of all W.

using i64 = long long;
using u16 = unsigned short;
using u8 = unsigned char;

constexpr int UNIT = 16, TILES = D / 16;
constexpr int ROWS = GROUP < 16 ? GROUP : 16, ROW_TILES = (GROUP + 15) / 16, HALVES = ROWS > 8 ? 2 : 1;
constexpr int KEY_BYTES = D * (FP8 ? 1 : 2), HEADS = WARPS / ROW_TILES;
constexpr int ROW_BYTES = KEY_BYTES * (BULK ? HEADS : 1), CHUNKS = ROW_BYTES / 16;  // what lies together in a stage
// An odd number of 16-byte chunks from key to key: the eight that ldmatrix reads at once are in different banks.
constexpr int PITCH = ROW_BYTES + (CHUNKS % 2 ? 0 : 16);
constexpr int ACROSS = CHUNKS > 4 ? 8 : 4, DOWN = 32 / ACROSS;  // lanes along a key, and keys at once
constexpr int STAGE_BYTES = 2 * UNIT * PITCH, RINGS = BULK ? 1 : WARPS, THREADS = 32 * (WARPS + BULK);
#define Q_SHARED (D > 128 && GROUP > 8)
constexpr int HEAD_SETS = H_KV * ROW_TILES / WARPS;
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;
#define INFINITE __int_as_float(0x7f800000)

__device__ __forceinline__ float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float log2_of(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Two values as one word of the queries' dtype, the first one in the low half.
__device__ __forceinline__ u32 pack(float low, float high) {
    u32 word;
#if BF16
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
#endif
    return word;
}

// Converts the two e4m3 values in the low half of `bytes`, exactly.
__device__ __forceinline__ u32 widen(u32 bytes) {
    u32 word;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(word) : "h"((u16)bytes));
#if BF16
    float low, high;
    asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}"
        : "=f"(low), "=f"(high) : "r"(word));
    word = pack(low, high);
#endif
    return word;
}

__device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if BF16
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
#endif
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Loads the operands of 16 values d for 16 keys, b[tile][half].  An fp8 matrix holds pairs, so a lane's d are the four
// from 4 (lane % 4) on; queries and output use the same order (`column`).
template <bool TRANSPOSED>
__device__ __forceinline__ void load_tile(u32 (&b)[2][2], u32 from) {
#if FP8
    u32 low, high;
    if (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                     : "=r"(low), "=r"(high) : "r"(from) : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                     : "=r"(low), "=r"(high) : "r"(from) : "memory");
    if (TRANSPOSED) {  // a word holds d and d + 1 of one key, then of the next key
        b[0][0] = widen(__byte_perm(low, 0, 0x4420)), b[0][1] = widen(__byte_perm(high, 0, 0x4420));
        b[1][0] = widen(__byte_perm(low, 0, 0x4431)), b[1][1] = widen(__byte_perm(high, 0, 0x4431));
    } else {
        b[0][0] = widen(low), b[0][1] = widen(low >> 16), b[1][0] = widen(high), b[1][1] = widen(high >> 16);
    }
#else
    if (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(b[0][0]), "=r"(b[0][1]), "=r"(b[1][0]), "=r"(b[1][1]) : "r"(from) : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(b[0][0]), "=r"(b[0][1]), "=r"(b[1][0]), "=r"(b[1][1]) : "r"(from) : "memory");
#endif
}

// Of 16 values d, the first of the pair `p` (0, 1) that a lane holds.
__device__ __forceinline__ int column(int p) {
    return FP8 ? 4 * (threadIdx.x % 4) + 2 * p : 8 * p + 2 * (threadIdx.x % 4);
}

// The number of keys that a sequence's query sees: the newest ones.
__device__ __forceinline__ int visible(int length, int window) { return max(min(length, window), 0); }
__device__ __forceinline__ int units_of(int length, int window) { return (visible(length, window) + UNIT - 1) / UNIT; }

// Cuts W units into shares for at most `ctas` CTAs, each with at least LEAST units unless there is only one.
__device__ __forceinline__ int shares_of(i64 units, int ctas) { return (int)max(min((i64)ctas, units / LEAST), 1ll); }
__device__ __forceinline__ i64 share_start(int g, i64 units, int shares) { return g * units / shares; }
__device__ __forceinline__ int owner_of(i64 unit, i64 units, int shares) {
    const i64 last = (unit + 1) * shares - 1;
    // last / units, without the 100 instructions of a division in 64 bits: the guess is off by at most 1.
    const int guess = (int)__fdividef((float)last, (float)units);
    return guess - (guess * units > last) + ((guess + 1) * units <= last);
}

// Adds a sink to lse2 (log-sum-exp, base 2) and returns the factor for the output.
__device__ __forceinline__ float sink_in(float& lse2, const float* sinks, int head) {
    if (!sinks) return 1.f;
    const float sink2 = sinks[head] * LOG2E, most = fmaxf(lse2, sink2);
    if (most == -INFINITE) return 1.f;
    const float keys = exp2_of(lse2 - most), all = keys + exp2_of(sink2 - most);
    lse2 = most + log2_of(all);
    return keys / all;
}
