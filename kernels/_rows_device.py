"""Device code of the `cluster` rungs of norms, softmax and gated activations: a row is read once, into registers.

CUDA C++, compiled per config by macros.  LANES threads of each of CLUSTER CTAs share a row, and a CTA has ROWS rows;
a thread holds VECTORS vectors of 16 bytes of each input.  Sums meet in a warp, a CTA and a cluster, always in the same
order.  With PERSISTENT a CTA goes on to further rows, and asks for the next one before it works on the one it has.
"""

from __future__ import annotations

SOURCE = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>

using i64 = long long;
using u32 = unsigned int;

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
constexpr bool WEIGHTED = OP == RMSNORM || OP == ADD_RMSNORM || OP == LAYERNORM;

// PIECE elements are moved at once: 16 bytes, or less where an address or a width is no multiple of that.
template <class E> struct alignas(sizeof(E) * PIECE) Piece { E value[PIECE]; };
struct Vector { T value[VECTOR]; };

__device__ __forceinline__ Piece<T> load_piece(const T* from) {
    Piece<T> piece;
    if constexpr (sizeof(piece) == 16) {
        uint4& raw = reinterpret_cast<uint4&>(piece);
        asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(raw.x), "=r"(raw.y), "=r"(raw.z), "=r"(raw.w)
                     : "l"(from)
                     : "memory");
    } else {
        piece = *reinterpret_cast<const Piece<T>*>(from);
    }
    return piece;
}

// Zeros past the end of the row.  A row is used once, and does not stay in L1; a weight does.
template <bool ONCE> __device__ __forceinline__ Vector load(const T* row, int column, int width) {
    Vector vector;
#pragma unroll
    for (int p = 0; p < VECTOR; p += PIECE) {
        Piece<T> piece = {};
        if (column + p < width)
            piece = ONCE ? load_piece(row + column + p) : *reinterpret_cast<const Piece<T>*>(row + column + p);
#pragma unroll
        for (int j = 0; j < PIECE; ++j) vector.value[p + j] = piece.value[j];
    }
    return vector;
}

template <class E> __device__ __forceinline__ void store(E* row, const E (&value)[VECTOR], int column, int width) {
#pragma unroll
    for (int p = 0; p < VECTOR; p += PIECE) {
        Piece<E> piece;
#pragma unroll
        for (int j = 0; j < PIECE; ++j) piece.value[j] = value[p + j];
        if (column + p < width) *reinterpret_cast<Piece<E>*>(row + column + p) = piece;
    }
}

__device__ __forceinline__ void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ float load_cluster(const float* mine, u32 rank) {
    u32 there;
    float value;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                 : "=r"(there)
                 : "r"((u32)__cvta_generic_to_shared(mine)), "r"(rank));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(there) : "memory");
    return value;
}

template <bool MAX, int COUNT> __device__ __forceinline__ float over_lanes(float value) {
#pragma unroll
    for (int step = COUNT / 2; step; step /= 2) {
        const float other = __shfl_xor_sync(~0u, value, step);
        value = MAX ? fmaxf(value, other) : value + other;
    }
    return value;
}

// The sum or the maximum over a row, for each of its threads.  Two calls in a row use different memory: a thread writes
// to the memory of the last call but one, which every thread has read before it passed the barrier of the last call.
template <bool MAX> __device__ __forceinline__ float over_row(float value, int turn) {
    constexpr int WARPS = (LANES + 31) / 32;
    value = over_lanes<MAX, LANES < 32 ? LANES : 32>(value);
    if constexpr (WARPS > 1) {
        __shared__ float of_warp[2][ROWS][WARPS];
        float* own = of_warp[turn % 2][threadIdx.x / LANES];
        if (threadIdx.x % 32 == 0) own[threadIdx.x % LANES / 32] = value;
        __syncthreads();
        value = over_lanes<MAX, WARPS>(own[threadIdx.x % WARPS]);
    }
    if constexpr (CLUSTER > 1) {
        __shared__ float of_cta[2];
        if (threadIdx.x == 0) of_cta[turn % 2] = value;
        cluster_barrier();
        value = over_lanes<MAX, CLUSTER>(load_cluster(&of_cta[turn % 2], threadIdx.x % CLUSTER));
    }
    return value;
}

__device__ __forceinline__ float sigmoid(float x) {
    const float decay = expf(-fabsf(x)), above = x >= 0 ? 1.0f : decay;
    // An error of two ulps vanishes in 16 bits.
    return sizeof(T) == 2 && !QUANTIZE ? __fdividef(above, 1.0f + decay) : above / (1.0f + decay);
}

__device__ __forceinline__ float gated(float gate, float up) {
    // gelu(g) = g sigmoid(2 u) is 1 + tanh(u) without its cancellation; 2 sqrt(2 / pi) = 1.5957691.
    const float argument = OP == GELU ? 1.5957691216f * (gate + 0.044715f * gate * gate * gate) : gate;
    return gate * sigmoid(argument) * up;
}

__device__ __forceinline__ unsigned char to_code(float value) {
#if QUANTIZE == 1
    return (unsigned char)(signed char)max(-127, min(127, __float2int_rn(value)));
#else
    unsigned short pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(value));
    return (unsigned char)pair;
