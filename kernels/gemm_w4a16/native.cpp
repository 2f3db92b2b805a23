#include <algorithm>
#include <vector>

#include "_native_multiply.h"

// The codes lie in panels of 32 columns, (N / 32, K / 8, 32): a word has eight codes of one column.  The low half of a
// word has the codes of k = 0, 2, 4, 6, the high half those of k = 1, 3, 5, 7.  So a shift brings a pair of neighbours
// to the low bits of both halves.  K is padded to whole groups with codes of 8, which is zero.
constexpr i64 PANEL = 32;
constexpr int COLUMNS = PANEL / LANES;

struct Shape {
    i64 M, N, K, group, a, out, threads;  // K: padded; a, out: strides of rows
};

using Words = Lanes<std::uint32_t>;
static inline Words words(const std::uint32_t* x) { return *(const Words*)x; }

// sums (R, PANEL) = a (R, group) times the codes of a group, less 8 or the column's zero point.
template <int R>
static inline void in_fp32(const float* a, i64 lda, const std::uint32_t* codes, i64 group, const Vector* zero,
                           Vector (*sums)[COLUMNS]) {
    for (i64 k = 0; k < group; k += 8, codes += PANEL)
        for (int j = 0; j < 8; ++j) {
            const int shift = j / 2 * 4 + j % 2 * 16;
            for (int c = 0; c < COLUMNS; ++c) {
                Vector code = __builtin_convertvector((Lanes<std::int32_t>)((words(codes + c * LANES) >> shift) & 15),
                                                      Vector) - zero[c];
                for (int r = 0; r < R; ++r) sums[r][c] += a[r * lda + k + j] * code;
            }
        }
}

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && !defined(WITHOUT_BF16)
#define WITH_BF16
// The same with codes less 8 in bf16, which is exact: a table of 32 entries gives both halves of a word at once.  Its
// entries 16 to 31 repeat the first, because bit 4 belongs to the next code.
static inline __m512i table() {
    alignas(64) std::uint16_t values[32];
    for (int i = 0; i < 32; ++i) {
        float value = float(i % 16 - 8);
        std::uint32_t bits;
        std::memcpy(&bits, &value, 4);
        values[i] = std::uint16_t(bits >> 16);
    }
    return _mm512_load_si512(values);
}

template <int R>
static inline void in_bf16(const std::uint32_t* a, i64 lda, const std::uint32_t* codes, i64 group, __m512i values,
                           Vector (*sums)[COLUMNS]) {
    for (i64 k = 0; k < group / 2; k += 4, codes += PANEL)
        for (int c = 0; c < COLUMNS; ++c) {
            __m512i word = _mm512_loadu_si512(codes + c * LANES);
            for (int j = 0; j < 4; ++j) {
                auto pair = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi32(word, 4 * j), values);
                for (int r = 0; r < R; ++r)
                    sums[r][c] = (Vector)_mm512_dpbf16_ps((__m512)sums[r][c], pair,
                                                          (__m512bh)_mm512_set1_epi32(int(a[r * lda + k + j])));
            }
        }
}
#endif

template <int R, class S>
static void band(const bf16* a, const float* wide, const std::uint32_t* codes, const S* scales, const std::uint8_t* zeros,
                 const bf16* bias, bf16* out, i64 width, const Shape& s) {
    Vector total[R][COLUMNS] = {};
    for (i64 k = 0; k < s.K; k += s.group, codes += s.group / 8 * PANEL, scales += PANEL) {
        Vector sums[R][COLUMNS] = {};
#ifdef WITH_BF16
        if (!zeros)
            in_bf16<R>((const std::uint32_t*)(a + k), s.K / 2, codes, s.group, table(), sums);
        else
#endif
        {
            Vector zero[COLUMNS];
            for (int c = 0; c < COLUMNS; ++c)
                for (int i = 0; i < LANES; ++i) zero[c][i] = zeros ? float(zeros[c * LANES + i]) : 8.0f;
            in_fp32<R>(wide + k, s.K, codes, s.group, zero, sums);
        }
        for (int c = 0; c < COLUMNS; ++c) {
            Vector scale = loaded(scales + c * LANES);
            for (int r = 0; r < R; ++r) total[r][c] += sums[r][c] * scale;
        }
        if (zeros) zeros += PANEL;
    }
    for (int r = 0; r < R; ++r)
        for (i64 n = 0; n < width; ++n) {
            float value = total[r][n / LANES][n % LANES];
            out[r * s.out + n] = rounded<bf16>(bias ? value + to_float(bias[n]) : value);
        }
}

// out (M, N) = a (M, K) times (codes - zeros) * scales + bias, in fp32, rounded once; zeros and bias may be null.
template <class S>
static void product(const bf16* a, const std::uint32_t* codes, const S* scales, const std::uint8_t* zeros,
                    const bf16* bias, bf16* out, const Shape& s, i64 columns) {
    std::vector<bf16> rows(s.M * s.K + 2, bf16{0});
    std::vector<float> wide(s.M * s.K);
    for (i64 m = 0; m < s.M; ++m)
        for (i64 k = 0; k < columns; ++k)
            rows[m * s.K + k] = a[m * s.a + k], wide[m * s.K + k] = to_float(a[m * s.a + k]);
    const i64 panels = (s.N + PANEL - 1) / PANEL, groups = s.K / s.group;
#pragma omp parallel for schedule(static) num_threads(s.threads) if (s.M * s.N * s.K > 65536)
    for (i64 p = 0; p < panels; ++p) {
        const i64 first = p * PANEL, width = std::min(PANEL, s.N - first);
        auto at = [&](auto body, i64 m) {
            body(rows.data() + m * s.K, wide.data() + m * s.K, codes + first * s.K / 8, scales + first * groups,
                 zeros ? zeros + first * groups : nullptr, bias ? bias + first : nullptr, out + m * s.out + first, width, s);
        };
        i64 m = 0;
        for (; m + 4 <= s.M; m += 4) at(band<4, S>, m);
        for (; m + 2 <= s.M; m += 2) at(band<2, S>, m);
        for (; m < s.M; ++m) at(band<1, S>, m);
    }
}

extern "C" int run(int dtype, const bf16* a, const std::uint32_t* codes, const void* scales, const std::uint8_t* zeros,
                   const bf16* bias, bf16* out, const Shape* shape, i64 columns) {
#define OF(S) product(a, codes, (const S*)scales, zeros, bias, out, *shape, columns)
    dtype == 0 ? OF(float) : dtype == 1 ? OF(bf16) : OF(fp16);
    return 0;
}
