"""`kvpop compact --method cartridge`: self-study of a corpus, and training of a cache on it.

Bad input raises a :class:`~kvpop_vllm.config.ConfigError` that names what to change.
"""

import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from kvpop_vllm import __version__
from kvpop_vllm.compaction.base_model import base_of, check_base
from kvpop_vllm.compaction.cartridge import (
    CONFIG_NAME,
    TENSORS_NAME,
    Cartridge,
    CartridgeConfig,
    Layer,
    looks_like_cartridge,
    read_cartridge,
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
from kvpop_vllm.compaction.prompt_place import Place, place_of
from kvpop_vllm.compaction.reference import read_corpus
from kvpop_vllm.compaction.run import CompactOptions, check_length, corpus_of, load, slots_of
from kvpop_vllm.compaction.sampling import TransformersSampler
from kvpop_vllm.compaction.trained_cache import TrainedCache, losses, packs
from kvpop_vllm.config import ConfigError
from kvpop_vllm.distill.run import load_tokenizer
from kvpop_vllm.distill.training_loop import CosineLoop, check_same_run, write_next_to_run
from kvpop_vllm.files import whole_lines
from kvpop_vllm.hub import name_of
from kvpop_vllm.model_shape import positions_of, read_model_config
from kvpop_vllm.progress import progress
from kvpop_vllm.rope import rope_at, turned

Engine = Callable[[str, str, int, set[int]], AbstractContextManager[Sampler]]
"""Function of model folder, dtype, most tokens of a request and stop tokens, that starts an engine."""


@dataclass(frozen=True)
class Training:
    """Options of ``--method cartridge``.

    Attributes:
        conversations: number of conversations.
        steps: optimiser steps. 0 writes the start.
        batch: conversations of a step.
        lr: peak of the learning rate. The paper's code has 0.02.
        init: text whose first P tokens the cache starts from, or folder of a cartridge, None for the corpus.
    """

    conversations: int = 256
    steps: int = 256
    batch: int = 16
    lr: float = 2e-2
    init: str | None = None

    def check(self) -> None:
        """Check that the learning rate is positive and finite, and that there are conversations for a batch."""
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
) -> CartridgeConfig:
    """Start or continue the training of a cartridge, write it, print one line, and return its config.

    Args:
        model: folder of the base model.
        data: text or JSONL file, or a folder of them.
        out: folder to write. ``out/run`` holds conversations, checkpoints and metrics.
        options: slots, chunk, dtype, seed, place and system are read.
        training: further options.
        engine: makes conversations, None for transformers.
        save_every: optimiser steps between checkpoints.

    Raises:
        TrainingError: training cannot go on.
    """
    began = time.monotonic()
    training.check()
    base = base_of(model)
    slots, _ = slots_of(options, base)
    tokenizer, positions = load_tokenizer(model), positions_of(read_model_config(model))
    place = place_of(tokenizer, options.place, options.system)
    text, tokens = corpus_of(place, data)
    start, first = _start(training, model, place, slots, tokens, positions)
    room = ROOM + len(place.around([]))
    chunk = chunk_tokens(options.chunk, len(tokens), slots, positions, room)
    arguments = {"slots": slots, "chunk": chunk} | asdict(training)
    arguments |= {name: getattr(options, name) for name in ("dtype", "seed", "place", "system")}
    corpus = {"sha256": hashlib.sha256(text.encode()).hexdigest(), "tokens": len(tokens)}
    run = Path(out) / "run"
    settings = {"model": name_of(Path(model).resolve())} | arguments
    settings |= {"corpus": corpus, "start": _digest(start, first), "head": place.head}
    # before the model is loaded, so that another --out is refused at once
    check_same_run(Path(out), settings)

    # an engine has the memory to itself until the conversations are made
    loaded = None if engine else load(model, options.dtype)
    conversations = []
    if training.steps:
        # a function, since a run whose conversations are complete starts no sampler
        engine_options = model, options.dtype, chunk + room, stop_tokens(model, tokenizer)
        sampler = partial(_start_sampler, engine, loaded, *engine_options)
        path, limits = run / "conversations.jsonl", {"longest": chunk, "seed": options.seed}
        conversations = _conversations(path, place, tokens, training.conversations, sampler, **limits)
    loaded = load(model, options.dtype) if loaded is None else loaded
    layers = start_of(start, loaded) if start else [(k, v, None) for k, v in read_corpus(loaded, first)]
    cache = TrainedCache(layers).to(next(loaded.parameters()).device)
    trainer = CacheTrainer(loaded, cache, conversations, run, training, slots, options.seed, save_every=save_every)
    last = trainer.run()

    provenance = {"kvpop": __version__, "corpus": corpus, "arguments": arguments}
    config = CartridgeConfig(
        **base, slots=slots, next_position=slots, method="cartridge", provenance=provenance, head=place.head
    )
    with torch.no_grad():
        layers = cache.layers()
    write_next_to_run(Path(out), lambda draft: write_cartridge(draft, config, layers), TENSORS_NAME, CONFIG_NAME)
    loss = f"loss {last['loss']:.4f}, " if last else ""
    print(f"{slots} slots for {len(tokens)} tokens, {loss}{time.monotonic() - began:.0f} s: wrote {out}")
    return config


