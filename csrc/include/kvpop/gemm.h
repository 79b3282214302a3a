// Products of small matrices of 32-bit words, accumulated in float32.

#pragma once

namespace kvpop::KVPOP_ISA {

// Words that are floats: a pair of words adds the product of two floats.
struct FloatWords {
    static constexpr int PER = 1;
    static KVPOP_INLINE vf multiply_add(vf acc, vu a, vu b) { return acc + (vf)a * (vf)b; }
};

#if KVPOP_BF16_DOT
// Words that are pairs of bfloat16: a pair of words adds the products of their lower and of their upper
// halves.
struct Bf16Words {
    static constexpr int PER = 2;
    static KVPOP_INLINE vf multiply_add(vf acc, vu a, vu b) {
        return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
    }
};
#endif

constexpr int GEMM_ROWS = 6;
#if KVPOP_VECTOR_BYTES == 64
constexpr int GEMM_VECTORS = 4;  // of columns; ROWS * VECTORS accumulators fit into the registers
#else
constexpr int GEMM_VECTORS = 2;
#endif

// c [rows, columns] = factor[row] * c + a [rows, words] b [words, columns]. Without factors c is
// overwritten.
struct Gemm {
    const uint32_t* a;
    int64_t a_stride;
    const uint32_t* b;
    int64_t b_stride;
    int64_t words;
    float* c;
    int64_t c_stride;
    const float* factor;
};

template <class W, int ROWS, int VECTORS>
KVPOP_INLINE void gemm_block(const Gemm& m, int64_t row, int64_t column) {
    const uint32_t* a = m.a + row * m.a_stride;
    const uint32_t* b = m.b + column;
    float* c = m.c + row * m.c_stride + column;
    vf acc[ROWS][VECTORS] = {};
    if (m.factor)
        for (int i = 0; i < ROWS; i++)
            for (int j = 0; j < VECTORS; j++) acc[i][j] = m.factor[row + i] * load(c + i * m.c_stride + j * VL);
    for (int64_t w = 0; w < m.words; w++) {
        vu columns[VECTORS];
        for (int j = 0; j < VECTORS; j++) columns[j] = load_as<vu>(b + w * m.b_stride + j * VL);
        for (int i = 0; i < ROWS; i++) {
            const vu x = a[i * m.a_stride + w] - vu{};
            for (int j = 0; j < VECTORS; j++) acc[i][j] = W::multiply_add(acc[i][j], x, columns[j]);
        }
    }
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < VECTORS; j++) store(c + i * m.c_stride + j * VL, acc[i][j]);
}

template <class W, int VECTORS>
void gemm_columns(const Gemm& m, int64_t rows, int64_t column) {
    int64_t row = 0;
    for (; row + GEMM_ROWS <= rows; row += GEMM_ROWS) gemm_block<W, GEMM_ROWS, VECTORS>(m, row, column);
    switch (rows - row) {
        case 1: return gemm_block<W, 1, VECTORS>(m, row, column);
        case 2: return gemm_block<W, 2, VECTORS>(m, row, column);
        case 3: return gemm_block<W, 3, VECTORS>(m, row, column);
        case 4: return gemm_block<W, 4, VECTORS>(m, row, column);
        case 5: return gemm_block<W, 5, VECTORS>(m, row, column);
    }
}

// columns must be a multiple of VL.
template <class W>
void gemm(const Gemm& m, int64_t rows, int64_t columns) {
    constexpr int WIDE = GEMM_VECTORS * VL;
    int64_t column = 0;
    for (; column + WIDE <= columns; column += WIDE) gemm_columns<W, GEMM_VECTORS>(m, rows, column);
#if KVPOP_VECTOR_BYTES == 64
    if (columns - column == 3 * VL) return gemm_columns<W, 3>(m, rows, column);
    if (columns - column == 2 * VL) return gemm_columns<W, 2>(m, rows, column);
#endif
    if (columns - column == VL) gemm_columns<W, 1>(m, rows, column);
}

}  // namespace kvpop::KVPOP_ISA
