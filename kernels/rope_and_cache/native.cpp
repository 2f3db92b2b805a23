#include <vector>

#include "_native.h"

struct Sizes {
    i64 T, H, H_kv, D, half, positions, slots;
    i64 q_token, q_head, k_token, k_head, v_token, v_head, out_token, out_head;  // strides
    i64 cos_row, sin_row;                                                        // strides of the tables
    i64 interleaved, threads;
};

template <class T, class In>
static void turn(const In* in, T* out, const float* cos, const float* sin, const Sizes& s) {
    for (i64 i = 0; i < s.half; ++i) {
        i64 first = s.interleaved ? 2 * i : i, second = s.interleaved ? 2 * i + 1 : i + s.half;
        float a = to_float(in[first]), b = to_float(in[second]);
        out[first] = rounded<T>(a * cos[i] - b * sin[i]);
        out[second] = rounded<T>(b * cos[i] + a * sin[i]);
    }
    for (i64 i = 2 * s.half; i < s.D; ++i) out[i] = rounded<T>(to_float(in[i]));
}

// Norms a head, rotates it and rounds it once; x is a buffer of D values.
template <class T>
static void norm_and_turn(const T* in, T* out, const T* norm, float eps, const float* cos, const float* sin, float* x,
                          const Sizes& s) {
    for (i64 i = 0; i < s.D; ++i) x[i] = to_float(in[i]);
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (i64 i = 0; i < s.D; ++i) squares += x[i] * x[i];
    const float scale = 1 / std::sqrt(squares / s.D + eps);
    for (i64 i = 0; i < s.D; ++i) x[i] *= scale * to_float(norm[i]);
    turn(x, out, cos, sin, s);
}

enum Bad { NONE, POSITION, SLOT };

template <class T>
static Bad tokens(const void* q, const void* k, const void* v, const float* cos, const float* sin,
                  const i64* positions, void* q_out, void* k_cache, void* v_cache, const i64* slots,
                  const void* q_norm, const void* k_norm, float eps, const Sizes& s) {
    for (i64 t = 0; t < s.T; ++t) {
        if (positions[t] < 0 || positions[t] >= s.positions) return POSITION;
        if (slots[t] >= s.slots) return SLOT;
    }
#pragma omp parallel for num_threads(s.threads) if (s.T * s.H * s.D > 16384)
    for (i64 t = 0; t < s.T; ++t) {
        std::vector<float> x(q_norm ? s.D : 0);
        auto head = [&](const T* in, T* out, const void* norm) {
            const float *c = cos + positions[t] * s.cos_row, *n = sin + positions[t] * s.sin_row;
            if (norm)
                norm_and_turn(in, out, (const T*)norm, eps, c, n, x.data(), s);
            else
                turn(in, out, c, n, s);
        };
        for (i64 h = 0; h < s.H; ++h)
            head((const T*)q + t * s.q_token + h * s.q_head, (T*)q_out + t * s.out_token + h * s.out_head, q_norm);
        if (slots[t] < 0) continue;
        for (i64 h = 0; h < s.H_kv; ++h) {
            i64 at = (slots[t] * s.H_kv + h) * s.D;
            head((const T*)k + t * s.k_token + h * s.k_head, (T*)k_cache + at, k_norm);
            std::memcpy((T*)v_cache + at, (const T*)v + t * s.v_token + h * s.v_head, s.D * sizeof(T));
        }
    }
    return NONE;
}

extern "C" int run(int dtype, const void* q, const void* k, const void* v, const float* cos, const float* sin,
                   const i64* positions, void* q_out, void* k_cache, void* v_cache, const i64* slots,
                   const void* q_norm, const void* k_norm, const Sizes* sizes, float eps) {
    auto run = dtype == 0 ? tokens<float> : dtype == 1 ? tokens<bf16> : tokens<fp16>;
    return run(q, k, v, cos, sin, positions, q_out, k_cache, v_cache, slots, q_norm, k_norm, eps, *sizes);
}
