#include <algorithm>
#include <vector>

#include "_native_multiply.h"

// Codes lie in panels of 32 columns, [N / 32, words, 32].  A 32-bit word of a column has 4 codes of 8 bits, or 8 codes of
// 4 bits: byte i has the codes of k + i (low half) and k + 4 + i.  Codes are unsigned; ZERO is the code of 0, or 0 if
// codes of 4 bits have minimums.
constexpr i64 PANEL = 32, FEW_ROWS = 16, MOST_ROWS = 240, MOST_K = 1024;
constexpr int COLUMNS = PANEL / LANES;

struct Shape {
    i64 M, N, K, group, bits, a, out, threads;  // a, out: strides of rows
};

using Words = Lanes<std::uint32_t>;
static inline Words words(const std::uint32_t* x) { return *(const Words*)x; }

// The code of k + i, of the 4 or 8 codes of a word.
template <int BITS>
static inline Vector code(Words word, int i) {
    const int shift = BITS == 8 ? 8 * i : i % 4 * 8 + i / 4 * 4;
    return __builtin_convertvector((Lanes<std::int32_t>)((word >> shift) & (BITS == 8 ? 255 : 15)), Vector);
}

// The activations: fp32, and for VNNI integers of 16 bits relative to the largest of a group, as two signed bytes.
struct Rows {
    std::vector<float> values, sums, steps;  // sums and steps (the value of 1): a number for each row and group
    std::vector<std::int8_t> high, low;
    std::vector<std::int32_t> totals;  // of the integers of a group
    std::vector<char> exact;           // groups that integers cannot represent: infinite, NaN, tiny, or far apart
};

static Rows prepared(const bf16* a, const Shape& s) {
    const i64 groups = s.K / s.group;
    const i64 few = s.M > FEW_ROWS ? 0 : s.M;  // more rows take the fp32 values alone
    Rows rows{std::vector<float>(s.M * s.K), std::vector<float>(few * groups), std::vector<float>(few * groups),
              std::vector<std::int8_t>(few * s.K), std::vector<std::int8_t>(few * s.K),
              std::vector<std::int32_t>(few * groups), std::vector<char>(few * groups)};
#pragma omp parallel for num_threads(s.threads) if (s.M * s.K > 65536)
    for (i64 m = 0; m < s.M; ++m)
        for (i64 g = 0; g < groups; ++g) {
            const i64 first = m * s.K + g * s.group, of = m * groups + g;
            float* x = rows.values.data() + first;
            float largest = 0, sum = 0, squares = 0;
            int small = 0;
            for (i64 k = 0; k < s.group; ++k) {
                x[k] = to_float(a[m * s.a + g * s.group + k]);
                largest = std::max(largest, std::fabs(x[k])), sum += x[k];
            }
            if (!few) continue;
            rows.sums[of] = sum;
            for (i64 k = 0; k < s.group; ++k)
                if (std::fabs(x[k]) < largest / 16) squares += x[k] * x[k], small += x[k] != 0;
            // If the small activations' root mean square is below the largest over 256, too few bits are left for them.
            const bool hidden = squares < small * (largest / 256) * (largest / 256);
            rows.exact[of] = sum - sum != 0 || (largest > 0 && (largest < 1e-18f || largest > 1e18f || hidden));
            if (rows.exact[of] || largest == 0) continue;
            const float step = largest / 32639, inverse = 1 / step;  // 32639 = 127 * 256 + 127
            rows.steps[of] = step;
            std::int32_t total = 0;
            for (i64 k = 0; k < s.group; ++k) {
                std::int32_t whole = std::int32_t(std::rint(x[k] * inverse));
                rows.low[first + k] = std::int8_t(whole);
                rows.high[first + k] = std::int8_t((whole - rows.low[first + k]) >> 8);
                total += whole;
            }
            rows.totals[of] = total;
        }
    return rows;
}