def _digest(start: Cartridge | None, first: list[int]) -> str:
    """Return a digest of what training starts from, since a continued run must begin with the contents of the same files."""
    return start.digest if start else hashlib.sha256(json.dumps(first).encode()).hexdigest()


def _start_sampler(
    engine: Engine | None, loaded: torch.nn.Module | None, model: str, dtype: str, most_tokens: int, stop: set[int]
) -> AbstractContextManager[Sampler]:
    """Return a context of an engine's sampler, or of the loaded model's. See :data:`Engine`."""
    return engine(model, dtype, most_tokens, stop) if engine else nullcontext(TransformersSampler(loaded, stop))


def _start(
    training: Training, model: str, place: Place, slots: int, tokens: list[int], positions: int | None
) -> tuple[Cartridge | None, list[int]]:
    """Return the cartridge that training starts from, or None and the tokens whose cache it starts from."""
    if training.init and looks_like_cartridge(training.init):
        return read_start(training.init, model, slots, place.head), []
    init_tokens = corpus_of(place, training.init)[1] if training.init else tokens
    check_length(place, len(init_tokens), slots, "first", positions)
    return None, place.around(init_tokens)[:slots]


def _conversations(
    path: Path,
    place: Place,
    tokens: list[int],
    count: int,
    start_sampler: Callable[[], AbstractContextManager[Sampler]],
    **options: int,
) -> list[Conversation]:
    """Return the conversations of a run. Those that its file lacks are made first."""
    todo = -(-count // ROUND) - _rounds(path, count)
    # a finished file needs no engine, whose start takes longest
    if todo:
        with start_sampler() as sample, progress(todo, "rounds of conversations") as tick:
            make_conversations(path, place, tokens, count, sample, **options, done=lambda: tick(1))
    return read_conversations(path)


def read_start(folder: str, model: str, slots: int, head: list[int]) -> Cartridge:
    """Return the cartridge that training starts from."""
    start = read_cartridge(folder)
    check_base(start.config, model, f"the cartridge {folder}")
    if start.config.slots != slots:
        raise ConfigError(f"--init {folder} has {start.config.slots} slots, not {slots}: set --slots to as many")
    if start.config.head != head:
        raise ConfigError(
            f"--init {folder} stands in another place: give the --place and --system that it was made with"
        )
    return start


def start_of(cartridge: Cartridge, model: torch.nn.Module) -> list[Layer]:
    """Return a cartridge's layers in the model's dtype, with keys for own tokens that go on at P."""
    like, shift = next(model.parameters()), cartridge.config.slots - cartridge.config.next_position
    return [
        (
            turned(k.float(), shift, rope_at(cartridge.config.rope, i)).to(like),
            v.to(like),
            None if bias is None else bias.to(like.device),
        )
        for i, (k, v, bias) in enumerate(cartridge.layers)
    ]


def stop_tokens(model: str, tokenizer) -> set[int]:
    """Return the ids that end an answer."""
    # a config may list several tokens that end a text
    ends = read_model_config(model).eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    return {end for end in (*ends, tokenizer.eos_token_id) if end is not None}


def _rounds(path: Path, count: int) -> int:
    """Return how many rounds of conversations a file holds."""
    finished = min(count, len(whole_lines(path)))
    return -(-count // ROUND) if finished == count else finished // ROUND


class CacheTrainer(CosineLoop):
    """Training of a cache on conversations.

    Args:
        model: the frozen model.
        cache: the cache, at its start.
        conversations: see :class:`Conversation`. Each epoch has them in another order.
        folder: folder of checkpoints and metrics.
        training: see :class:`Training`.
        position: position of the first token after the cache.
        seed: seed of the order.
        options: ``save_every`` and ``quiet``. See :class:`kvpop_vllm.distill.training_loop.Loop`.
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
        **options,
    ):
        super().__init__(cache, folder, training.steps, training.lr, **options)
        self.model, self.conversations, self.size = model, conversations, training.batch
        self.position, self.seed = position, seed

    def batch(self, step: int) -> list[Conversation]:
        """Return the conversations of a step."""
        count, size = len(self.conversations), self.size
        members = []
        for place in range(step * size, (step + 1) * size):
            # each epoch has its own order, which follows from the seed, so that a stopped run goes on with it
            if not members or place % count == 0:
                generator = torch.Generator().manual_seed(self.seed * 1_000_003 + place // count)
                order = torch.randperm(count, generator=generator).tolist()
            members.append(self.conversations[order[place % count]])
        return members

    def backward(self, step: int) -> dict[str, float]:
        """Add the gradient of a step's batch.

        Returns:
            ``loss`` and ``kl`` to the sparse teacher (nats per token), ``tokens`` of answers.
        """
        batch = self.batch(step)
        count = sum(len(conversation.answer) for conversation in batch)
        loss = kl = 0.0
        for pack in packs(batch):
            total, entropy = losses(self.model, self.trained.layers(), pack, self.position)
            # per token of the batch, whatever pack a token is in
            (total / count).backward()
            loss, kl = loss + float(total.detach()) / count, kl + (float(total.detach()) - entropy) / count
        return {"loss": loss, "kl": kl, "tokens": count}
