#include "_native.h"

struct Shape {
    i64 T, I, x, out, threads;  // x, out: strides of rows
};

// gelu(g) = g sigmoid(2 u) is 1 + tanh(u) without its cancellation; 2 sqrt(2 / pi) = 1.5957691.
template <bool GELU>
static inline float activation(float g) {
    float argument = GELU ? 1.5957691216f * (g + 0.044715f * g * g * g) : g;
    return g / (1.0f + exponential(-argument));
}

template <class T, bool GELU>
static void loop(const void* x_, void* out_, const Shape& s) {
    const i64 I = s.I;
#pragma omp parallel for num_threads(s.threads) if (s.T * I > 8192)
    for (i64 row = 0; row < s.T; ++row) {
        const T* gate = (const T*)x_ + row * s.x;
        const T* up = gate + I;
        T* out = (T*)out_ + row * s.out;
        for (i64 i = 0; i < I; ++i) {
            out[i] = rounded<T>(activation<GELU>(to_float(gate[i])) * to_float(up[i]));
        }
    }
}

template <class T>
static void rows(const void* x, void* out, const Shape& s, int gelu) {
    gelu ? loop<T, true>(x, out, s) : loop<T, false>(x, out, s);
}

extern "C" int run(int dtype, const void* x, void* out, const Shape* shape, int gelu) {
    FOR_DTYPE(dtype, rows, x, out, *shape, gelu)
}
