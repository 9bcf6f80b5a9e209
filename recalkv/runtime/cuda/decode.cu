// Attention of one token per sequence over the codec's rows: flash decoding with operands decoded in registers.
//
// A block handles a group of KV heads and a run of a sequence's slots (split-KV). Each of its SETS sets of PARTS warps
// processes 64 slots at a time and has separate sums:
//   1. Keys are decoded directly into the A operand of mma.m16n8k16, whose rows are slots, and multiplied with the
//      queries, segment by segment; a segment's scale is applied to its scores. Weights, relative to the largest score
//      so far, go through shared memory.
//   2. Values are decoded into the A operand, whose rows are coefficients, and multiplied with the weights, to which a
//      segment's scale is applied. Sums are in shared memory.
// Sets wait for each other only at the end. Where slots are too few for enough warps to keep a GPU busy, the warps of a
// set share its coefficients: their scores are added, and each sums different coefficients.
//
// A 32-bit word of a tile holds the same byte of four tokens, so one logical operation serves four coefficients for
// each place in the byte. A code and the two bits before it become a field of b + 1 bits; below the exponent of 1024,
// the field is a float16, and n(t) = t ((t^2 + B)^2 + D) takes four instructions for two coefficients.
//
// Defined by the host: SETS, PARTS (1, 2 or 4), RESIDENT (blocks per multiprocessor), NT (tiles of 8 queries), PAGED,
// CAPPED, QUERY (0 float32, 1 bfloat16, 2 float16), and for each number of bits POLY_B*, POLY_D* (float16, twice),
// GAIN* (float32).

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;

#define WARPS (SETS * PARTS)
#define THREADS (32 * WARPS)
#define QUERIES (8 * NT)
#define ONES 0x01010101u
#define LIFT 8.0f
#define LOG2E 1.4426950408889634f
#define NEGATIVE_INFINITY __int_as_float(0xff800000)
#define WEIGHT_STRIDE (64 * 2 + 16)

