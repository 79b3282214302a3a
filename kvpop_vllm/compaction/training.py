"""`kvpop compact --method cartridge`: self-study of a corpus, and training of a cache on it."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from kvpop_vllm import __version__
from kvpop_vllm.compaction.cartridge import (
    CONFIG_NAME,
    TENSORS_NAME,
    CartridgeConfig,
    base_of,
    check_new,
    write_cartridge,
)
from kvpop_vllm.compaction.conversations import (
    ROOM,
    ROUND,
    Conversation,
    Sampler,
    chunk_tokens,
    make_conversations,
    read_conversations,
)
from kvpop_vllm.compaction.reference import read_corpus
from kvpop_vllm.compaction.rope import check_rope
from kvpop_vllm.compaction.run import CompactOptions, Progress, check_length, corpus_of, load, slots_of
from kvpop_vllm.compaction.sampling import TransformersSampler
from kvpop_vllm.compaction.trained import TrainedCache, losses, packs
from kvpop_vllm.config import ConfigError
from kvpop_vllm.distill.checkpoints import Checkpoints
from kvpop_vllm.distill.hook import load_config, longest
from kvpop_vllm.distill.metrics import Metrics
from kvpop_vllm.distill.recipe import TrainingError
from kvpop_vllm.distill.run import load_tokenizer
from kvpop_vllm.files import remove, to_disk, write_whole

Engine = Callable[[str, str, int, set[int]], AbstractContextManager[Sampler]]
"""Function of model folder, dtype, most tokens of a request and stop tokens, that starts an engine."""
END = 0.1
"""Learning rate at the end, as a share of its peak."""
CLIP = 1.0
"""Largest norm of a step's gradient."""


@dataclass(frozen=True)
class Training:
    """Options of ``--method cartridge``.

    Attributes:
        conversations: number of conversations.
        steps: optimiser steps; 0 writes the start.
        batch: conversations of a step.
        lr: peak of the learning rate. The paper's code has 0.02.
        init_text: file whose first P tokens the cache starts from, or None for the corpus.
    """

    conversations: int = 256
    steps: int = 256
    batch: int = 16
    lr: float = 2e-2
    init_text: str | None = None

    def check(self) -> None:
        """Check the numbers.

        Raises:
            ConfigError: one is impossible.
        """
        if not 0 < self.lr < math.inf:
            raise ConfigError(f"--lr {self.lr} is not a number above 0: give 0.02, or less if the loss rises")
        if self.batch > self.conversations:
            raise ConfigError(f"a batch of {self.batch} needs as many conversations: lower --batch")


