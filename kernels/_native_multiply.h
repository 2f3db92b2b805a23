// The product of small matrices in registers, in fp32; B may have another dtype, and is converted as it is loaded.
#pragma once

#include <cstdlib>
#include <vector>

#include "_native.h"
#ifdef __AVX2__
#include <immintrin.h>
#endif

#ifdef __AVX512F__
constexpr int LANES = 16, REGISTERS = 32;
#else
constexpr int LANES = 8, REGISTERS = 16;
#endif
typedef float Vector __attribute__((vector_size(4 * LANES), aligned(4)));

// Memory from the start of a cache line on: a vector of 64 bytes elsewhere is read from two lines.
template <class E>
struct Aligned {
    using value_type = E;
    E* allocate(std::size_t count) { return (E*)std::aligned_alloc(64, (count * sizeof(E) + 63) / 64 * 64); }
    void deallocate(E* memory, std::size_t) { std::free(memory); }
    bool operator==(const Aligned&) const { return true; }
    bool operator!=(const Aligned&) const { return false; }
};
using Floats = std::vector<float, Aligned<float>>;

// Bytes.  With few rows of A, B comes from memory, and the processor's own prefetch ends at each page of 4 KB: on a Xeon
// of 2.8 GHz one row times bf16 takes 27% less time with this, times int8 33%.
constexpr i64 PREFETCHED = 4096;

template <class E>
using Lanes __attribute__((vector_size(LANES * sizeof(E)), aligned(1))) = E;

static inline Vector exponential(Vector x) { return exponential_of<Vector, Lanes<std::int32_t>>(x); }

static inline Vector loaded(const float* x) { return *(const Vector*)x; }
// By hand: GCC 12 converts vectors of int8 and of fp16 one by one.
static inline Vector loaded(const std::int8_t* x) {
#if defined(__AVX512F__)
    return (Vector)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)x)));
#elif defined(__AVX2__)
    return (Vector)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)x)));
#else
    Vector values;
    for (int i = 0; i < LANES; ++i) values[i] = x[i];
    return values;
#endif
}
static inline Vector loaded(const fp16* x) {
#if defined(__AVX512F__)
    return (Vector)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)x));
#elif defined(__AVX2__) && defined(__F16C__)
    return (Vector)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)x));
#else
    return __builtin_convertvector(*(const Lanes<fp16>*)x, Vector);
#endif
}
static inline Vector loaded(const bf16* x) {
    return (Vector)(__builtin_convertvector(*(const Lanes<std::uint16_t>*)x, Lanes<std::uint32_t>) << 16);
}

// C (R, C vectors) = A (R, K) B (K, C vectors), or C += it.
template <int R, int C, class W>
static inline void block(const float* a, i64 lda, const W* b, i64 ldb, float* c, i64 ldc, i64 K, bool add) {
    Vector sum[R][C];
    for (int r = 0; r < R; ++r)
        for (int j = 0; j < C; ++j) sum[r][j] = add ? loaded(c + r * ldc + j * LANES) : Vector{};
    for (i64 k = 0; k < K; ++k) {
        Vector row[C];
        for (int j = 0; j < C; ++j) {
            row[j] = loaded(b + k * ldb + j * LANES);
            if (R <= 4) __builtin_prefetch((const char*)(b + k * ldb + j * LANES) + PREFETCHED);
        }
        for (int r = 0; r < R; ++r) {
            Vector x = a[r * lda + k] - Vector{};
            for (int j = 0; j < C; ++j) sum[r][j] += x * row[j];
        }
    }
    for (int r = 0; r < R; ++r)
        for (int j = 0; j < C; ++j) *(Vector*)(c + r * ldc + j * LANES) = sum[r][j];
}

template <int R, int C, class W>
static inline void band(const float* a, i64 lda, const W* b, i64 ldb, float* c, i64 ldc, i64 N, i64 K, bool add) {
    i64 n = 0;
    for (; n + C * LANES <= N; n += C * LANES) block<R, C>(a, lda, b + n, ldb, c + n, ldc, K, add);
    for (; n < N; n += LANES) block<R, 1>(a, lda, b + n, ldb, c + n, ldc, K, add);
}

// C (rows, N) = A (rows, K) B (K, N), or C += it, with R x C vectors of C in registers; N is a multiple of LANES.
template <int R_, int C_, class W>
static void multiply(const float* a, i64 lda, const W* b, i64 ldb, float* c, i64 ldc, i64 rows, i64 N, i64 K, bool add) {
    constexpr int C = REGISTERS == 32 ? C_ : C_ / 2 + 1, R = REGISTERS == 32 ? R_ : 12 / C;  // sums, a row of B, spare
    i64 r = 0;
    for (; r + R <= rows; r += R) band<R, C>(a + r * lda, lda, b, ldb, c + r * ldc, ldc, N, K, add);
    for (; r + 4 <= rows; r += 4) band<4, C>(a + r * lda, lda, b, ldb, c + r * ldc, ldc, N, K, add);
    for (; r + 2 <= rows; r += 2) band<2, C>(a + r * lda, lda, b, ldb, c + r * ldc, ldc, N, K, add);
    for (; r < rows; ++r) band<1, C>(a + r * lda, lda, b, ldb, c + r * ldc, ldc, N, K, add);
}