__device__ __forceinline__ u32 fma2(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
__device__ __forceinline__ u32 mul2(u32 a, u32 b) {
    u32 d;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
__device__ __forceinline__ u32 add2(u32 a, u32 b) {
    u32 d;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
__device__ __forceinline__ u32 pair(float low, float high) {
    u32 d;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}
__device__ __forceinline__ float half_to_float(u16 x) {
    float d;
    asm("cvt.f32.f16 %0, %1;" : "=f"(d) : "h"(x));
    return d;
}
__device__ __forceinline__ float exp2_fast(float x) {
    float d;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(x));
    return d;
}
__device__ __forceinline__ void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// a where the mask has ones, b elsewhere.
__device__ __forceinline__ u32 select(u32 mask, u32 a, u32 b) {
    u32 d;
    asm("lop3.b32 %0, %1, %2, %3, 0xe4;" : "=r"(d) : "r"(a), "r"(b), "r"(mask));
    return d;
}
// Masked bits below the exponent of 1024: float16 values of 1024 plus these bits.
__device__ __forceinline__ u32 lifted(u32 x, u32 mask) {
    u32 d;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(x), "r"(mask), "r"(0x64006400u));
    return d;
}
__device__ __forceinline__ u32 select(u8 mask, u32 a, u32 b) { return select(mask * ONES, a, b); }
__device__ __forceinline__ uint2 load8(const u8* at) { return __ldg(reinterpret_cast<const uint2*>(at)); }
__device__ __forceinline__ uint4 load16(const u8* at) { return __ldg(reinterpret_cast<const uint4*>(at)); }
// Load from a table that all warps read repeatedly.
__device__ __forceinline__ uint4 load_kept(const uint4* at) {
    uint4 d;
    asm("ld.global.nc.L1::evict_last.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(d.x), "=r"(d.y), "=r"(d.z), "=r"(d.w)
        : "l"(at));
    return d;
}
__device__ __forceinline__ void prefetch(const u8* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

// Float16 bits of a value that float16 represents exactly.
__device__ constexpr u32 half_bits(double x) {
    int exponent = 15;
    while (x >= 2) {
        x /= 2;
        exponent++;
    }
    while (x < 1) {
        x *= 2;
        exponent--;
    }
    return (u32)(exponent << 10) | (u32)((x - 1) * 1024);
}
__device__ constexpr u32 twice(u32 half) { return half | half << 16; }

// For each number of bits: coefficients in a byte of the last plane, and first bit of the field of coefficient i.
template <int BITS>
struct Code;
#define CODE(BITS, NUMBERS, START)                                                                                     \
    template <>                                                                                                        \
    struct Code<BITS> {                                                                                                \
        static constexpr int numbers = NUMBERS;                                                                        \
        __device__ static constexpr int start(int i) { return START; }                                                 \
        __device__ static constexpr u32 mask(int i) { return ((2u << BITS) - 1) << start(i); }                         \
        __device__ static constexpr u32 factor(int i) { return (u32)(15 - BITS - start(i)) << 10; }                    \
        __device__ static constexpr u32 summand(int i) {                                                               \
            return 0x8000u | half_bits((double)(1 << (10 - start(i))) / (1 << BITS) + 1 - 1.0 / (2 << BITS));          \
        }                                                                                                              \
    }
CODE(1, 8, i < 2 ? i + 1 : i - 1);
CODE(2, 4, i < 2 ? 1 : 2 * i - 1);
CODE(3, 8, 1);
CODE(4, 2, 2 * i + 1);
CODE(6, 4, 1);
template <>
struct Code<8> {
    static constexpr int numbers = 2;
};

// The host's definition for a number of bits.
#define OF_BITS(NAME, BITS)                                                                                            \
    (BITS == 1   ? NAME##1                                                                                             \
     : BITS == 2 ? NAME##2                                                                                             \
     : BITS == 3 ? NAME##3                                                                                             \
     : BITS == 4 ? NAME##4                                                                                             \
     : BITS == 6 ? NAME##6                                                                                             \
                 : NAME##8)

template <int BITS>
__device__ __forceinline__ u32 curve(u32 t) {
    u32 z = fma2(t, t, OF_BITS(POLY_B, BITS));
    if constexpr (BITS != 1 && BITS != 8) z = fma2(z, z, OF_BITS(POLY_D, BITS));
    return mul2(z, t);
}

// Words with the fields of a byte's coefficients, from four tokens' bytes of the last plane, the preceding bytes in the
// chain, and, for codes of two planes, bytes of the first plane. Bits outside of the fields are arbitrary.
template <int BITS>
__device__ __forceinline__ void fields(u32 (&u)[Code<BITS>::numbers], u32 w, u32 before, u32 even, u32 odd) {
    if constexpr (BITS == 4) {
        u32 y = w ^ (before & 0x11111111u);
        u[0] = select((u8)0x3c, y << 2, before >> 3);
        u[1] = select((u8)0xf0, y, w << 3);
    } else if constexpr (BITS == 2 || BITS == 6) {
        u32 last = select((u8)0xfc, w << 2, before >> 6), second = select((u8)0xf0, w << 4, before >> 4);
        u32 y = w ^ (second & 0x55555555u);
        if constexpr (BITS == 2) {
            u32 lower = last >> 1;
            u[0] = select((u8)0x0c, y << 2, last << 1);
            u[1] = select((u8)0x0c, y, lower);
            u[2] = select((u8)0x30, y, lower);
            u[3] = select((u8)0xc0, y, lower);
        } else {
            u[0] = select((u8)0xf0, even << 4, select((u8)0x0c, y << 2, last << 1));
            u[1] = select((u8)0xf0, odd << 4, select((u8)0x0c, y, last >> 1));
            u[2] = select((u8)0xf0, even, select((u8)0x0c, y >> 2, last >> 3));
            u[3] = select((u8)0xf0, odd, select((u8)0x0c, y >> 4, last >> 5));
        }
    } else {
        u32 last = select((u8)0xfe, w << 1, before >> 7), second = select((u8)0xfc, w << 2, before >> 6);
        u32 y = w ^ second;
        if constexpr (BITS == 1) {
            u32 higher = y << 2, bit = last << 1, lower = last >> 1;
            u[0] = select((u8)0x04, higher, bit);
            u[1] = select((u8)0x08, higher, bit);
            u[2] = select((u8)0x04, y, lower);
            u[3] = select((u8)0x08, y, lower);
            u[4] = select((u8)0x10, y, lower);
            u[5] = select((u8)0x20, y, lower);
            u[6] = select((u8)0x40, y, lower);
            u[7] = select((u8)0x80, y, lower);
        } else {
            u[0] = select((u8)0x18, even << 3, select((u8)0x04, y << 2, last << 1));
            u[1] = select((u8)0x18, odd << 3, select((u8)0x04, y << 1, last));
            u[2] = select((u8)0x18, even << 1, select((u8)0x04, y, last >> 1));
            u[3] = select((u8)0x18, odd << 1, select((u8)0x04, y >> 1, last >> 2));
            u[4] = select((u8)0x18, even >> 1, select((u8)0x04, y >> 2, last >> 3));
            u[5] = select((u8)0x18, odd >> 1, select((u8)0x04, y >> 3, last >> 4));
            u[6] = select((u8)0x18, even >> 3, select((u8)0x04, y >> 4, last >> 5));
            u[7] = select((u8)0x18, odd >> 3, select((u8)0x04, y >> 5, last >> 6));
        }
    }
}

// Decode coefficients a and b of a byte (fields i and i + 1) for four tokens: one register of (a, b) per token.
template <int BITS, int I>
__device__ __forceinline__ void by_token(u32 (&n)[4], u32 a, u32 b) {
    using C = Code<BITS>;
    constexpr u32 mask = C::mask(I) | C::mask(I + 1) << 16, factor = C::factor(I) | C::factor(I + 1) << 16;
    constexpr u32 summand = C::summand(I) | C::summand(I + 1) << 16;
    u32 x = __byte_perm(a, b, 0x5410), y = __byte_perm(a, b, 0x7632);
    n[0] = curve<BITS>(fma2(lifted(x, mask), factor, summand));
    n[1] = curve<BITS>(fma2(lifted(x >> 8, mask), factor, summand));
    n[2] = curve<BITS>(fma2(lifted(y, mask), factor, summand));
    n[3] = curve<BITS>(fma2(lifted(y >> 8, mask), factor, summand));
}
// Decode a coefficient for tokens 0 and 2, and for tokens 1 and 3.
template <int BITS, int I>
__device__ __forceinline__ void by_number(u32& even, u32& odd, u32 u) {
    using C = Code<BITS>;
    constexpr u32 mask = twice(C::mask(I)), factor = twice(C::factor(I)), summand = twice(C::summand(I));
    even = curve<BITS>(fma2(lifted(u, mask), factor, summand));
    odd = curve<BITS>(fma2(lifted(u >> 8, mask), factor, summand));
}
// Decode 8-bit codes: v is code n xor the lowest bit of code n - 2, last the lowest bit of code n - 1, shifted by 3.
__device__ __forceinline__ u32 eight(u32 v, u32 last) {
    u32 whole = add2(lifted(v, 0x00ff00ffu), twice(0x8000u | half_bits(1152)));
    u32 rest = fma2(lifted(last, 0x00080008u), twice(half_bits(1.0 / 2048)), twice(0x8000u | half_bits(255.0 / 512)));
    return curve<8>(fma2(whole, twice(half_bits(1.0 / 128)), rest));
}
__device__ __forceinline__ void eight_by_token(u32 (&n)[4], u32 a, u32 b, u32 a_before, u32 b_before) {
    u32 v0 = a ^ (a_before & ONES), v1 = b ^ (b_before & ONES), l0 = b_before << 3, l1 = a << 3;
    u32 x = __byte_perm(v0, v1, 0x5410), y = __byte_perm(v0, v1, 0x7632);
    u32 lx = __byte_perm(l0, l1, 0x5410), ly = __byte_perm(l0, l1, 0x7632);
    n[0] = eight(x, lx);
    n[1] = eight(x >> 8, lx >> 8);
    n[2] = eight(y, ly);
    n[3] = eight(y >> 8, ly >> 8);
}

// A segment in the loop over keys. Rows count from the group's first byte; product is the segment's first product.
struct alignas(16) KeySegment {
    int bits, scale_row, first_row, last_row, columns, product, next_row, none;
};
// A warp's units of 8 columns in a segment of values; tile is the tile of the first unit.
struct alignas(16) ValueJob {
    int bits, segment, first_row, last_row, columns, unit, end, tile;
};

template <int BITS>
struct Loads {
    static constexpr int count = BITS == 8 ? 6 : BITS == 4 ? 3 : BITS == 3 || BITS == 6 ? 4 : 2;
};

// Load a lane's bytes of eight tokens for a unit of columns; missing columns give arbitrary bytes.
template <int BITS>
__device__ __forceinline__ void load_unit(uint2 (&r)[Loads<BITS>::count], const u8* last, KeySegment s, int unit,
                                          int c) {
    constexpr int wide = BITS == 4 || BITS == 8 ? 2 : 1;
    const u8* at = last + min((unit * 4 + c) * wide, s.columns - wide) * 16;
    r[0] = load8(at - 16);
    r[1] = load8(at);
    if constexpr (wide == 2) r[2] = load8(at + 16);
    if constexpr (BITS == 8) {
        const u8* second = at + s.columns * 16;
        r[3] = load8(second - 16);
        r[4] = load8(second);
        r[5] = load8(second + 16);
    }
    if constexpr (BITS == 3 || BITS == 6) {
        const u8* first = at - (s.last_row - s.first_row) * 16;
        r[2] = load8(first);
        r[3] = load8(first + s.columns * 16);
    }
}

template <int BITS>
__device__ __forceinline__ void score_segment(float (&scores)[4][NT][4], const u8* keys, KeySegment s,
                                              const uint2* queries, int lane, int part) {
    using C = Code<BITS>;
    constexpr int wide = BITS == 4 || BITS == 8 ? 2 : 1, products = wide == 2 ? 1 : C::numbers / 4;
    const int c = lane & 3, units = (s.columns + 4 * wide - 1) / (4 * wide);
    uint2 r[Loads<BITS>::count], next[Loads<BITS>::count];
    const u8* last = keys + s.last_row * 16;
    // Parts take units in turn, starting with the part that follows from the segment's first product.
    int unit = (part - s.product) & (PARTS - 1);
    load_unit<BITS>(r, last, s, unit, c);
    // A chain begins with zeros.
    if (unit == 0 && c == 0) {
        r[0] = make_uint2(0, 0);
        if constexpr (BITS == 8) r[3] = make_uint2(0, 0);
    }
    const uint2* query = queries + (s.product + unit * products) * (32 * NT) + lane;
#pragma unroll 1
    for (; unit < units; unit += PARTS, query += PARTS * products * 32 * NT) {
        load_unit<BITS>(next, last, s, unit + PARTS, c);
        uint2 q[products][NT];
#pragma unroll
        for (int p = 0; p < products; p++)
#pragma unroll
            for (int t = 0; t < NT; t++) q[p][t] = query[(p * NT + t) * 32];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 w[Loads<BITS>::count], n[2 * products][4];
#pragma unroll
            for (int i = 0; i < Loads<BITS>::count; i++) w[i] = half ? r[i].y : r[i].x;
            if constexpr (BITS == 8) {
                eight_by_token(n[0], w[1], w[4], w[0], w[3]);
                eight_by_token(n[1], w[2], w[5], w[1], w[4]);
            } else if constexpr (BITS == 4) {
                u32 u[2];
                fields<4>(u, w[1], w[0], 0, 0);
                by_token<4, 0>(n[0], u[0], u[1]);
                fields<4>(u, w[2], w[1], 0, 0);
                by_token<4, 0>(n[1], u[0], u[1]);
            } else {
                u32 u[C::numbers];
                fields<BITS>(u, w[1], w[0], w[Loads<BITS>::count - 2], w[Loads<BITS>::count - 1]);
                by_token<BITS, 0>(n[0], u[0], u[1]);
                by_token<BITS, 2>(n[1], u[2], u[3]);
                if constexpr (products == 2) {
                    by_token<BITS, 4>(n[2], u[4], u[5]);
                    by_token<BITS, 6>(n[3], u[6], u[7]);
                }
            }
#pragma unroll
            for (int m = 0; m < 2; m++)
#pragma unroll
                for (int p = 0; p < products; p++)
#pragma unroll
                    for (int t = 0; t < NT; t++)
                        mma(scores[2 * half + m][t], n[2 * p][2 * m], n[2 * p][2 * m + 1], n[2 * p + 1][2 * m],
                            n[2 * p + 1][2 * m + 1], q[p][t].x, q[p][t].y);
        }
#pragma unroll
        for (int i = 0; i < Loads<BITS>::count; i++) r[i] = next[i];
    }
}

// Add a segment's scores multiplied by its scales.
__device__ __forceinline__ void add_scaled(float (&total)[4][NT][4], const float (&scores)[4][NT][4], uint2 levels) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const u32 word = i < 2 ? levels.x : levels.y;
        float scale[2];
#pragma unroll
        for (int k = 0; k < 2; k++) {
            // 2^23 + level.
            float level = __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7540 | (2 * (i & 1) + k)));
            scale[k] = exp2_fast(fmaf(level, 0.125f, -1048592.0f));
        }
