// Vectors of KVPOP_VECTOR_BYTES bytes in GCC's vector notation, in the namespace KVPOP_ISA of one
// instruction set. Standard headers must be included before the target pragma that precedes this header.
// Otherwise inline functions of the standard library compiled for a newer processor could be linked into
// code for an older one. Lambdas in these headers must not use vectors, because GCC compiles them without
// the target.

#pragma once

#define KVPOP_INLINE inline __attribute__((always_inline))

namespace kvpop::KVPOP_ISA {

typedef float vf __attribute__((vector_size(KVPOP_VECTOR_BYTES)));
typedef int32_t vi __attribute__((vector_size(KVPOP_VECTOR_BYTES)));
typedef uint32_t vu __attribute__((vector_size(KVPOP_VECTOR_BYTES)));
typedef double vd __attribute__((vector_size(KVPOP_VECTOR_BYTES)));
typedef int64_t vl __attribute__((vector_size(KVPOP_VECTOR_BYTES)));
typedef float half_f __attribute__((vector_size(KVPOP_VECTOR_BYTES / 2)));
typedef int32_t half_i __attribute__((vector_size(KVPOP_VECTOR_BYTES / 2)));

constexpr int VL = KVPOP_VECTOR_BYTES / 4;  // floats per vector

template <class V, class T>
KVPOP_INLINE V load_as(const T* p) {
    V v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
}
KVPOP_INLINE vf load(const float* p) { return load_as<vf>(p); }
KVPOP_INLINE void store(float* p, vf v) { __builtin_memcpy(p, &v, sizeof v); }
KVPOP_INLINE vf splat(float x) { return x - vf{}; }
KVPOP_INLINE vf max(vf a, vf b) { return a > b ? a : b; }
// Prefetches into the second-level cache, because the few miss buffers of the first level would limit the
// bandwidth.
KVPOP_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

KVPOP_INLINE vi lanes() {
#if KVPOP_VECTOR_BYTES == 64
    return vi{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#elif KVPOP_VECTOR_BYTES == 32
    return vi{0, 1, 2, 3, 4, 5, 6, 7};
#else
    return vi{0, 1, 2, 3};
#endif
}

// Shuffles within each 128-bit part: lower and upper pairs of 32-bit (unpack) and 64-bit words of a and b.
// EVEN128 and ODD128: the even or odd 128-bit parts of a, followed by those of b.
#if KVPOP_VECTOR_BYTES == 64
constexpr vi LOW32{0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29};
constexpr vi HIGH32{2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31};
constexpr vi LOW64{0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29};
constexpr vi HIGH64{2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31};
constexpr vi EVEN128{0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27};
constexpr vi ODD128{4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31};
#elif KVPOP_VECTOR_BYTES == 32
constexpr vi LOW32{0, 8, 1, 9, 4, 12, 5, 13};
constexpr vi HIGH32{2, 10, 3, 11, 6, 14, 7, 15};
constexpr vi LOW64{0, 1, 8, 9, 4, 5, 12, 13};
constexpr vi HIGH64{2, 3, 10, 11, 6, 7, 14, 15};
constexpr vi EVEN128{0, 1, 2, 3, 8, 9, 10, 11};
constexpr vi ODD128{4, 5, 6, 7, 12, 13, 14, 15};
#else
constexpr vi LOW32{0, 4, 1, 5};
constexpr vi HIGH32{2, 6, 3, 7};
constexpr vi LOW64{0, 1, 4, 5};
constexpr vi HIGH64{2, 3, 6, 7};
#endif

// Computes VL sums at once: lane i of the result is the sum of the lanes of v[i].
KVPOP_INLINE vf sums_of_four(vf a, vf b, vf c, vf d) {
    const vf ab = __builtin_shuffle(a, b, LOW32) + __builtin_shuffle(a, b, HIGH32);
    const vf cd = __builtin_shuffle(c, d, LOW32) + __builtin_shuffle(c, d, HIGH32);
    return __builtin_shuffle(ab, cd, LOW64) + __builtin_shuffle(ab, cd, HIGH64);
}
KVPOP_INLINE vf join_quads(const vf* quads) {
#if KVPOP_VECTOR_BYTES == 16
    return quads[0];
#else
    const vf ab = __builtin_shuffle(quads[0], quads[1], EVEN128) + __builtin_shuffle(quads[0], quads[1], ODD128);
#if KVPOP_VECTOR_BYTES == 32
    return ab;
#else
    const vf cd = __builtin_shuffle(quads[2], quads[3], EVEN128) + __builtin_shuffle(quads[2], quads[3], ODD128);
    return __builtin_shuffle(ab, cd, EVEN128) + __builtin_shuffle(ab, cd, ODD128);
#endif
#endif
}

KVPOP_INLINE vf rotate(vf v, int by) { return __builtin_shuffle(v, (lanes() + by) & (VL - 1)); }
KVPOP_INLINE float sum(vf v) {
    for (int by = VL / 2; by > 0; by /= 2) v += rotate(v, by);
    return v[0];
}
KVPOP_INLINE float max(vf v) {
    for (int by = VL / 2; by > 0; by /= 2) v = max(v, rotate(v, by));
    return v[0];
}

// e^x to about 1 ulp for -87 <= x <= 88; 0 below, e^88 above; NaN stays NaN.
KVPOP_INLINE vf exp(vf x) {
    const vf low = splat(-87.0f), high = splat(88.0f), shift = splat(12582912.0f);  // 1.5 * 2^23
    const vf t = x < low ? low : (x > high ? high : x);
    const vf shifted = t * 1.44269504088896341f + shift;
    const vf n = shifted - shift;
    const vf r = (t - n * 0.693359375f) - n * -2.12194440e-4f;
    vf p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    const vi power = ((vi)shifted - (vi)shift + 127) << 23;
    return x < low ? vf{} : p * (vf)power;
}

KVPOP_INLINE float to_float(float x) { return x; }
KVPOP_INLINE float to_float(bf16 x) {
    const uint32_t bits = uint32_t(x.bits) << 16;
    float out;
    __builtin_memcpy(&out, &bits, 4);
    return out;
}
// Rounds to nearest, ties to even.
KVPOP_INLINE bf16 to_bf16(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return {uint16_t((bits >> 16) | 0x40)};
    return {uint16_t((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16)};
}

// A row of elements as float vectors, one or two per step of KVPOP_VECTOR_BYTES bytes. Two bfloat16 share a
// 32-bit word: a step yields the even elements, then the odd ones. place(e) is the index of element e in
// the sequence of vectors.
template <class T>
struct Rows;

template <>
struct Rows<float> {
    static constexpr int PER_STEP = 1;
    static KVPOP_INLINE int64_t place(int64_t e) { return e; }
    template <bool MASKED>
    static KVPOP_INLINE void load(const float* row, int64_t step, vu mask, vf* out) {
        const vu words = load_as<vu>(row + step * VL);
        out[0] = (vf)(MASKED ? words & mask : words);
    }
};

template <>
struct Rows<bf16> {
    static constexpr int PER_STEP = 2;
    static KVPOP_INLINE int64_t place(int64_t e) {
        const int64_t word = e / 2;
        return (2 * (word / VL) + (e & 1)) * VL + word % VL;
    }
    template <bool MASKED>
    static KVPOP_INLINE void load(const bf16* row, int64_t step, vu mask, vf* out) {
        vu words = load_as<vu>(row + step * 2 * VL);
        if (MASKED) words &= mask;
        out[0] = (vf)(words << 16);
        out[1] = (vf)(words & 0xffff0000u);
    }
};

}  // namespace kvpop::KVPOP_ISA