def train_cartridge(
    model: str,
    data: str,
    out: str,
    options: CompactOptions,
    training: Training,
    *,
    engine: Engine | None = None,
    save_every: int = 50,
    threads: int | None = None,
    quiet: bool = False,
) -> CartridgeConfig:
    """Start or continue the training of a cartridge, write it, print one line, and return its config.

    Args:
        model: folder of the base model.
        data: text or JSONL file, or a folder of them.
        out: folder to write; ``out/run`` holds conversations, checkpoints and metrics.
        options: slots, chunk, dtype and seed are read.
        training: further options.
        engine: makes conversations; None for transformers.
        save_every: optimiser steps between checkpoints.
        threads: CPU threads; None for all.
        quiet: True to hide the progress bar.

    Raises:
        ConfigError: an option is impossible, the folder holds another run, or model or data cannot be read.
        TrainingError: training cannot go on.
    """
    began = time.monotonic()
    training.check()
    if threads:
        torch.set_num_threads(threads)
    base = base_of(model)
    check_rope(base["rope"], str(model))
    slots, _ = slots_of(options, base["num_layers"], base["num_kv_heads"])
    tokenizer, positions = load_tokenizer(model), longest(load_config(model))
    text, tokens = corpus_of(tokenizer, data)
    first = corpus_of(tokenizer, training.init_text)[1] if training.init_text else tokens
    check_length(tokenizer, len(first), slots, "first", positions)
    chunk = chunk_tokens(options.chunk, len(tokens), slots, positions)
    arguments = {"slots": slots, "chunk": chunk, "dtype": options.dtype, "seed": options.seed} | asdict(training)
    corpus = {"sha256": hashlib.sha256(text.encode()).hexdigest(), "tokens": len(tokens)}
    start = hashlib.sha256(json.dumps(first[:slots]).encode()).hexdigest()
    run = Path(out) / "run"
    _check_same_run(Path(out), {"model": str(Path(model).resolve())} | arguments | {"corpus": corpus, "start": start})

    loaded = None if engine else load(model, options.dtype)
    path, conversations = run / "conversations.jsonl", []
    if training.steps:
        stop = stop_tokens(model, tokenizer)
        own = nullcontext(TransformersSampler(loaded, stop)) if loaded is not None else None
        todo = -(-training.conversations // ROUND) - _rounds(path, training.conversations)
        if todo:
            done = Progress(todo, "round of conversations")
            with own or engine(model, options.dtype, chunk + ROOM, stop) as sample:
                many, seed = training.conversations, options.seed
                make_conversations(path, tokenizer, tokens, many, sample, longest=chunk, seed=seed, done=done)
        conversations = read_conversations(path)
    loaded = load(model, options.dtype) if loaded is None else loaded
    cache = TrainedCache(read_corpus(loaded, first[:slots])).to(next(loaded.parameters()).device)
    trainer = CacheTrainer(loaded, cache, conversations, run, training, slots, options.seed, save_every, quiet)
    last = trainer.run()

    provenance = {"kvpop": __version__, "corpus": corpus, "arguments": arguments}
    config = CartridgeConfig(**base, slots=slots, next_position=slots, method="cartridge", provenance=provenance)
    _write(Path(out), config, cache)
    loss = f"loss {last['loss']:.4f}, " if last else ""
    print(f"{slots} slots for {len(tokens)} tokens, {loss}{time.monotonic() - began:.0f} s: wrote {out}")
    return config


def _check_same_run(out: Path, own: dict) -> None:
    """Check that a folder holds nothing but this run, and write ``run/run.json`` into a new one.

    Raises:
        ConfigError: it holds a run with other settings, or something else.
    """
    path = out / "run" / "run.json"
    if not path.exists():
        check_new(out)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(own, indent=1))
        return
    try:
        before = json.loads(path.read_text())
    except ValueError:
        raise ConfigError(f"{path} is damaged, so nobody can tell what it was: choose another --out") from None
    if name := next((name for name in {**own, **before} if own.get(name) != before.get(name)), None):
        raise ConfigError(
            f"{out} holds a run with {name} = {before.get(name)!r}, not {own.get(name)!r}: choose another --out, or the"
            " same settings"
        )


def stop_tokens(model: str, tokenizer) -> set[int]:
    """Return the ids that end an answer."""
    ends = load_config(model).eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    return {end for end in (*ends, tokenizer.eos_token_id) if end is not None}