#pragma unroll
        for (int t = 0; t < NT; t++)
#pragma unroll
            for (int k = 0; k < 4; k++) total[i][t][k] = fmaf(scores[i][t][k], scale[k >> 1], total[i][t][k]);
    }
}

// Load a lane's bytes of sixteen tokens for a unit: those of the column and the column before and, for codes of two
// planes or two columns, those of the other plane or column.
template <int BITS>
__device__ __forceinline__ void load_column(uint4 (&r)[4], const u8* values, const ValueJob& job, int unit, int g) {
    const int column = min(unit * 8 + g, job.columns - 1);
    const u8* at = values + (job.last_row + column) * 16;
    r[0] = load16(at);
    r[1] = load16(at - 16);
    if (column == 0) r[1] = make_uint4(0, 0, 0, 0);
    if constexpr (BITS == 3 || BITS == 6) {
        const u8* first = at - (job.last_row - job.first_row) * 16;
        r[2] = load16(first);
        r[3] = load16(first + job.columns * 16);
    }
    if constexpr (BITS == 8) {
        r[2] = load16(at + job.columns * 16);
        r[3] = load16(at + (job.columns - 1) * 16);
        if (column == 0) r[3] = make_uint4(0, 0, 0, 0);
    }
}

__device__ __forceinline__ u32 word(const uint4& x, int j) { return j == 0 ? x.x : j == 1 ? x.y : j == 2 ? x.z : x.w; }

