// Helpers of the C++ kernels for the CPU: the three dtypes as fp32 values, and an exponential that vectorises.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

using i64 = std::int64_t;

struct bf16 {
    std::uint16_t bits;
};
using fp16 = _Float16;

static inline float to_float(float x) { return x; }
static inline float to_float(std::int8_t x) { return x; }
static inline float to_float(fp16 x) { return x; }
static inline float to_float(bf16 x) {
    std::uint32_t bits = std::uint32_t(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

template <class T> static inline T rounded(float x) { return T(x); }
template <> inline bf16 rounded<bf16>(float x) {  // to nearest even; a NaN stays NaN
    std::uint32_t bits;
    std::memcpy(&bits, &x, 4);
    std::uint32_t nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return {std::uint16_t(x != x ? 0x7fc0 : nearest)};
}

// exp(x) with a relative error below 2**-22: 2**n times a polynomial of the rest, |rest| <= ln(2) / 2 (Cody and Waite,
// "Software Manual for the Elementary Functions", 1980).  The comparisons let a NaN through.
static inline float exponential(float x) {
    x = x > 89.0f ? 89.0f : x;
    x = x < -104.0f ? -104.0f : x;
    float n = std::rint(x * 1.44269504f);
    float rest = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float sum = 1.0f / 5040;
    sum = sum * rest + 1.0f / 720;
    sum = sum * rest + 1.0f / 120;
    sum = sum * rest + 1.0f / 24;
    sum = sum * rest + 1.0f / 6;
    sum = sum * rest + 0.5f;
    sum = sum * rest + 1.0f;
    sum = sum * rest + 1.0f;
    std::int32_t whole = std::int32_t(x != x ? 0.0f : n), half = whole / 2;  // in two steps: 2**n may be subnormal
    std::uint32_t low = std::uint32_t(half + 127) << 23, high = std::uint32_t(whole - half + 127) << 23;
    float a, b;
    std::memcpy(&a, &low, 4);
    std::memcpy(&b, &high, 4);
    return sum * a * b;
}

// Returns FUNCTION<T>(...) for the dtype with `_native.py`'s number; 0 if FUNCTION returns nothing.
#define FOR_DTYPE(dtype, FUNCTION, ...)                         \
    switch (dtype) {                                            \
        case 0: return (FUNCTION<float>(__VA_ARGS__), 0);       \
        case 1: return (FUNCTION<bf16>(__VA_ARGS__), 0);        \
        default: return (FUNCTION<fp16>(__VA_ARGS__), 0);       \
    }

// An argument of a recorded call: an int, an i64, a float or an address, in the first bytes of eight.
struct Slot {
    std::uint64_t bits;
    template <class A> A as() const {
        A value;
        std::memcpy(&value, &bits, sizeof(A));
        return value;
    }
};

template <class... A, std::size_t... I>
static int unpacked(int (*function)(A...), const Slot* slots, std::index_sequence<I...>) {
    return function(slots[I].as<A>()...);
}
template <class... A> static int unpacked(int (*function)(A...), const Slot* slots) {
    return unpacked(function, slots, std::index_sequence_for<A...>{});
}
