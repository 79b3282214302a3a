// Module kvpop_vllm._C: checks arguments and passes raw pointers to the kernels.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <limits>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "kvpop/decode_step.h"
#include "kvpop/isa.h"
#include "kvpop/online_topk.h"
#include "kvpop/prefill_chunk.h"
#include "kvpop/running_topk.h"
#include "kvpop/verify_step.h"

namespace {

using at::Tensor;
using kvpop::DecodeStep;
using kvpop::Scorer;
using kvpop::ScorerKind;

// Error: a step does not start at the request's tokens_seen. Nothing has been written.
struct StepOrder : std::runtime_error {
    using std::runtime_error::runtime_error;
};

void check(const Tensor& t, const char* name, at::ScalarType dtype, at::IntArrayRef shape) {
    TORCH_CHECK_TYPE(t.device().is_cpu() && t.scalar_type() == dtype, name, " must be a CPU tensor of ", dtype,
                     ", got ", t.scalar_type(), " on ", t.device());
    TORCH_CHECK_VALUE(t.sizes() == shape, name, " must have shape ", shape, ", got ", t.sizes());
}

// RetentionRule of a layer, checked once. The tensors are shared, so in-place changes of weights take
// effect.
class Rule {
  public:
    Rule(int64_t sinks, int64_t window, int64_t decay_step, const Tensor& log_gamma, const std::string& kind,
         std::map<std::string, Tensor> weights, bool hedgehog, std::optional<double> softcap, bool delayed, bool mean,
         bool corrects, bool ages, std::optional<double> threshold)
        : roles{sinks, window}, decay_step(decay_step), corrects(corrects), log_gamma(log_gamma), weights_(std::move(weights)) {
        TORCH_CHECK_VALUE(sinks >= 0 && window >= 1 && decay_step >= 1, "need sinks >= 0, window >= 1, decay_step >= 1");
        TORCH_CHECK_VALUE(std::max(sinks, window) <= INT32_MAX, "sinks and window must be below 2^31");
        check(log_gamma, "log_gamma", at::kDouble, {log_gamma.numel()});
        TORCH_CHECK_VALUE(log_gamma.is_contiguous(), "log_gamma must be contiguous");
        TORCH_CHECK_VALUE(!softcap || *softcap > 0, "gate_softcap must be positive");
        heads = log_gamma.size(0);
        scorer_.hedgehog = hedgehog;
        scorer_.softcap = softcap ? float(*softcap) : 0;
        scorer_.delayed = delayed;
        scorer_.mean = mean;
        scorer_.ages = ages;
        scorer_.bounded = threshold.has_value();
        scorer_.threshold = threshold.value_or(0);
        TORCH_CHECK_VALUE(!threshold || window >= 2, "a threshold needs a window of at least 2");
        if (kind == "linear") read_linear();
        else if (kind == "mlp") read_mlp();
        else if (kind == "mlstm") read_mlstm();
        else if (kind == "key_norm") scorer_.kind = ScorerKind::KeyNorm;
        else if (kind == "attention_mass") scorer_.kind = ScorerKind::AttentionMass;
        else if (kind == "moment_residual") scorer_.kind = ScorerKind::MomentResidual;
        else if (kind == "gate_scores") scorer_.kind = ScorerKind::Given;
        else if (kind == "draw") scorer_.kind = ScorerKind::Draw;
        else TORCH_CHECK_VALUE(kind == "none", "unknown scorer '", kind, "'");
    }

    const Scorer& scorer() const { return scorer_; }

    kvpop::Roles roles;
    int64_t decay_step, heads = 0, size = 0;  // size: D of the scorer, 0 without one
    bool corrects;
    Tensor log_gamma;

  private:
    const Tensor& find(const char* name) const {
        const auto found = weights_.find(name);
        TORCH_CHECK_VALUE(found != weights_.end(), "the scorer has no tensor ", name);
        return found->second;
    }
    const float* pointer(const char* name, std::vector<int64_t> shape) const {
        const Tensor& t = find(name);
        shape.insert(shape.begin(), heads);
        check(t, name, at::kFloat, shape);
        TORCH_CHECK_VALUE(t.is_contiguous(), name, " must be contiguous");
        return t.data_ptr<float>();
    }
    const float* optional_pointer(const char* name, std::vector<int64_t> shape) const {
        return weights_.count(name) ? pointer(name, std::move(shape)) : nullptr;
    }
    int64_t axis(const char* name, int64_t dimensions, int64_t which) const {
        const Tensor& t = find(name);
        TORCH_CHECK_VALUE(t.dim() == dimensions, name, " must have ", dimensions, " axes, got ", t.dim());
        return t.size(which);
    }
    int64_t input_width(const char* name, int64_t dimensions) {
        const int64_t wide = axis(name, dimensions, 1);
        TORCH_CHECK_VALUE(wide > 0 && wide % 2 == 0, name, " must have 2 * D inputs on axis 1, got ", wide);
        size = wide / 2;
        return wide;
    }