// Add the weighted values of 64 slots to a job's sums; values points to the lane's tile, number c.
template <int BITS>
__device__ __forceinline__ void add_values(float4* sums, const u8* values, const u8* weights, const u8* scales,
                                           const ValueJob& job, int lane) {
    using C = Code<BITS>;
    constexpr int pairs = C::numbers / 2;
    const int g = lane >> 2, c = lane & 3;
    uint4 r[4], next[4];
    u32 p[NT][8];
    load_column<BITS>(next, values, job, job.unit, g);
    const uint4* scale_at = reinterpret_cast<const uint4*>(scales + (job.segment * 64 + c * 16) * 2);
    const uint4 scale[2] = {scale_at[0], scale_at[1]};
#pragma unroll
    for (int t = 0; t < NT; t++) {
        const uint4* weight_at = reinterpret_cast<const uint4*>(weights + (t * 8 + g) * WEIGHT_STRIDE + c * 32);
        const uint4 weight[2] = {weight_at[0], weight_at[1]};
#pragma unroll
        for (int k = 0; k < 8; k++) p[t][k] = mul2(word(weight[k >> 2], k & 3), word(scale[k >> 2], k & 3));
    }
    float4* at = sums + job.tile * (32 * NT) + lane;
#pragma unroll 1
    for (int unit = job.unit; unit < job.end; unit++, at += pairs * 32 * NT) {
#pragma unroll
        for (int i = 0; i < (BITS == 3 || BITS == 6 || BITS == 8 ? 4 : 2); i++) r[i] = next[i];
        load_column<BITS>(next, values, job, unit + 1, g);
        float sum[pairs][NT][4];
#pragma unroll
        for (int i = 0; i < pairs; i++)
#pragma unroll
            for (int t = 0; t < NT; t++) {
                const float4 x = at[(i * NT + t) * 32];
                sum[i][t][0] = x.x;
                sum[i][t][1] = x.y;
                sum[i][t][2] = x.z;
                sum[i][t][3] = x.w;
            }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const u32 w = word(r[0], j), b = word(r[1], j);
            if constexpr (BITS == 8) {
                const u32 e = word(r[2], j), o = word(r[3], j);
                u32 v0 = w ^ (b & ONES), v1 = e ^ (o & ONES), l0 = o << 3, l1 = w << 3;
                u32 a0 = eight(v0, l0), a2 = eight(v0 >> 8, l0 >> 8), a1 = eight(v1, l1), a3 = eight(v1 >> 8, l1 >> 8);
#pragma unroll
                for (int t = 0; t < NT; t++) mma(sum[0][t], a0, a1, a2, a3, p[t][2 * j], p[t][2 * j + 1]);
            } else {
                u32 u[C::numbers], a[4];
                if constexpr (BITS == 3 || BITS == 6)
                    fields<BITS>(u, w, b, word(r[2], j), word(r[3], j));
                else
                    fields<BITS>(u, w, b, 0, 0);
#define PAIR(R)                                                                                                        \
    if constexpr (R < pairs) {                                                                                         \
        by_number<BITS, 2 * R>(a[0], a[2], u[2 * R]);                                                                  \
        by_number<BITS, 2 * R + 1>(a[1], a[3], u[2 * R + 1]);                                                          \
        _Pragma("unroll") for (int t = 0; t < NT; t++)                                                                 \
            mma(sum[R][t], a[0], a[1], a[2], a[3], p[t][2 * j], p[t][2 * j + 1]);                                      \
    }
                PAIR(0) PAIR(1) PAIR(2) PAIR(3)
            }
        }
#pragma unroll
        for (int i = 0; i < pairs; i++)
#pragma unroll
            for (int t = 0; t < NT; t++)
                at[(i * NT + t) * 32] = make_float4(sum[i][t][0], sum[i][t][1], sum[i][t][2], sum[i][t][3]);
    }
}

