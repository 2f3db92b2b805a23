// The rungs `gemv` of gemm_w4a16 and gemm_w8a16: a stream of packed codes, multiplied by mma.m16n8k16.
//
// A warp takes 16 rows of the weight.  In a chunk the four lanes of a quad hold 64 bytes of a row, 16 each, and 64 bytes
// of the row 8 below.  An mma takes whatever k a quad holds, because the order of a sum does not matter.  So codes and
// activations go from memory to the tensor core without a shuffle: `_packed.py` puts neighbours in k where mma needs them.
//
// An mma has 8 columns, room for more than M rows of a.  In groups of 64 or 32 the lanes of a quad hold SUB = 2 or 4
// groups of a row at once, and only lanes of group g feed column m SUB + g: sums of two groups are never mixed, and each
// is scaled in fp32 when it is complete.
#include "hopper.h"

using i64 = long long;
using u16 = unsigned short;
using u8 = unsigned char;

#if SCALE == 4
using Scale = float;
#else
using Scale = u16;
#endif

constexpr int LANE_K = 128 / BITS, CHUNK_K = 4 * LANE_K, A_WORDS = LANE_K / 2;
constexpr int OWN_SUBS = SUB > 1 ? 2 : 1;
constexpr int TILES = WARPS / WARPS_K, SHARES = WARPS_K * SPLIT;

struct Chunk {
    uint4 codes[2];
#if BITS == 4
    float scale[2][OWN_SUBS];
#if ZEROS
    u32 zero[2];
#endif
#endif
};

// A lane's next codes, scales, zero points and activations; later ones of its warp are at fixed distances.
struct Place {
    const u8* codes[2];
    const Scale* scales[2];
    const u8* zeros[2];
    const u16* a[N_TILES];
    bool mine[N_TILES];
};

__device__ __forceinline__ float bf16_to_float(u32 bits) { return __uint_as_float(bits << 16); }

__device__ __forceinline__ float load_scale(const Scale* from) {
#if SCALE == 4
    return *from;
#elif SCALE == 2
    return bf16_to_float(*from);
#else
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(*from));
    return value;
#endif
}

// Loads 16 bytes of codes if `left` > 0, the bytes left in the row.  Past the end the old codes stay: their
// activations are 0, and no code is infinite.  The weight is used once: the load bypasses L1, and L2 evicts it first.
template <bool GUARDED>
__device__ __forceinline__ void load_codes(uint4& codes, const u8* from, int left, u64 policy) {
    if (!GUARDED || left > 0)
        asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                     : "=r"(codes.x), "=r"(codes.y), "=r"(codes.z), "=r"(codes.w)
                     : "l"(from), "l"(policy));
}

// Loads LANE_K activations, of which `left` are in the row, and 0 for the others; another lane's group keeps its old
// value, which is 0.
template <bool GUARDED>
__device__ __forceinline__ void load_a(u32 (&words)[A_WORDS], const u16* from, int left, bool mine) {
#if A_VECTORS
    for (int word = 0; word < A_WORDS; word += 4) {
        const bool within = !GUARDED || left > 2 * word;
        if (GUARDED) words[word] = words[word + 1] = words[word + 2] = words[word + 3] = 0;
        asm volatile("{.reg .pred mine; setp.ne.u32 mine, %4, 0; @mine ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%5];}"
                     : "+r"(words[word]), "+r"(words[word + 1]), "+r"(words[word + 2]), "+r"(words[word + 3])
                     : "r"((u32)(mine && within)), "l"(from + 2 * word));
    }
#else
    for (int word = 0; word < A_WORDS; ++word) {
        words[word] = mine && left > 2 * word ? from[2 * word] : 0;
        if (mine && left > 2 * word + 1) words[word] |= (u32)from[2 * word + 1] << 16;
    }
#endif
}

__device__ __forceinline__ u32 subtract(u32 x, u32 y) {
    u32 difference;
    asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(difference) : "r"(x), "r"(y));
    return difference;
}