    void read_linear() {
        const int64_t wide = input_width("weight", 2);
        scorer_.kind = ScorerKind::Linear;
        scorer_.weight = pointer("weight", {wide});
        scorer_.bias = pointer("bias", {});
    }
    void read_mlp() {
        const int64_t wide = input_width("fc1_weight", 3), hidden = axis("fc1_weight", 3, 2);
        scorer_.kind = ScorerKind::MLP;
        scorer_.hidden = hidden;
        scorer_.fc1_weight = pointer("fc1_weight", {wide, hidden});
        scorer_.fc1_bias = pointer("fc1_bias", {hidden});
        scorer_.fc2_weight = pointer("fc2_weight", {hidden});
        scorer_.fc2_bias = pointer("fc2_bias", {});
    }
    void read_mlstm() {
        const int64_t wide = input_width("q_proj", 3);
        const int64_t columns = axis("q_proj", 3, 2), values = axis("out_weight", 2, 1);
        TORCH_CHECK_VALUE(columns > 0 && values > 0, "the mLSTM needs at least one feature and one value column");
        TORCH_CHECK_VALUE(weights_.count("v_proj") || values == size, "without v_proj, out_weight must have D columns");
        scorer_.kind = ScorerKind::MLSTM;
        scorer_.columns = columns;
        scorer_.features = columns * (scorer_.hedgehog ? 2 : 1);
        scorer_.values = values;
        scorer_.q_proj = pointer("q_proj", {wide, columns});
        scorer_.k_proj = pointer("k_proj", {wide, columns});
        scorer_.v_proj = optional_pointer("v_proj", {wide, values});
        scorer_.igate_weight = pointer("igate_weight", {wide});
        scorer_.igate_bias = pointer("igate_bias", {});
        scorer_.fgate_weight = pointer("fgate_weight", {wide});
        scorer_.fgate_bias = pointer("fgate_bias", {});
        scorer_.out_weight = pointer("out_weight", {values});
        scorer_.out_bias = pointer("out_bias", {});
        scorer_.norm_weight = optional_pointer("norm_weight", {values});
        scorer_.skip_weight = optional_pointer("skip_weight", {wide});
    }

