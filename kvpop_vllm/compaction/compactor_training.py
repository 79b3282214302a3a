"""`kvpop train-compactor`: training of a STILL compactor on windows of many texts.

Bad input raises a :class:`~kvpop_vllm.config.ConfigError` that names what to change.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from kvpop_vllm import __version__
from kvpop_vllm.cache.pages import BLOCK_SLOTS
from kvpop_vllm.compaction.base_model import base_of
from kvpop_vllm.compaction.cache_attention import Recorder, log_probabilities
from kvpop_vllm.compaction.cartridge import Layer
from kvpop_vllm.compaction.compactor_files import CONFIG_NAME, TENSORS_NAME, CompactorConfig, write_compactor
from kvpop_vllm.compaction.reference import read_corpus
from kvpop_vllm.compaction.run import load
from kvpop_vllm.compaction.still import WIDTH, Compactor
from kvpop_vllm.compaction.trained_cache import Packed
from kvpop_vllm.config import ConfigError
from kvpop_vllm.distill.data import PackedTokens
from kvpop_vllm.distill.run import load_tokenizer
from kvpop_vllm.distill.training_loop import CosineLoop, check_same_run, write_next_to_run
from kvpop_vllm.files import remove
from kvpop_vllm.hub import name_of
from kvpop_vllm.model_shape import positions_of, read_model_config, vocabulary_of

OWN = 4
"""Tokens of a window for each token after it."""


@dataclass(frozen=True)
class StillOptions:
    """Options of ``kvpop train-compactor``.

    Attributes:
        slots: P.
        window: most tokens of a window. Those after it are a quarter as many.
        steps: optimiser steps. 0 writes the start.
        batch: windows of a step.
        lr: peak of the learning rate.
        kl: weight of the KL divergence from the teacher.
        ce: weight of the cross-entropy to the text.
        dtype: dtype of the model. The compactor is float32 while it is trained.
        seed: seed of the windows.
    """

    slots: int = 256
    window: int = 1024
    steps: int = 1000
    batch: int = 4
    lr: float = 1e-4
    kl: float = 1.0
    ce: float = 0.1
    dtype: str = "float32"
    seed: int = 0

    @property
    def tokens_after(self) -> int:
        """Tokens after a window."""
        return self.window // OWN

    def check(self) -> None:
        """Check the numbers."""
        if not 0 < self.lr < math.inf:
            raise ConfigError(f"--lr {self.lr} is not a number above 0: give 0.0001, or less if the loss rises")
        if not (0 <= self.kl < math.inf and 0 <= self.ce < math.inf and self.kl + self.ce > 0):
            raise ConfigError(f"--kl {self.kl} and --ce {self.ce} are weights: give numbers from 0 on, one above 0")
        if self.window < 2 * self.slots:
            raise ConfigError(f"half a window must hold as many tokens as slots: raise --window to {2 * self.slots}")


def example_of(row: torch.Tensor, number: int, options: StillOptions) -> tuple[torch.Tensor, int]:
    """Return the tokens of one example, a window and what is after it, and T, the tokens of its window.

    A window has half of ``options.window`` tokens or more. After an even one its text goes on. After an odd one a
    passage of the window is repeated, which shows what can be found in the slots.

    Args:
        row: ids ``[window + own]``.
        number: number of the example. With the seed it decides how the row is cut.
        options: see :class:`StillOptions`.
    """
    draws = torch.Generator().manual_seed(options.seed * 1_000_003 + number)
    size = int(torch.randint(options.window // 2, options.window + 1, (), generator=draws))
    # every window ends at the same place of its row, so that the row goes on after it
    tokens = row[options.window - size :]
    if number % 2:
        first = int(torch.randint(size - options.tokens_after + 1, (), generator=draws))
        tokens = torch.cat([tokens[:size], tokens[first : first + options.tokens_after]])
    return tokens, size


def still_losses(
    model, compactor: Callable[[list], Sequence[Layer]], tokens: torch.Tensor, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the KL divergence from the full context to the slots, and the cross-entropy, in nats per token.

    The teacher reads all tokens in one pass, whose keys and values of the window are compacted. The student reads the
    tokens after the window, from position T on. The first of them is predicted by the window and does not count.

    Args:
        model: the frozen model, from :func:`kvpop_vllm.model_hook.load_model`.
        compactor: a :class:`~kvpop_vllm.compaction.still.Compactor`, or another function of the same arguments.
        tokens: ids ``[T + R]``.
        size: T.
    """
    device = next(model.parameters()).device
    tokens, positions = tokens.to(device), torch.arange(len(tokens), device=device)
    recorder = Recorder()
    with torch.no_grad():
        # the last token has nothing to predict
        teacher = log_probabilities(model, tokens[:-1], positions[:-1], recorder, slice(size, None))
    layers = compactor([(k[:, :size], v[:, :size]) for k, v in recorder.layers])
    student_attend = Packed(layers, [len(tokens) - 1 - size])
    student = log_probabilities(model, tokens[size:-1], positions[size:-1], student_attend, slice(None))
    kl = (teacher.exp() * (teacher - student)).sum(-1).mean()
    return kl, -student.gather(1, tokens[size + 1 :, None]).mean()


