"""Questions about documents, answered from caches that take the documents' place (`kvpop eval --task corpus`).

Every cache is made once for a document, before a question is known, and every question is asked behind it, as a chat
that begins there. The full context is the whole document in the same place. A document in the user's message is another
full context: what it differs by is not a matter of the cache's size.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from kvpop_vllm import policies
from kvpop_vllm.compaction.cartridge import Layer
from kvpop_vllm.compaction.conversations import (
    chunk_tokens,
    make_conversations,
    read_conversations,
    teacher_prompt,
)
from kvpop_vllm.compaction.matching import NO_WEIGHT, padded
from kvpop_vllm.compaction.queries import instruction
from kvpop_vllm.compaction.reference import read_corpus
from kvpop_vllm.compaction.run import CompactOptions, compacted, layers_of
from kvpop_vllm.compaction.sampling import TransformersSampler
from kvpop_vllm.compaction.still import Compactor
from kvpop_vllm.compaction.trained import Packed, TrainedCache
from kvpop_vllm.compaction.training import CacheTrainer, Training, stop_tokens
from kvpop_vllm.config import ConfigError
from kvpop_vllm.distill.hook import longest
from kvpop_vllm.evaluation import corpus_questions
from kvpop_vllm.evaluation.backends import TransformersBackend
from kvpop_vllm.evaluation.corpus_questions import Question
from kvpop_vllm.evaluation.policies import training_free
from kvpop_vllm.evaluation.statistics import estimate

FULL, MESSAGE, NOTHING = "full context", "in the message", "no context"
METHODS = "truncation", "first", "attention-matching", "cartridge", "still"
"""Methods of ``kvpop compact`` that make a cache of a document; a policy that compresses prompts is another."""
DEFAULT_METHODS = "truncation", "snapkv", "attention-matching"
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
        answers: ids of the answer to each, sampled behind the full context.
        logp: log-probabilities ``[A, V]`` of each answer's positions behind FULL and MESSAGE.
        full: keys and values ``[H, T, D]`` of every layer.
    """

    tokens: list[int]
    questions: list[Question]
    opened: list[str]
    answers: list[list[int]]
    logp: dict[str, list[torch.Tensor]]
    full: list[tuple[torch.Tensor, torch.Tensor]]


class Cache(NamedTuple):
    """Keys and values that a question is asked behind.

    Attributes:
        layers: keys, values and biases of every layer.
        position: position of the first token behind it.
        prompt: returns the ids of a question, up to where the answer begins.
        seconds: time that it took to make.
    """

    layers: Sequence[Layer]
    position: int
    prompt: Callable[[str], list[int]]
    seconds: float

    @property
    def bytes(self) -> int:
        """Bytes of keys and values; slots that pad a head do not count."""
        return sum(2 * k.shape[-1] * k.element_size() * used(k, bias) for k, _, bias in self.layers)


def used(k: torch.Tensor, bias: torch.Tensor | None) -> int:
    """Return the slots of all heads of a layer that have weight."""
    return k.shape[0] * k.shape[1] if bias is None else int((bias > NO_WEIGHT).sum())