    std::map<std::string, Tensor> weights_;
    Scorer scorer_;
};

bool is_bf16(const Tensor& t, const char* name) {
    TORCH_CHECK_TYPE(t.device().is_cpu() && (t.scalar_type() == at::kFloat || t.scalar_type() == at::kBFloat16), name,
                     " must be a float32 or bfloat16 CPU tensor, got ", t.scalar_type(), " on ", t.device(),
                     ": use impl='reference'");
    return t.scalar_type() == at::kBFloat16;
}

void fill_tokens(DecodeStep& step, const Tensor& q, const Tensor& k, const Tensor& v) {
    TORCH_CHECK_VALUE(q.dim() == 3 && k.dim() == 3, "q must be [R, Hq, D] and k, v [R, H, D]");
    step.requests = k.size(0), step.heads = k.size(1), step.size = k.size(2);
    TORCH_CHECK_VALUE(step.heads > 0 && q.size(1) % step.heads == 0, "query heads must be a multiple of KV heads");
    step.group = q.size(1) / step.heads;
    TORCH_CHECK_VALUE(step.size > 0 && step.size % 16 == 0, "head size must be a multiple of 16, got ", step.size,
                      ": use impl='reference'");
    step.cache_is_bf16 = is_bf16(k, "k");
    step.q_is_bf16 = is_bf16(q, "q");
    check(q, "q", q.scalar_type(), {step.requests, q.size(1), step.size});
    check(v, "v", k.scalar_type(), k.sizes());
    for (const Tensor* t : {&q, &k, &v})
        TORCH_CHECK_VALUE(t->stride(2) == 1, "the last axis of q, k, v must be contiguous");
    step.q = q.data_ptr(), step.k = k.data_ptr(), step.v = v.data_ptr();
    for (int i = 0; i < 2; i++)
        step.q_stride[i] = q.stride(i), step.k_stride[i] = k.stride(i), step.v_stride[i] = v.stride(i);
}

void fill_pages(DecodeStep& step, const Tensor& raw, int64_t block_slots, int64_t state_blocks, const Rule& rule) {
    const int64_t region = block_slots * (2 * step.size * step.item_bytes() + 8);
    check(raw, "pages", at::kByte, {raw.size(0), step.heads, region});
    TORCH_CHECK_VALUE(block_slots > 0 && block_slots % 16 == 0, "slots per block must be a multiple of 16");
    TORCH_CHECK_VALUE(raw.stride(2) == 1 && raw.stride(0) % 4 == 0 && raw.stride(1) % 4 == 0 &&
                          reinterpret_cast<uintptr_t>(raw.data_ptr()) % 4 == 0,
                      "the bytes of one block and head must be contiguous and aligned");
    const int64_t moments = step.keeps_moments() ? step.size * (step.size + 2) : 0;
    TORCH_CHECK_VALUE(state_blocks * region >= 4 * (rule.scorer().state_floats() + moments),
                      "the layout's state blocks hold less than the rule's state");
    step.raw = raw.data_ptr<uint8_t>();
    step.block_stride_bytes = raw.stride(0), step.head_stride_bytes = raw.stride(1);
    step.region_bytes = region, step.block_slots = block_slots, step.state_blocks = state_blocks;
}

void fill_requests(DecodeStep& step, const Tensor& page_table, const Tensor& positions, const Tensor& budgets) {
    TORCH_CHECK_VALUE(page_table.dim() == 3, "page_table must be [R, H, P]");
    check(page_table, "page_table", at::kInt, {step.requests, step.heads, page_table.size(2)});
    check(positions, "positions", at::kLong, {step.requests});
    check(budgets, "budgets", at::kInt, {step.requests, step.heads});
    step.page_table = page_table.data_ptr<int32_t>();
    step.positions = positions.data_ptr<int64_t>();
    step.positions_stride = positions.stride(0);
    step.budgets = budgets.data_ptr<int32_t>();
    for (int i = 0; i < 3; i++) step.table_stride[i] = page_table.stride(i);
    for (int i = 0; i < 2; i++) step.budgets_stride[i] = budgets.stride(i);
}

// Sets and checks the window of each request.
void fill_windows(DecodeStep& step, const Tensor& windows) {
    check(windows, "windows", at::kInt, {step.requests});
    step.windows = windows.data_ptr<int32_t>(), step.windows_stride = windows.stride(0);
    for (int64_t r = 0; r < step.requests; r++)
        TORCH_CHECK_VALUE(step.window(r) >= (step.scorer.bounded ? 2 : 1), "request ", r, ": a window of ", step.window(r),
                          " tokens is too small");
}

// Sets the gate scores of the tokens and the keys of the requests' draws, if the rule uses them.
void fill_inputs(DecodeStep& step, const std::optional<Tensor>& given, at::IntArrayRef tokens_and_heads,
                 const std::optional<Tensor>& keys) {
    TORCH_CHECK_VALUE(keys.has_value() == (step.scorer.kind == ScorerKind::Draw), "keys go with draws");
    if (keys) {
        check(*keys, "keys", at::kLong, {step.requests, step.heads});
        step.keys = keys->data_ptr<int64_t>();
        for (int i = 0; i < 2; i++) step.keys_stride[i] = keys->stride(i);
    }
    TORCH_CHECK_VALUE(given.has_value() == (step.scorer.kind == ScorerKind::Given), "given scores go with that scorer");
    if (!given) return;
    check(*given, "gate_scores", at::kFloat, tokens_and_heads);
    step.given = given->data_ptr<float>();
    for (int i = 0; i < 2; i++) step.given_stride[i] = given->stride(i);
}

// Checks that the first `needed` entries of a head's page-table row are valid block numbers.
void check_entries(const DecodeStep& step, int64_t r, int64_t h, int64_t needed, int64_t num_blocks) {
    const int32_t* row = step.page_table + r * step.table_stride[0] + h * step.table_stride[1];
    for (int64_t p = 0; p < needed; p++) {
        const int64_t block = row[p * step.table_stride[2]];
        TORCH_CHECK_INDEX(block >= 0 && block < num_blocks, "request ", r, ": page-table entry ", block, " at ", p,
                          " is not one of ", num_blocks, " blocks");
    }
}

// Protected tokens: raw [num_blocks, H, N * C], table [R, F], tokens [R], and biased [R] if any have a bias.
using PrefixTensors = std::optional<std::tuple<Tensor, Tensor, Tensor, std::optional<Tensor>>>;

void fill_prefix(DecodeStep& step, const PrefixTensors& prefix) {
    if (!prefix) return;
    const auto& [raw, table, tokens, biased] = *prefix;
    check(raw, "prefix pages", at::kByte, {raw.size(0), step.heads, step.region_bytes});
    TORCH_CHECK_VALUE(raw.stride(2) == 1 && raw.stride(0) % 4 == 0 && raw.stride(1) % 4 == 0 &&
                          reinterpret_cast<uintptr_t>(raw.data_ptr()) % 4 == 0,
                      "the bytes of one block and head must be contiguous and aligned");
    TORCH_CHECK_VALUE(table.dim() == 2, "the prefix table must be [R, F]");
    check(table, "prefix table", at::kInt, {step.requests, table.size(1)});
    check(tokens, "prefix tokens", at::kLong, {step.requests});
    step.prefix_raw = raw.data_ptr<uint8_t>();
    step.prefix_block_stride_bytes = raw.stride(0), step.prefix_head_stride_bytes = raw.stride(1);
    step.prefix_table = table.data_ptr<int32_t>(), step.prefix_tokens = tokens.data_ptr<int64_t>();
    for (int i = 0; i < 2; i++) step.prefix_table_stride[i] = table.stride(i);
    step.prefix_tokens_stride = tokens.stride(0);
    if (biased) {
        check(*biased, "prefix biases", at::kLong, {step.requests});
        step.prefix_biased = biased->data_ptr<int64_t>(), step.prefix_biased_stride = biased->stride(0);
    }
    for (int64_t r = 0; r < step.requests; r++) {
        const int64_t protects = step.prefix(r), needed = (protects + step.block_slots - 1) / step.block_slots;
        TORCH_CHECK_VALUE(protects >= 0 && protects <= INT32_MAX, "request ", r, ": a prefix of ", protects, " tokens is out of range");
        TORCH_CHECK_VALUE(step.biased(r) >= 0 && step.biased(r) <= protects, "request ", r, ": ", step.biased(r), " tokens of a prefix of ",
                          protects, " cannot have a bias");
        // A step below the end of the prefix reads up to its own token only.
        const int64_t read = step.positions ? (step.prefix_seen(r) + step.block_slots - 1) / step.block_slots : needed;
        TORCH_CHECK_INDEX(read <= table.size(1), "request ", r, ": its prefix table has ", table.size(1), " entries, ", read, " are needed");
        for (int64_t i = 0; i < read; i++) {
            const int64_t block = step.prefix_table[r * step.prefix_table_stride[0] + i * step.prefix_table_stride[1]];
            TORCH_CHECK_INDEX(block >= 0 && block < raw.size(0), "request ", r, ": prefix block ", block, " is not one of ", raw.size(0));
        }
    }
}

// Checks that a step of `tokens_of(r)` tokens of each request reads nothing out of bounds, and sets mass_row.
template <class F>
void check_requests(DecodeStep& step, const F& tokens_of, int64_t entries, int64_t num_blocks) {
    for (int64_t r = 0; r < step.requests; r++) {
        const int64_t tokens = tokens_of(r), q = step.position(r), since = q + tokens - step.prefix(r), ring_end = step.roles_of(r).first_long();
        TORCH_CHECK_VALUE(q >= 0 && q + tokens <= INT32_MAX, "request ", r, ": position ", q, " is out of range");
        for (int64_t h = 0; since > 0 && h < step.heads; h++) {
            const int64_t budget = step.budget(r, h);
            TORCH_CHECK_VALUE(budget >= ring_end, "request ", r, ", head ", h, ": ", budget,
                              " slots are fewer than sinks and window = ", ring_end);
            const int64_t needed = step.state_blocks + (std::min(since, budget) + step.block_slots - 1) / step.block_slots;
            if (step.scorer.coupled())
                step.mass_row = std::max(step.mass_row, (needed - step.state_blocks) * step.block_slots);
            TORCH_CHECK_INDEX(needed <= entries, "request ", r, ": its page-table row has ", entries, " entries, ",
                              needed, " are needed");
            check_entries(step, r, h, needed, num_blocks);
        }
    }
}

// Checks that slots in use of a head that has seen as many tokens as its step's position can be.
void check_filled(const DecodeStep& step, int64_t r, int64_t h) {
    const int64_t q = step.position(r), first = step.roles_of(r).first_long(), used = step.in_use(r, h), since = q - step.prefix(r);
    TORCH_CHECK_VALUE(used >= std::min(since, first) && used <= std::min(since, step.budget(r, h)), "request ", r, ", head ", h,
                      ": its cache says that ", used - first, " long-range slots are filled, which cannot be at position ", q);
}

std::string out_of_order(int64_t r, int64_t position, int64_t seen) {
    return "request " + std::to_string(r) + ": step starts at position " + std::to_string(position) +
           ", but its cache has seen " + std::to_string(seen) + " tokens";
}

void check_order(const DecodeStep& step) {
    for (int64_t r = 0; r < step.requests; r++) {
        const int64_t q = step.positions[r * step.positions_stride];
        for (int64_t h = 0; q > step.prefix(r) && h < step.heads; h++) {
            const int64_t seen = *step.tokens_seen(r, h);
            if (seen != q) throw StepOrder(out_of_order(r, q, seen));
            check_filled(step, r, h);
        }
    }
}

// Checks that the drafts before each request's position are staged.
void check_staged(const kvpop::VerifyStep& verified) {
    const DecodeStep& step = verified.step;
    for (int64_t r = 0; r < step.requests; r++) {
        const int64_t q = step.position(r), prefix = step.prefix(r);
        for (int64_t h = 0; q > prefix && h < step.heads; h++) {
            const int64_t seen = *step.tokens_seen(r, h), staged = verified.staged_count(r, h, seen);
            if (seen > q || seen + staged < q)
                throw StepOrder(out_of_order(r, q, seen) + " and holds " + std::to_string(staged) + " staged drafts");
            DecodeStep before = step;
            before.positions = &seen - r * step.positions_stride;
            if (seen > prefix) check_filled(before, r, h);
        }
    }
}

void fill_rule(DecodeStep& step, const Rule& rule, double scale) {
    TORCH_CHECK_VALUE(rule.heads == step.heads && (rule.size == 0 || rule.size == step.size),
                      "the rule is for another number of heads or another head size");
    step.scale = float(scale);
    step.roles = rule.roles, step.decay_step = rule.decay_step;
    step.log_gamma = rule.log_gamma.data_ptr<double>();
    step.scorer = rule.scorer();
    step.corrects = rule.corrects;
}

void fill_sinks(DecodeStep& step, const std::optional<Tensor>& sink_logits) {
    if (!sink_logits) return;
    check(*sink_logits, "sink_logits", at::kFloat, {step.heads * step.group});
    TORCH_CHECK_VALUE(sink_logits->is_contiguous(), "sink_logits must be contiguous");
    step.sink_logits = sink_logits->data_ptr<float>();
}

// Sets the step's pointers to the output and its log-sum-exps, and returns both.
std::tuple<Tensor, Tensor> results_in(DecodeStep& step, Tensor out, Tensor lse) {
    step.out = out.data_ptr();
    step.lse = lse.data_ptr<float>();
    return {out, lse};
}

// Allocates the output, shaped like q, unless there is one, and its log-sum-exps, and sets the step's pointers to them.
std::tuple<Tensor, Tensor> allocate_results(DecodeStep& step, const Tensor& q, const std::optional<Tensor>& into = std::nullopt) {
    if (into) {
        check(*into, "out", q.scalar_type(), q.sizes());
        TORCH_CHECK_VALUE(into->is_contiguous(), "out must be contiguous");
    }
    Tensor out = into ? *into : at::empty(q.sizes(), q.options().requires_grad(false).memory_format(at::MemoryFormat::Contiguous));
    return results_in(step, out, at::empty({q.size(0), q.size(1)}, out.options().dtype(at::kFloat)));
}

std::tuple<Tensor, Tensor> decode_step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& raw,
                                       int64_t block_slots, int64_t state_blocks, bool has_drafts, const Tensor& page_table,
                                       const Tensor& positions, const Tensor& budgets, const Tensor& windows,
                                       const Rule& rule, double scale, const std::optional<Tensor>& given,
                                       const PrefixTensors& prefix, const std::optional<Tensor>& keys,
                                       const std::optional<Tensor>& sink_logits, const std::optional<Tensor>& out) {
    DecodeStep step{};
    fill_tokens(step, q, k, v);
    fill_rule(step, rule, scale);
    fill_pages(step, raw, block_slots, state_blocks, rule);
    fill_requests(step, page_table, positions, budgets);
    fill_windows(step, windows);
    fill_inputs(step, given, {step.requests, step.heads}, keys);
    fill_sinks(step, sink_logits);
    fill_prefix(step, prefix);
    check_requests(step, [](int64_t) { return 1; }, page_table.size(2), raw.size(0));
    check_order(step);
    step.has_drafts = has_drafts;
    const auto results = allocate_results(step, q, out);
    kvpop::decode_step(step);
    return results;
}