__device__ __forceinline__ float query_at(const void* at, i64 place) {
#if QUERY == 0
    return static_cast<const float*>(at)[place];
#elif QUERY == 1
    return __uint_as_float((u32) static_cast<const u16*>(at)[place] << 16);
#else
    return half_to_float(static_cast<const u16*>(at)[place]);
#endif
}

struct Shared {
    float unit[QUERIES], inverse[QUERIES];
    // Per set, at the end: the largest score and the sum of the weights.
    float most[SETS][QUERIES], weight[SETS][QUERIES];
    alignas(16) u8 weights[SETS][QUERIES * WEIGHT_STRIDE];
#if PARTS > 1
    float4 scores[SETS * (PARTS - 1)][4 * NT][32];
#endif
    // Followed by arrays whose sizes the host knows: queries, mean coefficients, rotations, scales, sums of each set.
};

// Synchronize the warps of a set.
__device__ __forceinline__ void meet(int set) {
#if PARTS == 1
    __syncwarp();
#else
    asm volatile("bar.sync %0, %1;" ::"r"(set + 1), "n"(32 * PARTS) : "memory");
#endif
}

// Add the scores of the mean key by three float16 products, as accurate as one float32 product.
__device__ __forceinline__ void add_mean_scores(float (&score)[4][NT][4], const float2* mean_parts, const float2* turn,
                                                const uint4* places, int table_padded, int part, int lane) {
    const int g = lane >> 2, c = lane & 3;
#pragma unroll 1
    for (int step = part; step < table_padded / 8; step += PARTS) {
        u32 large[NT][2], small[NT][2];
#pragma unroll
        for (int k = 0; k < 2; k++) {
            float2 cs = turn[step * 8 + c + 4 * k];
#pragma unroll
            for (int t = 0; t < NT; t++) {
                float2 m = mean_parts[(t * 8 + g) * table_padded + step * 8 + c + 4 * k];
                float x = m.x * cs.x + m.y * cs.y, y = m.y * cs.x - m.x * cs.y;
                u32 high = pair(x, y);
                large[t][k] = high;
                small[t][k] = pair(x - half_to_float((u16)high), y - half_to_float((u16)(high >> 16)));
            }
        }
        uint4 table[2][4];
#pragma unroll
        for (int k = 0; k < 2; k++)
#pragma unroll
            for (int i = 0; i < 4; i++) table[k][i] = load_kept(places + ((step * 4 + i) * 2 + k) * 32 + lane);
#pragma unroll
        for (int k = 0; k < 3; k++)
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int t = 0; t < NT; t++) {
                    const uint4 a = table[k == 0][i];
                    mma(score[i][t], a.x, a.y, a.z, a.w, k == 1 ? small[t][0] : large[t][0],
                        k == 1 ? small[t][1] : large[t][1]);
                }
    }
}

