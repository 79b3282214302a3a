"""``kvpop compact``: reads a corpus with a model and writes a cartridge.

Bad input raises a :class:`~kvpop_vllm.config.ConfigError` that names what to change.
"""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import torch

from kvpop_vllm import __version__
from kvpop_vllm.cache.pages import BLOCK_SLOTS
from kvpop_vllm.calibration.shares import read_calibration
from kvpop_vllm.compaction.base_model import base_of
from kvpop_vllm.compaction.cartridge import CartridgeConfig, Layer, write_cartridge
from kvpop_vllm.compaction.compactor_files import read_compactor
from kvpop_vllm.compaction.prompt_place import Place, place_of
from kvpop_vllm.compaction.queries import REPEAT, repeat_prefill, room_after, self_study
from kvpop_vllm.compaction.reference import Fitting, fit, read_corpus
from kvpop_vllm.compaction.still import Compactor
from kvpop_vllm.config import MAX_BUDGET, ConfigError
from kvpop_vllm.distill.chat import render
from kvpop_vllm.distill.run import default_device, load_tokenizer
from kvpop_vllm.distill.sources import documents_of, find_sources
from kvpop_vllm.files import check_new
from kvpop_vllm.model_hook import check_rotation, load_model
from kvpop_vllm.model_shape import positions_of, read_model_config
from kvpop_vllm.policies.allocators import proportional
from kvpop_vllm.progress import progress
from kvpop_vllm.roles import Retention
from kvpop_vllm.rules.matching import Matching

METHODS = ("attention-matching", "first", "last", "still")


@dataclass(frozen=True)
class CompactOptions:
    """Options of ``kvpop compact``.

    Attributes:
        method: one of METHODS, or ``truncation``, which is ``last``.
        slots: P, None for that of the compactor.
        queries: ``repeat-prefill`` or ``self-study``.
        chunk: tokens of a chunk, None for one chunk.
        dtype: dtype of the model and of the cartridge.
        seed: seed of samples.
        calibration: folder of ``kvpop calibrate``, or JSON file with shares of the heads, or None.
        on_policy: False to fit upper layers to the full caches of lower ones.
        reference: most queries that a head is fitted to.
        answers: answers of self-study.
        matching: options of the fit.
        compactor: folder of the compactor of ``still``, which has as many slots.
        place: see :func:`kvpop_vllm.compaction.prompt_place.place_of`.
        system: the same.
    """

    method: str = "attention-matching"
    slots: int | None = 1024
    queries: str = "self-study"
    chunk: int | None = None
    dtype: str = "float32"
    seed: int = 0
    calibration: str | None = None
    on_policy: bool = True
    reference: int = 4096
    answers: int = 10
    matching: Matching = Matching()
    compactor: str | None = None
    place: str | None = None
    system: str | None = None


def corpus_of(place: Place, data: str | Path) -> tuple[str, list[int]]:
    """Return a corpus and its ids. Documents are joined with an empty line between them."""
    texts = []
    for document in documents_of(find_sources([data])):
        content = document.content
        texts.append(content if isinstance(content, str) else render(place.tokenizer, content, document.origin))
    text = "\n\n".join(texts)
    if not text.strip():
        raise ConfigError(f"{data} holds no text: give --data another file")
    return text, place.read(text)


def compact(model: str, data: str, out: str, options: CompactOptions) -> CartridgeConfig:
    """Write a cartridge of a corpus, print one line, and return its config.

    Args:
        model: folder of the base model.
        data: text or JSONL file, or a folder of them.
        out: folder to write.
        options: what to do.
    """
    began = time.monotonic()
    check_new(out)
    base = base_of(model)
    compactor = None
    if options.method == "still":
        if options.compactor is None:
            raise ConfigError("--method still needs a compactor: give --compactor, or train one: kvpop train-compactor")
        compactor = read_compactor(options.compactor, model, options.slots)
        options = replace(options, slots=compactor.config.slots)
    slots, budgets = slots_of(options, base)
    if slots != options.slots:
        reason = f"a multiple of {BLOCK_SLOTS}"
        reason += "" if options.calibration is None else ", for the head with the largest share"
        print(f"{options.slots} slots become {slots}, {reason}")
    # cheap checks come before the model is loaded
    place = place_of(load_tokenizer(model), options.place, options.system)
    text, corpus = corpus_of(place, data)
    check_length(place, len(corpus), slots, options.method, positions_of(read_model_config(model)))
    loaded = load(model, options.dtype)
    if compactor is None:
        layers, position = layers_of(loaded, place, corpus, slots, budgets, options)
    else:
        tokens = place.around(corpus)
        layers, position = compacted(loaded, compactor.module, tokens), len(tokens)
    arguments = {name: value for name, value in vars(options).items() if name != "matching"}
    provenance = {
        "kvpop": __version__,
        "corpus": {"sha256": hashlib.sha256(text.encode()).hexdigest(), "tokens": len(corpus)},
        "arguments": arguments | {"matching": vars(options.matching)},
    } | ({"compactor": {"sha256": compactor.digest}} if compactor else {})
    method = "last" if options.method == "truncation" else options.method
    config = CartridgeConfig(
        **base, slots=slots, next_position=position, method=method, provenance=provenance, head=place.head
    )
    write_cartridge(out, config, layers)
    size = sum(path.stat().st_size for path in Path(out).iterdir())
    print(f"{slots} slots for {len(corpus)} tokens, {size} bytes, {time.monotonic() - began:.0f} s: wrote {out}")
    return config


