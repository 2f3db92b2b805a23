// Device code of the `cluster` rungs of norms, softmax and gated activations: a row is read once, into registers.
//
// CUDA C++, compiled per config by macros.  LANES threads of each of CLUSTER CTAs share a row, and a CTA has ROWS rows;
// a thread holds VECTORS vectors of 16 bytes of each input.  Sums meet in a warp, a CTA and a cluster, always in the same
// order.  With PERSISTENT a CTA takes further rows, and requests the next row before it works on this row.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "hopper.h"

using i64 = long long;

#define RMSNORM 0
#define ADD_RMSNORM 1
#define LAYERNORM 2
#define SOFTMAX 3
#define SILU 4
#define GELU 5

#if ELEMENT == 4
using T = float;
#elif ELEMENT == 2
using T = __nv_bfloat16;
#else
using T = __half;
#endif
#if QUANTIZE
using Out = unsigned char;
#else
using Out = T;
#endif
constexpr int VECTOR = 16 / (int)sizeof(T);
constexpr int STRIDE = CLUSTER * LANES * VECTOR;
constexpr bool TWO_INPUTS = OP == ADD_RMSNORM || OP == SILU || OP == GELU;
#define NEG_INF __int_as_float(0xff800000)
// An activation needs no data of the other CTAs of its row.
#define CLUSTERED (CLUSTER > 1 && (QUANTIZE || OP < SILU))
// Weights are loaded once, before the first row; after the sums of each row if registers do not hold both.
constexpr bool LATE = VECTORS > 4;
static_assert(CLUSTER == 1 || ROWS == 1, "a CTA of a cluster has one row");
constexpr bool WEIGHTED = OP == RMSNORM || OP == ADD_RMSNORM || OP == LAYERNORM;

// The bits of 16 bytes of a row: kept as words, because elements of two bytes would take a register each.
struct Vector { u32 word[4]; };

__device__ __forceinline__ float get(const Vector& vector, int j) {
    if constexpr (sizeof(T) == 4) return __uint_as_float(vector.word[j]);
    const u32 word = vector.word[j / 2];
#if ELEMENT == 2
    return __uint_as_float(j % 2 ? word & 0xffff0000u : word << 16);
#else
    return __half2float(__ushort_as_half((unsigned short)(j % 2 ? word >> 16 : word)));
#endif
}

__device__ __forceinline__ u32 pair(float low, float high) {
#if ELEMENT == 1
    const __half2 both = __floats2half2_rn(low, high);
#else
    const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
#endif
    return reinterpret_cast<const u32&>(both);
}

__device__ __forceinline__ float rounded(float value) {
    return sizeof(T) == 4 ? value : static_cast<float>(static_cast<T>(value));
}

__device__ __forceinline__ Vector pack(const float (&value)[VECTOR]) {
    Vector vector;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if constexpr (sizeof(T) == 4) vector.word[i] = __float_as_uint(value[i]);
        else vector.word[i] = pair(value[2 * i], value[2 * i + 1]);
    return vector;
}

// PIECE elements are moved at once: 16 bytes, or less where an address or a width is not a multiple of 16.  What lies
// past the end of the row is zero.  A row is used once: its loads of 16 bytes leave no line in L1; those of a weight do.
template <bool ONCE> __device__ __forceinline__ Vector load(const T* row, int column, int width) {
    constexpr int BYTES = PIECE * (int)sizeof(T);
    Vector vector = {};
#pragma unroll
    for (int p = 0; p < VECTOR / PIECE; ++p) {
        const T* from = row + column + p * PIECE;
        if (column + p * PIECE >= width) continue;
        u32* to = &vector.word[p * BYTES / 4];
        if constexpr (BYTES == 16 && ONCE)
            asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                         : "l"(from)
                         : "memory");
        else if constexpr (BYTES == 16) {
            const uint4 raw = *reinterpret_cast<const uint4*>(from);
            to[0] = raw.x, to[1] = raw.y, to[2] = raw.z, to[3] = raw.w;
        } else if constexpr (BYTES == 8) {
            const uint2 raw = *reinterpret_cast<const uint2*>(from);
            to[0] = raw.x, to[1] = raw.y;
        } else if constexpr (BYTES == 4)
            to[0] = *reinterpret_cast<const u32*>(from);
        else
            to[0] |= (u32)*reinterpret_cast<const unsigned short*>(from) << (16 * (p % 2));
    }
    return vector;
}