// Turn scores into weights relative to the largest score so far; rescale the sums if it has grown.
__device__ __forceinline__ void weigh(float (&score)[4][NT][4], float (&most)[NT][2], float (&weight)[NT][2],
                                      const float* unit, u8* weights, float4* sums, int tiles, int block, int first,
                                      int length, double softcap, int lane) {
    const int g = lane >> 2, c = lane & 3;
    float shrink[NT][2];
    bool moved = false;
#pragma unroll
    for (int t = 0; t < NT; t++) {
        // Base-2 scores, and the largest score of each query.
        float largest[2] = {most[t][0], most[t][1]};
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int k = 0; k < 4; k++) {
                float x = score[i][t][k] * unit[t * 8 + 2 * c + (k & 1)];
#if CAPPED
                const float cap = (float)softcap;
                x = fminf(x * (2.0f * LOG2E / cap), 64.0f);
                x = cap * (1.0f - 2.0f / (exp2_fast(x) + 1.0f));
#endif
                const int slot = block * 64 + g * 8 + 2 * i + (k >> 1);
                x = slot >= first && slot < length ? x * LOG2E : NEGATIVE_INFINITY;
                score[i][t][k] = x;
                largest[k & 1] = fmaxf(largest[k & 1], x);
            }
#pragma unroll
        for (int i = 4; i < 32; i <<= 1) {
            largest[0] = fmaxf(largest[0], __shfl_xor_sync(~0u, largest[0], i));
            largest[1] = fmaxf(largest[1], __shfl_xor_sync(~0u, largest[1], i));
        }
        float finite[2];
#pragma unroll
        for (int k = 0; k < 2; k++) {
            // Somewhat above the largest score, so that sums are seldom rescaled.
            if (largest[k] > most[t][k]) largest[k] += 2;
            const bool any = largest[k] != NEGATIVE_INFINITY;
            finite[k] = any ? largest[k] - LIFT : 0;
            shrink[t][k] = any ? exp2_fast(most[t][k] - largest[k]) : 1;
            weight[t][k] *= shrink[t][k];
            moved |= most[t][k] != largest[k];
            most[t][k] = largest[k];
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int k = 0; k < 4; k++) {
                score[i][t][k] = exp2_fast(score[i][t][k] - finite[k & 1]);
                weight[t][k & 1] += score[i][t][k];
            }
        // Eight tokens of a query in the order 0, 2, 1, 3, 4, 6, 5, 7.
#pragma unroll
        for (int k = 0; k < 2; k++) {
            uint4 packed =
                make_uint4(pair(score[0][t][k], score[1][t][k]), pair(score[0][t][2 + k], score[1][t][2 + k]),
                           pair(score[2][t][k], score[3][t][k]), pair(score[2][t][2 + k], score[3][t][2 + k]));
            *reinterpret_cast<uint4*>(weights + (t * 8 + 2 * c + k) * WEIGHT_STRIDE + g * 16) = packed;
        }
    }
    if (__any_sync(~0u, moved)) {
#pragma unroll 1
        for (int i = 0; i < tiles; i++)
#pragma unroll
            for (int t = 0; t < NT; t++) {
                float4* at = sums + (i * NT + t) * 32 + lane;
                const float4 x = *at;
                *at = make_float4(x.x * shrink[t][0], x.y * shrink[t][1], x.z * shrink[t][0], x.w * shrink[t][1]);
            }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    attend(const u8* rows, const int* pages, const int* key_segments, const int* value_segments, const int* value_jobs,
           const int* numbers, const int* product_numbers, const void* queries, const float* means,
           const float* anchors, const uint4* places, const int* first_at, const int* length_at, const int* offset_at,
           float* partial, float* most_out, float* sum_out, int block_units, int tile_units, int page_stride,
           int per_block, int capacity, int count, int key_width, int value_width, int pairs, int padded,
           int table_padded, int products, int segments_room, int tiles, double softcap) {
    const int group = blockIdx.x, run = blockIdx.y, batch = blockIdx.z, groups = gridDim.x, runs = gridDim.y;
    const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, c = lane & 3;
    const int set = warp / PARTS, part = warp % PARTS;
    const i64 block_stride = (i64)block_units * 16, tile_stride = (i64)tile_units * 16;
    extern __shared__ __align__(16) u8 memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    uint2* query_parts = reinterpret_cast<uint2*>(memory + ((sizeof(Shared) + 15) & ~15));
    float2* mean_parts = reinterpret_cast<float2*>(query_parts + products * 32 * NT);
    float2* turns = mean_parts + QUERIES * table_padded;
    u8* all_scales = reinterpret_cast<u8*>(turns + SETS * table_padded);
    u8* scales = all_scales + set * segments_room * 64 * 2;
    float4* all_sums = reinterpret_cast<float4*>(all_scales + SETS * segments_room * 64 * 2);
    float4* sums = all_sums + set * tiles * 32 * NT;
    u8* weights = shared.weights[set];
    // Tables of the group: key segments, jobs of the parts, scale rows and gains of the values.
    KeySegment* key_segment = reinterpret_cast<KeySegment*>(all_sums + SETS * tiles * 32 * NT);
    ValueJob* jobs = reinterpret_cast<ValueJob*>(key_segment + segments_room);
    int* value_segment = reinterpret_cast<int*>(jobs + PARTS * segments_room);

    const int* key_table = key_segments + group * (segments_room * 8 + 2);
    const int key_count = key_table[0], key_bytes = key_table[1];
    const int* value_table = value_segments + group * (segments_room * 2 + 4);
    const int value_count = value_table[0], key_byte = value_table[1], value_bytes = value_table[2];
    const int value_byte = key_byte + key_bytes, own_width = value_table[3];
    const int first = max(first_at[batch], 0), length = min(length_at[batch], capacity), offset = offset_at[batch];
    const int begin_all = first >> 6, end_all = first < length ? (length + 63) >> 6 : 0;
    const int share = (max(end_all - begin_all, 0) + runs - 1) / runs;
    const int begin = begin_all + run * share, end = min(begin + share, end_all);
    const i64 row = ((i64)batch * groups + group) * count;

    // Offset of a tile of the run; missing tiles are read as the nearest existing one.
    auto tile_at = [&](int tile) -> i64 {
        tile = max(min(tile, (length - 1) >> 4), first >> 4);
#if PAGED
        return (i64)pages[(i64)batch * page_stride + tile / per_block] * block_stride +
               (i64)(tile % per_block) * tile_stride;
#else
        return (i64)batch * block_stride + (i64)tile * tile_stride;
#endif
    };
    // Rotations of the start of a set's block of 64 slots, digit by digit; each warp computes those that it reads.
    auto find_turns = [&](int block) {
        const int position = block * 64 + offset;
#pragma unroll 1
        for (int j = lane; j < (table_padded + 8 * (PARTS - 1 - part)) / PARTS; j += 32) {
            const int i = ((j >> 3) * PARTS + part) * 8 + (j & 7);
            if (i >= table_padded) break;
            float cos = 1, sin = 0;
#pragma unroll
            for (int digit = 0; digit < 3; digit++) {
                int value = digit == 0 ? position & 255 : digit == 1 ? (position >> 8) & 255 : (position >> 16) + 1;
                const float* at = anchors + (digit * 256 + min(max(value, 0), 255)) * 2 * padded + i;
                float other_cos = __ldg(at), other_sin = __ldg(at + padded), next = cos * other_cos - sin * other_sin;
                sin = sin * other_cos + cos * other_sin;
                cos = next;
            }
            turns[set * table_padded + i] = make_float2(cos, sin);
        }
        __syncwarp();
    };
    // Prefetch with eight lanes per tile of a set's block.
    auto prefetch_rows = [&](int block, int byte, int bytes) {
        const u8* at = rows + tile_at(4 * block + (lane >> 3)) + byte * 16;
#pragma unroll 1
        for (int i = (lane & 7) * 128; i < bytes * 16; i += 1024) prefetch(at + i);
    };

    // Prefetch a set's first or next block: all of it, in shares, if warps share it, else the first segment.
    auto prefetch_block = [&](int block) {
#if PARTS > 1
        const int bytes = (key_bytes + value_bytes + PARTS - 1) / PARTS;
        prefetch_rows(block, key_byte + part * bytes, bytes);
#else
        prefetch_rows(block, key_byte, key_table[8]);
#endif
    };

    if (begin < end) {
        if (begin + set < end) prefetch_block(begin + set);
#pragma unroll 1
        for (int i = tid; i < segments_room * 8; i += THREADS)
            reinterpret_cast<int*>(key_segment)[i] = key_table[2 + i];
#pragma unroll 1
        for (int i = tid; i < PARTS * segments_room * 8; i += THREADS)
            reinterpret_cast<int*>(jobs)[i] = value_jobs[group * PARTS * segments_room * 8 + i];
#pragma unroll 1
        for (int i = tid; i < 2 * segments_room; i += THREADS) value_segment[i] = value_table[4 + i];
#pragma unroll 1
        for (int i = tid; i < SETS * tiles * 32 * NT; i += THREADS) all_sums[i] = make_float4(0, 0, 0, 0);
#pragma unroll 1
        for (int q = warp; q < QUERIES; q += WARPS) {
            float largest = 0;
            if (q < count) {
#pragma unroll 8
                for (int i = lane; i < key_width; i += 32)
                    largest = fmaxf(largest, fabsf(query_at(queries, (row + q) * key_width + i)));
#pragma unroll 4
                for (int i = lane; i < 2 * pairs; i += 32)
                    largest = fmaxf(largest, fabsf(means[(row + q) * 2 * pairs + i]) * (1.0f / 1024));
            }
            for (int i = 16; i; i >>= 1) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, i));
            if (lane == 0) {
                largest = largest > 0 ? largest : 1.0f;
                shared.unit[q] = largest;
                shared.inverse[q] = 1.0f / largest;
            }
        }
        __syncthreads();
#pragma unroll 1
        for (int i = tid; i < products * NT * 32; i += THREADS) {
            int product = i / (32 * NT), own = i & 31, q = (i / 32) % NT * 8 + (own >> 2);
            const int4 numbers_of =
                __ldg(reinterpret_cast<const int4*>(product_numbers) + (group * products + product) * 4 + (own & 3));
            const int at[4] = {numbers_of.x, numbers_of.y, numbers_of.z, numbers_of.w};
            float x[4];
#pragma unroll
            for (int k = 0; k < 4; k++) {
                int which = at[k];
                x[k] = 0;
                if (which >= 0 && q < count) {
                    int bits = which >> 16;
                    float gain = OF_BITS(GAIN, bits);
                    x[k] = query_at(queries, (row + q) * key_width + (which & 0xffff)) * shared.inverse[q] * gain;
                }
            }
            query_parts[i] = make_uint2(pair(x[0], x[1]), pair(x[2], x[3]));
        }
#pragma unroll 1
        for (int i = tid; i < QUERIES * table_padded; i += THREADS) {
            int q = i / table_padded, pair_index = i - q * table_padded;
            float2 x = make_float2(0, 0);
            if (q < count && pair_index < pairs) {
                const float* at = means + (row + q) * 2 * pairs + pair_index;
                x = make_float2(at[0] * shared.inverse[q], at[pairs] * shared.inverse[q]);
            }
            mean_parts[i] = x;
        }
        __syncthreads();
    }

    // For queries t * 8 + 2 c + k; only a set's first warp uses them.
    float most[NT][2], weight[NT][2];
