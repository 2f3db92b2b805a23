// Device code of `split_kv`, last part: the stream of keys and values.

// A place in the sequence of units: the unit that a warp loads next, or multiplies next.
struct Cursor {
    int b, set, key, end;  // sequence, set of heads, first key of the unit, one past the last key

    __device__ __forceinline__ void open(int length, int window) {
        end = length;
        key = length - visible(length, window);
    }
    // Moves to the next segment; the last one has no next one.
    __device__ __forceinline__ void skip(const int* lens, int B, int window) {
        if (++set == HEAD_SETS) {
            set = 0;
            do ++b;
            while (b < B && visible(lens[b], window) == 0);
        }
        open(b < B ? lens[b] : 0, window);
    }
    __device__ __forceinline__ int left() const { return (end - key + UNIT - 1) / UNIT; }
};

struct Keys {
    const u8 *k, *v;
    const int* table;
    i64 k_page, k_slot, k_head, v_page, v_slot, v_head, table_row;  // in bytes; table_row in entries
};

// The page of key `key + lane % UNIT`, 0 for a key past the end.
__device__ __forceinline__ int page_at(const Keys& keys, const Cursor& at) {
    const int key = at.key + threadIdx.x % UNIT;
    return key < at.end ? __ldg(keys.table + at.b * keys.table_row + (u32)key / BLOCK_SIZE) : 0;
}

__device__ __forceinline__ void copy(u32 to, const u8* from, int bytes, u64 policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(to), "l"(from),
                 "r"(bytes), "l"(policy)
                 : "memory");
}

// Loads a unit's keys and values to a stage, and 0 for keys past the end, where a page may hold NaN.
__device__ __forceinline__ void load_unit(const Keys& keys, const Cursor& at, int page, int kv_head, u32 stage,
                                          u64 policy) {
    const int lane = threadIdx.x % 32, row = lane / ACROSS, chunk = lane % ACROSS;
#pragma unroll
    for (int i = 0; i < UNIT / DOWN; ++i) {
        const int r = row + i * DOWN;
        const int bytes = at.key + r < at.end ? 16 : 0;
        const u64 slot = (u32)(at.key + r) % BLOCK_SIZE;
        const u64 block = (u32)__shfl_sync(~0u, page, r);  // 64 bits: page * stride passes 2**31 in a cache of 2 GiB
        const u8* k = keys.k + block * keys.k_page + slot * keys.k_slot + kv_head * keys.k_head + chunk * 16;
        const u8* v = keys.v + block * keys.v_page + slot * keys.v_slot + kv_head * keys.v_head + chunk * 16;
        const u32 to = stage + r * PITCH + chunk * 16;
#pragma unroll
        for (int c = 0; c < CHUNKS; c += ACROSS)
            if (CHUNKS % ACROSS == 0 || c + chunk < CHUNKS) {
                copy(to + c * 16, k + c * 16, bytes, policy);
                copy(to + UNIT * PITCH + c * 16, v + c * 16, bytes, policy);
            }
    }
}

__device__ __forceinline__ void copy_row(u32 to, const u8* from, u32 bar, u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
            "r"(to),
        "l"(from), "r"(ROW_BYTES), "r"(bar), "l"(policy)
        : "memory");
}

// The warp that fills the ring of a CTA (BULK): lane r copies key r of a unit for all heads, lane 16 + r its value.
// Keys past the end become 0 with ordinary stores, because a bulk copy cannot fill.
__device__ __forceinline__ void fill(const Keys& keys, Cursor at, const int* lens, int B, int window, int count,
                                     u32 ring, u32 full, u32 empty, u64 policy) {
    const int lane = threadIdx.x % 32, r = lane % UNIT;
    const bool values = lane >= UNIT;
    const u8* const base = values ? keys.v : keys.k;
    const i64 to_page = values ? keys.v_page : keys.k_page, to_slot = values ? keys.v_slot : keys.k_slot;
    const i64 to_set = HEADS * (values ? keys.v_head : keys.k_head);
    int page = page_at(keys, at);
#pragma unroll 1
    for (int unit = 0, stage = 0, parity = 1; unit < count; ++unit) {
        const int there = min(at.end - at.key, UNIT);
        const u8* from = base + (u32)page * (u64)to_page + (u32)(at.key + r) % BLOCK_SIZE * (u64)to_slot +
                         at.set * to_set;
        at.key += UNIT;
        if (at.key >= at.end) at.skip(lens, B, window);
        page = page_at(keys, at);
        const u32 bar = full + 8 * stage, tile = ring + stage * STAGE_BYTES;
        wait(empty + 8 * stage, parity);
        if (there < UNIT) {
            for (int row = there; row < UNIT; ++row)
                for (int byte = 16 * lane; byte < ROW_BYTES; byte += 512)
#pragma unroll
                    for (int which = 0; which < 2; ++which)
                        asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(
                                         tile + (which * UNIT + row) * PITCH + byte),
                                     "r"(0)
                                     : "memory");
            fence_async();  // later copies come after these stores
        }
        __syncwarp();
        if (lane == 0) expect(bar, there * (2 * ROW_BYTES));
        __syncwarp();
        if (r < there) copy_row(tile + lane * PITCH, from, bar, policy);
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        parity ^= stage == 0;
    }
}

