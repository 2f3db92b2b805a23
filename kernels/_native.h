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
// "Software Manual for the Elementary Functions", 1980).  F is a float or a vector of them, I the int32 of that shape.
// The comparisons let a NaN through.  What becomes 0 is not computed, because a Xeon takes 150 cycles for such a product.
template <class F, class I>
static inline F exponential_of(F x) {
    const F most = F{} + 89.0f, least = F{} - 104.0f, all = x;
    x = x > most ? most : x;
    x = x < least ? F{} : x;
    F shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2**23: the last bits are the nearest integer
    F n = shifted - 12582912.0f;
    F rest = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    F sum = F{} + 1.0f / 5040;
    sum = sum * rest + 1.0f / 720;
    sum = sum * rest + 1.0f / 120;
    sum = sum * rest + 1.0f / 24;
    sum = sum * rest + 1.0f / 6;
    sum = sum * rest + 0.5f;
    sum = sum * rest + 1.0f;
    sum = sum * rest + 1.0f;
    I whole;
    std::memcpy(&whole, &shifted, sizeof whole);
    whole -= 0x4b400000;
    I half = whole >> 1, low = (half + 127) << 23, high = (whole - half + 127) << 23;  // in two steps: 2**n may be subnormal
    F a, b;
    std::memcpy(&a, &low, sizeof a);
    std::memcpy(&b, &high, sizeof b);
    return all < least ? F{} : sum * a * b;
}
static inline float exponential(float x) { return exponential_of<float, std::int32_t>(x); }

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
