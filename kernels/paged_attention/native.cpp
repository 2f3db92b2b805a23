#include "_native_attention.h"

struct Paged : Shape {
    i64 tokens, pages_of_sequence, pages;  // sizes of q, of a row of the table, of the caches
};

// Whether a bound, a length or a page that a query sees is out of place, as reference/pages.py says; it has the words.
static bool out_of_place(const Where& at, const Paged& s) {
    if (at.q_bounds && (at.q_bounds[0] != 0 || at.q_bounds[s.B] != s.tokens)) return true;
    for (i64 b = 0; b < s.B; ++b) {
        const i64 queries = at.q_bounds ? at.q_bounds[b + 1] - at.q_bounds[b] : 1, length = at.lengths[b];
        if (queries < 0 || length < 0 || length > s.pages_of_sequence * s.block_size) return true;
        const i64 first = s.window ? std::max<i64>(0, length - queries + 1 - s.window) : 0;
        for (i64 page = first / s.block_size; queries && page * s.block_size < length; ++page) {
            const i64 block = at.table[b * s.table + page];
            if (block < 0 || block >= s.pages) return true;
        }
    }
    return false;
}

extern "C" int run(int dtype, const void* q, const void* k, const void* v, void* out, const int* q_bounds,
                    const int* lengths, const int* table, const Paged* shape, float scale) {
    Where at{q_bounds, nullptr, lengths, table};
    if (out_of_place(at, *shape)) return 1;
    FOR_DTYPE(dtype, attention, q, k, v, out, at, *shape, scale)
}