#pragma unroll
    for (int t = 0; t < NT; t++) {
        most[t][0] = most[t][1] = NEGATIVE_INFINITY;
        weight[t][0] = weight[t][1] = 0;
    }
#pragma unroll 1
    for (int block = begin + set; block < end; block += SETS) {
        float score[4][NT][4];
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int t = 0; t < NT; t++)
#pragma unroll
                for (int k = 0; k < 4; k++) score[i][t][k] = 0;
        find_turns(block);
        add_mean_scores(score, mean_parts, turns + set * table_padded, places, table_padded, part, lane);
        const u8* keys = rows + tile_at(4 * block + (g >> 1)) + key_byte * 16 + (g & 1) * 8;
#pragma unroll 1
        for (int s = 0; s < key_count; s++) {
            const KeySegment segment = key_segment[s];
            const uint2 levels = load8(keys + segment.scale_row * 16);
#if PARTS == 1
            if (s + 1 < key_count)
                prefetch_rows(block, key_byte + key_segment[s + 1].scale_row,
                              key_segment[s + 1].next_row - key_segment[s + 1].scale_row);
            else
                prefetch_rows(block, value_byte, value_bytes);
#endif
            float scores[4][NT][4];
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int t = 0; t < NT; t++)
#pragma unroll
                    for (int k = 0; k < 4; k++) scores[i][t][k] = 0;
            switch (segment.bits) {
                case 1: score_segment<1>(scores, keys, segment, query_parts, lane, part); break;
                case 2: score_segment<2>(scores, keys, segment, query_parts, lane, part); break;
                case 3: score_segment<3>(scores, keys, segment, query_parts, lane, part); break;
                case 4: score_segment<4>(scores, keys, segment, query_parts, lane, part); break;
                case 6: score_segment<6>(scores, keys, segment, query_parts, lane, part); break;
                default: score_segment<8>(scores, keys, segment, query_parts, lane, part); break;
            }
            add_scaled(score, scores, levels);
        }
        // Scale levels of four slots of two value segments, loaded early as they are needed soon.
        const int four = lane & 15;
        const u8* levels_at = rows + tile_at(4 * block + (four >> 2)) + value_byte * 16 + (four & 3) * 4;
        auto levels_of = [&](int segment) {
            return __ldg(reinterpret_cast<const u32*>(levels_at + value_segment[2 * segment] * 16));
        };
        u32 early[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int segment = (lane >> 4) + 2 * (part + i * PARTS);
            early[i] = segment < value_count ? levels_of(segment) : 0;
        }
