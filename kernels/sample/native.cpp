#include <limits>

#include "_native.h"

struct Shape {
    i64 B, V, row, threads;  // row: elements between two rows
};

// The first index of a row's largest value, or -1 if that value is not finite or the row has a NaN.
template <class T>
static i64 best(const T* x, i64 V) {
    float most = -std::numeric_limits<float>::infinity();
    int nan = 0;
#pragma omp simd reduction(max : most) reduction(| : nan)
    for (i64 i = 0; i < V; ++i) {
        float value = to_float(x[i]);
        most = value > most ? value : most;
        nan |= value != value;
    }
    if (nan || !std::isfinite(most)) return -1;
    i64 index = 0;
    while (to_float(x[index]) != most) ++index;
    return index;
}

template <class T>
static int rows(const void* logits, i64* tokens, const Shape& s) {
#pragma omp parallel for num_threads(s.threads) if (s.B > 1)
    for (i64 b = 0; b < s.B; ++b) tokens[b] = best((const T*)logits + b * s.row, s.V);
    for (i64 b = 0; b < s.B; ++b)
        if (tokens[b] < 0) return 1;
    return 0;
}

extern "C" int run(int dtype, const void* logits, i64* tokens, const Shape* shape) {
    auto run = dtype == 0 ? rows<float> : dtype == 1 ? rows<bf16> : rows<fp16>;
    return run(logits, tokens, *shape);
}
