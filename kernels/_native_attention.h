// Attention on the CPU for the dense and the paged op, which differ only in the place of a key.
//
// As FlashAttention-2 (Dao, 2023): a tile of queries meets the keys tile by tile, with a running maximum and sum per
// row.  The query heads of a key's head are rows of one tile, so a key is converted once for all of them.  The keys of
// a tile are transposed, and both products run in registers, ROWS x COLUMNS vectors at a time.  With fewer rows than
// FEW, as in a decode step, scores are dot products instead, because the transposition would cost more than it saves.
#pragma once

#include <algorithm>
#include <limits>

#include "_native_multiply.h"

constexpr int FEW = 12, KEYS = 64, QUERIES = 64, AHEAD = 8;
constexpr i64 PART = 256;  // the least keys that are worth the start of another thread
constexpr float NEVER = -std::numeric_limits<float>::infinity();

struct Shape {
    i64 B, H, H_kv, D, threads;
    i64 q_token, q_head, out_token, out_head, k_token, k_head, v_token, v_head;  // strides
    i64 k_page, v_page, block_size, table;                                       // strides of the paged cache
    i64 causal, window;  // the number of keys that a query sees, its own included; 0: all
};

struct Where {
    const int *q_bounds, *k_bounds, *lengths, *table;  // null: one query per sequence; paged; dense; dense
};

// Joins the lanes of x by a sum or a maximum.
template <class Join>
static inline float joined(Vector x, Join join) {
#ifdef __AVX512F__
    auto eight = join(__builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7),
                      __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15));
#else
    auto eight = x;
#endif
    auto four = join(__builtin_shufflevector(eight, eight, 0, 1, 2, 3), __builtin_shufflevector(eight, eight, 4, 5, 6, 7));
    auto two = join(four, __builtin_shufflevector(four, four, 2, 3, 0, 1));
    return join(two, __builtin_shufflevector(two, two, 1, 0, 3, 2))[0];
}
static inline float total(Vector x) {
    return joined(x, [](auto a, auto b) { return a + b; });
}
static inline float largest(Vector x) {
    return joined(x, [](auto a, auto b) { return a > b ? a : b; });
}

template <class T>
static inline void fetch(const T* row, i64 D) {
    for (i64 d = 0; d < D; d += 64 / sizeof(T)) __builtin_prefetch(row + d);
}

// Scores of R rows with one key of D values.
template <int R, class T>
static inline void dots(const float* q, i64 ldq, const T* key, i64 D, float* scores) {
    Vector sum[R] = {};
    for (i64 d = 0; d < D; d += LANES) {
        Vector part = loaded(key + d);
        for (int r = 0; r < R; ++r) sum[r] += loaded(q + r * ldq + d) * part;
    }
    for (int r = 0; r < R; ++r) scores[r * KEYS] = total(sum[r]);
}

// out (R, D) += scores (R, count) times the rows of values.
template <int R, class T>
static inline void weighted(const float* scores, const T* const* values, i64 count, i64 D, float* out, i64 ldo) {
    for (i64 d = 0; d < D; d += LANES) {
        Vector sum[R];
        for (int r = 0; r < R; ++r) sum[r] = loaded(out + r * ldo + d);
        for (i64 j = 0; j < count; ++j) {
            Vector part = loaded(values[j] + d);
            for (int r = 0; r < R; ++r) sum[r] += scores[r * KEYS + j] * part;
        }
        for (int r = 0; r < R; ++r) *(Vector*)(out + r * ldo + d) = sum[r];
    }
}

// Calls FUNCTION<R>(row) for bands of 4 rows and of the rows that are left.
#define FOR_BANDS(rows, r, R, BODY)                      \
    for (i64 r = 0; r < rows;) switch (std::min<i64>(rows - r, 4)) { \
            case 4: { constexpr int R = 4; BODY; r += 4; break; }     \
            case 3: { constexpr int R = 3; BODY; r += 3; break; }     \
            case 2: { constexpr int R = 2; BODY; r += 2; break; }     \
            default: { constexpr int R = 1; BODY; r += 1; }           \
        }

// The running maximum and sum of a tile of rows, and its buffers.
struct Tile {
    i64 width;  // D rounded up to a multiple of LANES
    Floats q, scores, out, keys, turned, values, most, sum, kept;  // kept: the factor of what was summed before

    Tile(i64 rows, i64 D) : width((D + LANES - 1) / LANES * LANES) {
        q.resize(rows * D), scores.resize(rows * KEYS), out.resize(rows * width);
        most.resize(rows), sum.resize(rows), kept.resize(rows);
    }
};

template <class T>
struct Attention {
    const T *q, *k, *v;
    T* out;
    Where at;
    Shape s;
    float scale;