#endif
}

extern "C" __global__ void
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
__launch_bounds__(LANES * ROWS)
rows(const T* x, const T* second, const T* weight, const T* bias, Out* out, T* sums, float* scales, i64 T_rows,
     int width, i64 stride_x, i64 stride_second, i64 stride_out, i64 stride_sums, float eps, float weight_offset) {
    const int lane = threadIdx.x % LANES, rank = blockIdx.x % CLUSTER;
    const int column = (rank * LANES + lane) * VECTOR;
    const i64 step = (i64)(gridDim.x / CLUSTER) * ROWS;
    i64 row = (i64)(blockIdx.x / CLUSTER) * ROWS + threadIdx.x / LANES;
    int turn = 0;

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
    load_row(row, held, other);
    if constexpr (WEIGHTED) {
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) w[i] = load<false>(weight, column + i * STRIDE, width);
        if constexpr (OP == LAYERNORM)
#pragma unroll
            for (int i = 0; i < VECTORS; ++i) b[i] = load<false>(bias, column + i * STRIDE, bias ? width : 0);
    }
#if PERSISTENT
    // All threads of a cluster take as many turns.
    for (i64 first = row - threadIdx.x / LANES; first < T_rows; first += step, row += step) {
        Vector next_held[VECTORS], next_other[VECTORS];
        load_row(row + step, next_held, next_other);
#else
    {
#endif
        const int inside = row < T_rows ? width : 0;
        // What one row needs: its sum of squares; its mean and variance; its maximum and sum.
        float shift = 0, scale = 1, total = 0;
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const int left = width - (column + i * STRIDE);
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) {
                const float v = static_cast<float>(held[i].value[j]);
                if constexpr (OP == RMSNORM) total = fmaf(v, v, total);
                if constexpr (OP == ADD_RMSNORM) {
                    // The sum is rounded before the norm, so the norm and the next layer see the same numbers.
                    held[i].value[j] = static_cast<T>(v + static_cast<float>(other[i].value[j]));
                    const float rounded = static_cast<float>(held[i].value[j]);
                    total = fmaf(rounded, rounded, total);
                }
                if constexpr (OP == LAYERNORM) total += v;
                if constexpr (OP == SOFTMAX) {
                    if (i + j == 0) total = -INFINITY;
                    total = fmaxf(total, j < left ? v : -INFINITY);
                }
            }
            if constexpr (OP == ADD_RMSNORM)
                store<T>(sums + row * stride_sums, held[i].value, column + i * STRIDE, inside);
        }
        if constexpr (OP == RMSNORM || OP == ADD_RMSNORM) scale = rsqrtf(over_row<false>(total, turn++) / width + eps);
        if constexpr (OP == LAYERNORM || OP == SOFTMAX) {
            shift = OP == LAYERNORM ? over_row<false>(total, turn++) / width : over_row<true>(total, turn++);
            total = 0;
#pragma unroll
            for (int i = 0; i < VECTORS; ++i)
#pragma unroll
                for (int j = 0; j < VECTOR; ++j) {
                    const float v = static_cast<float>(held[i].value[j]) - shift;
                    if (j < width - (column + i * STRIDE)) total += OP == LAYERNORM ? v * v : expf(v);
                }
            total = over_row<false>(total, turn++);
            scale = OP == LAYERNORM ? rsqrtf(total / width + eps) : 1.0f / total;
        }
        auto result = [&](int i, int j) {
            float v = static_cast<float>(held[i].value[j]);
            if constexpr (OP == SILU || OP == GELU) return gated(v, static_cast<float>(other[i].value[j]));
            if constexpr (OP == SOFTMAX) return expf(v - shift) * scale;
            v = (v - shift) * scale;
            if constexpr (ROUND_FIRST) v = static_cast<float>(static_cast<T>(v));
            v *= static_cast<float>(w[i].value[j]) + weight_offset;
            return OP == LAYERNORM ? v + static_cast<float>(b[i].value[j]) : v;
        };
#if QUANTIZE
        float value[VECTORS][VECTOR], largest = 0;
#pragma unroll
        for (int i = 0; i < VECTORS; ++i)
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) largest = fmaxf(largest, fabsf(value[i][j] = result(i, j)));
        largest = over_row<true>(largest, turn++);
        const float unit = largest > 0 ? largest / (QUANTIZE == 1 ? 127.0f : 448.0f) : 1.0f;
        const float inverse = 1.0f / unit;
        if (rank == 0 && lane == 0 && row < T_rows) scales[row] = unit;
#endif
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            Out rounded[VECTOR];
#pragma unroll
            for (int j = 0; j < VECTOR; ++j)
#if QUANTIZE
                rounded[j] = to_code(value[i][j] * inverse);
#else
                rounded[j] = static_cast<T>(result(i, j));
#endif
            store<Out>(out + row * stride_out, rounded, column + i * STRIDE, inside);
        }
#if PERSISTENT
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) held[i] = next_held[i], other[i] = next_other[i];
#endif
    }
    // No CTA exits while another CTA reads its sums.
    if constexpr (CLUSTER > 1) cluster_barrier();
}
"""
