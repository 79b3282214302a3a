// Times at which tokens are evicted from k long-range slots, with arrivals one by one
// (kvpop_vllm/kernels/ops/serving.py, online_topk).

#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "kvpop/decode_step.h"

namespace kvpop {

// Simulation of one head. Among tokens of the same position modulo n the order never changes. Each such
// class is a heap with its lowest token on top, and an eviction compares the tops: O(n + log k) per
// arrival, O(log k) for n = 1.
class OnlineTopk {
  public:
    OnlineTopk(const float* score, const int64_t* position, int64_t tokens, double log_gamma, int64_t decay_step,
               int64_t window, bool ages, const uint64_t* key)
        : score_(score), position_(position), log_gamma_(log_gamma), step_(decay_step), window_(window), ages_(ages), key_(key) {
        first_ = tokens ? *std::min_element(position, position + tokens) : 0;
        const int64_t last = tokens ? *std::max_element(position, position + tokens) : 0;
        classes_.resize(size_t(std::min(step_, last - first_ + 1)));
    }

    // Writes evicted_at [tokens]. The first `held` tokens are in the slots from the start.
    void run(int64_t tokens, int64_t held, int64_t topk, int64_t* evicted_at) {
        std::fill(evicted_at, evicted_at + tokens, std::numeric_limits<int64_t>::max());
        if (ages_ || key_) return run_changing(tokens, held, topk, evicted_at);
        for (int64_t i = 0; i < tokens; i++) {
            add(i);
            if (i < held || i < topk) continue;
            const int64_t q = position_[i] + window_;
            evicted_at[take_lowest(q)] = q;
        }
    }

  private:
    // With ages or draws the order of any two tokens may change, so every arrival examines all tokens.
    void run_changing(int64_t tokens, int64_t held, int64_t topk, int64_t* evicted_at) {
        std::vector<int64_t> there;
        for (int64_t i = 0; i < tokens; i++) {
            there.push_back(i);
            if (i < held || i < topk) continue;
            const int64_t q = position_[i] + window_;
            const uint64_t base = key_ ? draw_base(*key_, q) : 0;
            size_t lowest = 0;
            double least = 0;
            for (size_t j = 0; j < there.size(); j++) {
                const int64_t t = there[j], age = q - position_[t];
                const double raw = key_ ? draw_of(base, position_[t]) : double(score_[t]) * double(age);
                const double value = raw + decayed(age);
                const bool older = position_[t] < position_[there[lowest]];
                if (j == 0 || value < least || (value == least && older)) lowest = j, least = value;
            }
            evicted_at[there[lowest]] = q;
            there[lowest] = there.back();
            there.pop_back();
        }
    }
    double decayed(int64_t age) const { return double(age / step_) * log_gamma_; }

    struct Entry {
        double priority;  // orders the tokens of a class
        int64_t position, token;
        // Of equal priorities the older token is the lower one; std heaps keep the greatest on top.
        bool operator<(const Entry& other) const {
            return priority != other.priority ? priority > other.priority : position > other.position;
        }
    };

    void add(int64_t token) {
        const int64_t since = position_[token] - first_;
        std::vector<Entry>& heap = classes_[size_t(since % step_)];
        heap.push_back({double(score_[token]) - double(since / step_) * log_gamma_, position_[token], token});
        std::push_heap(heap.begin(), heap.end());
    }

    double effective(const Entry& e, int64_t q) const {
        return double(score_[e.token]) + double((q - e.position) / step_) * log_gamma_;
    }

    int64_t take_lowest(int64_t q) {
        std::vector<Entry>* lowest = nullptr;
        double least = 0;
        for (std::vector<Entry>& heap : classes_) {
            if (heap.empty()) continue;
            const double value = effective(heap.front(), q);
            if (!lowest || value < least || (value == least && heap.front().position < lowest->front().position)) {
                lowest = &heap;
                least = value;
            }
        }
        std::pop_heap(lowest->begin(), lowest->end());
        const int64_t token = lowest->back().token;
        lowest->pop_back();
        return token;
    }

    const float* score_;
    const int64_t* position_;
    double log_gamma_;
    int64_t step_, window_, first_;
    bool ages_;
    const uint64_t* key_;  // key of draws, or null
    std::vector<std::vector<Entry>> classes_;
};

// score, position, evicted_at [heads, tokens], contiguous; keys [heads] of draws, or null.
void online_topk(const float* score, const int64_t* position, int64_t heads, int64_t tokens, int64_t held, int64_t topk,
                 int64_t window, const double* log_gamma, int64_t decay_step, bool ages, const int64_t* keys, int64_t* evicted_at);

}  // namespace kvpop
