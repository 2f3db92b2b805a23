// Arithmetic of every width, one thread an element.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

using u32 = unsigned int;
using u64 = unsigned long long;

// x: (n, 2), y: (n, 16)
extern "C" __global__ void wide_integers(const long long* x, long long* y) {
    const int i = threadIdx.x;
    const long long a = x[2 * i], b = x[2 * i + 1];
    const u64 ua = a, ub = b;
    long long* to = y + 16 * i;
    to[0] = a + b;
    to[1] = a * b;
    to[2] = b ? a / b : 0;
    to[3] = b ? a % b : 0;
    to[4] = ub ? ua / ub : 0;
    to[5] = __mul64hi(a, b);
    to[6] = __umul64hi(ua, ub);
    to[7] = a << (b & 63);
    to[8] = a >> (b & 63);
    to[9] = ua >> (b & 63);
    to[10] = __popcll(ua) + 100 * __clzll(a) + 10000 * __ffsll(b);
    to[11] = __brevll(ua);
    to[12] = min(a, b) ^ max(ua, ub);
    to[13] = (long long)(int)a * (int)b + (u64)(u32)a * (u32)b;
    to[14] = __sad((int)a, (int)b, 7) + __mulhi((int)a, (int)b) + __byte_perm((u32)a, (u32)b, 0x5241);
    const __int128 product = (__int128)a * b;
    to[15] = (long long)((product + a) >> 70) ^ (long long)(product - b);
}

extern "C" __global__ void narrow_integers(const signed char* a, const unsigned short* b, int* y) {
    const int i = threadIdx.x;
    signed char c = a[i];
    c = (signed char)(c * 3 - (signed char)b[i]);
    unsigned short s = b[i];
    s += c;
    s <<= 3;
    y[3 * i] = c;
    y[3 * i + 1] = s;
    y[3 * i + 2] = (short)s / (short)(b[i] | 1) + ((unsigned char)c >> 1);
}

// y: (n, 16)
extern "C" __global__ void functions(const float* x, float* y) {
    const int i = threadIdx.x;
    const float v = x[i], p = fabsf(v) + 1e-3f;
    float* to = y + 16 * i;
    to[0] = sinf(v);
    to[1] = cosf(v);
    to[2] = expf(v);
    to[3] = logf(p);
    to[4] = v / p;
    to[5] = sqrtf(p);
    to[6] = rsqrtf(p);
    to[7] = powf(p, 1.7f);
    to[8] = tanhf(v);
    to[9] = erff(v);
    to[10] = log1pf(p);
    to[11] = exp2f(v);
    to[12] = fmodf(v, 0.7f);
    to[13] = atan2f(v, p);
    to[14] = cbrtf(v);
    to[15] = tanf(v);
}

// y: (n, 8)
extern "C" __global__ void double_functions(const double* x, double* y) {
    const int i = threadIdx.x;
    const double v = x[i], p = fabs(v) + 1e-9;
    double* to = y + 8 * i;
    to[0] = sin(v);
    to[1] = exp(v);
    to[2] = log(p);
    to[3] = v / p;
    to[4] = sqrt(p);
    to[5] = pow(p, 2.3);
    to[6] = tanh(v);
    to[7] = __dadd_rz(v, 1e-20) + fma(v, v, -p) + rint(v) + trunc(v) + ceil(v);
}

// Rounding towards everywhere, and conversions; y: (n, 16) of int.
extern "C" __global__ void conversions(const float* x, int* y) {
    const int i = threadIdx.x;
    const float v = x[i];
    int* to = y + 16 * i;
    to[0] = __float2int_rn(v);
    to[1] = __float2int_rz(v);
    to[2] = __float2int_ru(v);
    to[3] = __float2int_rd(v);
    to[4] = __float2uint_rz(v);
    to[5] = (int)(long long)v;
    to[6] = (signed char)v;
    to[7] = __float_as_int(__int2float_rz(to[0] * 16777217));
    to[8] = __float_as_int(__fadd_ru(v, 1e-7f));
    to[9] = __float_as_int(__fmul_rd(v, 1.1f));
    to[10] = __float_as_int(__fmaf_rz(v, 1.1f, 0.3f));
    to[11] = __float_as_int(__double2float_rn((double)v * 1.1));
    to[12] = __float_as_int(roundf(v)) ^ __float_as_int(floorf(v));
    to[13] = isnan(v) + 2 * isinf(v) + 4 * signbit(v) + 8 * isfinite(v);
    to[14] = __float_as_int(fminf(v, 0.25f)) ^ __float_as_int(fmaxf(v, -3.0f));
    to[15] = __float_as_int(ldexpf(v, 3)) ^ __float_as_int(copysignf(2.5f, v));
}

// x: (n, 2) floats. y: (n, 12) of 16 bits.
extern "C" __global__ void halves(const float* x, __half* y) {
    const int i = threadIdx.x;
    const __half a = __float2half_rn(x[2 * i]), b = __float2half_rn(x[2 * i + 1]);
    const __half2 pair = __halves2half2(a, b), other = __floats2half2_rn(0.5f, -3.0f);
    __half* to = y + 12 * i;
    to[0] = a + b;
    to[1] = a * b;
    to[2] = __hfma(a, b, a);
    to[3] = __hmax(a, b);
    to[4] = hsqrt(__habs(a));
    to[5] = a / b;
    const __half2 sum = __hfma2(pair, other, pair);
    to[6] = sum.x;
    to[7] = sum.y;
    to[8] = __hlt(a, b) ? __hneg(a) : __hadd_sat(a, b);
    to[9] = __short2half_rn((short)(x[2 * i] * 100));
    to[10] = __low2half(__h2div(pair, other));
    to[11] = hexp2(a);
}

// y: (n, 8) of 16 bits.
extern "C" __global__ void brain_floats(const float* x, __nv_bfloat16* y) {
    const int i = threadIdx.x;
    const __nv_bfloat16 a = __float2bfloat16(x[2 * i]), b = __float2bfloat16(x[2 * i + 1]);
    __nv_bfloat16* to = y + 8 * i;
    to[0] = a + b;
    to[1] = a * b;
    to[2] = __hfma(a, b, a);
    to[3] = __hmin(a, b);
    to[4] = a / b;
    const __nv_bfloat162 pair = __hmul2(__halves2bfloat162(a, b), __float2bfloat162_rn(1.5f));
    to[5] = pair.x;
    to[6] = pair.y;
    to[7] = __hgt(a, b) ? a : b;
}

// x: (n, 2) floats. y: (n, 4) bytes, z: (n, 2) floats.
extern "C" __global__ void eight_bits(const float* x, unsigned char* y, float* z) {
    const int i = threadIdx.x;
    const float2 v = make_float2(x[2 * i], x[2 * i + 1]);
    const __nv_fp8x2_e4m3 pair(v);
    const __nv_fp8x2_e5m2 wide(v);
    y[4 * i] = pair.__x & 255;
    y[4 * i + 1] = pair.__x >> 8;
    y[4 * i + 2] = wide.__x & 255;
    y[4 * i + 3] = wide.__x >> 8;
    const float2 back = (float2)pair;
    z[2 * i] = back.x;
    z[2 * i + 1] = back.y + (float)__nv_fp8_e5m2(v.x);
}
