#include "_native.h"

struct Sizes {
    i64 T, H, H_kv, D, half, positions, slots;
    i64 q_token, q_head, k_token, k_head, v_token, v_head, out_token, out_head;  // strides
    i64 table;                                                                   // of cos and sin
    i64 interleaved, threads;
};

template <class T>
static void turn(const T* in, T* out, const float* cos, const float* sin, const Sizes& s) {
    for (i64 i = 0; i < s.half; ++i) {
        i64 first = s.interleaved ? 2 * i : i, second = s.interleaved ? 2 * i + 1 : i + s.half;
        float a = to_float(in[first]), b = to_float(in[second]);
        out[first] = rounded<T>(a * cos[i] - b * sin[i]);
        out[second] = rounded<T>(b * cos[i] + a * sin[i]);
    }
    for (i64 i = 2 * s.half; i < s.D; ++i) out[i] = in[i];
}

enum Bad { NONE, POSITION, SLOT };

template <class T>
static Bad tokens(const void* q, const void* k, const void* v, const float* cos, const float* sin,
                   const i64* positions, void* q_out, void* k_cache, void* v_cache, const i64* slots, const Sizes& s) {
    for (i64 t = 0; t < s.T; ++t) {
        if (positions[t] < 0 || positions[t] >= s.positions) return POSITION;
        if (slots[t] >= s.slots) return SLOT;
    }
#pragma omp parallel for num_threads(s.threads) if (s.T * s.H * s.D > 16384)
    for (i64 t = 0; t < s.T; ++t) {
        const float *c = cos + positions[t] * s.table, *n = sin + positions[t] * s.table;
        for (i64 h = 0; h < s.H; ++h)
            turn((const T*)q + t * s.q_token + h * s.q_head, (T*)q_out + t * s.out_token + h * s.out_head, c, n, s);
        if (slots[t] < 0) continue;
        for (i64 h = 0; h < s.H_kv; ++h) {
            i64 at = (slots[t] * s.H_kv + h) * s.D;
            turn((const T*)k + t * s.k_token + h * s.k_head, (T*)k_cache + at, c, n, s);
            std::memcpy((T*)v_cache + at, (const T*)v + t * s.v_token + h * s.v_head, s.D * sizeof(T));
        }
    }
    return NONE;
}

extern "C" int run(int dtype, const void* q, const void* k, const void* v, const float* cos, const float* sin,
                    const i64* positions, void* q_out, void* k_cache, void* v_cache, const i64* slots,
                   const Sizes* sizes) {
    switch (dtype) {
        case 0: return tokens<float>(q, k, v, cos, sin, positions, q_out, k_cache, v_cache, slots, *sizes);
        case 1: return tokens<bf16>(q, k, v, cos, sin, positions, q_out, k_cache, v_cache, slots, *sizes);
        default: return tokens<fp16>(q, k, v, cos, sin, positions, q_out, k_cache, v_cache, slots, *sizes);
    }
}