// The queries are in registers, or, where registers are full, in shared memory at each lane's own place.
struct State {
#if Q_SHARED
    uint4* shared;
#else
    u32 q[TILES][4];
#endif
    float acc[2 * TILES][4], peak[2], total[2];

    // Loads the queries of one virtual head; rows past the group's last one are 0.
    __device__ __forceinline__ void open(const u16* queries, i64 stride_h, int rows) {
        const int row = threadIdx.x % 32 / 4;
#pragma unroll
        for (int j = 0; j < TILES; ++j) {
            u32 words[4] = {};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int r = row + i % 2 * 8;
                const u16* from = queries + r * stride_h + 16 * j + column(i / 2);
                if (i % 2 < HALVES && r < rows) words[i] = PAIRS ? *(const u32*)from : from[0] | (u32)from[1] << 16;
            }
#if Q_SHARED
            shared[j * 32] = {words[0], words[1], words[2], words[3]};
#else
            for (int i = 0; i < 4; ++i) q[j][i] = words[i];
#endif
        }
#pragma unroll
        for (int n = 0; n < 2 * TILES; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) acc[n][i] = 0;
        for (int h = 0; h < 2; ++h) peak[h] = -INFINITE, total[h] = 0;
    }

    // Adds a stage, of which `left` keys exist; factor and cap as in `split_kv`.
    __device__ __forceinline__ void add(u32 stage, int left, float factor, float cap2) {
        const int lane = threadIdx.x % 32, row = lane % 8, low = lane / 8 % 2, high = lane / 16;
        const u32 down = (8 * low + row) * PITCH + (FP8 ? 0 : 16 * high);
        const u32 across = FP8 ? down : (8 * high + row) * PITCH + 16 * low;
        float s[2][4] = {};
#pragma unroll
        for (int j = 0; j < TILES; ++j) {
            u32 k[2][2];
            load_tile<false>(k, stage + across + j * (FP8 ? 16 : 32));
#if Q_SHARED
            const uint4 words = shared[j * 32];
            const u32 a[4] = {words.x, words.y, words.z, words.w};
#else
            const u32 (&a)[4] = q[j];
#endif
            mma(s[0], a, k[0][0], k[0][1]);
            mma(s[1], a, k[1][0], k[1][1]);
        }
        float most[2] = {-INFINITE, -INFINITE};
#pragma unroll
        for (int h = 0; h < HALVES; ++h) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float& x = s[i / 2][2 * h + i % 2];
#if SOFTCAP
                x = cap2 - 2 * cap2 * __fdividef(1.f, 1.f + exp2_of(x * factor));
#else
                x *= factor;
#endif
                if (i / 2 * 8 + lane % 4 * 2 + i % 2 >= left) x = -INFINITE;
                most[h] = fmaxf(most[h], x);
            }
            most[h] = fmaxf(most[h], __shfl_xor_sync(~0u, most[h], 1));
            most[h] = fmaxf(most[h], __shfl_xor_sync(~0u, most[h], 2));
        }
        if (__any_sync(~0u, most[0] > peak[0] || (HALVES == 2 && most[1] > peak[1]))) {
#pragma unroll
            for (int h = 0; h < HALVES; ++h) {
                const float higher = fmaxf(peak[h], most[h]);
                // Without a score above -inf so far, -inf - -inf would be NaN.
                const float rescale = peak[h] == -INFINITE ? 0.f : exp2_of(peak[h] - higher);
                peak[h] = higher;
                total[h] *= rescale;
#pragma unroll
                for (int n = 0; n < 2 * TILES; ++n) acc[n][2 * h] *= rescale, acc[n][2 * h + 1] *= rescale;
            }
        }
        u32 p[4] = {};
#pragma unroll
        for (int h = 0; h < HALVES; ++h) {
            const float shift = peak[h] == -INFINITE ? 0.f : peak[h];
            float w[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) total[h] += w[i] = exp2_of(s[i / 2][2 * h + i % 2] - shift);
            p[h] = pack(w[0], w[1]), p[2 + h] = pack(w[2], w[3]);
        }