// sums (R, PANEL) = a (R, group) times the codes of a group, less ZERO.
template <int R, int BITS>
static inline void in_fp32(const float* a, i64 lda, const std::uint32_t* codes, i64 group, float zero,
                           Vector (*sums)[COLUMNS]) {
    constexpr int COUNT = 32 / BITS;
    for (i64 k = 0; k < group; k += COUNT, codes += PANEL)
        for (int c = 0; c < COLUMNS; ++c) {
            Words word = words(codes + c * LANES);
            for (int i = 0; i < COUNT; ++i) {
                Vector value = code<BITS>(word, i) - zero;
                for (int r = 0; r < R; ++r) sums[r][c] += a[r * lda + k + i] * value;
            }
        }
}

#if defined(__AVX512VNNI__) && !defined(WITHOUT_VNNI)
#define WITH_VNNI
// The same of integers: each 32-bit word of `high` and `low` has the bytes of four neighbours along K.
template <int R, int BITS>
static inline void by_vnni(const std::int8_t* high, const std::int8_t* low, i64 lda, const std::uint32_t* codes, i64 group,
                           const std::int32_t* totals, const float* steps, i64 groups, int zero, Vector (*sums)[COLUMNS]) {
    const __m512i mask = _mm512_set1_epi8(15);
    for (int c = 0; c < COLUMNS; ++c, codes += LANES) {
        __m512i h[R] = {}, l[R] = {};
        auto multiply = [&](__m512i bytes, i64 k) {
            for (int r = 0; r < R; ++r) {
                std::int32_t four;
                std::memcpy(&four, high + r * lda + k, 4);
                h[r] = _mm512_dpbusd_epi32(h[r], bytes, _mm512_set1_epi32(four));
                std::memcpy(&four, low + r * lda + k, 4);
                l[r] = _mm512_dpbusd_epi32(l[r], bytes, _mm512_set1_epi32(four));
            }
        };
        for (i64 k = 0; k < group; k += 32 / BITS) {
            const std::uint32_t* at = codes + k * BITS / 32 * PANEL;
            __m512i word = _mm512_loadu_si512(at);
            __builtin_prefetch((const char*)at + PREFETCHED);
            if constexpr (BITS == 8) {
                multiply(word, k);
            } else {
                multiply(_mm512_and_si512(word, mask), k);
                multiply(_mm512_and_si512(_mm512_srli_epi16(word, 4), mask), k + 4);
            }
        }
        for (int r = 0; r < R; ++r) {
            __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(h[r], 8), l[r]);
            sum = _mm512_sub_epi32(sum, _mm512_set1_epi32(zero * totals[r * groups]));
            sums[r][c] = (Vector)_mm512_cvtepi32_ps(sum) * steps[r * groups];
        }
    }
}
#endif

// R rows of `out` from row m on, for the panel whose first column is `first`.
template <int R, int BITS, class S>
static void few(const Rows& rows, i64 m, const std::uint32_t* codes, const S* scales, const S* minimums, float* out,
                 const Shape& s) {
    const i64 groups = s.K / s.group;
    const int zero = BITS == 8 ? 128 : minimums ? 0 : 8;
    Vector total[R][COLUMNS] = {};
    for (i64 g = 0; g < groups; ++g, codes += s.group * BITS / 32 * PANEL, scales += PANEL) {
        Vector sums[R][COLUMNS] = {};
        const i64 at = m * s.K + g * s.group, of = m * groups + g;
        bool exact = false;
        for (int r = 0; r < R; ++r) exact |= rows.exact[of + r * groups] != 0;
#ifdef WITH_VNNI
        if (!exact)
            by_vnni<R, BITS>(rows.high.data() + at, rows.low.data() + at, s.K, codes, s.group, rows.totals.data() + of,
                             rows.steps.data() + of, groups, zero, sums);
        else
#endif
            in_fp32<R, BITS>(rows.values.data() + at, s.K, codes, s.group, float(zero), sums);
        for (int c = 0; c < COLUMNS; ++c) {
            Vector scale = loaded(scales + c * LANES);
            for (int r = 0; r < R; ++r) total[r][c] += sums[r][c] * scale;
            if (minimums) {
                Vector minimum = loaded(minimums + c * LANES);
                for (int r = 0; r < R; ++r) total[r][c] -= rows.sums[of + r * groups] * minimum;
            }
        }
        if (minimums) minimums += PANEL;
    }
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < COLUMNS; ++c) *(Vector*)(out + r * PANEL + c * LANES) = total[r][c];
}