    i64 first_query(i64 b) const { return at.q_bounds ? at.q_bounds[b] : b; }
    i64 queries(i64 b) const { return at.q_bounds ? at.q_bounds[b + 1] - at.q_bounds[b] : 1; }
    i64 keys(i64 b) const { return at.lengths ? at.lengths[b] : at.k_bounds[b + 1] - at.k_bounds[b]; }
    // Finds `count` keys and values of head h, from `key` on.
    void find(i64 b, i64 h, i64 key, i64 count, const T** keys, const T** values) const {
        i64 page = key / s.block_size, token = key % s.block_size;
        for (i64 j = 0; j < count; ++j) {
            i64 block = at.table ? at.table[b * s.table + page] : 0, row = at.table ? token : at.k_bounds[b] + key + j;
            keys[j] = k + block * s.k_page + row * s.k_token + h * s.k_head;
            values[j] = v + block * s.v_page + row * s.v_token + h * s.v_head;
            if (++token == s.block_size) token = 0, ++page;
        }
    }
    // Row r of a tile is query r / group of head r % group.  It sees the keys [begin, end).
    i64 end(i64 b, i64 query) const {
        return s.causal ? std::max<i64>(0, std::min(keys(b), keys(b) - queries(b) + query + 1)) : keys(b);
    }
    i64 begin(i64 b, i64 query) const { return s.window ? std::max<i64>(0, end(b, query) - s.window) : 0; }

    // Computes queries [from, to) of sequence b and head h over the keys [low, high) that they see.
    void attend(i64 b, i64 h, i64 from, i64 to, i64 low, i64 high, Tile& tile) const {
        const i64 group = s.H / s.H_kv, rows = (to - from) * group, D = s.D, width = tile.width;
        for (i64 r = 0; r < rows; ++r) {
            const T* source = q + (first_query(b) + from + r / group) * s.q_token + (h * group + r % group) * s.q_head;
            for (i64 d = 0; d < D; ++d) tile.q[r * D + d] = to_float(source[d]) * scale;
            tile.most[r] = NEVER, tile.sum[r] = 0;
        }
        std::fill_n(tile.out.begin(), rows * width, 0.0f);
        for (i64 key = low; key < high; key += KEYS) {
            const i64 count = std::min<i64>(KEYS, high - key);
            const bool few = rows < FEW && D % LANES == 0;
            const T *keys[KEYS], *values[KEYS];
            find(b, h, key, count, keys, values);
            if (few) {
                for (i64 j = 0; j < count; ++j) {
                    fetch(keys[std::min(j + AHEAD, count - 1)], D), fetch(values[j], D);
                    FOR_BANDS(rows, r, R, (dots<R>(&tile.q[r * D], D, keys[j], D, &tile.scores[r * KEYS + j])))
                }
            } else {
                load(keys, values, count, tile);
                multiply<6, 4>(tile.q.data(), D, tile.turned.data(), KEYS, tile.scores.data(), KEYS, rows, KEYS, D, false);
            }
            for (i64 query = from; query < to; ++query) {
                const i64 last = std::clamp<i64>(end(b, query) - key, 0, count);
                const i64 first = std::clamp<i64>(begin(b, query) - key, 0, last);
                for (i64 r = (query - from) * group; r < (query - from + 1) * group; ++r) raise(r, first, last, tile);
            }
            weigh(rows, tile);
            float *scores = tile.scores.data(), *out = tile.out.data();
            if (few)
                FOR_BANDS(rows, r, R, (weighted<R>(scores + r * KEYS, values, count, D, out + r * width, width)))
            else
                multiply<6, 4>(scores, KEYS, tile.values.data(), width, out, width, rows, width, count, true);
        }
    }

    // The keys of a tile, transposed, and its values; the columns from D to `width` stay 0.
    void load(const T* const* keys, const T* const* values, i64 count, Tile& tile) const {
        tile.keys.resize(KEYS * s.D), tile.turned.resize(s.D * KEYS), tile.values.resize(KEYS * tile.width);
        for (i64 j = 0; j < count; ++j) {
            float *key = &tile.keys[j * s.D], *value = &tile.values[j * tile.width];
            for (i64 d = 0; d < s.D; ++d) key[d] = to_float(keys[j][d]);
            for (i64 d = 0; d < s.D; ++d) value[d] = to_float(values[j][d]);
        }
        for (i64 d = 0; d < s.D; ++d)
            for (i64 j = 0; j < KEYS; ++j) tile.turned[d * KEYS + j] = j < count ? tile.keys[j * s.D + d] : 0;
    }

    // Row r sees its scores in [begin, end): the maximum grows to the largest of them.
    static void raise(i64 r, i64 begin, i64 end, Tile& tile) {
        float *scores = &tile.scores[r * KEYS], most = tile.most[r];
        std::fill(scores, scores + begin, NEVER);
        std::fill(scores + end, scores + KEYS, NEVER);
        Vector parts = most - Vector{};
        for (i64 j = 0; j < KEYS; j += LANES) {
            Vector part = loaded(scores + j);
            parts = part > parts ? part : parts;
        }
        most = largest(parts);
        if (most == NEVER)  // the maximum ignores a NaN
            for (i64 j = begin; j < end; ++j) most = scores[j] != scores[j] ? scores[j] : most;
        tile.kept[r] = tile.most[r] == NEVER ? 0 : exponential(tile.most[r] - most);
        tile.most[r] = most;
    }