// Two codes to bf16, exactly: puts the bits below a power of two (`magic` is 128, whose last bit is worth 1) and
// subtracts the zero.  `magic` is an argument: an instruction holds one constant, so ptxas would load the other again.
__device__ __forceinline__ u32 dequantize(u32 codes, u32 zero, u32 magic) {
#if BITS == 4
    return subtract(codes & 0x000f000f | magic, zero);
#else
    return subtract(codes & 0x007f007f | magic, codes & 0x00800080 | magic);  // the sign bit has the value -128
#endif
}

__device__ __forceinline__ void mma(float (&c)[4], const u32 (&w)[4], u32 low, u32 high) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "r"(low), "r"(high));
}

// Loads the chunk that is `ahead` shares after `place`; `chunk` is its number.
template <bool GUARDED>
__device__ __forceinline__ void load_chunk(Chunk& into, const Place& place, int ahead, int chunk, int groups,
                                           int row_bytes, int quad, u64 policy, u32 magic) {
    for (int r = 0; r < 2; ++r) {
        const int at = chunk * 64 + quad * 16;
        load_codes<GUARDED>(into.codes[r], place.codes[r] + ahead * SHARES * 64, row_bytes - at, policy);
#if BITS == 4
        for (int s = 0; s < OWN_SUBS; ++s)
            if (!GUARDED || chunk * SUB + (2 * quad + s) % SUB < groups)
                into.scale[r][s] = load_scale(place.scales[r] + ahead * SHARES * SUB + s);
#if ZEROS
        if (!GUARDED || chunk * SUB + quad * SUB / 4 < groups)
            into.zero[r] = magic | place.zeros[r][ahead * SHARES * SUB] * 0x00010001u;
#endif
#endif
    }
}

__device__ __forceinline__ void multiply(const Chunk& chunk, const u32 (&a)[N_TILES][A_WORDS],
                                         float (&total)[N_TILES][4], u32 magic) {
    float sum[N_TILES][4] = {};
    const u32* words[2] = {&chunk.codes[0].x, &chunk.codes[1].x};
    // Two words at a time: their activations are neighbours, as the registers of an operand must be.
    for (int i = 0; i < 16 / BITS; ++i)
        for (int word = 0; word < 4; word += 2) {
            u32 w[4];
            for (int r = 0; r < 2; ++r)
                for (int high = 0; high < 2; ++high) {
                    const u32 codes = words[r][word + high] >> i * BITS;
#if BITS == 4 && ZEROS
                    w[2 * high + r] = dequantize(codes, chunk.zero[r], magic);
#else
                    w[2 * high + r] = dequantize(codes, 0x43084308, magic);  // 128 + 8
#endif
                }
            for (int t = 0; t < N_TILES; ++t) mma(sum[t], w, a[t][4 * i + word], a[t][4 * i + word + 1]);
        }
    for (int t = 0; t < N_TILES; ++t)
        for (int c = 0; c < 4; ++c)
#if BITS == 4
            total[t][c] = fmaf(sum[t][c], chunk.scale[c / 2][c % OWN_SUBS], total[t][c]);
#else
            total[t][c] += sum[t][c];
#endif
}