// out (height, PANEL) += rows from m on times a panel, whose weights become fp32 values once, MOST_K at a time.
template <int BITS, class S>
static void many(const Rows& rows, i64 m, i64 height, const std::uint32_t* codes, const S* scales, const S* minimums,
                 float* wide, float* out, const Shape& s) {
    const float zero = BITS == 8 ? 128 : minimums ? 0 : 8;
    for (i64 from = 0; from < s.K; from += MOST_K) {
        const i64 depth = std::min(MOST_K, s.K - from);
        for (i64 k = 0; k < depth; k += 32 / BITS, codes += PANEL)
            for (int c = 0; c < COLUMNS; ++c) {
                const i64 group = (from + k) / s.group * PANEL + c * LANES;
                Vector scale = loaded(scales + group), minimum = minimums ? loaded(minimums + group) : Vector{};
                for (int i = 0; i < 32 / BITS; ++i)
                    *(Vector*)(wide + (k + i) * PANEL + c * LANES) =
                        (code<BITS>(words(codes + c * LANES), i) - zero) * scale - minimum;
            }
        multiply<12, 2>(rows.values.data() + m * s.K + from, s.K, wide, PANEL, out, PANEL, height, PANEL, depth, true);
    }
}

// out (M, N) = a (M, K) times (codes - ZERO) * scales - minimums, plus bias, in fp32, rounded once.
template <int BITS, class S>
static void product(const bf16* a, const std::uint32_t* codes, const S* scales, const S* minimums, const bf16* bias,
                    bf16* out, const Shape& s) {
    const Rows rows = prepared(a, s);
    const i64 panels = (s.N + PANEL - 1) / PANEL, groups = s.K / s.group;
#pragma omp parallel num_threads(s.threads) if (s.M * s.N * s.K > 65536)
    {
        Floats sums(std::min(s.M, MOST_ROWS) * PANEL), wide(s.M > FEW_ROWS ? MOST_K * PANEL : 0);
#pragma omp for schedule(static)
        for (i64 p = 0; p < panels; ++p)
            for (i64 from = 0; from < s.M; from += MOST_ROWS) {
                const i64 height = std::min(MOST_ROWS, s.M - from), first = p * PANEL;
                const i64 width = std::min(PANEL, s.N - first);
                const std::uint32_t* panel = codes + first * s.K * BITS / 32;
                const S *scale = scales + first * groups, *minimum = minimums ? minimums + first * groups : nullptr;
                auto at = [&](auto body, i64 m) { body(rows, from + m, panel, scale, minimum, sums.data() + m * PANEL, s); };
                i64 m = 0;
                if (s.M > FEW_ROWS) {
                    std::fill(sums.begin(), sums.end(), 0.0f);
                    many<BITS>(rows, from, height, panel, scale, minimum, wide.data(), sums.data(), s);
                    m = height;
                }
                for (; m + 4 <= height; m += 4) at(few<4, BITS, S>, m);
                for (; m + 2 <= height; m += 2) at(few<2, BITS, S>, m);
                for (; m < height; ++m) at(few<1, BITS, S>, m);
                for (m = 0; m < height; ++m)
                    for (i64 n = 0; n < width; ++n) {
                        float value = sums[m * PANEL + n];
                        out[(from + m) * s.out + first + n] =
                            rounded<bf16>(bias ? value + to_float(bias[first + n]) : value);
                    }
            }
    }
}

template <class S>
static void by_bits(const bf16* a, const std::uint32_t* codes, const void* scales, const void* minimums, const bf16* bias,
                    bf16* out, const Shape& s) {
    s.bits == 4 ? product<4>(a, codes, (const S*)scales, (const S*)minimums, bias, out, s)
                : product<8>(a, codes, (const S*)scales, (const S*)minimums, bias, out, s);
}

extern "C" int run(int dtype, const bf16* a, const std::uint32_t* codes, const void* scales, const void* minimums,
                   const bf16* bias, bf16* out, const Shape* shape) {
    FOR_DTYPE(dtype, by_bits, a, codes, scales, minimums, bias, out, *shape)
}