def _rounds(path: Path, count: int) -> int:
    """Return how many rounds of conversations a file holds."""
    found = min(count, sum(line.endswith("\n") for line in path.open(encoding="utf-8"))) if path.exists() else 0
    return -(-count // ROUND) if found == count else found // ROUND


def _write(out: Path, config: CartridgeConfig, cache: TrainedCache) -> None:
    """Write a cartridge's files beside ``run``, the config last, because it makes the folder a cartridge."""
    draft = out / "run" / "cartridge"
    remove(draft)
    with torch.no_grad():
        write_cartridge(draft, config, cache.layers())
    for name in (TENSORS_NAME, CONFIG_NAME):
        os.replace(draft / name, out / name)
    to_disk(out / TENSORS_NAME)
    remove(draft)


class CacheTrainer:
    """Training of a cache on conversations; the same call continues a run that was stopped.

    Args:
        model: the frozen model.
        cache: the cache, at its start.
        conversations: see :class:`Conversation`. Each epoch has them in another order.
        folder: folder of checkpoints and metrics.
        training: see :class:`Training`.
        position: position of the first token behind the cache.
        seed: seed of the order.
        save_every: optimiser steps between checkpoints.
        quiet: True to hide the progress bar.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        cache: TrainedCache,
        conversations: Sequence[Conversation],
        folder: Path,
        training: Training,
        position: int,
        seed: int = 0,
        save_every: int = 50,
        quiet: bool = False,
    ):
        self.model, self.cache, self.conversations = model, cache, conversations
        self.folder, self.training, self.position = folder, training, position
        self.seed, self.save_every, self.quiet = seed, save_every, quiet
        self.optimiser = torch.optim.AdamW(cache.parameters(), lr=training.lr, weight_decay=0.0)
        self.checkpoints = Checkpoints(folder)

    def rate(self, step: int) -> float:
        """Return a learning rate: it rises over the first twentieth of the steps, then falls as a cosine to a tenth."""
        steps, warmup = self.training.steps, max(1, self.training.steps // 20)
        if step < warmup:
            return self.training.lr * (step + 1) / warmup
        progress = (step - warmup) / max(1, steps - 1 - warmup)
        return self.training.lr * (END + (1 - END) * 0.5 * (1 + math.cos(math.pi * progress)))

    def batch(self, step: int) -> list[Conversation]:
        """Return the conversations of a step."""
        count, size = len(self.conversations), self.training.batch
        found = []
        for place in range(step * size, (step + 1) * size):
            if not found or place % count == 0:
                generator = torch.Generator().manual_seed(self.seed * 1_000_003 + place // count)
                order = torch.randperm(count, generator=generator).tolist()
            found.append(self.conversations[order[place % count]])
        return found

    def run(self) -> dict[str, float]:
        """Train to the last step, from the newest checkpoint if there is one, and return the last step's metrics.

        Raises:
            ConfigError: the newest checkpoint cannot be loaded.
            TrainingError: a loss or gradient is not finite, or a file cannot be written.
        """
        steps = self.training.steps
        if not steps:
            return {}
        try:
            first = self.checkpoints.load(self.cache, self.optimiser)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        try:
            with Metrics(self.folder, first) as metrics:
                with tqdm(range(first, steps), initial=first, total=steps, disable=self.quiet) as bar:
                    for step in bar:
                        found = self.step(step)
                        metrics.add(step, found)
                        bar.set_postfix({name: f"{value:.4f}" for name, value in found.items()})
                        if (step + 1) % self.save_every == 0 or step + 1 == steps:
                            self.checkpoints.save(step + 1, self.cache, self.optimiser)
                return metrics.last()
        except OSError as error:
            raise TrainingError(f"training stopped: {error}; the same command continues it") from None

    def step(self, step: int) -> dict[str, float]:
        """Take one optimiser step.

        Returns:
            ``loss`` and ``kl`` to the sparse teacher (nats per token), ``tokens`` of answers, ``grad_norm``, ``lr``.

        Raises:
            TrainingError: a loss or gradient is not finite.
        """
        batch, rate = self.batch(step), self.rate(step)
        count = sum(len(own.answer) for own in batch)
        loss = kl = 0.0
        for pack in packs(batch):
            total, entropy = losses(self.model, self.cache.layers(), pack, self.position)
            (total / count).backward()
            loss, kl = loss + float(total.detach()) / count, kl + (float(total.detach()) - entropy) / count
        norm = float(torch.nn.utils.clip_grad_norm_(self.cache.parameters(), CLIP))
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise TrainingError(f"training stopped at step {step}: loss {loss}, gradient norm {norm}; lower --lr")
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        return {"loss": loss, "kl": kl, "tokens": count, "grad_norm": norm, "lr": rate}