extern "C" __global__ void
#if SPLIT > 1
__cluster_dims__(SPLIT, 1, 1)
#endif
__launch_bounds__(32 * WARPS, CTAS_PER_SM)
gemv(const u16* a, const u8* codes, const Scale* scale, const u8* zero, const u16* bias, u16* out, int N, int K,
     int groups, i64 stride_a, i64 stride_codes, i64 stride_scale, i64 stride_out, u32 magic) {
    __shared__ float partial[WARPS][M][16];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, rank = blockIdx.x % SPLIT;
    const int quad = lane % 4, octet = lane / 4;
    const int share = rank * WARPS_K + warp % WARPS_K;
    const int first = (blockIdx.x / SPLIT * TILES + warp / WARPS_K) * 16;
    const int row_bytes = (K + LANE_K - 1) / LANE_K * 16, chunks = (K + CHUNK_K - 1) / CHUNK_K;
    u64 policy = 0;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));

    Place place;
    for (int r = 0; r < 2; ++r) {
        const i64 row = min(first + octet + 8 * r, N - 1);
        place.codes[r] = codes + row * stride_codes + share * 64 + quad * 16;
        place.scales[r] = scale + row * stride_scale + share * SUB + 2 * quad % SUB;
        place.zeros[r] = zero + row * stride_scale + share * SUB + quad * SUB / 4;
    }
    // Column n = octet of each tile of a holds row n / SUB, for lanes whose codes are of group n % SUB.
    for (int t = 0; t < N_TILES; ++t) {
        const int n = 8 * t + octet;
        place.mine[t] = n / SUB < M && n % SUB == quad * SUB / 4;
        place.a[t] = a + (place.mine[t] ? n / SUB : 0) * stride_a + share * CHUNK_K + quad * LANE_K;
    }
    float total[N_TILES][4] = {};
    Chunk ring[DEPTH] = {};
    u32 x[2][N_TILES][A_WORDS] = {};
    const int own_k = K - quad * LANE_K;  // activations of a row from the lane's first one on
    for (int d = 0; d < DEPTH; ++d)
        if (share + d * SHARES < chunks)
            load_chunk<true>(ring[d], place, d, share + d * SHARES, groups, row_bytes, quad, policy, magic);
    for (int t = 0; t < N_TILES; ++t)
        load_a<true>(x[0][t], place.a[t], own_k - share * CHUNK_K, place.mine[t]);
    int chunk = share;
    for (; chunk + (2 * DEPTH - 1) * SHARES < K / CHUNK_K; chunk += DEPTH * SHARES) {
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) {
            for (int t = 0; t < N_TILES; ++t)
                load_a<false>(x[(d + 1) % 2][t], place.a[t] + (d + 1) * SHARES * CHUNK_K, LANE_K, place.mine[t]);
            multiply(ring[d], x[d % 2], total, magic);
            load_chunk<false>(ring[d], place, d + DEPTH, 0, groups, row_bytes, quad, policy, magic);
        }
        for (int r = 0; r < 2; ++r) {
            place.codes[r] += DEPTH * SHARES * 64;
            place.scales[r] += DEPTH * SHARES * SUB;
            place.zeros[r] += DEPTH * SHARES * SUB;
        }
        for (int t = 0; t < N_TILES; ++t) place.a[t] += DEPTH * SHARES * CHUNK_K;
    }
#pragma unroll
    for (int d = 0; d < 2 * DEPTH; ++d, chunk += SHARES) {
        if (chunk >= chunks) break;
        const int next = chunk + DEPTH * SHARES;
        for (int t = 0; t < N_TILES; ++t)
            load_a<true>(x[(d + 1) % 2][t], place.a[t] + (d + 1) * SHARES * CHUNK_K, own_k - (chunk + SHARES) * CHUNK_K,
                         place.mine[t]);
        multiply(ring[d % DEPTH], x[d % 2], total, magic);
        if (d < DEPTH && next < chunks)
            load_chunk<true>(ring[d], place, d + DEPTH, next, groups, row_bytes, quad, policy, magic);
    }

    for (int t = 0; t < N_TILES; ++t)
        for (int r = 0; r < 2; ++r)
            for (int c = 0; c < 2; ++c) {
                float value = total[t][2 * r + c];
                if (SUB > 1) value += total[t][2 * r + 1 - c];
                if (SUB > 2) value += __shfl_xor_sync(~0u, value, 1);
                const int n = 8 * t + 2 * quad + c;
                if (n % SUB == 0 && n / SUB < M) partial[warp][n / SUB][octet + 8 * r] = value;
            }
    if (SPLIT > 1) cluster_barrier(); else if (WARPS_K > 1) __syncthreads(); else __syncwarp();

    // One warp of each tile adds the shares, always in the same order.
    if (rank == 0 && warp % WARPS_K == 0)
        for (int i = lane; i < 16 * M; i += 32) {
            const int m = i / 16, row = first + i % 16;
            if (row >= N) continue;
            float value = 0;
            for (int other = 0; other < SPLIT; ++other)
                for (int w = 0; w < WARPS_K; ++w) {
                    const float* from = &partial[warp + w][m][i % 16];
                    value += SPLIT > 1 ? load_cluster(shared_address(from), other) : *from;
                }
#if BITS == 8
            value *= load_scale(scale + row);
#endif
            if (bias) value += bf16_to_float(bias[row]);
            asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out[m * stride_out + row]) : "f"(value));
        }
    // No CTA exits while another CTA reads its sums.
    if (SPLIT > 1) cluster_barrier();
}