// E: T, or one byte; `word` holds VECTOR elements.
template <class E> __device__ __forceinline__ void store(E* row, const u32* word, int column, int width) {
    constexpr int BYTES = PIECE * (int)sizeof(E);
#pragma unroll
    for (int p = 0; p < VECTOR / PIECE; ++p) {
        E* to = row + column + p * PIECE;
        if (column + p * PIECE >= width) continue;
        const u32* from = word + p * BYTES / 4;
        const int shift = 8 * (p * BYTES % 4);
        if constexpr (BYTES == 16) *reinterpret_cast<uint4*>(to) = make_uint4(from[0], from[1], from[2], from[3]);
        else if constexpr (BYTES == 8) *reinterpret_cast<uint2*>(to) = make_uint2(from[0], from[1]);
        else if constexpr (BYTES == 4) *reinterpret_cast<u32*>(to) = from[0];
        else if constexpr (BYTES == 2) *reinterpret_cast<unsigned short*>(to) = (unsigned short)(from[0] >> shift);
        else *reinterpret_cast<unsigned char*>(to) = (unsigned char)(from[0] >> shift);
    }
}

template <bool MAX, int COUNT> __device__ __forceinline__ float over_lanes(float value) {
#pragma unroll
    for (int step = COUNT / 2; step; step /= 2) {
        const float other = __shfl_xor_sync(~0u, value, step);
        value = MAX ? fmaxf(value, other) : value + other;
    }
    return value;
}

// The sum or the maximum over a row, for each of its threads.  Calls use two buffers in turn, so one barrier a call is
// enough: call n + 2 writes where call n has read, and every thread has read it when it arrives at the barrier of n + 1.
template <bool MAX> __device__ __forceinline__ float over_row(float value, int call) {
    constexpr int WARPS = (LANES + 31) / 32;
    value = over_lanes<MAX, LANES < 32 ? LANES : 32>(value);
    if constexpr (WARPS > 1) {
        __shared__ float of_warp[2][ROWS][WARPS];
        float* own = of_warp[call % 2][threadIdx.x / LANES];
        if (threadIdx.x % 32 == 0) own[threadIdx.x % LANES / 32] = value;
        __syncthreads();  // the sums of all warps are in shared memory
        value = over_lanes<MAX, WARPS>(own[threadIdx.x % WARPS]);
    }
    if constexpr (CLUSTER > 1) {
        __shared__ float of_cta[2];
        if (threadIdx.x == 0) of_cta[call % 2] = value;
        cluster_barrier();  // the sums of all CTAs are in their shared memory
        value = over_lanes<MAX, CLUSTER>(load_cluster(shared_address(&of_cta[call % 2]), threadIdx.x % CLUSTER));
    }
    return value;
}

__device__ __forceinline__ float sigmoid(float x) {
    const float decay = expf(-fabsf(x)), above = x >= 0 ? 1.0f : decay;
    // An error of two ulps vanishes in 16 bits.
    return sizeof(T) == 2 && !QUANTIZE ? __fdividef(above, 1.0f + decay) : above / (1.0f + decay);
}

__device__ __forceinline__ float gated(float gate, float up) {
    // gelu(g) = g (1 + tanh(u)) / 2 = g sigmoid(2 u), where nothing cancels; 2 sqrt(2 / pi) = 1.5957691.
    const float argument = OP == GELU ? 1.5957691216f * (gate + 0.044715f * gate * gate * gate) : gate;
    return gate * sigmoid(argument) * up;
}

__device__ __forceinline__ u32 code(float value) {
#if QUANTIZE == 1
    return max(-127, min(127, __float2int_rn(value))) & 0xff;
#else
    unsigned short both;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(0.0f), "f"(value));
    return both;
#endif
}

extern "C" __global__ void
#if CLUSTERED
__cluster_dims__(CLUSTER, 1, 1)
#endif
__launch_bounds__(LANES * ROWS)
rows(const T* x, const T* second, const T* weight, const T* bias, Out* out, T* sums, float* scales, i64 T_rows,
     int width, i64 stride_x, i64 stride_second, i64 stride_out, i64 stride_sums, float eps, float weight_offset) {
    const int lane = threadIdx.x % LANES, rank = blockIdx.x % CLUSTER;
    const int column = (rank * LANES + lane) * VECTOR;
    [[maybe_unused]] const i64 step = (i64)(gridDim.x / CLUSTER) * ROWS;
    i64 row = (i64)(blockIdx.x / CLUSTER) * ROWS + threadIdx.x / LANES;
    int calls = 0;  // calls of over_row

    Vector held[VECTORS], other[VECTORS], w[VECTORS], b[VECTORS];
    auto load_row = [&](i64 of, Vector (&first)[VECTORS], Vector (&next)[VECTORS]) {
        const int inside = of < T_rows ? width : 0;
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) first[i] = load<true>(x + of * stride_x, column + i * STRIDE, inside);
        if constexpr (TWO_INPUTS)
#pragma unroll
            for (int i = 0; i < VECTORS; ++i)
                next[i] = load<true>(second + of * stride_second, column + i * STRIDE, inside);
    };
    auto load_weight = [&](int i) {
        if constexpr (WEIGHTED) w[i] = load<false>(weight, column + i * STRIDE, width);
        if constexpr (OP == LAYERNORM) b[i] = load<false>(bias, column + i * STRIDE, bias ? width : 0);
    };
    if constexpr (WEIGHTED && !LATE) {
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) load_weight(i);
        // Keeps these loads before the row's: ptxas would move them behind the sums, and the CTA would wait for memory
        // twice.  The barrier does not wait for the loads.
        __syncthreads();
    }
    load_row(row, held, other);
