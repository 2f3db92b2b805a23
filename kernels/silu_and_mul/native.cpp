#include "_native.h"

struct Shape {
    i64 T, I, x, out, threads;  // x, out: strides of rows
};

template <class T>
static void rows(const void* x_, void* out_, const Shape& s) {
    const i64 I = s.I;
#pragma omp parallel for num_threads(s.threads) if (s.T * I > 8192)
    for (i64 row = 0; row < s.T; ++row) {
        const T* gate = (const T*)x_ + row * s.x;
        const T* up = gate + I;
        T* out = (T*)out_ + row * s.out;
        for (i64 i = 0; i < I; ++i) {
            float g = to_float(gate[i]);
            out[i] = rounded<T>(g / (1.0f + exponential(-g)) * to_float(up[i]));
        }
    }
}

extern "C" int run(int dtype, const void* x, void* out, const Shape* shape) {
    FOR_DTYPE(dtype, rows, x, out, *shape)
}
