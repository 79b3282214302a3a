"""Questions about documents, answered from caches that take the documents' place (`kvpop eval --task corpus`).

Every cache is made once for a document, before a question is known, and every question is asked after it. The document
stands in the user's message, or in front of everything if the model has no chat template. The full context is the whole
document in the same place.

Bad input raises a :class:`~kvpop_vllm.config.ConfigError` that names what to change.
"""

import itertools
import math
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from kvpop_vllm import policies
from kvpop_vllm.compaction.cache_attention import log_probabilities
from kvpop_vllm.compaction.cartridge import Layer
from kvpop_vllm.compaction.cartridge_training import CacheTrainer, Training, stop_tokens
from kvpop_vllm.compaction.conversations import (
    chunk_tokens,
    make_conversations,
    read_conversations,
)
from kvpop_vllm.compaction.prompt_place import place_of
from kvpop_vllm.compaction.reference import read_corpus
from kvpop_vllm.compaction.run import CompactOptions, compacted, layers_of
from kvpop_vllm.compaction.sampling import TransformersSampler
from kvpop_vllm.compaction.still import Compactor
from kvpop_vllm.compaction.trained_cache import Packed, TrainedCache
from kvpop_vllm.config import ConfigError
from kvpop_vllm.evaluation import corpus_questions
from kvpop_vllm.evaluation.backends import TransformersBackend
from kvpop_vllm.evaluation.corpus_questions import Question
from kvpop_vllm.evaluation.policies import training_free
from kvpop_vllm.evaluation.statistics import estimate
from kvpop_vllm.model_shape import positions_of
from kvpop_vllm.rules.matching import NO_WEIGHT, padded

FULL, NOTHING = "full context", "no context"
METHODS = "truncation", "first", "attention-matching", "cartridge", "still"
"""Methods of ``kvpop compact`` that make a cache of a document. A policy that compresses prompts is another."""
DEFAULT_METHODS = "truncation", "snapkv", "attention-matching"
POLICY = "policy:"
"""Prefix of a policy that has the name of a method."""
ANSWER = 128
"""Most tokens of an answer to an open question."""
TIMED = 3
"""Passes whose median is the time to a first token."""


class Examination(NamedTuple):
    """Questions about one document, with the answers of the model that reads all of it.

    Attributes:
        tokens: ids of the document.
        questions: with choices.
        opened: open questions.
        answers: ids of the answer to each, sampled after the full context.
        logp: log-probabilities ``[A, V]`` of each answer's positions.
        full: keys and values ``[H, T, D]`` of every layer, of what stands before the document and of what separates it
            too.
    """

    tokens: list[int]
    questions: list[Question]
    opened: list[str]
    answers: list[list[int]]
    logp: list[torch.Tensor]
    full: list[tuple[torch.Tensor, torch.Tensor]]


class Cache(NamedTuple):
    """Keys and values that a question is asked after.

    Attributes:
        layers: keys, values and biases of every layer.
        position: position of the first token after it.
        seconds: time that it took to make.
    """

    layers: Sequence[Layer]
    position: int
    seconds: float

    @property
    def bytes(self) -> int:
        """Bytes of keys and values. Slots that pad a head do not count."""
        return sum(2 * k.shape[-1] * k.element_size() * used(k, bias) for k, _, bias in self.layers)


def used(k: torch.Tensor, bias: torch.Tensor | None) -> int:
    """Return the slots of all heads of a layer that have weight."""
    return k.shape[0] * k.shape[1] if bias is None else int((bias > NO_WEIGHT).sum())


def finish_time(device: torch.device) -> float:
    """Return the time in seconds when a device has done its work."""
    # kernels run asynchronously, and without this only their launch would be timed
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.monotonic()


def _held_slots(k: torch.Tensor, v: torch.Tensor, held_mask: torch.Tensor) -> Layer:
    """Return the held tokens of a layer. Heads that hold fewer than others are padded."""
    heads, largest = [], int(held_mask.sum(-1).max())
    for head, rows in enumerate(held_mask.to(k.device)):
        bias = torch.zeros(1, int(rows.sum()), device=k.device)
        heads.append(padded(k[None, head, rows], v[None, head, rows], bias, largest))
    return tuple(torch.cat(part) for part in zip(*heads, strict=True))