#if PARTS > 1
        if (part) {
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int t = 0; t < NT; t++)
                    shared.scores[set * (PARTS - 1) + part - 1][i * NT + t][lane] =
                        make_float4(score[i][t][0], score[i][t][1], score[i][t][2], score[i][t][3]);
        }
        meet(set);
        if (!part) {
#pragma unroll
            for (int other = 0; other < PARTS - 1; other++)
#pragma unroll
                for (int i = 0; i < 4; i++)
#pragma unroll
                    for (int t = 0; t < NT; t++) {
                        const float4 x = shared.scores[set * (PARTS - 1) + other][i * NT + t][lane];
                        score[i][t][0] += x.x;
                        score[i][t][1] += x.y;
                        score[i][t][2] += x.z;
                        score[i][t][3] += x.w;
                    }
        }
#endif
        if (!part) weigh(score, most, weight, shared.unit, weights, sums, tiles, block, first, length, softcap, lane);
        // Scales of the value segments, in the token order of the weights.
#pragma unroll 1
        for (int i = 0, segment = (lane >> 4) + 2 * part; segment < value_count; i++, segment += 2 * PARTS) {
            const u32 levels = i == 0 ? early[0] : i == 1 ? early[1] : levels_of(segment);
            const float gain = __int_as_float(value_segment[2 * segment + 1]);
            float x[4];
#pragma unroll
            for (int k = 0; k < 4; k++) {
                float level = __uint_as_float(__byte_perm(levels, 0x4b000000u, 0x7540 | k));
                x[k] = exp2_fast(fminf(fmaf(level, 0.125f, -1048592.0f), 7.0f)) * gain;
            }
            *reinterpret_cast<uint2*>(scales + (segment * 64 + four * 4) * 2) =
                make_uint2(pair(x[0], x[2]), pair(x[1], x[3]));
        }
        meet(set);
        if (block + SETS < end) prefetch_block(block + SETS);
        const u8* values = rows + tile_at(4 * block + c) + value_byte * 16;
#pragma unroll 1
        for (int i = 0; i < segments_room; i++) {
            const ValueJob job = jobs[part * segments_room + i];
#define VALUES(BITS) add_values<BITS>(sums, values, weights, scales, job, lane)
            switch (job.bits) {
                case 0: break;
                case 1: VALUES(1); break;
                case 2: VALUES(2); break;
                case 3: VALUES(3); break;
                case 4: VALUES(4); break;
                case 6: VALUES(6); break;
                default: VALUES(8); break;
            }
        }
        __syncwarp();
    }
    // Combine the sets: sum weights over a query's lanes, and make all sums relative to the largest score.
    if (!part) {
#pragma unroll
        for (int t = 0; t < NT; t++)
#pragma unroll
            for (int k = 0; k < 2; k++) {
#pragma unroll
                for (int i = 4; i < 32; i <<= 1) weight[t][k] += __shfl_xor_sync(~0u, weight[t][k], i);
                if (g == 0) {
                    shared.most[set][t * 8 + 2 * c + k] = most[t][k] - LIFT;
                    shared.weight[set][t * 8 + 2 * c + k] = weight[t][k];
                }
            }
    }
    __syncthreads();
    float share_of[SETS][NT][2];
    const i64 out = (((i64)batch * runs + run) * groups + group) * count;
#pragma unroll
    for (int t = 0; t < NT; t++)
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const int q = t * 8 + 2 * c + k;
            float top = NEGATIVE_INFINITY, total = 0;
#pragma unroll
            for (int i = 0; i < SETS; i++) top = fmaxf(top, shared.most[i][q]);
            const float finite = top == NEGATIVE_INFINITY ? 0 : top;
#pragma unroll
            for (int i = 0; i < SETS; i++) {
                share_of[i][t][k] = exp2_fast(shared.most[i][q] - finite);
                total += shared.weight[i][q] * share_of[i][t][k];
            }
            if (warp == 0 && g == 0 && q < count) {
                most_out[out + q] = top;
                sum_out[out + q] = total;
            }
        }
#pragma unroll 1
    for (int tile = warp; tile < tiles; tile += WARPS)
#pragma unroll
        for (int t = 0; t < NT; t++) {
            float sum[4] = {0, 0, 0, 0};
            if (begin < end)
#pragma unroll
                for (int i = 0; i < SETS; i++) {
                    const float4 x = all_sums[((i * tiles + tile) * NT + t) * 32 + lane];
                    sum[0] = fmaf(x.x, share_of[i][t][0], sum[0]);
                    sum[1] = fmaf(x.y, share_of[i][t][1], sum[1]);
                    sum[2] = fmaf(x.z, share_of[i][t][0], sum[2]);
                    sum[3] = fmaf(x.w, share_of[i][t][1], sum[3]);
                }
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const int number = numbers[(group * tiles + tile) * 16 + g + (k >> 1) * 8], q = t * 8 + 2 * c + (k & 1);
                if (number >= 0 && q < count) partial[(out + q) * value_width + number] = sum[k];
            }
        }
#pragma unroll 1
    for (int i = tid; i < count * (value_width - own_width); i += THREADS)
        partial[(out + i / (value_width - own_width)) * value_width + own_width + i % (value_width - own_width)] = 0;
}