    // Scores become weights relative to the rows' maxima.
    static void weigh(i64 rows, Tile& tile) {
        for (i64 r = 0; r < rows; ++r) {
            float *scores = &tile.scores[r * KEYS], most = tile.most[r] == NEVER ? 0 : tile.most[r];
            Vector sums{};
            for (i64 j = 0; j < KEYS; j += LANES) sums += *(Vector*)(scores + j) = exponential(loaded(scores + j) - most);
            tile.sum[r] = tile.sum[r] * tile.kept[r] + total(sums);
        }
        for (i64 r = 0; r < rows; ++r)
            if (tile.kept[r] != 1)
                for (i64 d = 0; d < tile.width; d += LANES) *(Vector*)(&tile.out[r * tile.width + d]) *= tile.kept[r];
    }

    void store(i64 b, i64 h, i64 from, i64 to, const Tile& tile) const {
        const i64 group = s.H / s.H_kv;
        for (i64 r = 0; r < (to - from) * group; ++r) {
            T* target = out + (first_query(b) + from + r / group) * s.out_token + (h * group + r % group) * s.out_head;
            float inverse = tile.sum[r] == 0 ? 0 : 1 / tile.sum[r];
            for (i64 d = 0; d < s.D; ++d) target[d] = rounded<T>(tile.out[r * tile.width + d] * inverse);
        }
    }

    void run() const {
        struct Unit {
            i64 b, h, from, to, low, high, part, parts;
        };
        std::vector<Unit> units;
        i64 group = s.H / s.H_kv, pairs = 0, tiles = 0, most_rows = 0;
        for (i64 b = 0; b < s.B; ++b) tiles += (queries(b) + QUERIES - 1) / QUERIES * s.H_kv;
        for (i64 b = 0; b < s.B; ++b)
            for (i64 from = 0; from < queries(b); from += QUERIES) {
                i64 to = std::min(from + QUERIES, queries(b)), low = begin(b, from), high = end(b, to - 1);
                // Few tiles are divided by keys, so that every thread has work.
                i64 parts = std::clamp<i64>((high - low) / PART, 1, std::max<i64>(1, 4 * s.threads / tiles));
                for (i64 h = 0; h < s.H_kv; ++h)
                    for (i64 part = 0; part < parts; ++part)
                        units.push_back({b, h, from, to, low + (high - low) * part / parts,
                                         low + (high - low) * (part + 1) / parts, part, parts});
                pairs += (to - from) * (high - low) * s.H, most_rows = std::max(most_rows, (to - from) * group);
            }
        bool divided = false;
        for (const Unit& unit : units) divided |= unit.parts > 1;
        std::vector<Tile> kept(divided ? units.size() : 0, Tile(divided ? most_rows : 0, s.D));
#pragma omp parallel num_threads(s.threads) if (pairs * s.D > 65536)
        {
            Tile own(most_rows, s.D);
#pragma omp for schedule(dynamic)
            for (i64 i = 0; i < (i64)units.size(); ++i) {
                const Unit& u = units[units.size() - 1 - i];  // a sequence's last queries see most keys: longest first
                Tile& tile = u.parts > 1 ? kept[units.size() - 1 - i] : own;
                attend(u.b, u.h, u.from, u.to, u.low, u.high, tile);
                if (u.parts == 1) store(u.b, u.h, u.from, u.to, tile);
            }
        }
        for (size_t i = 0; i < units.size(); ++i)
            if (units[i].parts > 1 && units[i].part == 0) {
                for (i64 part = 1; part < units[i].parts; ++part) merge(kept[i], kept[i + part]);
                store(units[i].b, units[i].h, units[i].from, units[i].to, kept[i]);
            }
    }

    static void merge(Tile& into, const Tile& part) {
        for (size_t r = 0; r < into.most.size(); ++r) {
            float most = into.most[r] > part.most[r] || into.most[r] != into.most[r] ? into.most[r] : part.most[r];
            float a = into.most[r] == NEVER ? 0 : exponential(into.most[r] - most);
            float b = part.most[r] == NEVER ? 0 : exponential(part.most[r] - most);
            into.most[r] = most, into.sum[r] = into.sum[r] * a + part.sum[r] * b;
            for (i64 d = 0; d < into.width; ++d) {
                float& value = into.out[r * into.width + d];
                value = value * a + part.out[r * into.width + d] * b;
            }
        }
    }
};

template <class T>
static void attention(const void* q, const void* k, const void* v, void* out, const Where& at, const Shape& shape,
                      float scale) {
    Attention<T>{(const T*)q, (const T*)k, (const T*)v, (T*)out, at, shape, scale}.run();
}