def now(device: torch.device) -> float:
    """Return the time in seconds when a device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.monotonic()


def _held_slots(k: torch.Tensor, v: torch.Tensor, held: torch.Tensor) -> Layer:
    """Return the held tokens of a layer; heads that hold fewer than others are padded."""
    heads, most = [], int(held.sum(-1).max())
    for head, rows in enumerate(held.to(k.device)):
        bias = torch.zeros(1, int(rows.sum()), device=k.device)
        heads.append(padded(k[None, head, rows], v[None, head, rows], bias, most))
    return tuple(torch.cat(part) for part in zip(*heads, strict=True))


class Corpus:
    """Documents with questions, and the model that answers them.

    Args:
        backend: holds the model.
        folder: the model's folder.
        tokenizer: the model's.
        each: most questions of each kind about a document.
        seed: seed of questions and answers.
        steps: optimiser steps of ``cartridge``.
        compactor: compactor of ``still``.
    """

    def __init__(
        self,
        backend: TransformersBackend,
        folder: str,
        tokenizer,
        each: int,
        seed: int,
        steps: int,
        compactor: Compactor | None = None,
    ):
        self.backend, self.model, self.folder, self.tokenizer = backend, backend.model, folder, tokenizer
        self.each, self.seed, self.steps, self.compactor = each, seed, steps, compactor
        self.device = next(self.model.parameters()).device
        self.sampler = TransformersSampler(self.model, stop_tokens(folder, tokenizer))

    def ask(self, number: int, tokens: list[int]) -> tuple[Examination, dict[str, Cache]]:
        """Return the questions about a document and the caches of FULL and MESSAGE."""
        text = self.tokenizer.decode(tokens)
        questions = corpus_questions.make_questions(text, self.each, f"{self.seed}/{number}")
        opened = corpus_questions.open_questions(text)
        head = teacher_prompt(self.tokenizer, opened[0])[0]
        caches = {
            FULL: self._read(tokens, self._behind_a_cache),
            MESSAGE: self._read([*head, *tokens], lambda prompt: teacher_prompt(self.tokenizer, prompt)[1]),
        }
        full = [layer[:2] for layer in caches[FULL].layers]
        self.sampler.tokens, self.sampler.prefix = tokens, full
        seeds = [self.seed * 1_000_003 + 1009 * number + i for i in range(len(opened))]
        prompts = [self._behind_a_cache(prompt) for prompt in opened]
        answers = [one.tokens for one in self.sampler(tokens, prompts, ANSWER, seeds)]
        logp = {
            name: [self.behind(cache, [cache.prompt(o)], [a])[0] for o, a in zip(opened, answers, strict=True)]
            for name, cache in caches.items()
        }
        return Examination(tokens, questions, opened, answers, logp, full), caches

    def _read(self, tokens: list[int], prompt: Callable[[str], list[int]]) -> Cache:
        began = now(self.device)
        layers = [(k, v, None) for k, v in read_corpus(self.model, tokens)]
        return Cache(layers, len(tokens), prompt, now(self.device) - began)

    def _behind_a_cache(self, prompt: str) -> list[int]:
        return instruction(self.tokenizer, prompt)

    @torch.inference_mode()
    def behind(self, cache: Cache, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> list[torch.Tensor]:
        """Return log-probabilities ``[A, V]`` at each position of answers to prompts, each alone behind a cache.

        They are on the CPU.
        """
        rows = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        device, lengths = cache.layers[0][0].device, [len(row) for row in rows]
        places = [cache.position + i for length in lengths for i in range(length)]
        hidden = self.model.get_decoder()(
            input_ids=torch.tensor([sum(rows, [])], device=device),
            position_ids=torch.tensor([places], device=device),
            use_cache=False,
            attend=Packed(cache.layers, lengths),
        ).last_hidden_state[0]
        own = [h[-len(a) - 1 : -1] for h, a in zip(hidden.split(lengths), answers, strict=True)]
        return [
            part.log_softmax(-1).cpu()
            for part in self.model.get_output_embeddings()(torch.cat(own)).float().split(list(map(len, answers)))
        ]

    def make(self, method: str, slots: int, exam: Examination) -> Cache:
        """Return a document's cache of P slots per KV head.

        Args:
            method: one of METHODS, NOTHING or a policy that compresses prompts.
            slots: P.
            exam: the document.

        Raises:
            ConfigError: the method cannot make it.
        """
        began = now(self.device)
        if method == NOTHING:
            layers, position = [(k[:, :1], v[:, :1], None) for k, v in exam.full], 1
        elif method == "cartridge":
            layers, position = self._trained(slots, exam.tokens), slots
        elif method == "still":
            layers, position = compacted(self.model, self.compactor, exam.tokens), len(exam.tokens)
        elif method in METHODS:
            options = CompactOptions(method, slots, seed=self.seed)
            equal = torch.full((self.backend.shape.num_layers, self.backend.shape.num_kv_heads), slots)
            layers, position = layers_of(self.model, self.tokenizer, exam.tokens, slots, equal, options)
        else:
            held = self._held(method, slots, exam.tokens)
            seconds = now(self.device) - began  # its own cache has the tokens that are held
            layers = [_held_slots(*layer, rows) for layer, rows in zip(exam.full, held, strict=True)]
            return Cache(layers, len(exam.tokens), self._behind_a_cache, seconds)
        return Cache(layers, position, self._behind_a_cache, now(self.device) - began)

    def _held(self, policy: str, slots: int, tokens: list[int]) -> torch.Tensor:
        """Return what a policy holds at the end of a document that is its prompt, ``[layers, H, T]`` booleans."""
        resolved = training_free(policy).resolve(self.backend.shape, slots, None, None)
        with self.backend.start(resolved) as run:
            return run.held(torch.tensor(tokens))

    def _trained(self, slots: int, tokens: list[int]) -> list[Layer]:
        """Return the slots of a trained cartridge: one epoch over new conversations."""
        training = replace(Training(), steps=self.steps)
        training = replace(training, conversations=self.steps * training.batch)
        chunk = chunk_tokens(None, len(tokens), slots, longest(self.model.config))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "conversations.jsonl"
            sampler = TransformersSampler(self.model, self.sampler.stop)
            many, seed = training.conversations, self.seed
            make_conversations(path, self.tokenizer, tokens, many, sampler, longest=chunk, seed=seed)
            cache = TrainedCache([(k, v, None) for k, v in read_corpus(self.model, tokens[:slots])])
            cache = cache.to(self.device)
            conversations = read_conversations(path)
            CacheTrainer(self.model, cache, conversations, Path(folder), training, slots, seed, 10**9, True).run()
        with torch.no_grad():
            return cache.layers()

    def measure(self, cache: Cache, exam: Examination) -> Iterator[dict]:
        """Yield records of a cache's answers: of each question with choices, then one of all open questions.

        Yields:
            ``kind, right`` (the likeliest choice per token is the true one) and, for gaps, ``exact`` (greedy decoding
            writes it); then ``kl`` and ``kl_message``, the divergences from FULL and MESSAGE in nats per token of the
            answers, ``tokens`` of them and ``first``, seconds to the first token behind the cache.
        """
        for question in exam.questions:
            prompt = cache.prompt(question.prompt) + self._tokens(question.begin)
            choices = [self._tokens(choice) for choice in question.choices]
            letters = all(len(ids) == 1 for ids in choices)
            rows = choices[:1] if letters else choices  # letters have their scores from one pass
            found = self.behind(cache, [prompt] * len(rows), rows) * (len(choices) if letters else 1)
            pairs = zip(found, choices, strict=True)
            scores = [float(logp.gather(1, torch.tensor(ids).unsqueeze(1)).mean()) for logp, ids in pairs]
            right = question.right
            record = {"kind": question.kind, "right": float(scores.index(max(scores)) == right)}
            if question.kind in corpus_questions.GAPS:
                record["exact"] = float(found[right].argmax(-1).tolist() == choices[right])
            yield record
        lost, count = dict.fromkeys(exam.logp, 0.0), sum(map(len, exam.answers))
        for i, (prompt, answer) in enumerate(zip(exam.opened, exam.answers, strict=True)):
            (own,) = self.behind(cache, [cache.prompt(prompt)], [answer])
            for name, logp in exam.logp.items():
                lost[name] += float((logp[i].exp() * (logp[i] - own)).sum())
        times, ids = [], cache.prompt(exam.opened[0])
        for _ in range(TIMED):
            began = now(self.device)
            self.behind(cache, [ids[:-1]], [ids[-1:]])
            times.append(now(self.device) - began)
        nats = {"kl": lost[FULL] / count, "kl_message": lost[MESSAGE] / count}
        yield {"kind": "open", "tokens": count, "first": statistics.median(times)} | nats

    def _tokens(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]


def check_methods(methods: Sequence[str]) -> None:
    """Check the names of methods.

    Raises:
        ConfigError: one is unknown, given twice, or a policy that does not compress a prompt at its end.
    """
    for method in methods:
        if methods.count(method) > 1:
            raise ConfigError(f"--methods names {method} twice: give it once")
        known = [*METHODS, *(policy.name for policy in policies.loadable()[0] if policy.compresses)]
        if method not in known:
            raise ConfigError(f"--methods {method} makes no cache of a document: choose from {', '.join(known)}")


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
        exam, known = corpus.ask(number, tokens)
        caches = [*((name, 0) for name in (*known, NOTHING)), *((method, p) for p in slots for method in methods)]
        for method, count in caches:
            cache = known[method] if method in known else corpus.make(method, count, exam)
            about = {"task": "corpus", "document": number, "unit": unit}
            about |= {"method": method, "slots": count, "bytes": cache.bytes}
            for record in corpus.measure(cache, exam):
                yield about | {"build": cache.seconds} | record
            tick(1)


def summarise(records: list[dict], against: str) -> list[dict]:
    """Return a line for each number of slots and method; see :data:`COLUMNS`.

    ``kl ratio`` and ``kl_message ratio`` are summed divergences over those of the method ``against`` with as many slots.
    ``pays`` is the number of questions after which the cache has cost no more time than reading the document for each.
    """
    groups: dict[tuple, list[dict]] = {}
    for record in records:
        groups.setdefault((record["slots"], record["method"]), []).append(record)
    nats = {key: {m["document"]: m for m in own if m["kind"] == "open"} for key, own in groups.items()}
    table = []
    for (slots, method), own in groups.items():
        opened = list(nats[slots, method].values())
        line = {"slots": slots or None, "method": method, "documents": len(opened)}
        line |= {"MiB": statistics.mean(m["bytes"] for m in opened) / 2**20}
        units = [m["unit"] for m in opened]
        for kind in ("right", *corpus_questions.KINDS):
            some = [m for m in own if m["kind"] != "open" and kind in ("right", m["kind"])]
            if some:
                line |= estimate(kind, [m["right"] for m in some], units=[m["unit"] for m in some], shares=True)
        gaps = [m for m in own if "exact" in m]
        if gaps:
            line |= estimate("exact", [m["exact"] for m in gaps], units=[m["unit"] for m in gaps], shares=True)
        other = nats.get((slots, against), {}) if method != against else {}
        for name in [] if method == FULL else ["kl"] if method == MESSAGE else ["kl", "kl_message"]:
            lost = [m[name] * m["tokens"] for m in opened]
            line |= estimate(name, lost, [m["tokens"] for m in opened], units=units)
            if other:
                beside = [other[m["document"]][name] * m["tokens"] for m in opened]
                line |= estimate(f"{name} ratio", lost, beside, units=units)
        build, first = (statistics.median(m[name] for m in opened) for name in ("build", "first"))
        if method in (FULL, MESSAGE):
            line["first s"] = build + first
        else:
            line |= {"build s": build, "first s": first}
            whole = next(one["first s"] for one in table if one["method"] == FULL)
            if method != NOTHING and first < whole:
                line["pays"] = math.ceil(build / (whole - first))
        table.append(line)
    return table


COLUMNS = (
    *("slots", "method", "documents", "MiB", "right", *corpus_questions.KINDS, "exact"),
    *("kl", "kl ratio", "kl_message", "kl_message ratio", "build s", "first s", "pays"),
)
