"""Prefill of chunks over a fixed-budget paged cache, piece after piece (DESIGN "One step"; docs/kernels.md).

The host never waits for the device. It works out in the first layer of a step what all layers have in common.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from kvpop_vllm.kernels.triton._launch import Launches, Recording
from kvpop_vllm.kernels.triton._prefill_attend import attend, blocks_of
from kvpop_vllm.kernels.triton._prefill_plan import ROWS, Piece, pieces_of
from kvpop_vllm.kernels.triton._prefill_scores import _mlstm_inputs, _mlstm_scores
from kvpop_vllm.kernels.triton._prefill_slots import _enter, _gather, _settle, _store
from kvpop_vllm.kernels.triton._prefill_steps import _steps
from kvpop_vllm.kernels.triton._serving_pages import Cache, KernelConfig, Step, View, Weights, view
from kvpop_vllm.kernels.triton._tiles import DECODE, LARGE, tile_of
from kvpop_vllm.kernels.triton.decode_step import cache_of, check_step, floats, kernel_config, prefix_of, weights_of
from kvpop_vllm.kernels.triton.delayed_mlstm import OPTIONS, Tiles, _readout, _states
from kvpop_vllm.kernels.triton.online_topk import eviction_times
from torch.utils.weak import WeakIdKeyDictionary
from triton.runtime import driver

from kvpop_vllm.cache.chunks import Chunks, send
from kvpop_vllm.cache.pages import Prefix, cdiv


def prefill_chunk(
    q, k, v, pages, page_table, chunks, *, rule, scale, gate_scores=None, prefix=None, keys=None, sink_logits=None,
    out=None,
):  # fmt: skip
    """Implement :func:`kvpop_vllm.kernels.ops.prefill_chunk`.

    All tensors, including those of the rule, are on q's device, but for the budgets of ``chunks`` and the ``tokens``
    and ``biased`` of the prefix, which are on the CPU. A chunk that does not start at a head's ``tokens_seen`` raises
    no error: the head's pages stay unchanged, its outputs and log-sum-exps are NaN.

    Raises:
        NotImplementedError, TypeError, ValueError: as in :mod:`decode_step`.
    """
    if chunks.budgets.device.type != "cpu":
        raise ValueError(f"prefill_chunk takes budgets on the CPU, got {chunks.budgets.device}")
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    weights, options, form_of_rule, of_rule = _known(rule)
    tensors = q, k, v, out, page_table, pages.raw, gate_scores, keys, sink_logits
    prefixes = () if prefix is None else (prefix.table, prefix.tokens, prefix.biased, prefix.pages.raw)
    form = *map(_form, (*tensors, *prefixes)), form_of_rule, pages.layout, q.shape[1:], page_table.shape[1:]

    def make_plan():
        check_step(q, k, v, pages, rule, weights, prefix, len(chunks), min(chunks.windows), "prefill_chunk")
        if (alike := _ALIKE.get(form)) is None:
            if len(_ALIKE) == MOST_FORMS:
                _ALIKE.clear()
            configs = (kernel_config(pages, page_table, q, rule, constants) for constants in ({}, options))
            alike = _ALIKE[form] = _Alike(*configs, q.device)
        return _Plan(chunks, rule, prefix, pages, page_table, alike)

    same_pages = prefix is not None and prefix.pages is pages
    stream = driver.active.get_current_stream(q.get_device()) if q.is_cuda else None
    of_step = q.shape[0], k.shape, v.shape, scale, same_pages, stream, *map(id, prefixes[1:3])
    plan = chunks.once((*form, *of_step), make_plan)
    lse, before = floats(q.device, *q.shape[:2]), prefix_of(prefix)
    of_prefix = () if same_pages else (before.k, before.v, before.score)
    of_layer = q, k, v, out, lse, *pages.arrays[:5], page_table, gate_scores, keys, sink_logits, before.table
    of_layer = *of_layer, *of_prefix, *of_rule
    if plan.recording is not None:
        plan.recording.repeat(of_layer)
        return out, lse
    launch, plan.alike.launch.stream = plan.alike.launch, stream
    if plan.layers == 1 and plan.alike.repeatable:  # where each layer has a plan of its own, nothing is recorded
        launch = Recording(launch, of_layer, interpreted=not q.is_cuda)
    plan.layers += 1
    of_call = scale, gate_scores, before, keys, sink_logits, out, lse
    with torch.no_grad():
        _Prefill(q, k, v, pages, page_table, rule, weights, *of_call, plan, launch).run()
    if launch is not plan.alike.launch:
        launch.close(plan.tensors())
        plan.recording, plan.alike.repeatable = launch if launch.repeatable else None, launch.repeatable
    return out, lse


def _form(tensor: torch.Tensor | None) -> tuple | None:
    """Return all that a launch depends on of a tensor, but its address and sizes."""
    if tensor is None:
        return None
    return tensor.dtype, tensor.get_device(), tensor.stride(), tensor.data_ptr() % 16


_KNOWN, _ALIKE = WeakIdKeyDictionary(), {}
"""Weights and options of rules, and the constants and launches of layers of a form."""
MOST_FORMS = 256


def _known(rule) -> tuple[Weights, dict, tuple, tuple]:
    """Return a rule's weights and options of kernels, all that launches and their checks depend on, and its tensors."""
    if (record := _KNOWN.get(rule)) is None:
        weights, options = weights_of(rule.scorer, "prefill_chunk")
        stores = rule.compression or rule.rounds
        queries = stores and (stores.queries, rule.compresses, rule.first_query(1))
        numbers = rule.sinks, rule.decay_step, rule.moment_correction, queries, *options.items()
        tensors = rule.log_gamma, *(weight for weight in weights if weight is not None)
        record = _KNOWN[rule] = weights, options, (*map(_form, (rule.log_gamma, *weights)), *numbers), tensors
    return record


