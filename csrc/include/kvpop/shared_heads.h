// Heads of a layer that divide its budget by their scores (kvpop_vllm/kernels/reference/shared_heads.py). A head's share lies in
// its state: long-range slots it may fill, how many it has filled, and which of the request's regions its slot pages are; of
// equal shares page p of head h is region p * H + h.

#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "kvpop/isa.h"
#include "kvpop/scratch.h"

namespace kvpop {

constexpr int64_t FLOOR_PART = 1, FLOOR_WHOLE = 5;  // the part of an equal share that every head gets

// `step` with q, k, v, out, lse and given scores of token i on their first axis, as the only request.
inline DecodeStep only_token(const DecodeStep& whole, int64_t i) {
    DecodeStep step = whole;
    const int64_t q_bytes = whole.q_is_bf16 ? 2 : 4, query_heads = i * whole.heads * whole.group;
    const auto token = [](const void* base, int64_t items, int64_t bytes) {
        return static_cast<const uint8_t*>(base) + items * bytes;
    };
    step.requests = 1;
    step.q = token(whole.q, i * whole.q_stride[0], q_bytes);
    step.k = token(whole.k, i * whole.k_stride[0], whole.item_bytes());
    step.v = token(whole.v, i * whole.v_stride[0], whole.item_bytes());
    step.out = static_cast<uint8_t*>(whole.out) + query_heads * whole.size * q_bytes;
    step.lse = whole.lse + query_heads;
    if (whole.given) step.given = whole.given + i * whole.given_stride[0];
    return step;
}

// One request; its page table, budget, position and prompt are those of row r of `whole`.
class SharedHeads {
  public:
    SharedHeads(const DecodeStep& whole, int64_t r, const Kernels& kernels)
        : whole_(whole), r_(r), kernels_(kernels), first_(whole.roles.first_long()), base_(whole.budget(r, 0)),
          topk_(base_ - first_), width_(whole.state_blocks + whole.share_pages), table_(size_t(whole.heads * width_)),
          budgets_(size_t(whole.heads)), valid_(size_t(whole.heads)), inserted_(size_t(whole.heads)) {}

    // The step at position q of the token that is number i on the first axis.
    void step(int64_t i, int64_t q) {
        position_ = q;
        step_ = only_token(whole_, i);
        step_.positions = &position_, step_.positions_stride = 0;
        if (whole_.prompts) step_.prompts = whole_.prompts + r_ * whole_.prompts_stride;
        step_.page_table = table_.data(), step_.table_stride[1] = width_, step_.table_stride[2] = 1;
        step_.budgets = budgets_.data(), step_.budgets_stride[1] = 1;
        step_.valid = valid_.data(), step_.valid_stride[1] = 1;
        if (q == 0) start();
        read();
        if (!step_.roles_of(0).decides_at(q) || q > step_.prompt(0))
            return each_head([&](int64_t h, float* scratch) { kernels_.decode_heads(step_, 0, 1, h, scratch); });
        each_head([&](int64_t h, float* scratch) { inserted_[size_t(h)] = kernels_.score(step_, 0, h, scratch); });
        if (std::vector<int64_t> shares = divide(); !shares.empty()) {
            each_head([&](int64_t h, float* scratch) {
                const int64_t over = step_.in_use(0, h) - first_ - shares[size_t(h)];
                kernels_.shrink(step_, 0, h, std::max(over, int64_t(0)), scratch);
            });
            hand_out(shares);
            read();
        }
        each_head([&](int64_t h, float* scratch) { kernels_.finish(step_, 0, h, inserted_[size_t(h)], scratch); });
    }

  private:
    float* word(int64_t h, int64_t i) const { return whole_.share_word(r_, h, i); }
    int64_t slots() const { return whole_.block_slots; }
    int64_t pages(int64_t share) const { return (first_ + share + slots() - 1) / slots(); }

    template <class F>
    void each_head(const F& f) {
        const int64_t floats = kernels_.scratch_floats(step_);
        at::parallel_for(0, whole_.heads, 1, [&](int64_t begin, int64_t end) {
            float* scratch = scratch_of_this_thread(floats);
            for (int64_t h = begin; h < end; h++) f(h, scratch);
        });
    }

    // Equal shares.
    void start() {
        for (int64_t h = 0; h < whole_.heads; h++) {
            *word(h, 0) = float(topk_), *word(h, 1) = 0;
            for (int64_t p = 0; p < whole_.share_pages; p++) *word(h, 2 + p) = p < pages(topk_) ? float(p * whole_.heads + h) : -1;
        }
    }