// places: state block and byte of each staged draft. query_bytes: bytes of its queries.
std::tuple<Tensor, Tensor> verify_step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& raw,
                                       int64_t block_slots, int64_t state_blocks,
                                       const std::vector<std::pair<int64_t, int64_t>>& places, int64_t query_bytes,
                                       const Tensor& page_table, const Tensor& positions, const Tensor& first_tokens,
                                       const Tensor& drafts, const Tensor& budgets, const Tensor& windows, const Rule& rule,
                                       double scale, const std::optional<Tensor>& given,
                                       const PrefixTensors& prefix, const std::optional<Tensor>& keys,
                                       const std::optional<Tensor>& sink_logits, const std::optional<Tensor>& out) {
    kvpop::VerifyStep verified{};
    DecodeStep& step = verified.step;
    fill_tokens(step, q, k, v);
    const int64_t tokens = step.requests, requests = step.requests = positions.size(0);
    fill_rule(step, rule, scale);
    fill_pages(step, raw, block_slots, state_blocks, rule);
    check(first_tokens, "first_tokens", at::kLong, {requests});
    check(drafts, "drafts", at::kInt, {requests});
    verified.first_tokens = first_tokens.data_ptr<int64_t>(), verified.first_tokens_stride = first_tokens.stride(0);
    verified.drafts = drafts.data_ptr<int32_t>(), verified.drafts_stride = drafts.stride(0);
    const int64_t most = verified.most_drafts = int64_t(places.size());
    verified.places = places.data(), verified.query_bytes = query_bytes;
    const int64_t queries = step.scorer.coupled() ? step.group * step.size * (step.q_is_bf16 ? 2 : 4) : 0;
    const int64_t moments = step.keeps_moments() ? step.size * (step.size + 2) : 0;
    const int64_t bytes = 2 * verified.row_bytes() + query_bytes + 8;
    int64_t used = 4 * (rule.scorer().state_floats() + moments);
    for (const auto& [block, byte] : places) {
        TORCH_CHECK_VALUE(block >= 0 && block < state_blocks && byte >= 0 && byte % 4 == 0 && byte + bytes <= step.region_bytes &&
                              block * step.region_bytes + byte >= used && query_bytes >= queries && query_bytes % 4 == 0,
                          "the layout has no room for ", most, " staged drafts");
        used = block * step.region_bytes + byte + bytes;
    }
    for (int64_t r = 0; r < requests; r++) {
        const int64_t first = verified.first_token(r), many = verified.drafts_of(r);
        TORCH_CHECK_VALUE(many >= -1 && many <= most && (many < 0 || (first >= 0 && first < tokens - many)), "request ", r, ": ", many,
                          " drafts after token ", first, " of ", tokens, " tokens do not fit: at most ", most, " can be staged");
    }
    fill_inputs(step, given, {tokens, step.heads}, keys);
    fill_sinks(step, sink_logits);
    const Tensor last = prefix ? positions.add(drafts.clamp_min(0)) : positions;
    fill_requests(step, page_table, last, budgets);
    fill_windows(step, windows);
    fill_prefix(step, prefix);
    fill_requests(step, page_table, positions, budgets);
    check_requests(step, [&](int64_t r) { return std::max(verified.drafts_of(r), int64_t(0)) + 1; }, page_table.size(2), raw.size(0));
    check_staged(verified);
    step.has_drafts = most > 0;
    const auto results = allocate_results(step, q, out);
    std::vector<bool> written(tokens);
    for (int64_t r = 0; r < requests; r++)
        for (int64_t j = 0; j <= verified.drafts_of(r); j++) written[verified.first_token(r) + j] = true;
    if (std::find(written.begin(), written.end(), false) != written.end()) {  // some belong to no request
        std::get<0>(results).zero_();
        std::get<1>(results).fill_(-std::numeric_limits<double>::infinity());
    }
    kvpop::verify_step(verified);
    return results;
}