class _Alike:
    """Constants and launches of layers whose arguments differ in addresses alone.

    Attributes:
        config, of_scorer: constants of kernels of all rules, and of those that depend on the scorer.
        launch: launches a kernel, see :mod:`_launch`.
        repeatable: False if a recording of the launches could not be repeated.
        tiles, width: tiles of an mLSTM's states, and columns of a product with its features.
    """

    def __init__(self, config: KernelConfig, of_scorer: KernelConfig, device: torch.device):
        self.config, self.of_scorer, self.launch, self.repeatable = config, of_scorer, Launches(), True
        if of_scorer.scorer == "mlstm":
            self.tiles = Tiles(of_scorer.features, of_scorer.values, ROWS, device)
            self.width = max(16, of_scorer.padded_columns)


class _Plan:
    """Numbers, pieces and workspaces that the layers of a step have in common.

    Attributes:
        alike: what layers of the same form have in common in all steps.
        prefix: prefixes of the requests, by which the plan is found.
        blocks: blocks of attention.
        numbers: see :meth:`_numbers`.
        right: ``[R, H]`` int32, 0 for a wrong start; all layers have seen the same tokens.
        pieces: pieces of all tokens, or if the rule is sequential, of those of prefixes.
        evicted: pieces whose evictions are known, if they are the same in all layers.
        layers: how many layers have formed their arguments.
        recording: launches of the second layer, None if no layer can repeat them.
    """

    def __init__(self, chunks: Chunks, rule, prefix: Prefix | None, pages, table, alike: _Alike):
        self.alike, self.prefix, self.blocks, self.evicted = alike, prefix, blocks_of(alike.config), set()
        self.layers, self.recording = 0, None
        protected = biased = [0] * len(chunks)
        if prefix is not None:
            protected = prefix.tokens.tolist()
        if prefix is not None and prefix.biased is not None:
            biased = prefix.biased.tolist()
        self.numbers = self._numbers(chunks, protected, biased, table.device)
        start, end, *_ = self.numbers.unsqueeze(1).unbind(2)
        heads = torch.arange(table.shape[1], device=table.device)
        tokens_seen = pages.position[table[:, :, pages.layout.state_blocks].long(), heads, 0]
        self.right = ((tokens_seen == start) | (start <= end)).int()  # a tail may begin on any pages
        self.pieces = pieces_of(chunks, rule, protected, biased, table.device)

    @staticmethod
    def _numbers(chunks: Chunks, protected: list[int], biased: list[int], device: torch.device) -> torch.Tensor:
        """Return numbers of each request, ``[R, 7 + H]`` int32.

        They are its start, p, the number of tokens that have a bias, w; the position of the first token of the chunk
        after the prefix, its index in the batch, the number of these tokens; and the budgets.
        """
        lines, first = [], 0
        of_chunks = chunks.starts, chunks.lengths, chunks.windows, chunks.budgets.tolist()
        for start, length, window, budgets, p, leading in zip(*of_chunks, protected, biased, strict=True):
            inside = min(max(p - start, 0), length)
            lines.append([start, p, leading, window, start + inside, first + inside, length - inside, *budgets])
            first += length
        return send(lines, device, torch.int32)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield the tensors that the layers share."""
        values = [self.numbers, self.right, *(value for piece in self.pieces for value in vars(piece).values())]
        while values:
            value = values.pop()
            if isinstance(value, torch.Tensor):
                yield value
            elif isinstance(value, tuple | dict):
                values.extend(value.values() if isinstance(value, dict) else value)


class _Prefill:
    """Arguments and outputs of one call."""

    def __init__(
        self,
        q,
        k,
        v,
        pages,
        table,
        rule,
        weights,
        scale,
        gate_scores,
        before: Cache,
        keys,
        sink_logits,
        out,
        lse,
        plan: _Plan,
        launch: Launches | Recording,
    ):
        self.plan, self.right, self.alike = plan, plan.right, plan.alike
        self.config, self.launch = plan.alike.config, launch
        self.sink_logits, self.weights = sink_logits, weights
        self.q, self.tokens, self.gate_scores, self.keys = view(q), (view(k), view(v)), gate_scores, keys
        self.rule, self.scale, self.device = rule, scale, q.device
        self.cache, self.before = cache_of(pages, table), before
        self.out, self.lse, self.num_heads = out, lse, k.shape[1]

    def run(self) -> None:
        """Process all pieces, and the tokens after the prefixes of a sequential rule."""
        for piece in self.plan.pieces:
            self.launch.reuse()
            self.process(piece)
        if self.rule.sequential:
            self.in_steps()

    def process(self, piece: Piece) -> None:
        """Compute scores, evictions and attention of a piece, and store the survivors."""
        if piece.rows:
            left, inserted, score = self._scores(piece)
            if piece not in self.plan.evicted:
                self._evict(piece, score)
            if self.rule.same_in_all_layers:
                self.plan.evicted.add(piece)
        pages, results = (self.cache, self.before), (self.scale, self.out, self.lse, self.sink_logits)
        of_step = self.q, self.tokens, *pages, piece.gone, self.right, *results
        attend(piece, self.config, self.plan.blocks, *of_step, launch=self.launch)
        if piece.rows:
            arguments = self.tokens, inserted, left, score, piece.slot_of, self.cache, piece.segments, piece.blocks()
            self._of_rows(_store, piece, (*arguments, self.right, piece.rows), (self.config, ROWS), num_warps=4)

    def _of_rows(self, kernel, piece: Piece, arguments: tuple, constants: tuple, **options) -> None:
        """Launch a kernel of :data:`ROWS` tail rows and one head."""
        self.launch(kernel, (piece.rows // ROWS, self.num_heads), arguments, constants, **options)

    def _scores(self, piece: Piece) -> tuple:
        """Return the tokens ``[H, P, 2 D]`` that leave the window, and scores ``[H, P]`` at insertion and of leaving tokens."""
        scorer, inserted = self.rule.scorer, None
        if scorer.takes_gate_scores:
            inserted = self.gate_scores[piece.tail_rows].T.contiguous()
        if scorer.recurrent and not scorer.delayed:
            inserted = self._read(piece, None)
        sizes = self.num_heads, piece.rows, 2 * self.config.size
        left = self.launch.empty(*sizes, dtype=self.cache.k.dtype, device=self.device)
        if scorer.recurrent and scorer.delayed:
            return left, inserted, self._read(piece, left)
        score = None
        if inserted is not None:
            score = self.launch.empty(*inserted.shape, dtype=inserted.dtype, device=self.device)
        arguments = self.tokens, inserted, self.cache, piece.segments, piece.blocks(), left, score, piece.rows
        self._of_rows(_gather, piece, arguments, (self.config, ROWS), num_warps=4)
        if inserted is None and not scorer.draws and scorer.kernel != "none":
            score = scorer.scores(*left.chunk(2, -1))
        return left, inserted, score

    def _read(self, piece: Piece, left: torch.Tensor | None) -> torch.Tensor:
        """Update the states of an mLSTM, and return scores ``[H, P]`` of tokens gathered in ``left``, or of the new ones."""
        config, heads, rows, blocks = self.alike.of_scorer, self.num_heads, piece.rows, piece.blocks()
        tiles, counts, (f, v) = self.alike.tiles, (rows // ROWS, len(piece)), (config.features, config.values)
        states = sum(counts)
        sizes = rows * f, rows * f, rows * v, rows * v, rows, rows, rows, states * f * v, states * f, states
        read, write, values, readouts, igate, decay, score, *of_blocks = (
            self.launch.empty(heads, size, dtype=torch.float32, device=self.device) for size in sizes
        )
        of_rows = self.tokens, left, self.weights, self.cache, piece.segments, blocks
        self._of_rows(
            _mlstm_inputs, piece, (*of_rows, read, write, values, igate, decay, *of_blocks[1:], rows, states),
            (config, ROWS, self.alike.width), **OPTIONS,
        )  # fmt: skip
        self.launch(
            _states, (tiles.f_blocks, tiles.v_blocks, heads * len(piece)),
            (write, values, igate, decay, None, None, None, *of_blocks, piece.ends, self.cache, piece.segments,
             self.right, rows, *counts),
            (config, *tiles.constants()), **OPTIONS,
        )  # fmt: skip
        self.launch(
            _readout, (tiles.v_blocks, rows // ROWS, heads),
            (read, write, values, igate, decay, *of_blocks, readouts, None, None, piece.segment_of, 0, rows, *counts),
            tiles.constants("F"), **OPTIONS,
        )  # fmt: skip
        of_rows = self.tokens, left, self.weights, piece.segments, blocks, readouts, score, rows
        self._of_rows(_mlstm_scores, piece, of_rows, (config, ROWS), num_warps=4)
        return score

    def _evict(self, piece: Piece, score: torch.Tensor | None) -> None:
        """Find when keys of a piece are evicted, and the slots of tokens that leave the window."""
        if not piece.entries:
            return
        rule, arrays, (scores, positions, free) = self.rule, (piece.segments, piece.topk), piece.candidates
        self.launch(
            _enter, (cdiv(piece.most_entries, piece.width), len(piece), self.num_heads),
            (score, self.cache, *arrays, scores, positions, piece.rows, piece.entries), (self.config, piece.width),
        )  # fmt: skip
        order = {"log_gamma": rule.log_gamma, "decay_step": rule.decay_step, "ages": rule.ages, "keys": self.keys}
        leaves = eviction_times(piece, scores, positions, **order, launch=self.launch)
        sizes = piece.rows, piece.keys, piece.entries
        arguments = leaves, *arrays, free, piece.gone, piece.slot_of, *sizes
        self.launch(_settle, (len(piece), self.num_heads), arguments, (piece.width,), num_warps=4)

    def in_steps(self) -> None:
        """Run decode steps for the tokens after the prefixes, one after another in each request."""
        config, numbers = self.alike.of_scorer, self.plan.numbers
        columns = (View(column, numbers.shape[1]) for column in numbers.T[1:7])
        protected, biased, windows, positions, tokens, counts = columns
        protected = View() if self.before.table is None else protected
        biased = View() if self.before.score is None else biased
        of_tokens = self.q, *self.tokens, view(self.gate_scores)
        of_requests = positions, view(numbers[:, 7:]), windows, view(self.keys), protected, biased
        work = self.launch.empty(*self.right.shape, config.work, dtype=torch.float32, device=self.device)
        of_layer = self.cache, self.before, self.weights, self.rule.log_gamma, self.scale
        step = Step(*of_tokens, *of_requests, *of_layer, self.out, self.lse, work, sink_logits=self.sink_logits)
        stages = tile_of(DECODE, config.wide, config.size).stages
        if config.residual and config.size > LARGE:  # no block of 64 KiB of products is loaded ahead
            stages = 2
        arguments, options = (step, tokens, counts, self.right), {"num_warps": 8, "num_stages": stages}
        self.launch(_steps, (1, *self.right.T.shape), arguments, (config,), **options, enable_fp_fusion=False)
