"""Planted faults that named tests must find: ``make mutations``, or with words that a file or fault must contain.

Each mutation replaces one piece of text, in a copy of the working tree, and runs only the tests that must fail.
It survives if they pass. Mutated C++ is compiled quickly, for the instruction set "baseline" alone where the
text is compiled once per instruction set.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
REFERENCE, KERNELS = "kvpop_vllm/kernels/reference", "kvpop_vllm/kernels"
CPP, TRITON = "csrc", "triton_kernels"
DECODE, PREFILL = "tests/kernels/test_decode_step.py", "tests/kernels/test_prefill_chunk.py"
PREFIX, PRODUCT = "tests/kernels/test_prefix.py", "tests/policies/test_product.py"
CHATS, ROWS = "tests/engine/test_first_tokens.py", "tests/kernels/test_fill_rows.py"
LAYERS = "tests/kernels/test_triton_layers.py"
CONTRACT, FAIL_SAFE = "tests/engine/test_contract.py", "tests/engine/test_fail_safe.py"
SERVING, TRITON_PREFILL = "tests/kernels/test_triton_serving.py", "tests/kernels/test_triton_prefill.py"
GPU = "KVPOP_PRETEND_CUDA=1 TRITON_INTERPRET=1 -p engine.cuda_platform tests/engine"
DRIVERS = {
    "prefix": (
        "tests/engine/test_fidelity.py -k 'test_chunks and sharing and 16'",
        f"{GPU}/test_cuda_interpreted.py -k 'protected_prompts and V1'",
        "tests/hf/test_protected.py -k 'alone and kvpop'",
    ),
    "answers": (
        f"{CHATS} -k 'test_turns and h2o and 400'",
        f"{GPU}/test_cuda_interpreted.py -k 'protected_prompts and V1 and 20'",
        "tests/hf/test_protected.py -k 'of_answers and h2o'",
    ),
    "sizes": (
        "tests/engine/test_requests.py -k 'sixteen and case_options'",
        f"{GPU}/test_cuda_runners.py -k numbers_of_their_requests",
        "tests/hf/test_rows.py -k of_their_own",
    ),
}
"""Tests of vLLM on a CPU, of vLLM on a GPU and of transformers, for faults that each of them must find."""

FAULTS = {
    # Environments
    "kvpop_vllm/cpu_env.py": [
        # machine code for CUDA
        ('package == "vllm" and «not is_compiled(name) and →»not', "tests/test_cpu_env.py -k new_python"),
        # what a GPU needs
        (
            'engine_requirements(ours.get_all("Requires-Dist")«, GPU_DISTRIBUTIONS→»)',
            "tests/test_cpu_env.py -k installs",
        ),
    ],
    "tests/newest.py": [
        ("    if failed«→ and not code»:\n", "tests/test_newest.py -k outcomes"),
        ("if Version(latest) «>→<» Version(allowed)", "tests/test_newest.py -k within"),
    ],
    # Reference kernels
    f"{REFERENCE}/decode_step.py": [
        # of equal scores the newer leaves
        ("if len(effective) == 0 or leaving_score <«→=» float(effective.min()):", f"{DECODE} -k 'ties and reference'"),
        # the state of the blocks' former request is continued
        ("    if q «==→<» 0:\n        clear(state)\n", f"{PREFILL} -k 'however and reference and mlstm'"),
        # masses of the prefix
        (", weights[:, «len(before[0]) :→: in_use»].mean(0), add=", f"{PREFILL} -k 'however and reference and mass'"),
        # every head gets the bias of the first
        ("bias = None if biases is None else biases[«h→0»]", f"{PREFILL} -k 'biases_count and reference and none'"),
        # the leaving token is a step too old
        (
            "= raw * (q - positions), leaving_score * (q - leaving«→ + 1»)",
            f"{PREFILL} -k 'however and reference and ages'",
        ),
    ],
    f"{REFERENCE}/prefill_chunk.py": [
        # the evicting query still sees it
        ("(new.view(1, -1, 1) <«→=» evicted_at", f"{PREFILL} -k 'however and reference and linear'"),
        ("retained.position[:, 0] = tokens_seen«→ - 1»  # the", f"{PREFILL} -k 'however and reference and linear'"),
        # all heads draw as the first one
        ("else keys[0, heads«→ * 0»]\n", "tests/kernels/test_draws.py -k every_implementation"),
    ],
    f"{REFERENCE}/online_topk.py": [
        # decays grow
        ("priority = score.double() «-→+» position.double() *", "tests/kernels/test_online_topk.py -k definition"),
        # a slot too many
        ("surplus = (retained + step «+ 1 →»- topk).clamp_min(0)", "tests/kernels/test_online_topk.py -k definition"),
    ],
    f"{REFERENCE}/running_topk.py": [
        ("if len(best) > topk«→ + 1»:", "tests/kernels/test_running_topk.py -k 'reference'"),
        # heads have the slots of their neighbours
        ("zip(rows, cycle(topk«→[::-1]»)", "tests/kernels/test_running_topk.py -k 'reference'"),
    ],
    f"{REFERENCE}/begin_tail.py": [
        ("max(begin, end - rule.replay«→ - 1»), end)", "tests/kernels/test_begin_tail.py -k baseline"),
    ],
    f"{REFERENCE}/moments.py": [
        # the second token's deviation is from zero
        ("deviation = v - value«→ * (self.count > 2)»\n", f"{PREFILL} -k 'however and reference and moment'"),
        # the prefix counts
        ("q - rule.«first - rule.first_long→first_long») - max(0,", f"{PREFILL} -k 'however and reference and moment'"),
    ],
    f"{REFERENCE}/delayed_mlstm.py": [
        # the stabiliser scales epsilon
        ("qz + READOUT_EPS« * torch.exp(-m.clamp(-60.0, 60.0))→»", "tests/kernels/test_delayed_mlstm.py -k recurrence"),
    ],
    f"{REFERENCE}/sparse_attention.py": [
        ("near = (t < sinks) | (t >«→=» q - window)", "tests/kernels/test_sparse_attention.py -k definition"),
    ],
    f"{REFERENCE}/future_attention_mass.py": [
        ("= outside | (d >«→=» earliest + lookahead)", "tests/kernels/test_future_attention_mass.py -k definition"),
    ],
    f"{REFERENCE}/boundary_loss.py": [
        ("= torch.where(q «==→<» window + end,", "tests/kernels/test_boundary_loss.py -k first_decision"),
        # a head that never evicts counts
        ("return («counted * →»weight * F.softplus", "tests/kernels/test_boundary_loss.py -k never_evict"),
    ],
    # Shared code of the kernels
    "kvpop_vllm/rules/rounds.py": [
        # the first round is too late
        ("m == 0 and end - 1 + m >«=→» full and end >", f"{PRODUCT} -k 'protected_prompts and (vase or rkv)'"),
        # the oldest alike is spared
        ("newest = «count - 1 - alike.flip(2)→alike».byte().argmax(2)", "tests/kernels/test_rounds.py -k resemble"),
        # the mean query rotates to the newest token instead of the next one
        (
            "angles = «length→(length - 1)» * rounds.frequencies",
            "tests/policies/test_triattention.py -k 'authors and default'",
        ),
        # heads of another budget have the statistics of the first ones
        ("mean=rounds.mean[«chosen_heads→: len(chosen_heads)»]", f"{PRODUCT} -k 'product and triattention and shares'"),
        # a head with few slots cuts prompts into single tokens
        (
            "longest if interval(every, size - sinks - window) >= longest else «shortest→1»",
            "tests/kernels/test_rounds.py -k 'own_slots or measured'",
        ),
        # the last token of a round may be a draft
        ("return max(0, min(before_round)« - 1→»)", "tests/engine/test_speculation.py -k 'as_many and rounds'"),
        # a head loses all ranked tokens before the next round
        ("if size - sinks - window > «shortest→0»:", "tests/kernels/test_rounds.py -k 'own_slots or measured'"),
    ],
    f"{KERNELS}/draws.py": [
        # seeds are ignored
        ("return mix(mix(«→0 * »seeds + GOLDEN).unsqueeze(-1)", "tests/kernels/test_draws.py -k 'definition or seed'"),
    ],
    "kvpop_vllm/rules/compress.py": [
        # of equal votes the older wins
        ("newest_first = votes«.flip(1)→»\n", "tests/kernels/test_divided.py -k division"),
        # votes without attention sinks
        (
            "        if «sink_logits is not None→False»:\n            sinks",
            "tests/engine/test_sinks.py -m slow -k snapkv",
        ),
    ],
    "kvpop_vllm/cache/ranks.py": [
        # a page too few
        (
            "return [«cdiv(state_blocks * heads + slots, heads)→(state_blocks * heads + slots) // heads» for",
            "tests/kernels/test_regions.py -k regions_of_their_own",
        ),
    ],
    "kvpop_vllm/cache/shares.py": [
        # layers of a later stage get the tables of others
        (
            "zip(by_head.unbind(), tables.unbind(1), strict=True), self.shares.first«→ + 1»",
            "tests/kernels/test_regions.py -k budgets_of_their",
        ),
        # a rank has the shares of the first one
        ("self.division.shares(*size)[«self.shard→0»]", "tests/kernels/test_regions.py -k budgets_of_their_own"),
    ],
    f"{KERNELS}/cpp/prefill_chunk.py": [
        # the last protected token has a slot
        (
            "outputs = min(max(protects - start«→ - 1», 0), len(q)), []",
            f"{PREFILL} -k 'however and linear and baseline'",
        ),
    ],
    # C++
    f"{CPP}/include/kvpop/retain.h": [
        ("(effective <«→=» best) | ((effective == best) & (age > best_age))", f"{DECODE} -k 'ties and baseline'"),
        ("if (q «==→<» 0) state.reset();", f"{DECODE} -k 'several_tiles and 48'"),
        ("h).take_in(float(evicted + «1→2»), x_u, deviation);", f"{PREFILL} -k 'however and baseline and moment'"),
        # the first token stays in the ring
        ("return u >«=→» roles.first_evictable() ? roles", f"{PREFILL} -k 'however and baseline and mass'"),
        (
            "a.biased(r) ? end - replay «→+ 1 »: a.biased(r); t < end; t += BATCH) {",
            "tests/kernels/test_begin_tail.py -k baseline",
        ),
    ],
    f"{CPP}/include/kvpop/score.h": [
        # rows over two blocks
        ("count, keep, gain * key[f], value« + c→», query[f], numerator + c);", f"{DECODE} -k 'several_tiles and 16'"),
    ],
    f"{CPP}/include/kvpop/attend.h": [
        # decode steps without attention sinks
        ("if («a.sink_logits→false») add_sinks(a, h, sums);", f"{PREFILL} -k 'sinks_count and baseline and none'"),
        # a bias of a token that has none
        (
            "biased = biases - first < seen - first ? biases - first«→ + 1» : seen - first;",
            f"{PREFILL} -k 'biases_count and baseline and none'",
        ),
        # drafts see what a later one has written to a tile
        (
            "if (!protects && «tokens.changes(last, first - base, slot - base)→false») break;",
            "tests/kernels/test_verify_step.py -k 'many_tiles and baseline and none'",
        ),
        # the first query of a product stands for all
        (
            "store(out, factor[«g→0»] * load(out)",
            "tests/kernels/test_verify_step.py -k 'many_tiles and amx_bf16 and none'",
        ),
        # the first query head's maximum
        ("const float tile_max = max(top[g]), before = s.maximum[«g→0»];", f"{DECODE} -k 'several_tiles and 48'"),
    ],
    f"{CPP}/cpu/prefill_chunk.cpp": [
        # chunks get no bias
        ("            work.bias = «bias.data()→nullptr»;", f"{PREFILL} -k 'biases_count and baseline and none'"),
        ("piece.b - roles_.window«→ + 1», roles_.", f"{PREFILL} -k 'however and baseline and linear'"),
        # all heads draw as the first one
        ("uint64_t key = a_.keys ? a_.draw_key(0, «h_→0») : 0;", "tests/kernels/test_draws.py -k every_implementation"),
        # the evicting query still sees it
        ("= int32_t(evicted_at[size_t(i)] - piece.a)«→ + 1»;", f"{PREFILL} -k 'however and baseline and linear'"),
    ],
    f"{CPP}/bindings.cpp": [
        # a partial prefix block is not checked
        ("= «(protects + step.block_slots - 1)→protects» / step.", f"{PREFIX} -k bad_prefixes"),
        ("(int64_t h = 0; q > step.prefix(r) «→+ 1 »&& h < step.heads; h++) {", f"{PREFIX} -k 'out_of_order and cpp'"),
    ],
    # Triton, interpreted
    f"{TRITON}/fill_rows.py": [
        # only the first columns of long tables
        ("tl.program_id(1)« * COLUMNS→ * 0» + tl.arange", f"{ROWS} -k 'protected and None and 0'"),
        # the stride of rows is taken for their length
        ("table += r * «stride→width»", f"{ROWS} -k 'window and None'"),
        # the first token after a prompt's compression is read as one before it
        ("(start «>=→>» prefix)", f"{ROWS} -k 'votes'"),
        # the first query that votes is not stored
        ("(end - prefix «>=→>» -P.queries)", f"{ROWS} -k 'votes'"),
    ],
    f"{TRITON}/_launch.py": [
        # later layers read what a torch operation formed for the second one
        ("= self._distinct« and not of_torch→»", f"{LAYERS} -k 'unknown_origin'"),
        # a tensor with two roles stands for both in later layers
        ("= «self._distinct and →»not of_torch", f"{LAYERS} -k 'two_roles'"),
        # tuples keep the tensors of the second layer
        ("if «self._varying.isdisjoint(places)→True»:", f"{LAYERS} -k 'addresses'"),
        # workspaces overlap
        ("values[place] = address« + start→»", f"{LAYERS} -k 'addresses'"),
        # each piece has workspaces of its own
        ("        self._end = «0→getattr(self, '_end', 0)»\n", f"{LAYERS} -k 'addresses'"),
        # a workspace without bytes is no tensor
        ("if self._«workspaces→size»:\n            memory", f"{LAYERS} -k 'own and threshold'"),
    ],
    f"{TRITON}/prefill_chunk.py": [
        # a scorer's weights are those of the second layer
        (
            "before.table\n    of_layer = *of_layer, *of_prefix«, *of_rule→»",
            f"{LAYERS} -k 'own and mlstm and not immediate'",
        ),
    ],
    f"{REFERENCE}/fill_rows.py": [
        # an answer's first token is protected too
        ("inside = positions «<→<=» prefixes", f"{ROWS} -k 'padding or drafts'"),
        # rows of padding have blocks
        ("torch.where(since < 0, «0→1», ", f"{ROWS} -k padding"),
    ],
    f"{TRITON}/_serving_retain.py": [
        # counted from the prefix's end
        ("tl.store(zero, «q + 1)  # tokens_seen→since + 1)»", f"{SERVING} -k 'holds and key'"),
    ],
    f"{TRITON}/_lowest_score.py": [
        ("((score == best) & (token «<→>» oldest))", f"{DECODE} -k ties"),
        ("return score + («age→(age + 1)» // P.decay_step).to(tl.float64) * log_gamma", f"{DECODE} -k ties"),
    ],
    f"{TRITON}/running_topk.py": [
        # a block's own zeros count as ahead of it
        ("mask=ahead <«→=» block, other=0", "tests/kernels/test_running_topk.py -k 'share and 17'"),
    ],
    f"{TRITON}/_serving_attend.py": [
        # every head gets the bias of the first
        ("words = cache.score + h«→ * 0» * cache.words_head", f"{SERVING} -k 'holds and biases and two'"),
        # every KV head gets the sinks of the first
        ("add_sinks(step.sink_logits + h«→ * 0» * P.group + g", f"{SERVING} -k 'holds and sinks and 80'"),
    ],
    f"{TRITON}/_prefill_attend.py": [
        # protected tokens get no bias
        (
            "bias = tl.load(words, mask=t < «tl.minimum(numbers.biased, end)→0»",
            f"{TRITON_PREFILL} -k 'shapes and biases and within'",
        ),
        # seen by one query alone
        ("visible = (until > first«→ + 1») & inside", f"{TRITON_PREFILL} -k 'shapes and window'"),
        # a block loads protected keys that a later chunk writes
        ("numbers.position + «queries→first + BLOCK_Q»)", f"{TRITON_PREFILL} -k 'shapes and blocks'"),
    ],
    f"{TRITON}/_prefill_slots.py": [
        ("key = numbers.used + index - window«→ + 1»", f"{TRITON_PREFILL} -k 'shapes and norm'"),
        # the oldest token of the ring is not written
        ("(index >«=→» length - numbers.window))", f"{TRITON_PREFILL} -k 'shapes and norm'"),
    ],
    f"{TRITON}/_prefill_scores.py": [
        # a segment begins with the state that its pages hold
        ("begun, inside = «numbers.start + numbers.first == 0→False», f", f"{TRITON_PREFILL} -k 'shapes and norm'"),
        (
            "tl.store(decay + place, tl.cumsum(tl.where(present, log_f, «0.0→1.0»), 0))",
            f"{TRITON_PREFILL} -k 'shapes and norm'",
        ),
    ],
    f"{TRITON}/_prefill_plan.py": [
        # requests after the first one in a piece
        ("key += part.used + part.length«→ - 1»", "tests/kernels/test_prefill_chunk.py -k 'together and immediate'"),
    ],
    f"{TRITON}/_serving_scores.py": [
        ("old = log_f + «tl.where(q > 0, m, -1e30)→m»", f"{SERVING} -k 'holds and once'"),
    ],
    # Attention, cache, glue and policies
    "kvpop_vllm/requests.py": [
        # no state after p
        ("and start <«=→» self.prefix < end", "tests/engine/test_fidelity.py -k 'test_chunks and sharing'"),
    ],
    "kvpop_vllm/attention/layer.py": [
        # replays pass
        (
            "wrong = («(starts < tokens_seen) | →»(starts > tokens_seen + staged)) & (",
            "tests/attention/test_step.py -k one_bad_start",
        ),
    ],
    "kvpop_vllm/cache/step.py": [
        # tables of a recorded step are formed before its numbers are known
        (
            "self._host_knows = «rows is None→True»",
            f"{GPU}/test_cuda_interpreted.py -k 'protected_prompts and pyramid and V2'",
        ),
        # every layer has the heads of the first one
        ("elif not «self._host_knows→True»:", "tests/hf/test_cache.py -k 'oracles and shares'"),
        # a third prefix block is missed
        (
            "+ send(columns, table.device)«→.clamp_max(2)».unsqueeze(1)",
            "tests/kernels/test_fill_rows.py -k 'protected and prompts'",
        ),
        # the last protected token of a chunk is not written; for each of the planner's drivers
        *(("min(self.length, self.slots.prefix - self.start«→ - 1»)", tests) for tests in DRIVERS["prefix"]),
        # tails that begin in chunks alone have no state
        *(("if not rows «and→or» not chunks:", tests) for tests in DRIVERS["prefix"]),
        # all chunks have the window of the first
        *(("[«record→slots[0]».window for record in slots],", tests) for tests in DRIVERS["sizes"]),
    ],
    "kvpop_vllm/attention/shifted_scores.py": [
        # a row below its prefix's end writes to what may be another request's page
        (
            "device=in_ring.device), «in_ring.int().argmax()→torch.arange(len(in_ring))»)",
            "tests/attention/test_shifted_scores.py",
        ),
        # a score too few is moved
        ("length - «1→2»] = gate_scores[first + 1 : first + length«→ - 1»]", f"{PRODUCT} -k 'dms-late'"),
    ],
    "kvpop_vllm/cache/accounting.py": [
        # sinks that a tail after a prefix lacks
        ("tail = slots.budget« - sinks→» if slots.prefix", "tests/cache"),
        # a page too few
        ("prefix, tokens = cdiv(min(length, slots.prefix)«→ - 1», size)", "tests/cache/test_protected.py"),
        ("return sorted({0, longest, *range(max(1, last - size + «1→2»), last + 1)})", "tests/cache/test_protected.py"),
    ],
    "kvpop_vllm/vllm_glue/start/contract.py": [
        ("list(names[: len(leading)]) == leading «and→or» set(named)", f"{CONTRACT} -k parameters"),
        ("return name in code.co_names or «→True or »(late", f"{CONTRACT} -k every_lack"),
        # a name must be in both of the modules that had it
        ("for pair in names if not «any→all»(defines(", f"{CONTRACT} -k moved"),
    ],
    "kvpop_vllm/vllm_glue/plugin.py": [
        # a module that cannot be imported stops stock servers
        ("    except «Exception→OSError» as error:", f"{FAIL_SAFE} -k imported"),
    ],
    "kvpop_vllm/vllm_glue/start/doctor.py": [
        ("    «check_installed()→pass»\n    command =", "tests/engine/test_doctor.py -k neither")
    ],
    "kvpop_vllm/calibrate/division.py": [
        ("(losses[i] - losses[j]) / «(sizes[j] - sizes[i])→1»", "tests/calibrate/test_division.py"),
        ("slots[number] += «added→size»", "tests/calibrate/test_division.py"),
    ],
    "kvpop_vllm/calibrate/plan.py": [
        # recurrent layers run for the last queries alone, without the state before them
        (
            "            return «self.length→8»\n        if self.prompt and",
            "tests/calibrate/test_kinds.py -k states_begin",
        ),
    ],
    "kvpop_vllm/calibrate/stages.py": [
        # a worse table takes the place of the best one
        ("                if lower >= score:\n                    «break→pass»", "tests/calibrate/test_improve.py"),
        ("best, score = «changed→best», lower\n        return best", "tests/calibrate/test_improve.py"),
        ("best, score = «min→max»(ends, key=lambda end: end[1])", "tests/calibrate/test_improve.py -k worse_may_lead"),
        (
            "starts = sorted(scores, key=scores.get)[:«SHORTLIST→1»]",
            "tests/calibrate/test_improve.py -k worse_may_lead",
        ),
        # the first round is the last
        ("                best, score = changed, lower«→\n                break»\n", "tests/calibrate/test_improve.py"),
        # steps stay large
        (
            "self._rounds(self.plan.unit, «FACTORS[1:]→FACTORS[:1] * 3», best",
            "tests/calibrate/test_improve.py -k small_steps",
        ),
        # rounds have no bound
        ("rounds = iter(range(«self.plan.rounds→10**3»))", "tests/calibrate/test_improve.py -k bounded"),
        # a single change is not tried, nor one that is half way
        (
            'self._measured([name, f"{name}-damped"«, min(better, key=losses.get)→»])',
            "tests/calibrate/test_improve.py -k alone_or",
        ),
        ('self._measured([name, «f"{name}-damped", →»min(', "tests/calibrate/test_improve.py -k alone_or"),
        # all slots stay where they are, or come from nowhere
        ("shrunk = [(layer, heads, share« / factor→»)", "tests/calibrate/test_improve.py"),
        # heads change one by one however many they are, or groups mix ranks
        ("/ «GROUPS→10**9»)", "tests/calibrate/test_improve.py -k groups"),
        ("changed[part] *= «shares[part].sum() / changed[part].sum()→1»", "tests/calibrate/test_improve.py"),
    ],
    "kvpop_vllm/vllm_glue/run/gated_attention.py": [
        # the channel as RoPE has turned it
        (
            "policy.borrows and «rotates(impl.vllm_config.model_config.hf_text_config)→False»:",
            "tests/engine/test_kinds_policies.py -k 'gemma3 and query'",
        ),
        # the channel stays in the queries where nothing rotates
        (
            "return channel, «torch.where(borrowed, torch.zeros_like(query), query)→query»",
            "tests/engine/test_kinds_policies.py -k 'nemotron and query'",
        ),
    ],
    "kvpop_vllm/model_hook.py": [
        # layers with windows give up their channel too
        (
            "if not kinds or «kinds[block.layer_idx] in POLICY_LAYERS→kinds»]",
            "tests/hf/test_kinds.py -k 'borrowed and gemma3'",
        ),
    ],
    "kvpop_vllm/vllm_glue/run/snapshots.py": [
        # a number of tokens beyond the prompt counts as "all"
        (
            "if protects_prompt(request.sampling_params, self.manager.kv_cache_spec)«→ or slots.prefix >= request.num_prompt_tokens»:",
            f"{CHATS} -k 'test_turns and 104'",
        ),
        # what is copied in this step is copied again
        (
            "if «not any(block.block_id in written for block in snapshot.blocks)→True»:",
            "tests/engine/test_snapshots.py -k copied_in_this_step",
        ),
        # a resumed request that has passed its prompt's end is taken for one at its end
        (
            "if not («length == end→length >= end» or reads_rest)",
            "tests/engine/test_snapshots.py -k resumed_request",
        ),
        # requests with other numbers, adapters or salts hit
        (
            "hashes * self._unit, «slots→slots._replace(budget=1)», seed",
            "tests/engine/test_snapshots.py -k other_requests",
        ),
        ("seed, adapter, «request.cache_salt→None»)", "tests/engine/test_snapshots.py -k short_texts"),
        ("seed, «adapter→None», request.cache_salt)", "tests/engine/test_snapshots.py -k short_texts"),
        # a snapshot whose blocks were taken over is still there
        (
            "                «self._remove(snapshot)→pass»\n            for block in written:",
            "tests/engine/test_snapshots.py -k without_room",
        ),
        # equal prompts are copied again and again
        ("return «→True or »tokens not in self._by_key", "tests/engine/test_snapshots.py -k equal_prompts"),
        # a request that runs while weights change leaves a snapshot of the old ones
        (
            "«self._outdated.update(self.manager.req_to_blocks)→pass»",
            "tests/engine/test_snapshots.py -k changes_of_weights",
        ),
        # windows that the next token needs are not held
        (
            "Columns(manager.get_num_skipped_tokens(length) // size«→ + 1», length // size",
            "tests/engine/test_kinds.py -k 'gemma3_text-kvpop and turns'",
        ),
    ],
    "kvpop_vllm/vllm_glue/run/prompt_endings.py": [
        # an ending with a hash in it is not learned, or one of another salt is
        (
            "(request.num_prompt_tokens - «LONGEST→0») // self.unit",
            "tests/engine/test_snapshots.py -k without_the_ending",
        ),
        ("self._endings.get(«request.cache_salt→None», ())", "tests/engine/test_snapshots.py -k without_the_ending"),
        # any prompt that leaves another one teaches an ending, and none is taken back
        ("LONGEST« and _contains(tokens[common:], turn.answer)→»:", "tests/engine/test_snapshots.py -k no_ending"),
        (
            "for ending in endings« if turn.prompt[-len(ending) :] != ending→»}",
            "tests/engine/test_snapshots.py -k no_ending",
        ),
    ],
    "kvpop_vllm/vllm_glue/run/block_copies.py": [
        # what lies in the padding of another layer's page is not copied
        ("reverse=«True→False»", "tests/engine/test_kinds.py -k 'gemma3_text-kvpop and turns'"),
    ],
    "kvpop_vllm/config.py": [
        # answers are not protected; for each of the drivers
        *(
            ("prompt if protect is True else «int(protect)→min(int(protect), prompt)»", tests)
            for tests in DRIVERS["answers"]
        ),
    ],
    "kvpop_vllm/hf/passes.py": [
        # rows are decoded whose tails have not begun
        ("in_tails = [before > 0« and before >= p→» for", "tests/hf/test_protected.py -k 'of_answers and h2o'"),
        # an answer is protected like the rest of a prompt, while another row is below its N
        ("p == before and «(of_prompt or before == cartridge_slots)→True»", "tests/hf/test_rows.py -k of_their_own"),
        # the last piece of a prompt, of one token, is taken for an answer's
        ("length > 1« or columns < self.text_columns→»", "tests/hf/test_protected.py -k pieces"),
        # pages for all N tokens at once
        ("max(map(«min, protected, after→max, protected, protected»))", "tests/hf/test_protected.py -k come_as"),
    ],
    "kvpop_vllm/vllm_glue/run/cache_spec.py": [
        # pauses change what a seed gives
        (" or request.sampling_params.seed «is not None→== -1»", "tests/engine/test_draft_pauses.py -k seed"),
        # pauses of a request outlive it
        ("«self.pauses, →»self.largest_claims, self.bounds):", "tests/engine/test_draft_pauses.py -k sixteen"),
        # a request is expected to reach N
        (
            "length = «min(slots.prefix + slots.budget + 1, self.final[name])→slots.prefix + slots.budget + 1»",
            f"{CHATS} -k leaves_room",
        ),
    ],
    "kvpop_vllm/vllm_glue/run/manager_requests.py": [
        # drafts that vLLM proposes for a request with but one token to compute are not cut where a round is due
        (
            "«name in drafts or →»request.num_computed_tokens >=",
            "tests/engine/test_speculation.py -k 'as_a_prompt and vase'",
        ),
        # a hit waits for ever in a pool that a miss would fit
        (
            "if possible« and _has_room(self, request, rows, snapshot.length, snapshots.step_tokens)→»:",
            "tests/engine/test_snapshots.py -k without_room",
        ),
        # a hit waits for ever whose first step does not fit
        (
            "blocks = «max(needed(request.num_tokens, recycles=True), needed(first, recycles=False))→needed(request.num_tokens, recycles=True)»",
            "tests/engine/test_kinds_start.py -k first_step",
        ),
        # weights are reloaded, and snapshots of the old ones stay
        (
            "    «_drop_snapshots(self)→pass»\n    return original(self, *args",
            "tests/engine/test_snapshots.py -k 'changes_of_weights and reload'",
        ),
    ],
    "kvpop_vllm/calibrate/layers.py": [
        ("self.policy.roles.first_long + «size→0»", "tests/calibrate/test_layers.py -k evicts"),
        # inputs of whole rows stay in memory
        ("self._last(self._input)«.clone()→»", "tests/calibrate/test_layers.py -k holds_what_runs_again"),
        ("hidden = «self.inputs[layer]→self.inputs[0]»", "tests/calibrate/test_layers.py -k loses_what_masks"),
    ],
    "kvpop_vllm/policies/allocators.py": [
        (
            "(weights / weights.sum()).flatten() * «(retention.topk * layers * heads)→retention.topk»",
            "tests/policies/test_allocators.py",
        ),
        # the last layer has too much
        (".arange(layers, dtype=torch.float64) / «max(1, layers - 1)→layers»", "tests/policies/test_allocators.py"),
    ],
    "kvpop_vllm/scorers/kvzap.py": [
        ("F.gelu(self.fc1(x)«→, approximate='tanh'»)", "tests/scorers/test_kvzap.py -k kvpress"),
    ],
    "kvpop_vllm/policies/h2o.py": [
        ("AttentionMass(mean=«True→False»)", "tests/policies/test_identities.py -k divides"),
    ],
    "kvpop_vllm/distill/memory.py": [
        # logits that no loss reads
        (
            "sizes.products« if recipe.distils else sizes.layers * sizes.layer→»",
            "tests/distill/test_memory.py -k products",
        ),
    ],
    "kvpop_vllm/distill/listwise.py": [
        # later attention is forgotten
        (
            "log_mass[..., ranked] = «log_mass[..., ranked].logaddexp(added)→added»",
            "tests/distill/test_objectives.py -k token_by_token",
        ),
    ],
}
"""Faults by file: a piece of text with «the right words→the wrong ones», and arguments of pytest for what must fail.