std::tuple<Tensor, Tensor> prefill_chunk(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& raw,
                                         int64_t block_slots, int64_t state_blocks, const Tensor& page_table,
                                         int64_t start, const Tensor& budgets, const Rule& rule, double scale,
                                         const std::optional<Tensor>& given, const PrefixTensors& prefix,
                                         const std::optional<Tensor>& keys,
                                         const std::optional<Tensor>& sink_logits) {
    kvpop::PrefillChunk chunk;
    DecodeStep& step = chunk.step = {};
    fill_tokens(step, q, k, v);
    chunk.start = start, chunk.length = step.requests;
    step.requests = 1;
    fill_rule(step, rule, scale);
    fill_pages(step, raw, block_slots, state_blocks, rule);
    check(budgets, "budgets", at::kInt, {step.heads});
    fill_inputs(step, given, {chunk.length, step.heads}, keys);
    fill_sinks(step, sink_logits);
    const Tensor position = at::full({1}, start, at::kLong);
    TORCH_CHECK_VALUE(page_table.dim() == 2, "page_table must be [H, P]");
    fill_requests(step, page_table.unsqueeze(0), position, budgets.unsqueeze(0));
    fill_prefix(step, prefix);
    TORCH_CHECK_VALUE(start >= step.prefix(0), "a chunk begins at ", start, ", within its prefix of ", step.prefix(0), " tokens");
    check_requests(step, [&](int64_t) { return chunk.length; }, page_table.size(1), raw.size(0));
    check_order(step);
    const auto results = allocate_results(step, q);
    kvpop::prefill_chunk(chunk);
    return results;
}

