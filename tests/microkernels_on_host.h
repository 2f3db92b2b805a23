// CUDA as the microkernels use it, on a CPU: one thread of the host for each thread of a block, blocks in turn.
// Stands in for `common.cu` and for the tensor-core macros, so that all else is run as it is written.
//
// The tensor-core instructions are written from the PTX ISA's tables, not from the kernels: where a descriptor's bits
// lie, how 128-byte swizzling exchanges address bits, which element of a matrix is in which register of which thread.

#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

struct Index {
    u32 x;
};
thread_local Index threadIdx, blockIdx;
Index gridDim, blockDim;
alignas(1024) u8 shared[232448];
std::barrier<>* together;
u32 registers_of[1024][4], words_of_b[1024][2];

struct float2 {
    float x, y;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float __uint_as_float(u32 bits) { float f; std::memcpy(&f, &bits, 4); return f; }
inline u32 __float_as_uint(float f) { u32 bits; std::memcpy(&bits, &f, 4); return bits; }
inline u64 __cvta_generic_to_shared(const void* p) { return u64(static_cast<const u8*>(p) - shared); }
inline void __syncthreads() { together->arrive_and_wait(); }
// The kernels broadcast only what all lanes have in common.
inline u32 __shfl_sync(u32, u32 value, int) { return value; }

struct Clock {
    u64 cycles, nanoseconds;
};
inline Clock now() { return {0, 0}; }
inline void keep_clock(Clock* clocks, Clock) {
    if (threadIdx.x == 0) clocks[blockIdx.x] = {3000, 2000};
}
struct alignas(16) Vector {
    u32 word[4];
};
inline Vector load_from_l2(const Vector* from) { return *from; }
inline Vector load_once(const Vector* from) { return *from; }
inline void store(Vector* to, Vector v) { *to = v; }
inline float fast_exp2(float x) { return std::exp2(x); }
inline float fast_rsqrt(float x) { return 1.f / std::sqrt(x); }
inline void shared_to_tensor_cores() {}
inline void wgmma_fence() {}
inline void wgmma_commit() {}
template <int PENDING>
inline void wgmma_wait() {}
template <int COUNT>
inline void hold(float*) {}

#ifdef DTYPE_bf16
constexpr u32 SIZE = 2;
inline float value(const u8* p) { u16 h; std::memcpy(&h, p, 2); return __uint_as_float(u32(h) << 16); }
#elif defined(DTYPE_tf32)
constexpr u32 SIZE = 4;
inline float value(const u8* p) { u32 w; std::memcpy(&w, p, 4); return __uint_as_float(w & ~0x1fffu); }
#else  // e4m3: a sign, 4 bits of exponent with bias 7, 3 of mantissa
constexpr u32 SIZE = 1;
inline float value(const u8* p) {
    const int exponent = *p >> 3 & 15, mantissa = *p & 7;
    const float size = exponent ? std::ldexp(1.f + mantissa / 8.f, exponent - 7) : std::ldexp(mantissa / 8.f, -6);
    return *p & 128 ? -size : size;
}
#endif
constexpr u32 K = 32 / SIZE;

// Element k of row `row` of a K-major operand in shared memory (PTX ISA, "Shared Memory Matrix Layout").
inline float element(u64 descriptor, u32 row, u32 k) {
    const u32 start = (descriptor & 0x3fff) << 4, stride = (descriptor >> 32 & 0x3fff) << 4;
    if (descriptor >> 62 != 1 || (descriptor >> 49 & 7) != 0) std::abort();  // 128-byte swizzle from an aligned start
    u32 address = start + row / 8 * stride + row % 8 * 128 + k * SIZE;
    address ^= (address >> 7 & 7) << 4;
    return value(shared + address);
}

// Element k of row `row` of a 16-row fragment whose word i of a thread is registers_of[thread][i].
inline float in_registers(u32 first_thread, u32 row, u32 k) {
    const u32 at = k * SIZE, lane = row % 8 * 4 + at % 16 / 4;
    const u32 word = registers_of[first_thread + lane][row / 8 + at / 16 * 2];
    u8 bytes[4];
    std::memcpy(bytes, &word, 4);
    return value(bytes + at % 4);
}

inline void publish(const u32* words, int count) {
    for (int i = 0; i < count; ++i) registers_of[threadIdx.x][i] = words[i];
    __syncthreads();
}

#ifdef N
template <typename A>
inline void wgmma(float* d, A a, u64 b, u32 add) {
    const u32 warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    for (u32 i = 0; i < N / 2; ++i) {
        const u32 row = warp * 16 + lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
        float sum = add ? d[i] : 0.f;
        for (u32 k = 0; k < K; ++k) sum += a(row, k) * element(b, column, k);
        d[i] = sum;
    }
}
#define WGMMA_SHARED(d, a, b, add) wgmma(d, [&](u32 row, u32 k) { return element(a, row, k); }, b, add)
#define WGMMA_REGISTERS(d, words, b, add)                                                                            \
    (publish(words, 4),                                                                                              \
     wgmma(d, [](u32 row, u32 k) { return in_registers(threadIdx.x / 32 * 32, row % 16, k); }, b, add), __syncthreads())
#endif

// m16n8: B's word i of a thread holds column lane / 4, bytes lane % 4 * 4 and, for the second, 16 further.
inline void mma(float* d, const u32* a, const u32* b) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x - lane;
    std::memcpy(words_of_b[threadIdx.x], b, 8);
    publish(a, 4);
    for (u32 i = 0; i < 4; ++i) {
        const u32 row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        for (u32 k = 0; k < K; ++k) {
            u8 bytes[4];
            std::memcpy(bytes, &words_of_b[warp + column * 4 + k * SIZE % 16 / 4][k * SIZE / 16], 4);
            d[i] += in_registers(warp, row, k) * value(bytes + k * SIZE % 4);
        }
    }
    __syncthreads();
}
#define MMA(d, a, b) mma(d, a, b)

template <typename... A, std::size_t... I>
void call(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
    kernel(*static_cast<std::remove_cv_t<A>*>(arguments[I])...);
}

template <typename... A>
void run(u32 grid, u32 block, void (*kernel)(A...), void** arguments) {
    gridDim.x = grid;
    blockDim.x = block;
    std::barrier barrier(block);
    together = &barrier;
    std::vector<std::thread> threads;
    for (u32 t = 0; t < block; ++t)
        threads.emplace_back([=] {
            threadIdx.x = t;
            for (u32 b = 0; b < grid; ++b) {
                blockIdx.x = b;
                call(kernel, arguments, std::index_sequence_for<A...>{});
                __syncthreads();
            }
        });
    for (auto& thread : threads) thread.join();
}
