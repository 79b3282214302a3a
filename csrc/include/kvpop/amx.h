// Products of small matrices of bfloat16 pairs with AMX, 16 x 16 floats at a time. All eight tiles are
// full: matrices have a multiple of 16 words and of 16 columns, and memory for a multiple of 16 rows.

#pragma once

namespace kvpop::KVPOP_ISA {

constexpr int64_t AMX_ROWS = 16, AMX_WORDS = 16;  // of a tile of a; b's tiles: 16 rows of words, 16 columns

struct AmxWords {
    static constexpr int PER = 2;
};

// The intrinsics do not tell the compiler which memory they read.
KVPOP_INLINE void memory_is_written(const void* some) { __asm__ volatile("" : : "r"(some) : "memory"); }

struct alignas(64) AmxShape {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Configures the AMX tiles of this thread for the lifetime of the object.
struct AmxTiles {
    AmxTiles() {
        const AmxShape shape;
        memory_is_written(&shape);
        _tile_loadconfig(&shape);
    }
    ~AmxTiles() { _tile_release(); }
    AmxTiles(const AmxTiles&) = delete;
};

// Computes rows [row, row + 16 ROWS) and columns [column, column + 16 COLUMNS). Tiles 0 to 3 are sums, 4
// and 5 belong to a, 6 and 7 to b.
template <int ROWS, int COLUMNS>
KVPOP_INLINE void amx_block(const Gemm& m, int64_t row, int64_t column) {
    const int64_t a_bytes = m.a_stride * 4, b_bytes = m.b_stride * 4, c_bytes = m.c_stride * 4;
    const uint32_t *a = m.a + row * m.a_stride, *b = m.b + column;
    float* c = m.c + row * m.c_stride + column;
    float* below = c + AMX_ROWS * m.c_stride;
    if (m.factor) {
        _tile_loadd(0, c, c_bytes);
        if (COLUMNS == 2) _tile_loadd(1, c + AMX_WORDS, c_bytes);
        if (ROWS == 2) _tile_loadd(2, below, c_bytes);
        if (ROWS == 2 && COLUMNS == 2) _tile_loadd(3, below + AMX_WORDS, c_bytes);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t w = 0; w < m.words; w += AMX_WORDS) {
        _tile_loadd(4, a + w, a_bytes);
        _tile_loadd(6, b + w * m.b_stride, b_bytes);
        _tile_dpbf16ps(0, 4, 6);
        if (COLUMNS == 2) {
            _tile_loadd(7, b + w * m.b_stride + AMX_WORDS, b_bytes);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (ROWS == 2) {
            _tile_loadd(5, a + AMX_ROWS * m.a_stride + w, a_bytes);
            _tile_dpbf16ps(2, 5, 6);
        }
        if (ROWS == 2 && COLUMNS == 2) _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, c_bytes);
    if (COLUMNS == 2) _tile_stored(1, c + AMX_WORDS, c_bytes);
    if (ROWS == 2) _tile_stored(2, below, c_bytes);
    if (ROWS == 2 && COLUMNS == 2) _tile_stored(3, below + AMX_WORDS, c_bytes);
}

template <int ROWS>
void amx_rows(const Gemm& m, int64_t row, int64_t columns) {
    int64_t column = 0;
    for (; column + 2 * AMX_WORDS <= columns; column += 2 * AMX_WORDS) amx_block<ROWS, 2>(m, row, column);
    if (column < columns) amx_block<ROWS, 1>(m, row, column);
}

// Requires a live AmxTiles object.
template <>
inline void gemm<AmxWords>(const Gemm& m, int64_t rows, int64_t columns) {
    for (int64_t i = 0; m.factor && i < rows; i++)
        for (int64_t c = 0; c < columns && m.factor[i] != 1; c += VL)
            store(m.c + i * m.c_stride + c, m.factor[i] * load(m.c + i * m.c_stride + c));
    memory_is_written(m.a);
    int64_t row = 0;
    for (; row + AMX_ROWS < rows; row += 2 * AMX_ROWS) amx_rows<2>(m, row, columns);
    if (row < rows) amx_rows<1>(m, row, columns);
    memory_is_written(m.c);
}

}  // namespace kvpop::KVPOP_ISA
