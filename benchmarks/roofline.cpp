// Measure the most that one thread of this machine can do: bytes read per second, and multiply-adds of float32 and bfloat16.
// Compiled for the machine it runs on (-march=native).

#include <torch/extension.h>

#include <chrono>
#include <vector>
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {

typedef float vf __attribute__((vector_size(64)));
typedef int64_t vl __attribute__((vector_size(64)));

double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Seconds to read all bytes once, in blocks of block_bytes in the given order; where asked, the block that follows is fetched
// while one is read, which pays where the processor cannot guess it.
double read_once(const at::Tensor& bytes, const at::Tensor& order, int64_t block_bytes, bool fetch) {
    const uint8_t* base = bytes.data_ptr<uint8_t>();
    const int64_t* at = order.data_ptr<int64_t>();
    vl sums[4] = {};
    const double begin = now();
    for (int64_t i = 0; i < order.numel(); i++) {
        const uint8_t* p = base + at[i] * block_bytes;
        const uint8_t* ahead = base + at[i + 1 < order.numel() ? i + 1 : i] * block_bytes;
        for (int64_t b = 0; b < block_bytes; b += 256) {
            for (int j = 0; j < 4; j++) {
                if (fetch) __builtin_prefetch(ahead + b + 64 * j, 0, 2);
                vl x;
                __builtin_memcpy(&x, p + b + 64 * j, 64);
                sums[j] ^= x;
            }
        }
    }
    const double seconds = now() - begin;
    volatile int64_t keep = (sums[0] ^ sums[1] ^ sums[2] ^ sums[3])[0];
    (void)keep;
    return seconds;
}

// Floating-point operations per second of independent multiply-adds in registers.
double float_rate(int64_t rounds) {
    vf acc[12], a = vf{} + 1.0f, b = vf{} + 1e-9f;
    for (vf& x : acc) x = vf{};
    const double begin = now();
    for (int64_t i = 0; i < rounds; i++) {
        for (vf& x : acc) x += a * b;
        __asm__ volatile("" : "+v"(a), "+v"(b));
    }
    const double seconds = now() - begin;
    vf total{};
    for (vf& x : acc) total += x;
    volatile float keep = total[0];
    (void)keep;
    return double(rounds) * 12 * 16 * 2 / seconds;
}

double bf16_rate(int64_t rounds) {
#if defined(__AVX512BF16__)
    __m512 acc[12];
    for (__m512& x : acc) x = _mm512_setzero_ps();
    __m512i a = _mm512_set1_epi16(0x3f80), b = _mm512_set1_epi16(0x3080);
    const double begin = now();
    for (int64_t i = 0; i < rounds; i++) {
        for (__m512& x : acc) x = _mm512_dpbf16_ps(x, (__m512bh)a, (__m512bh)b);
        __asm__ volatile("" : "+v"(a), "+v"(b));
    }
    const double seconds = now() - begin;
    __m512 total = _mm512_setzero_ps();
    for (__m512& x : acc) total = _mm512_add_ps(total, x);
    volatile float keep = ((vf)total)[0];
    (void)keep;
    return double(rounds) * 12 * 32 * 2 / seconds;
#else
    return 0;
#endif
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
    module.def("read_once", &read_once);
    module.def("float_rate", &float_rate);
    module.def("bf16_rate", &bf16_rate);
}