def check_length(place: Place, corpus: int, slots: int, method: str, positions: int | None) -> None:
    """Check that a corpus is long enough for its slots and short enough for the model.

    Args:
        place: where the corpus stands.
        corpus: its tokens.
        slots: P.
        method: one of METHODS, or ``truncation``.
        positions: positions of the model, or None.
    """
    tokens = len(place.around(range(corpus)))
    if len(place.head) >= slots:
        raise ConfigError(
            f"the chat has {len(place.head)} tokens before the corpus, and {slots} slots are no more: raise --slots"
        )
    # its reference tokens must fit after the corpus
    if method == "attention-matching":
        room_after(place, corpus, positions, REPEAT)
    elif tokens < slots:
        possible = tokens // BLOCK_SLOTS * BLOCK_SLOTS
        advice = f"lower --slots to {possible}" if possible else f"give at least {BLOCK_SLOTS} tokens"
        advice = f"give at least {slots} tokens, or a compactor to fewer slots" if method == "still" else advice
        raise ConfigError(f"the corpus has {tokens} tokens, fewer than {slots} slots: {advice}")
    elif positions is not None and slots > positions:
        raise ConfigError(f"the model has {positions} positions: lower --slots")
    elif method == "still" and positions is not None and tokens >= positions:
        raise ConfigError(
            f"the model has {positions} positions, too few for {tokens} tokens and any after them: cut the corpus"
        )


def slots_of(options: CompactOptions, base: dict) -> tuple[int, torch.Tensor]:
    """Return P, a multiple of 64, and the slots of each head ``[L, H]``, for a model (:func:`base_of`)."""
    layers, heads = base["num_layers"], base["num_kv_heads"]
    equal = -(-options.slots // BLOCK_SLOTS) * BLOCK_SLOTS
    if options.calibration is None:
        return equal, torch.full((layers, heads), equal)
    if options.method != "attention-matching":
        raise ConfigError("--kv-calibration shares slots that are fitted, by --method attention-matching: leave it out")
    calibration, roles = read_calibration(options.calibration), Retention(equal, 0, 0)
    calibration.check_model(SimpleNamespace(**base), options.calibration)
    if calibration.shares is None:
        return equal, torch.full((layers, heads), equal)
    budgets = proportional(calibration.shares, roles, layers, heads).long().clamp_min(1)
    largest = -(-int(budgets.max()) // BLOCK_SLOTS) * BLOCK_SLOTS
    if largest > MAX_BUDGET:
        raise ConfigError(f"a head would have {largest} slots, more than {MAX_BUDGET}: lower --slots")
    return largest, budgets


def load(model: str, dtype: str) -> torch.nn.Module:
    """Return the model for inference on the default device."""
    loaded = load_model(model, getattr(torch, dtype)).to(default_device()).eval().requires_grad_(False)
    check_rotation(loaded, base_of(model)["rope"])
    return loaded


@torch.no_grad()
def compacted(model, compactor: Compactor, tokens: list[int]) -> list[Layer]:
    """Return the layers that a compactor makes of a corpus, in one prefill and one pass."""
    return compactor.to(next(model.parameters()).device)(read_corpus(model, tokens))


def layers_of(
    model, place: Place, corpus: Sequence[int], slots: int, budgets: torch.Tensor, options: CompactOptions
) -> tuple[list[Layer], int]:
    """Return a cartridge's layers and its next position.

    Args:
        model: the loaded model.
        place: where the corpus stands.
        corpus: its ids.
        slots: P.
        budgets: ``[L, H]``, slots of each head.
        options: what to do.
    """
    positions, tokens = positions_of(model.config), place.around(corpus)
    if options.method != "attention-matching":
        # the last tokens still follow the head, as in a chat that is cut
        part = tokens[:slots] if options.method == "first" else place.head + tokens[len(place.head) - slots :]
        return [(k, v, None) for k, v in read_corpus(model, part)], slots
    size = options.chunk or len(corpus)
    ends = [len(place.head) + min(a + size, len(corpus)) for a in range(0, len(corpus), size)]
    ends[-1] = len(tokens)  # the first chunk has what is before the corpus, the last one what is after it
    chunks = list(zip([0, *ends], ends, strict=False))
    caches = read_corpus(model, tokens)
    if options.queries == "self-study":
        settings = {"answers": options.answers, "seed": options.seed}
        with progress(options.answers, "answers") as tick:
            reference = self_study(model, place, corpus, caches, positions, **settings, done=lambda: tick(1))
    else:
        reference = repeat_prefill(place, corpus, chunks, positions)
    with progress(len(budgets), "layers") as tick:
        fitting = Fitting(
            caches,
            reference,
            budgets,
            chunks,
            options.matching,
            on_policy=options.on_policy,
            queries=options.reference,
            seed=options.seed,
            slots=slots,
            done=lambda: tick(1),
        )
        return fit(model, fitting, reference, len(tokens)), len(tokens)