std::tuple<Tensor, Tensor> prefix_attention(const Tensor& q, const Tensor& raw, int64_t block_slots, const Tensor& table,
                                            int64_t first, int64_t last, int64_t biased, bool causal, bool cache_is_bf16, double scale,
                                            const std::optional<Tensor>& sink_logits) {
    kvpop::PrefillChunk chunk{};
    DecodeStep& step = chunk.step;
    TORCH_CHECK_VALUE(q.dim() == 3 && raw.dim() == 3 && table.dim() == 1 && q.stride(2) == 1, "q must be [L, Hq, D], the last axis contiguous, and the table [F]");
    step.requests = 1, step.heads = raw.size(1), step.size = q.size(2), step.cache_is_bf16 = cache_is_bf16, step.q_is_bf16 = is_bf16(q, "q");
    TORCH_CHECK_VALUE(step.size > 0 && step.size % 16 == 0 && step.heads > 0 && q.size(1) % step.heads == 0 && block_slots > 0,
                      "head size must be a multiple of 16, and query heads one of KV heads");
    step.group = q.size(1) / step.heads, chunk.length = q.size(0);
    fill_sinks(step, sink_logits);
    step.q = q.data_ptr(), step.scale = float(scale), step.block_slots = block_slots;
    for (int i = 0; i < 2; i++) step.q_stride[i] = q.stride(i);
    step.region_bytes = block_slots * (2 * step.size * step.item_bytes() + 8);
    TORCH_CHECK_VALUE(first >= 0 && last > first && (!causal || last - first == chunk.length), "no keys, or not as many as queries");
    const Tensor tokens = at::full({1}, last, at::kLong), biases = at::full({1}, biased, at::kLong);
    fill_prefix(step, std::make_tuple(raw, table.unsqueeze(0), tokens, std::optional<Tensor>(biases)));
    const auto results = allocate_results(step, q);
    if (chunk.length) kvpop::prefix_attention(chunk, first, last, causal);
    return results;
}