    // Tables, budgets and slots in use, as the shares say. Refuses what no step has written.
    void read() {
        for (int64_t h = 0; h < whole_.heads; h++) {
            const float share = *word(h, 0), filled = *word(h, 1);
            if (!(share >= 0 && filled >= 0 && filled <= share && share <= float(topk_ * whole_.heads)))
                throw std::runtime_error("request " + std::to_string(r_) + ": its cache holds no share of head " + std::to_string(h));
            budgets_[size_t(h)] = int32_t(first_ + int64_t(share));
            int32_t* row = table_.data() + h * width_;
            for (int64_t p = 0; p < whole_.state_blocks; p++) row[p] = region(h, p);
            for (int64_t p = 0; p < pages(int64_t(share)); p++) {
                const float number = *word(h, 2 + p);
                if (!(number >= 0 && number < float((pages(topk_) + 1) * whole_.heads)))
                    throw std::runtime_error("request " + std::to_string(r_) + ": its cache names no page " + std::to_string(p));
                const int64_t n = int64_t(number);
                row[whole_.state_blocks + p] = region(n % whole_.heads, whole_.state_blocks + n / whole_.heads);
            }
            valid_[size_t(h)] = int32_t(step_.in_use(0, h));
        }
    }
    int32_t region(int64_t h, int64_t p) const {
        return whole_.page_table[r_ * whole_.table_stride[0] + h * whole_.table_stride[1] + p * whole_.table_stride[2]];
    }

    // How many long-range slots each head may fill; empty where all that is ranked fits.
    std::vector<int64_t> divide() const {
        const Roles roles = step_.roles_of(0);
        std::vector<std::tuple<double, int64_t, int64_t>> ranked;  // effective score, position, head
        for (int64_t h = 0; h < whole_.heads; h++) {
            const auto add = [&](int64_t slot, int64_t t) {
                const double raw = step_.scores(step_.slot_region(0, h, slot))[slot % slots()];
                ranked.emplace_back(effective(raw, position_ - t, h), t, h);
            };
            for (int64_t slot = first_; slot < step_.in_use(0, h); slot++)
                add(slot, step_.slot_positions(step_.slot_region(0, h, slot))[slot % slots()]);
            for (int64_t u = roles.decided(position_); u < roles.decided(position_ + 1); u++) add(roles.ring_slot(u), u);
        }
        const int64_t room = whole_.heads * topk_;
        if (int64_t(ranked.size()) <= room) return {};
        std::nth_element(ranked.begin(), ranked.begin() + room, ranked.end(), std::greater<>());
        std::vector<int64_t> counts(size_t(whole_.heads)), shares;
        for (int64_t i = 0; i < room; i++) counts[size_t(std::get<2>(ranked[size_t(i)]))]++;
        int64_t before = 0, total = 0;
        for (const int64_t count : counts) {
            total += (FLOOR_WHOLE - FLOOR_PART) * count + FLOOR_PART * topk_;
            const int64_t end = (2 * total + FLOOR_WHOLE) / (2 * FLOOR_WHOLE);  // rounded, so that all together are H k
            shares.push_back(end - before);
            before = end;
        }
        return shares;
    }
    double effective(double raw, int64_t age, int64_t h) const {
        if (whole_.scorer.mean) raw /= double(age);
        if (whole_.scorer.ages) raw *= double(age);
        const double value = raw + double(age / whole_.decay_step) * whole_.log_gamma[h];
        return value == value ? value : -std::numeric_limits<double>::infinity();  // no number has no place in an order
    }

    // New shares; pages that a head needs no more go to those that need more.
    void hand_out(const std::vector<int64_t>& shares) {
        std::vector<bool> taken(size_t((pages(topk_) + 1) * whole_.heads));
        for (int64_t h = 0; h < whole_.heads; h++)
            for (int64_t p = 0; p < std::min(pages(int64_t(*word(h, 0))), pages(shares[size_t(h)])); p++)
                taken[size_t(*word(h, 2 + p))] = true;
        size_t next = 0;
        for (int64_t h = 0; h < whole_.heads; h++) {
            const int64_t had = pages(int64_t(*word(h, 0))), needs = pages(shares[size_t(h)]);
            *word(h, 0) = float(shares[size_t(h)]);
            for (int64_t p = std::min(had, needs); p < whole_.share_pages; p++) {
                while (p < needs && taken.at(next)) next++;
                *word(h, 2 + p) = p < needs ? float(next++) : -1;
            }
        }
    }

    const DecodeStep& whole_;
    const int64_t r_;
    const Kernels& kernels_;
    const int64_t first_, base_, topk_, width_;
    int64_t position_ = 0;
    DecodeStep step_{};
    std::vector<int32_t> table_, budgets_, valid_;
    std::vector<float> inserted_;
};

}  // namespace kvpop
