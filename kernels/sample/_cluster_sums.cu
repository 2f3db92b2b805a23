// Device code that `cluster` begins with: loads, order-preserving keys, and sums over a cluster in a fixed order.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

using i64 = long long;
using u32 = unsigned int;
using u64 = unsigned long long;

#if ELEMENT == 4
using T = float;
#elif ELEMENT == 2
using T = __nv_bfloat16;
#else
using T = __half;
#endif
constexpr int VECTOR = BYTES / (int)sizeof(T);
constexpr int UNROLL = 4;
constexpr int WARPS = THREADS / 32;
constexpr int CUTS = 7;       // thresholds that a pass compares with
constexpr int SEGMENT = 128;  // tokens that a warp may hold: those between two thresholds
constexpr int FEW = 128;      // tokens of a row for that end, in which each is compared with each
#define NEVER __int_as_float(0xff800000)
#define LARGEST 3.4028234663852886e38f

struct alignas(BYTES) Vector { T value[VECTOR]; };

__device__ __forceinline__ Vector load(const T* from) {
    Vector vector;
#if BYTES == 16
    uint4& raw = reinterpret_cast<uint4&>(vector);
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(raw.x), "=r"(raw.y), "=r"(raw.z), "=r"(raw.w) : "l"(from) : "memory");
#else
    vector = *reinterpret_cast<const Vector*>(from);
#endif
    return vector;
}

// NaN becomes -inf and +inf the largest float, so that a row without a law gives a token of the vocabulary.
__device__ __forceinline__ float lawful(float x) { return x == x ? fminf(x, LARGEST) : NEVER; }

// A key has the order of its float; both zeros have one key.
__device__ __forceinline__ u32 to_key(float x) {
    const u32 bits = __float_as_uint(x == 0.f ? 0.f : x);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float from_key(u32 key) {
    return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key);
}

// A weight below 2**-126 is 0; to keep it takes 3 more instructions and a branch for each logit (read in the SASS).
__device__ __forceinline__ float weigh(float x, float best, float rate) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"((x - best) * rate));
    return power;
}

__device__ __forceinline__ void barrier() {
#if CLUSTER > 1
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
    __syncthreads();
#endif
}

__device__ __forceinline__ float load_cluster(const float* mine, u32 rank) {
#if CLUSTER > 1
    u32 there;
    float value;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                 : "=r"(there) : "r"((u32)__cvta_generic_to_shared(mine)), "r"(rank));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(there) : "memory");
    return value;
#else
    return *mine;
#endif
}

struct Shared {
    float warps[WARPS][8], cta[2][8], total[8];
    float segment[WARPS][SEGMENT], list[FEW], found[FEW], weight[FEW];
    float length;  // of list
    int lengths[WARPS];
};

// Sums or maxima over the cluster, in a fixed order; every thread gets them.  `turn` tells apart two calls in a row: no
// thread can be more than one cluster barrier ahead.
template <bool MAX, int N> __device__ __forceinline__ void combine(Shared& shared, int& turn, float (&value)[N]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int step = 16; step; step /= 2) {
            const float other = __shfl_xor_sync(~0u, value[n], step);
            value[n] = MAX ? fmaxf(value[n], other) : value[n] + other;
        }
        if (lane == 0) shared.warps[warp][n] = value[n];
    }
    __syncthreads();
    float sum = MAX ? NEVER : 0.f;
    if (threadIdx.x < N) {
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const float other = shared.warps[w][threadIdx.x];
            sum = MAX ? fmaxf(sum, other) : sum + other;
        }
        shared.cta[turn][threadIdx.x] = sum;
    }
    if (CLUSTER > 1) {
        barrier();
        if (threadIdx.x < N) {
            sum = MAX ? NEVER : 0.f;
#pragma unroll
            for (int rank = 0; rank < CLUSTER; ++rank) {
                const float other = load_cluster(&shared.cta[turn][threadIdx.x], rank);
                sum = MAX ? fmaxf(sum, other) : sum + other;
            }
        }
    }
    if (threadIdx.x < N) shared.total[threadIdx.x] = sum;
    __syncthreads();
#pragma unroll
    for (int n = 0; n < N; ++n) value[n] = shared.total[n];
    turn ^= 1;
}
