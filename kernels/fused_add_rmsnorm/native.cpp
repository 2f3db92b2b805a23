#include "_native.h"

struct Shape {
    i64 T, H, x, residual, out, sum, threads;  // x to sum: strides of rows
};

// rmsnorm of x, or of the rounded sum of x and residual, which goes to `sum`; residual and sum may be null.  With
// `first`, x / rms is rounded before the product with the weight.
template <class T>
static void rows(const void* x_, const void* residual_, const void* weight_, void* out_, void* sum_, const Shape& s,
                 float eps, float offset, int first) {
    const i64 H = s.H;
#pragma omp parallel for num_threads(s.threads) if (s.T * H > 16384)
    for (i64 row = 0; row < s.T; ++row) {
        const T* x = (const T*)x_ + row * s.x;
        const T* weight = (const T*)weight_;
        T* out = (T*)out_ + row * s.out;
        if (residual_) {
            const T* residual = (const T*)residual_ + row * s.residual;
            T* sum = (T*)sum_ + row * s.sum;
            for (i64 i = 0; i < H; ++i) sum[i] = rounded<T>(to_float(x[i]) + to_float(residual[i]));
            x = sum;
        }
        float squares = 0;
#pragma omp simd reduction(+ : squares)
        for (i64 i = 0; i < H; ++i) squares += to_float(x[i]) * to_float(x[i]);
        float scale = 1.0f / std::sqrt(squares / H + eps);
        if (first && sizeof(T) == 2) {
            for (i64 i = 0; i < H; ++i)
                out[i] = rounded<T>(to_float(rounded<T>(to_float(x[i]) * scale)) * (to_float(weight[i]) + offset));
        } else {
            for (i64 i = 0; i < H; ++i) out[i] = rounded<T>(to_float(x[i]) * scale * (to_float(weight[i]) + offset));
        }
    }
}

extern "C" int run(int dtype, const void* x, const void* residual, const void* weight, void* out, void* sum,
                    const Shape* shape, float eps, float offset, int first) {
    FOR_DTYPE(dtype, rows, x, residual, weight, out, sum, *shape, eps, offset, first)
}