#pragma unroll
        for (int j = 0; j < TILES; ++j) {
            u32 v[2][2];
            load_tile<true>(v, stage + UNIT * PITCH + down + j * (FP8 ? 16 : 32));
            mma(acc[2 * j], p, v[0][0], v[0][1]);
            mma(acc[2 * j + 1], p, v[1][0], v[1][1]);
        }
    }

    // The pair `p` of tile `j` in row half `h`.
    __device__ __forceinline__ float2 pair(int j, int p, int h) const {
        return FP8 ? float2{acc[2 * j][2 * h + p], acc[2 * j + 1][2 * h + p]}
                   : float2{acc[2 * j + p][2 * h], acc[2 * j + p][2 * h + 1]};
    }
};

// A sequence without a visible key has no unit: CTA g of G writes zeros for the sequences g, g + G, ...
__device__ __forceinline__ void write_empty(const Output& to, const int* lens, int B, int window) {
    for (int b = blockIdx.x; b < B; b += gridDim.x) {
        if (visible(lens[b], window)) continue;
        for (int i = threadIdx.x; i < H_KV * GROUP * (D / 2); i += THREADS) {
            const int head = i / (D / 2), d = 2 * (i % (D / 2));
            to.put(b, head, d, 0, 0);
            float lse2 = -INFINITE;
            sink_in(lse2, to.sinks, head);
            if (d == 0) to.put_lse(b, head, lse2);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM)
split_kv(const u16* q, const u8* k_cache, const u8* v_cache, const int* table, const int* lens, const float* sinks,
         const float* k_scale, const float* v_scale, u16* out, float* lse, float* partial, float* partial_lse,
         u32* counters, int B, int window, float scale, float cap, i64 q_t, i64 q_h, i64 k_page, i64 k_slot, i64 k_head,
         i64 v_page, i64 v_slot, i64 v_head, i64 table_row, i64 out_t, i64 out_h, i64 lse_t, i64 lse_h) {
    extern __shared__ __align__(16) u8 raw[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = blockIdx.x;
#if BULK
    __shared__ u64 barriers[2 * STAGES];
    const u32 ring = shared_address(raw), full = shared_address(barriers), empty = full + 8 * STAGES;
#else
    const u32 ring = shared_address(raw) + warp * STAGES * STAGE_BYTES;
#endif
    const Keys keys{k_cache, v_cache, table, k_page, k_slot, k_head, v_page, v_slot, v_head, table_row};
    const Output to{out, lse, sinks, out_t, out_h, lse_t, lse_h};
    u64 policy = 0;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));

    i64 units = 0;
    for (int b = lane; b < B; b += 32) units += units_of(lens[b], window);
    for (int step = 16; step; step /= 2) units += __shfl_xor_sync(~0u, units, step);
    units *= HEAD_SETS;
    const int shares = shares_of(units, gridDim.x);
    const i64 start = share_start(g, units, shares), stop = g < shares ? share_start(g + 1, units, shares) : start;
    write_empty(to, lens, B, window);
    if (start >= stop) return;

    // Finds the sequence that has unit `start`, 32 sequences at a time.
    Cursor first{0, 0, 0, 0};
    i64 passed = 0;
    for (int base = 0;; base += 32) {
        const int own = base + lane < B ? units_of(lens[base + lane], window) * HEAD_SETS : 0;
        int sum = own;
        for (int step = 1; step < 32; step *= 2) {
            const int below = __shfl_up_sync(~0u, sum, step);
            if (lane >= step) sum += below;
        }
        const u32 behind = __ballot_sync(~0u, passed + sum > start);
        if (behind) {
            const int at = __ffs(behind) - 1;
            first.b = base + at;
            passed += __shfl_sync(~0u, sum - own, at);
            break;
        }
        passed += __shfl_sync(~0u, sum, 31);
    }
    const int length = lens[first.b], each = units_of(length, window), within = (int)(start - passed);
    first.set = within / each;
    first.open(length, window);
    first.key += within % each * UNIT;
    int segment = -(within % each);  // the segment's first unit, from `start` on

    const int count = (int)(stop - start);
    Cursor now = first;
#if BULK
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) init(full + 8 * stage, 1), init(empty + 8 * stage, WARPS);
        publish_inits();
    }
    __syncthreads();
    if (warp == WARPS) return fill(keys, first, lens, B, window, count, ring, full, empty, policy);
    const u32 own = ring + warp / ROW_TILES * KEY_BYTES;
    int stage = 0, parity = 0;