def _made_and_last(k: torch.Tensor, v: torch.Tensor, made_slots: Layer, slots: int) -> Layer:
    """Return the made slots of a layer and the last tokens of the document, together ``slots``."""
    near, (own_k, own_v, bias) = slots - made_slots[0].shape[1], (part.to(k.device) for part in made_slots)
    last = [x[:, x.shape[1] - near :].to(like) for x, like in ((k, own_k), (v, own_v))]
    return torch.cat([own_k, last[0]], 1), torch.cat([own_v, last[1]], 1), torch.nn.functional.pad(bias, (0, near))


class Corpus:
    """Documents with questions, and the model that answers them.

    Args:
        backend: holds the model.
        folder: the model's folder.
        tokenizer: the model's.
        per_kind: largest number of questions of each kind about a document.
        seed: seed of questions and answers.
        steps: optimiser steps of ``cartridge``.
        compactor: compactor of ``still``.
    """

    def __init__(
        self,
        backend: TransformersBackend,
        folder: str,
        tokenizer,
        per_kind: int,
        seed: int,
        steps: int,
        compactor: Compactor | None = None,
    ):
        self.backend, self.model, self.folder = backend, backend.model, folder
        self.tokenizer, self.place = tokenizer, place_of(tokenizer)
        self.per_kind, self.seed, self.steps, self.compactor = per_kind, seed, steps, compactor
        self.device = next(self.model.parameters()).device
        self.sampler = TransformersSampler(self.model, stop_tokens(folder, tokenizer))

    def ask(self, number: int, document: list[int]) -> tuple[Examination, Cache]:
        """Return the questions about a document, and the cache of the full context."""
        text, tokens = self.tokenizer.decode(document), self.place.around(document)
        questions = corpus_questions.make_questions(text, self.per_kind, f"{self.seed}/{number}")
        opened = corpus_questions.open_questions(text)
        began = finish_time(self.device)
        full = read_corpus(self.model, tokens)
        cache = Cache([(k, v, None) for k, v in full], len(tokens), finish_time(self.device) - began)
        # the sampler need not read the document again
        self.sampler.tokens, self.sampler.prefix = tokens, full
        seeds = [self.seed * 1_000_003 + 1009 * number + i for i in range(len(opened))]
        prompts = [self.place.asking(prompt) for prompt in opened]
        answers = [answer.tokens for answer in self.sampler(tokens, prompts, ANSWER, seeds)]
        logp = [
            self.logp_after(cache, [prompt_tokens], [a])[0] for prompt_tokens, a in zip(prompts, answers, strict=True)
        ]
        return Examination(document, questions, opened, answers, logp, full), cache

    @torch.inference_mode()
    def logp_after(
        self, cache: Cache, prompts: Sequence[list[int]], answers: Sequence[list[int]]
    ) -> list[torch.Tensor]:
        """Return log-probabilities ``[A, V]`` at each position of answers to prompts, each alone after a cache.

        They are on the CPU.
        """
        rows = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        lengths, ends = [len(row) for row in rows], list(itertools.accumulate(map(len, rows)))
        places = [cache.position + i for length in lengths for i in range(length)]
        # token i is predicted at i - 1, so that answers begin one place before their first token
        index = [i for end, answer in zip(ends, answers, strict=True) for i in range(end - len(answer) - 1, end - 1)]
        logp = log_probabilities(self.model, sum(rows, []), places, Packed(cache.layers, lengths), index)
        return list(logp.cpu().split(list(map(len, answers))))

    def make(self, method: str, slots: int, exam: Examination) -> Cache:
        """Return a document's cache of P slots per KV head.

        Args:
            method: one of METHODS, NOTHING or a policy that compresses prompts, see :data:`POLICY`.
            slots: P.
            exam: the document.
        """
        began = finish_time(self.device)
        if method == NOTHING:
            position = len(self.place.head) or 1
            layers = [(k[:, :position], v[:, :position], None) for k, v in exam.full]
        elif method == "cartridge":
            layers, position = self._trained(slots, exam.tokens), slots
        elif method == "still":
            tokens = self.place.around(exam.tokens)
            layers, position = compacted(self.model, self.compactor, tokens), len(tokens)
        elif method in METHODS:
            options = CompactOptions(method, slots, seed=self.seed)
            equal = torch.full((self.backend.shape.num_layers, self.backend.shape.num_kv_heads), slots)
            layers, position = layers_of(self.model, self.place, exam.tokens, slots, equal, options)
        else:
            return self._of_policy(method.removeprefix(POLICY), slots, exam)
        return Cache(layers, position, finish_time(self.device) - began)

    def _of_policy(self, policy: str, slots: int, exam: Examination) -> Cache:
        """Return what a policy makes of a document that is its prompt, as :meth:`make` does."""
        began, tokens = finish_time(self.device), self.place.around(exam.tokens)
        held_tokens, made_layers = self._held(policy, slots, tokens)
        # only the policy's prefill counts, not the selection for the comparison
        seconds = finish_time(self.device) - began  # its own cache has the tokens that are held
        if made_layers[0][0].shape[1]:
            pairs = zip(exam.full, made_layers, strict=True)
            layers = [_made_and_last(*layer, made_layer, slots) for layer, made_layer in pairs]
        else:
            layers = [_held_slots(*layer, rows) for layer, rows in zip(exam.full, held_tokens, strict=True)]
        return Cache(layers, len(tokens), seconds)

    def _held(self, policy: str, slots: int, tokens: list[int]) -> tuple[torch.Tensor, list[Layer]]:
        """Return what a policy holds at the end of a document that is its prompt, ``[layers, H, T]`` booleans.

        The second result is the slots that the policy has made of the document in each layer. Most policies make none.
        """
        resolved = training_free(policy).resolve(self.backend.shape, slots, None, None)
        with self.backend.start(resolved) as run:
            return run.held(torch.tensor(tokens)), run.cache.made_slots()

    def _trained(self, slots: int, tokens: list[int]) -> list[Layer]:
        """Return the slots of a trained cartridge: one epoch over new conversations."""
        training = replace(Training(), steps=self.steps)
        # as many as one epoch takes
        training = replace(training, conversations=self.steps * training.batch)
        chunk = chunk_tokens(None, len(tokens), slots, positions_of(self.model.config))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "conversations.jsonl"
            sampler = TransformersSampler(self.model, self.sampler.stop)
            many, seed = training.conversations, self.seed
            make_conversations(path, self.place, tokens, many, sampler, longest=chunk, seed=seed)
            first = self.place.around(tokens)[:slots]
            cache = TrainedCache([(k, v, None) for k, v in read_corpus(self.model, first)]).to(self.device)
            # so rarely that the run ends without a checkpoint
            conversations, rarely = read_conversations(path), {"save_every": 10**9, "quiet": True}
            CacheTrainer(self.model, cache, conversations, Path(folder), training, slots, seed, **rarely).run()
        with torch.no_grad():
            return cache.layers()

    def measure(self, cache: Cache, exam: Examination) -> Iterator[dict]:
        """Yield records of a cache's answers: of each question with choices, then one of all open questions.

        Yields:
            ``kind, right`` (the likeliest choice per token is the true one) and, for gaps, ``exact`` (greedy decoding
            writes it). The last has ``kl``, the divergence from the full context in nats per token of the answers,
            ``tokens`` of them and ``first``, seconds to the first token after the cache.
        """
        for question in exam.questions:
            prompt = self.place.asking(question.prompt) + self._tokens(question.begin)
            choices = [self._tokens(choice) for choice in question.choices]
            letters = all(len(ids) == 1 for ids in choices)
            rows = choices[:1] if letters else choices  # letters have their scores from one pass
            choice_logps = self.logp_after(cache, [prompt] * len(rows), rows) * (len(choices) if letters else 1)
            pairs = zip(choice_logps, choices, strict=True)
            # per token, since choices have different lengths
            scores = [float(logp.gather(1, torch.tensor(ids).unsqueeze(1)).mean()) for logp, ids in pairs]
            right = question.right
            record = {"kind": question.kind, "right": float(scores.index(max(scores)) == right)}
            if question.kind in corpus_questions.GAPS:
                record["exact"] = float(choice_logps[right].argmax(-1).tolist() == choices[right])
            yield record
        lost, count = 0.0, sum(map(len, exam.answers))
        # summed here, and divided by the tokens of all answers
        for prompt, answer, logp in zip(exam.opened, exam.answers, exam.logp, strict=True):
            (compressed_logp,) = self.logp_after(cache, [self.place.asking(prompt)], [answer])
            lost += float((logp.exp() * (logp - compressed_logp)).sum())
        times, ids = [], self.place.asking(exam.opened[0])
        # the median, since the first pass of a shape may compile or allocate
        for _ in range(TIMED):
            began = finish_time(self.device)
            self.logp_after(cache, [ids[:-1]], [ids[-1:]])
            times.append(finish_time(self.device) - began)
        yield {"kind": "open", "tokens": count, "first": statistics.median(times), "kl": lost / count}

    def _tokens(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]