#if PERSISTENT
    // All threads of a cluster run the same number of rounds, because over_row has barriers.
    for (i64 first = row - threadIdx.x / LANES; first < T_rows; first += step, row += step) {
        Vector next_held[VECTORS], next_other[VECTORS];
        load_row(row + step, next_held, next_other);
#else
    {
#endif
        const int inside = row < T_rows ? width : 0;
        // y = (x - shift) * scale: one over the root of the mean square; mean and one over the deviation; for softmax
        // the maximum, and one over the sum of exponentials.
        float shift = 0, scale = 1, total = 0;
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const int left = width - (column + i * STRIDE);
            if constexpr (OP == ADD_RMSNORM) {
                // The sum is rounded before the norm, so the norm and the next layer see the same numbers.
                float sum[VECTOR];
#pragma unroll
                for (int j = 0; j < VECTOR; ++j) sum[j] = get(held[i], j) + get(other[i], j);
                held[i] = pack(sum);
                store<T>(sums + row * stride_sums, held[i].word, column + i * STRIDE, inside);
            }
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) {
                const float v = get(held[i], j);
                if constexpr (OP == RMSNORM || OP == ADD_RMSNORM) total = fmaf(v, v, total);
                if constexpr (OP == LAYERNORM) total += v;
                if constexpr (OP == SOFTMAX) {
                    if (i + j == 0) total = NEG_INF;
                    total = fmaxf(total, j < left ? v : NEG_INF);
                }
            }
        }
        if constexpr (OP == RMSNORM || OP == ADD_RMSNORM) scale = rsqrtf(over_row<false>(total, calls++) / width + eps);
        if constexpr (OP == LAYERNORM || OP == SOFTMAX) {
            shift = OP == LAYERNORM ? over_row<false>(total, calls++) / width : over_row<true>(total, calls++);
            total = 0;
#pragma unroll
            for (int i = 0; i < VECTORS; ++i)
#pragma unroll
                for (int j = 0; j < VECTOR; ++j) {
                    const float v = get(held[i], j) - shift;
                    if (j < width - (column + i * STRIDE)) total += OP == LAYERNORM ? v * v : expf(v);
                }
            total = over_row<false>(total, calls++);
            scale = OP == LAYERNORM ? rsqrtf(total / width + eps) : 1.0f / total;
        }
        auto result = [&](int i, int j) {
            float v = get(held[i], j);
            if constexpr (OP == SILU || OP == GELU) return gated(v, get(other[i], j));
            if constexpr (OP == SOFTMAX) return expf(v - shift) * scale;
            v = (v - shift) * scale;
            if constexpr (ROUND_FIRST) v = rounded(v);
            v *= get(w[i], j) + weight_offset;
            return OP == LAYERNORM ? v + get(b[i], j) : v;
        };
#if QUANTIZE
        float value[VECTORS][VECTOR], largest = 0;
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            if constexpr (LATE) load_weight(i);
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) largest = fmaxf(largest, fabsf(value[i][j] = result(i, j)));
        }
        largest = over_row<true>(largest, calls++);
        // At least fp32's least normal number, so that its inverse is finite.
        const float quant_scale = largest > 0 ? fmaxf(largest / (QUANTIZE == 1 ? 127.0f : 448.0f), 0x1p-126f) : 1.0f;
        const float inverse = 1.0f / quant_scale;
        if (rank == 0 && lane == 0 && row < T_rows) scales[row] = quant_scale;
#endif
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
#if QUANTIZE
            u32 codes[VECTOR / 4] = {};
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) codes[j / 4] |= code(value[i][j] * inverse) << (8 * (j % 4));
            store<Out>(out + row * stride_out, codes, column + i * STRIDE, inside);
#else
            float value[VECTOR];
            if constexpr (LATE) load_weight(i);
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) value[j] = result(i, j);
            store<Out>(out + row * stride_out, pack(value).word, column + i * STRIDE, inside);
#endif
        }
#if PERSISTENT
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) held[i] = next_held[i], other[i] = next_other[i];
#endif
    }
    // No CTA exits while another CTA reads its sums.
    if constexpr (CLUSTERED) cluster_barrier();
}
