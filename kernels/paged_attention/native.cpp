#include "_native_attention.h"

extern "C" int run(int dtype, const void* q, const void* k, const void* v, void* out, const int* q_bounds,
                    const int* lengths, const int* table, const Shape* shape, float scale) {
    Where at{q_bounds, nullptr, lengths, table};
    FOR_DTYPE(dtype, attention, q, k, v, out, at, *shape, scale)
}