def check_methods(methods: Sequence[str]) -> None:
    """Check the names of methods."""
    for method in methods:
        if methods.count(method) > 1:
            raise ConfigError(f"--methods names {method} twice: give it once")
        compressing = [policy.name for policy in policies.loadable()[0] if policy.compresses]
        names = [*METHODS, *(POLICY + name if name in METHODS else name for name in compressing)]
        if method not in names:
            raise ConfigError(f"--methods {method} makes no cache of a document: choose from {', '.join(names)}")


def records_of(
    corpus: Corpus, documents: Sequence[tuple[list[int], int]], methods: Sequence[str], slots: Sequence[int], tick
) -> Iterator[dict]:
    """Yield the records of all documents: of full contexts, of none, then of each method and number of slots.

    A record has ``document, unit, method, slots``, ``bytes`` of keys and values, ``build`` seconds and what
    :meth:`Corpus.measure` yields.

    Args:
        corpus: the model.
        documents: tokens and unit of each.
        methods: see :func:`check_methods`.
        slots: P.
        tick: called after each cache.
    """
    for number, (tokens, unit) in enumerate(documents):
        exam, full_cache = corpus.ask(number, tokens)
        caches = [(FULL, 0), (NOTHING, 0), *((method, p) for p in slots for method in methods)]
        for method, count in caches:
            cache = full_cache if method == FULL else corpus.make(method, count, exam)
            about = {"task": "corpus", "document": number, "unit": unit}
            about |= {"method": method, "slots": count, "bytes": cache.bytes}
            for record in corpus.measure(cache, exam):
                yield about | {"build": cache.seconds} | record
            tick(1)