Assignments before these arguments are environment variables.
"""


class Mutation(NamedTuple):
    """One fault.

    Attributes:
        file: path of the mutated file.
        old: text that occurs once in it.
        new: text that replaces it.
        tests: arguments of pytest that select the tests which must fail.
    """

    file: str
    old: str
    new: str
    tests: str


def mutations() -> list[Mutation]:
    """Return all faults of the table."""
    faults = []
    for file, rows in FAULTS.items():
        for change, tests in rows:
            old, new = (re.sub("«(.*?)→(.*?)»", rf"\{side}", change, flags=re.DOTALL) for side in (1, 2))
            faults.append(Mutation(file, old, new, tests))
    return faults


def copied(target: Path) -> Path:
    """Copy the working tree without ignored files, and the compiled extension, to ``target``."""
    files = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(files, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0"):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    for extension in (ROOT / "kvpop_vllm").glob("_C*.so"):
        shutil.copy2(extension, target / "kvpop_vllm")
    (target / "kvpop_vllm/kernels/triton").symlink_to(target / TRITON)  # else the installed kernels are imported
    return target


def build(tree: Path, *touched: str) -> None:
    """Build the extension, recompiling the sources ``touched``.

    Raises:
        CalledProcessError: it does not compile.
    """
    for source in touched:
        (tree / source).touch()
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    environment = os.environ | {"KVPOP_REQUIRE_EXT": "1"}
    subprocess.run(command, cwd=tree, env=environment, check=True, capture_output=True, text=True)


def source_of(file: str) -> str:
    """Return the source to recompile. Headers are those that are compiled once per instruction set."""
    return file if file.endswith(".cpp") else f"{CPP}/cpu/kernels_baseline.cpp"


def run(tree: Path, tests: str, interpreted: bool) -> subprocess.CompletedProcess:
    """Run tests in a copy of the working tree; ``interpreted`` is for those of Triton's kernels."""
    environment = os.environ | {"PYTHONPATH": f"{tree}:{tree / 'tests'}", "OMP_WAIT_POLICY": "passive"}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"  # it would be taken for that of the file before
    if interpreted:
        environment["TRITON_INTERPRET"] = "1"
    words = shlex.split(tests)
    while "=" in words[0]:
        name, environment[name] = words.pop(0).split("=")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *words]
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)