void begin_tail(const Tensor& raw, int64_t block_slots, int64_t state_blocks, const Tensor& page_table, const Rule& rule,
                int64_t replay, bool is_bf16, const PrefixTensors& prefix) {
    DecodeStep step{};
    TORCH_CHECK_VALUE(page_table.dim() == 3 && rule.scorer().kind == ScorerKind::MLSTM && replay >= 0 && prefix,
                      "page_table must be [R, H, P], the scorer an mLSTM, the tokens to replay a number, and a prefix there");
    step.requests = page_table.size(0), step.heads = page_table.size(1), step.size = rule.size, step.cache_is_bf16 = is_bf16;
    fill_rule(step, rule, 1);
    fill_pages(step, raw, block_slots, state_blocks, rule);
    check(page_table, "page_table", at::kInt, page_table.sizes());
    step.page_table = page_table.data_ptr<int32_t>();
    for (int i = 0; i < 3; i++) step.table_stride[i] = page_table.stride(i);
    fill_prefix(step, prefix);
    TORCH_CHECK_INDEX(state_blocks <= page_table.size(2), "a page-table row has ", page_table.size(2), " entries, ", state_blocks,
                      " are needed");
    for (int64_t r = 0; r < step.requests; r++)
        for (int64_t h = 0; step.prefix(r) > 0 && h < step.heads; h++) check_entries(step, r, h, state_blocks, raw.size(0));
    kvpop::begin_tail(step, replay);
}