#else
    Cursor ahead = first;
    int page = page_at(keys, ahead);
    auto load = [&](int unit) {
        if (unit < count) {
            const Cursor at = ahead;
            const int block = page;
            ahead.key += UNIT;
            page = page_at(keys, ahead);  // looked up one unit early, so no copy waits for it
            load_unit(keys, at, block, (at.set * WARPS + warp) / ROW_TILES, ring + unit % STAGES * STAGE_BYTES, policy);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    auto cross = [&] {
        if (ahead.key < ahead.end) return;
        ahead.skip(lens, B, window);
        page = page_at(keys, ahead);
    };
    for (int unit = 0; unit < STAGES - 1; ++unit) load(unit), cross();
#endif

    State state;
#if Q_SHARED
    state.shared = reinterpret_cast<uint4*>(raw + RINGS * STAGES * STAGE_BYTES + warp * TILES * 512) + lane;
#endif
#pragma unroll 1
    for (int unit = 0; unit < count;) {
        const int virtual_head = now.set * WARPS + warp, kv_head = virtual_head / ROW_TILES;
        const int row_tile = virtual_head % ROW_TILES, rows = min(GROUP - 16 * row_tile, ROWS);
        const int head = kv_head * GROUP + 16 * row_tile;
        state.open(q + now.b * q_t + head * q_h, q_h, rows);
        const float factor = scale * (k_scale ? k_scale[kv_head] : 1.f) * (SOFTCAP ? 2 * LOG2E / cap : LOG2E);
        const float cap2 = cap * LOG2E, v_factor = v_scale ? v_scale[kv_head] : 1.f;
#if BULK
        const int until = min(count, unit + now.left());
#pragma unroll 1
        for (; unit < until; ++unit, now.key += UNIT) {
            wait(full + 8 * stage, parity);
            state.add(own + stage * STAGE_BYTES, now.end - now.key, factor, cap2);
            __syncwarp();
            if (lane == 0) arrive(empty + 8 * stage);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
            parity ^= stage == 0;
        }
#else
#pragma unroll 1
        do {
            // To where this segment or the one being loaded ends, so that the inner loop looks for no segment.
            int until = min(count, unit + now.left());
            if (unit + STAGES - 1 < count) until = min(until, unit + ahead.left());
#pragma unroll 1
            for (; unit < until; ++unit, now.key += UNIT) {
                asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
                __syncwarp();  // all copies have arrived, and no lane reads the stage that is filled next
                load(unit + STAGES - 1);
                state.add(ring + unit % STAGES * STAGE_BYTES, now.end - now.key, factor, cap2);
            }
            cross();
        } while (now.key < now.end && unit < count);
#endif

        // The segment is finished if it began in this share and ends here; otherwise a part is kept.
        const bool begun = segment >= 0, whole = begun && now.key >= now.end;
        const i64 place = ((g * 2 + begun) * WARPS + warp) * ROWS;
#pragma unroll
        for (int h = 0; h < HALVES; ++h) {
            const int row = lane / 4 + 8 * h;
            float total = state.total[h];
            total += __shfl_xor_sync(~0u, total, 1);
            total += __shfl_xor_sync(~0u, total, 2);
            float lse2 = total == 0.f ? -INFINITE : state.peak[h] + log2_of(total);
            if (row >= rows) continue;
            const float over = total == 0.f ? 0.f : v_factor / total;
            const float by = over * (whole ? sink_in(lse2, sinks, head + row) : 1.f);
            float* part = partial + (place + row) * D;
#pragma unroll
            for (int j = 0; j < TILES; ++j)
#pragma unroll
                for (int p = 0; p < 2; ++p) {
                    const float2 values = state.pair(j, p, h);
                    const int d = 16 * j + column(p);
                    if (whole) to.put(now.b, head + row, d, values.x * by, values.y * by);
                    else *reinterpret_cast<float2*>(part + d) = {values.x * by, values.y * by};
                }
            if (lane % 4 == 0) {
                if (whole) to.put_lse(now.b, head + row, lse2);
                else partial_lse[place + row] = lse2;
            }
        }
        if (!whole) {
            const int last_unit = segment + units_of(now.end, window) - 1;
            const int began = begun ? g : owner_of(start + segment, units, shares);
            const int ends = last_unit < count ? g : owner_of(start + last_unit, units, shares);
            Parts{partial, partial_lse, counters, began, ends, warp}.join(g, to, now.b, head, rows);
        }
        segment = unit;
        now.skip(lens, B, window);
    }
}
