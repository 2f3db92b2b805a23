// Device code of `split_kv`, second part: the output, and how the parts that the shares leave of a head are added.

// Where the results go.
struct Output {
    u16* out;
    float* lse;
    const float* sinks;
    i64 out_t, out_h, lse_t, lse_h;

    __device__ __forceinline__ void put(int b, int head, int d, float x, float y) const {
        u16* to = out + b * out_t + head * out_h + d;
        const u32 word = pack(x, y);
#if PAIRS
        *reinterpret_cast<u32*>(to) = word;
#else
        to[0] = (u16)word, to[1] = (u16)(word >> 16);
#endif
    }
    __device__ __forceinline__ void put_lse(int b, int head, float lse2) const {
        if (lse) lse[b * lse_t + head * lse_h] = lse2 * LN2;
    }
};

// Says that this warp has written, to a group of `count` warps; true for the last one, which may read what the others
// wrote.  The counter is 0 before and after.
__device__ __forceinline__ bool arrive(u32* counter, int count) {
    u32 before = 0;
    __syncwarp();
    if (threadIdx.x % 32 == 0)
        asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                     : "=r"(before) : "l"(counter), "r"(count - 1) : "memory");
    before = __shfl_sync(~0u, before, 0);
    __syncwarp();
    return before == count - 1;
}

constexpr int BATCH = CTAS_PER_SM * WARPS > 8 ? 2 : 4;  // parts on their way at once, as far as registers reach
constexpr int ROWS_AT_ONCE = D >= 512 / ROWS ? 512 / D : ROWS, FOURS = (ROWS_AT_ONCE * D + 127) / 128;

// The parts of a virtual head of a segment, one of each share from `first` to `last`.
struct Parts {
    float *values, *lse2;
    u32* counters;
    int first, last, warp;

    // A CTA leaves at most two: of a segment that began before its share, and of one that begins in it.
    __device__ __forceinline__ i64 row_of(int share) const {
        return ((i64)(share * 2 + (share == first)) * WARPS + warp) * ROWS;
    }

    // Adds `count` parts, of each `step`-th share from `from` on, in their order; their sum becomes that of `from`, or
    // the output.
    __device__ __forceinline__ void add(int from, int step, int count, bool all, const Output& to, int b, int head,
                                        int rows) const {
        const int lane = threadIdx.x % 32;
#pragma unroll 1
        for (int top = 0; top < rows; top += ROWS_AT_ONCE) {
            const int size = min(ROWS_AT_ONCE, rows - top) * D;
            float4 sum[FOURS];
            float most[FOURS], total[FOURS];
#pragma unroll
            for (int c = 0; c < FOURS; ++c) sum[c] = {0, 0, 0, 0}, most[c] = -INFINITE, total[c] = 0;
#pragma unroll 1
            for (int i = 0; i < count; i += BATCH) {
                float4 part[BATCH][FOURS];
                float own[BATCH][FOURS];
#pragma unroll
                for (int j = 0; j < BATCH; ++j)
#pragma unroll
                    for (int c = 0; c < FOURS; ++c) {
                        const int at = 4 * (32 * c + lane);
                        part[j][c] = {0, 0, 0, 0}, own[j][c] = -INFINITE;
                        if (i + j >= count || at >= size) continue;
                        const i64 row = row_of(from + (i + j) * step) + top;
                        part[j][c] = *reinterpret_cast<const float4*>(values + row * D + at);
                        own[j][c] = lse2[row + at / D];
                    }
#pragma unroll
                for (int j = 0; j < BATCH; ++j)
#pragma unroll
                    for (int c = 0; c < FOURS; ++c) {
                        const float higher = fmaxf(most[c], own[j][c]), shift = higher == -INFINITE ? 0.f : higher;
                        const float keep = exp2_of(most[c] - shift), weight = exp2_of(own[j][c] - shift);
                        most[c] = higher;
                        total[c] = total[c] * keep + weight;
                        sum[c].x = sum[c].x * keep + part[j][c].x * weight;
                        sum[c].y = sum[c].y * keep + part[j][c].y * weight;
                        sum[c].z = sum[c].z * keep + part[j][c].z * weight;
                        sum[c].w = sum[c].w * keep + part[j][c].w * weight;
                    }
            }
            __syncwarp();  // no lane still reads what is written next
#pragma unroll
            for (int c = 0; c < FOURS; ++c) {
                const int at = 4 * (32 * c + lane), row = top + at / D, d = at % D;
                if (at >= size) continue;
                float all_lse2 = total[c] == 0 ? -INFINITE : most[c] + log2_of(total[c]);
                float by = total[c] == 0 ? 0.f : 1.f / total[c];
                if (all) {
                    by *= sink_in(all_lse2, to.sinks, head + row);
                    to.put(b, head + row, d, sum[c].x * by, sum[c].y * by);
                    to.put(b, head + row, d + 2, sum[c].z * by, sum[c].w * by);
                    if (d == 0) to.put_lse(b, head + row, all_lse2);
                } else {
                    float4* mine = reinterpret_cast<float4*>(values + (row_of(from) + top) * D + at);
                    *mine = {sum[c].x * by, sum[c].y * by, sum[c].z * by, sum[c].w * by};
                    if (d == 0) lse2[row_of(from) + row] = all_lse2;
                }
            }
        }
    }

    // A warp comes here when it has written the part of share `g`.  The last one of a group adds the group's parts, and
    // waits for none.  More than WIDTH parts are added in about sqrt(count) groups, and then the groups' sums.
    __device__ __forceinline__ void join(int g, const Output& to, int b, int head, int rows) const {
        int index = g - first, left = last - first + 1, step = 1, fan = left;
        if (left > WIDTH)
            for (fan = 1; fan * fan < left;) ++fan;
#pragma unroll 1
        for (int level = 0; left > 1; ++level) {
            const int group = index / fan, count = min(fan, left - group * fan), from = first + group * fan * step;
            left = (left + fan - 1) / fan;
            if (count > 1) {
                // Counters of groups are `fan` shares apart, so that of level 1 has a place behind the first one's.
                if (!arrive(counters + (from + level) * WARPS + warp, count)) return;
                add(from, step, count, left == 1, to, b, head, rows);
            }
            index = group, step *= fan;
        }
    }
};