def outcome(tree: Path, mutation: Mutation) -> str:
    """Return "killed" if the tests fail or crash, "SURVIVED" if they pass, or why they did not run."""
    done = run(tree, mutation.tests, mutation.file.startswith(TRITON))
    if done.returncode == 1 or done.returncode < 0:  # a test has failed, or the process has crashed
        return "killed"
    return f"NOT RUN (exit {done.returncode}): {done.stdout[-300:]}" if done.returncode else "SURVIVED"


def plant(tree: Path, mutation: Mutation) -> str:
    """Plant one fault, run its tests and restore the file; return :func:`outcome`'s result."""
    path, compiled = tree / mutation.file, mutation.file.startswith(CPP)
    text, when = path.read_text(), (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    if text.count(mutation.old) != 1:
        return f"TEXT FOUND {text.count(mutation.old)} TIMES"
    try:
        path.write_text(text.replace(mutation.old, mutation.new))
        os.utime(path, ns=when)  # of C++ only source_of is recompiled
        if compiled:
            build(tree, source_of(mutation.file))
        return outcome(tree, mutation)
    finally:
        path.write_text(text)
        os.utime(path, ns=when)


def main() -> int:
    """Plant the chosen mutations and return 1 if any was not killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="plant mutations whose file or texts contain one of these")
    words = parser.parse_args().words
    chosen = [row for row in mutations() if not words or any(word in " ".join(row) for word in words)]
    chosen.sort(key=lambda row: row.file.startswith(CPP))  # from the first of these on the extension is mutated
    failed, stale = 0, None
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        tree = copied(Path(folder))
        setup = tree / "setup.py"  # quick to compile
        setup.write_text(setup.read_text().replace('"-O3"', '"-Og"'))
        for tests in dict.fromkeys(row.tests for row in chosen):
            interpreted = any(row.tests == tests and row.file.startswith(TRITON) for row in chosen)
            if run(tree, tests, interpreted).returncode:
                print(f"without a fault, these fail too: pytest {tests}")
                return 1
        for number, row in enumerate(chosen, 1):
            begin = time.monotonic()
            if row.file.startswith(CPP) and stale != source_of(row.file):
                build(tree, *(() if stale is None else (stale,)))
                stale = source_of(row.file)
            outcome = plant(tree, row)
            failed += outcome != "killed"
            change = f"{row.file}: {row.new.strip().splitlines()[0]}"
            print(f"[{number}/{len(chosen)}] {outcome} in {time.monotonic() - begin:.0f} s  {change}", flush=True)
    print(f"{len(chosen) - failed} of {len(chosen)} mutations were killed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