def summarise(records: list[dict], against: str) -> list[dict]:
    """Return a line for each number of slots and method. See :data:`COLUMNS`.

    ``kl ratio`` is summed divergences over those of the method ``against`` with as many slots.
    ``pays`` is the number of questions after which the cache has cost no more time than reading the document for each.
    """
    groups: dict[tuple, list[dict]] = {}
    for record in records:
        groups.setdefault((record["slots"], record["method"]), []).append(record)
    nats = {key: {m["document"]: m for m in members if m["kind"] == "open"} for key, members in groups.items()}
    table = []
    for (slots, method), members in groups.items():
        opened = list(nats[slots, method].values())
        line = {"slots": slots or None, "method": method, "documents": len(opened)}
        line |= {"MiB": statistics.mean(m["bytes"] for m in opened) / 2**20}
        units = [m["unit"] for m in opened]
        for kind in ("right", *corpus_questions.KINDS):
            closed = [m for m in members if m["kind"] != "open" and kind in ("right", m["kind"])]
            if closed:
                line |= estimate(kind, [m["right"] for m in closed], units=[m["unit"] for m in closed], shares=True)
        gaps = [m for m in members if "exact" in m]
        if gaps:
            line |= estimate("exact", [m["exact"] for m in gaps], units=[m["unit"] for m in gaps], shares=True)
        base = nats.get((slots, against), {}) if method != against else {}
        if method != FULL:
            lost = [m["kl"] * m["tokens"] for m in opened]
            line |= estimate("kl", lost, [m["tokens"] for m in opened], units=units)
            if base:
                reference = [base[m["document"]]["kl"] * m["tokens"] for m in opened]
                line |= estimate("kl ratio", lost, reference, units=units)
        table.append(line | _seconds(method, opened, table))
    return table


def _seconds(method: str, opened: list[dict], table: list[dict]) -> dict:
    """Return the times of a method, and after how many questions it pays, by its records of open questions.

    Args:
        method: the method.
        opened: its record of each document.
        table: the lines that are ready, that of the full context among them.
    """
    build, first = (statistics.median(m[name] for m in opened) for name in ("build", "first"))
    if method == FULL:
        return {"first s": build + first}
    times = {"build s": build, "first s": first}
    # the full context has no slots and is the first group, so that its line is there already
    full_seconds = next(line["first s"] for line in table if line["method"] == FULL)
    if method != NOTHING and first < full_seconds:
        times["pays"] = math.ceil(build / (full_seconds - first))
    return times


COLUMNS = (
    *("slots", "method", "documents", "MiB", "right", *corpus_questions.KINDS, "exact"),
    *("kl", "kl ratio", "build s", "first s", "pays"),
)