Tensor online_topk(const Tensor& score, const Tensor& position, int64_t held, int64_t topk, int64_t window,
                   const Tensor& log_gamma, int64_t decay_step, bool ages, const std::optional<Tensor>& keys) {
    TORCH_CHECK_VALUE(score.dim() == 2, "score must be [H, T]");
    check(score, "score", at::kFloat, score.sizes());
    check(position, "position", at::kLong, score.sizes());
    check(log_gamma, "log_gamma", at::kDouble, {score.size(0)});
    TORCH_CHECK_VALUE(topk >= 0 && held >= 0 && held <= std::min(topk, score.size(1)) && window >= 1 && decay_step >= 1,
                      "need 0 <= held <= min(topk, T), window >= 1 and decay_step >= 1");
    if (keys) check(*keys, "keys", at::kLong, {score.size(0)});
    const Tensor drawn = keys ? keys->contiguous() : Tensor();
    const Tensor s = score.contiguous(), p = position.contiguous(), g = log_gamma.contiguous();
    Tensor evicted_at = at::empty(score.sizes(), p.options());
    kvpop::online_topk(s.data_ptr<float>(), p.data_ptr<int64_t>(), s.size(0), s.size(1), held, topk,
                       window, g.data_ptr<double>(), decay_step, ages, keys ? drawn.data_ptr<int64_t>() : nullptr,
                       evicted_at.data_ptr<int64_t>());
    return evicted_at;
}

std::pair<Tensor, Tensor> running_topk(const Tensor& priority, int64_t sinks, int64_t window,
                                       const std::vector<int64_t>& topk) {
    TORCH_CHECK_VALUE(priority.dim() >= 1 && priority.size(-1) <= std::numeric_limits<int32_t>::max(),
                      "priority must be [.., S] with S below 2^31");
    check(priority, "priority", at::kDouble, priority.sizes());
    const Tensor p = priority.contiguous();
    const int64_t tokens = p.size(-1), rows = tokens ? p.numel() / tokens : 0, heads = int64_t(topk.size());
    TORCH_CHECK_VALUE(heads > 0 && rows % heads == 0, "topk must have a number for each head");
    Tensor rank = at::empty(p.sizes(), p.options().dtype(at::kInt)), cutoff = at::empty_like(rank);
    // Sinks and window are clamped to the number of tokens: the result is the same, and sums stay in range.
    kvpop::running_topk(p.data_ptr<double>(), rows, tokens, std::min(sinks, tokens), std::min(window, tokens),
                        topk.data(), heads, rank.data_ptr<int32_t>(), cutoff.data_ptr<int32_t>());
    return {rank, cutoff};
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
    using py::arg;
    module.doc() = "C++ kernels of kvpop_vllm for the CPU";
    const auto nogil = py::call_guard<py::gil_scoped_release>();
    py::register_exception<StepOrder>(module, "StepOrder", PyExc_RuntimeError);
    py::class_<Rule>(module, "Rule", "A RetentionRule, checked and unpacked.")
        .def(py::init<int64_t, int64_t, int64_t, const Tensor&, const std::string&, std::map<std::string, Tensor>, bool,
                      std::optional<double>, bool, bool, bool, bool, std::optional<double>>(),
             arg("sinks"), arg("window"), arg("decay_step"), arg("log_gamma"), arg("kind"), arg("weights"),
             arg("hedgehog") = true, arg("softcap") = py::none(), arg("delayed") = true,
             arg("mean") = false, arg("uses_moment_correction") = false, arg("ages") = false, arg("threshold") = py::none());
    module.def("decode_step", &decode_step, nogil, "See kvpop_vllm.kernels.ops.decode_step.");
    module.def("verify_step", &verify_step, nogil, "See kvpop_vllm.kernels.ops.verify_step.");
    module.def("begin_tail", &begin_tail, nogil, "See kvpop_vllm.kernels.ops.begin_tail.");
    module.def("prefill_chunk", &prefill_chunk, nogil, "See kvpop_vllm.kernels.ops.prefill_chunk.");
    module.def("prefix_attention", &prefix_attention, nogil, "Attention to tokens of a protected prefix (kvpop_vllm/kernels/cpp/prefill_chunk.py).");
    module.def("online_topk", &online_topk, nogil, "See kvpop_vllm.kernels.ops.online_topk.");
    module.def("running_topk", &running_topk, nogil, "See kvpop_vllm.kernels.ops.running_topk; float64.");
    module.def("isa_levels", [] {
        std::vector<std::string> names;
        for (const kvpop::Isa& level : kvpop::isa_levels()) names.emplace_back(level.name);
        return names;
    }, "Instruction sets this processor runs, slowest first.");
    module.def("current_isa", [] { return kvpop::current_isa().name; });
    module.def("set_isa", &kvpop::set_isa, arg("name"),
               "Forces an instruction set; ValueError if it is not one of isa_levels().");
}