class StillTrainer(CosineLoop):
    """Training of a compactor.

    Args:
        model: the frozen model.
        compactor: the compactor, at its start.
        rows: rows of ids ``[window + own]``, for any number from 0 on.
        folder: folder of checkpoints and metrics.
        options: see :class:`StillOptions`.
        how_often: ``save_every`` and ``quiet``. See :class:`kvpop_vllm.distill.training_loop.Loop`.
    """

    def __init__(self, model, compactor: Compactor, rows, folder: Path, options: StillOptions, **how_often):
        super().__init__(compactor, folder, options.steps, options.lr, **how_often)
        self.model, self.rows, self.options = model, rows, options

    def backward(self, step: int) -> dict[str, float]:
        """Add the gradient of a step's windows, and return ``loss``, ``kl`` and ``ce``, means of the windows."""
        options, total = self.options, torch.zeros(3)
        for number in range(step * options.batch, (step + 1) * options.batch):
            kl, ce = still_losses(self.model, self.trained, *example_of(self.rows[number], number, options))
            loss = options.kl * kl + options.ce * ce
            # window by window: the graph of one is as large as its teacher's activations
            (loss / options.batch).backward()
            total += torch.stack([loss, kl, ce]).detach().cpu() / options.batch
        return dict(zip(("loss", "kl", "ce"), total.tolist(), strict=True))


def train_compactor(
    model: str,
    data: Sequence[str],
    out: str,
    options: StillOptions,
    *,
    save_every: int = 50,
) -> CompactorConfig:
    """Start or continue the training of a compactor, write it, print one line, and return its config.

    Args:
        model: folder of the base model.
        data: files and folders of text. As in distillation, a tenth of the documents is held back.
        out: folder to write. ``out/run`` holds tokens, checkpoints and metrics.
        options: what to do.
        save_every: optimiser steps between checkpoints.

    Raises:
        TrainingError: training cannot go on.
    """
    began = time.monotonic()
    slots = -(-options.slots // BLOCK_SLOTS) * BLOCK_SLOTS
    options = replace(options, slots=slots)
    options.check()
    base = base_of(model)
    positions = positions_of(read_model_config(model))
    if positions is not None and options.window + options.tokens_after > positions:
        raise ConfigError(f"the model has {positions} positions: lower --window to {positions * OWN // (OWN + 1)}")
    run = Path(out) / "run"
    settings = {"seed": options.seed, "vocab_size": vocabulary_of(model), "folder": run}
    rows = PackedTokens(data, load_tokenizer(model), options.window + options.tokens_after, **settings)
    provenance = {"kvpop": __version__, "data": rows.fingerprint, "arguments": asdict(options)}
    config = CompactorConfig(**base, slots=slots, width=WIDTH, provenance=provenance)
    run_settings = {"model": name_of(Path(model).resolve())} | asdict(options) | {"data": rows.fingerprint}
    new = not Path(out).exists()
    check_same_run(Path(out), run_settings)
    try:
        # the first row reads the text, so that bad text is refused before the model loads
        first = rows[0][: options.window].tolist()
    except ConfigError as error:
        if new:  # so that the mended command finds no other run there
            remove(Path(out))
        raise ConfigError(str(error).replace("--length", "--window")) from None

    loaded = load(model, options.dtype)
    compactor = config.build().to(next(loaded.parameters()).device)
    compactor.measure(read_corpus(loaded, first))
    last = StillTrainer(loaded, compactor, rows, run, options, save_every=save_every).run()
    write_next_to_run(Path(out), lambda draft: write_compactor(draft, config, compactor), TENSORS_NAME, CONFIG_NAME)
    loss = f"loss {last['loss']:.4f}, " if last else ""
    size = (Path(out) / TENSORS_NAME).stat().st_size
    print(f"a compactor to {slots} slots, {loss}{size} bytes, {time.monotonic() - began:.0f} s: wrote {out}")
    return config
