// Access to single elements of q and of the slots.

#pragma once

namespace kvpop::KVPOP_ISA {

KVPOP_INLINE float read_q(const DecodeStep& a, int64_t r, int64_t head, int64_t e) {
    const int64_t at = r * a.q_stride[0] + head * a.q_stride[1] + e;
    return a.q_is_bf16 ? to_float(static_cast<const bf16*>(a.q)[at]) : static_cast<const float*>(a.q)[at];
}

template <class T>
KVPOP_INLINE const T* key_row(const DecodeStep& a, int64_t r, int64_t h, int64_t slot) {
    return reinterpret_cast<const T*>(a.slot_region(r, h, slot)) + slot % a.block_slots * a.size;
}
// Returns the key at index `at` of the tokens a request attends to: its prefix, then its tail. Values
// follow N rows after keys.
template <class T>
KVPOP_INLINE const T* seen_row(const DecodeStep& a, int64_t r, int64_t h, int64_t at, int64_t prefix) {
    if (at >= prefix) return key_row<T>(a, r, h, at - prefix);
    return reinterpret_cast<const T*>(a.prefix_region(r, h, at)) + at % a.block_slots * a.size;
}
template <class T>
KVPOP_INLINE const T* value_row(const DecodeStep& a, int64_t r, int64_t h, int64_t slot) {
    return key_row<T>(a, r, h, slot) + a.block_slots * a.size;
}

}  // namespace kvpop::KVPOP_ISA
