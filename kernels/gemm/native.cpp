#include <algorithm>
#include <vector>

#include "_native_multiply.h"

// The weight lies in panels of PANEL columns, (N / PANEL, K, PANEL), so that every product reads it once, in order.
constexpr i64 PANEL = 32, MOST_ROWS = 240, MOST_K = 1024, FEW_ROWS = 16;  // a block of a and the sums of a panel stay in L2

struct Shape {
    i64 M, N, K, a, out, threads;  // a, out: strides of rows
};

// out (M, N) = a (M, K) panels * scales + bias; scales and bias may be null.
template <class T, class W>
static void product(const void* a_, const void* panels, const float* scales, const void* bias_, void* out_, Shape s) {
    const i64 M = s.M, N = s.N, K = s.K;
    i64 stride_a = s.a;
    const T* bias = (const T*)bias_;
    Floats rows;
    const float* a = (const float*)a_;
    if constexpr (!std::is_same_v<T, float>) {
        rows.resize(M * K);
#pragma omp parallel for num_threads(s.threads) if (M * K > 65536)
        for (i64 m = 0; m < M; ++m)
            for (i64 k = 0; k < K; ++k) rows[m * K + k] = to_float(((const T*)a_)[m * stride_a + k]);
        a = rows.data(), stride_a = K;
    }
    const i64 count = (N + PANEL - 1) / PANEL;
#pragma omp parallel num_threads(s.threads) if (M * N * K > 65536)
    {
        Floats sums(std::min(M, MOST_ROWS) * PANEL), wide;
        for (i64 from = 0; from < M; from += MOST_ROWS) {
            const i64 height = std::min(MOST_ROWS, M - from);
#pragma omp for schedule(static) nowait
            for (i64 p = 0; p < count; ++p) {
                const W* panel = (const W*)panels + p * K * PANEL;
                std::fill(sums.begin(), sums.end(), 0.0f);
                for (i64 k = 0; k < K; k += MOST_K) {
                    const i64 depth = std::min(MOST_K, K - k);
                    const float* rows = a + from * stride_a + k;
                    const W* part = panel + k * PANEL;
                    if (std::is_same_v<W, float> || height <= FEW_ROWS) {
                        multiply<12, 2>(rows, stride_a, part, PANEL, sums.data(), PANEL, height, PANEL, depth, true);
                    } else {  // many rows: the weight is converted once
                        wide.resize(MOST_K * PANEL);
                        for (i64 i = 0; i < depth * PANEL; ++i) wide[i] = to_float(part[i]);
                        multiply<12, 2>(rows, stride_a, wide.data(), PANEL, sums.data(), PANEL, height, PANEL, depth,
                                        true);
                    }
                }
                const i64 first = p * PANEL, width = std::min(PANEL, N - first);
                for (i64 m = 0; m < height; ++m) {
                    T* out = (T*)out_ + (from + m) * s.out + first;
                    for (i64 n = 0; n < width; ++n) {
                        float value = sums[m * PANEL + n] * (scales ? scales[first + n] : 1.0f);
                        out[n] = rounded<T>(bias ? value + to_float(bias[first + n]) : value);
                    }
                }
            }
        }
    }
}

template <class T>
static void same(const void* a, const void* panels, const float* scales, const void* bias, void* out, const Shape& s) {
    if (scales)
        product<T, std::int8_t>(a, panels, scales, bias, out, s);
    else
        product<T, T>(a, panels, scales, bias, out, s);
}

extern "C" int run(int dtype, const void* a, const void* panels, const float* scales, const void* bias, void* out,
                   const Shape* shape) {
    FOR_DTYPE(dtype, same, a, panels, scales, bias, out, *shape)
}
