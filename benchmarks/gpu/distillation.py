"""Distillation on a GPU: the trainer's steps on models of SmolLM2-135M's and Qwen3-8B's shape, tokens a second and memory.

A step is one row of 8,192 tokens, of 16,384 with Qwen3-8B's shape. With a frozen base only scorers are trained, by the
boundary loss: a KL at the output would not reach them. If the base is trained too, there is a KL to the top 256 tokens of
the initial model, which runs row by row; its pass counts.
"""

import dataclasses
import itertools
import json
import math
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from gpu.clock import milliseconds
from gpu.run import QWEN3_8B
from gpu.sections import Bench, Case, ops_take
from kvpop_vllm.distill.memory import Run, Sizes
from kvpop_vllm.distill.recipe import Recipe
from kvpop_vllm.distill.recipes import PAPER
from kvpop_vllm.distill.run import OnlineTeacher
from kvpop_vllm.distill.sharding import Process
from kvpop_vllm.distill.trainer import Trainer
from kvpop_vllm.model_hook import NAME, config_to_load
from kvpop_vllm.testing import write_tiny_model

CONFIG = LlamaConfig(
    num_hidden_layers=30,
    hidden_size=576,
    intermediate_size=1536,
    num_attention_heads=9,
    num_key_value_heads=3,
    vocab_size=49152,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
)
"""SmolLM2-135M's."""
LENGTH, LONG = 8192, 16384
MARGIN = 0.1
"""Largest difference of the peak memory from the memory model's, as a share."""
OPS = {"delayed_mlstm", "running_topk", "sparse_attention", "future_attention_mass"}
"""Ops with kernels of their own that a step takes."""


def cases(bench: Bench) -> Iterator[Case]:
    """Yield the cases of the section."""
    kinds = {"scorers": False, "scorers and base": True}
    for kind, trains_base in kinds.items():
        yield Case(f"a step is right, {kind}", partial(step_right, trains_base=trains_base))
    for kind, trains_base in kinds.items():
        times, needs = partial(step_times, trains_base=trains_base), (f"a step is right, {kind}",)
        yield Case(f"distillation, {kind}, S {LENGTH}", times, needs)
    yield Case(f"distillation, scorers of Qwen3-8B's shape, S {LONG}", large_step_times, ("a step is right, scorers",))


def step_right(bench: Bench, trains_base: bool) -> Iterator[dict]:
    """Check losses and gradient norms of two steps (one if interpreted) against the reference's, in float32.

    Both run on the same device.
    """
    sizes, shape, steps = dict(length=64, window=[8], topk=[20]), dict(head_dim=32), 2
    if bench.small:
        sizes, shape = dict(length=32, window=[4], topk=[8]), dict(head_dim=16, layers=1, q_heads=2, kv_heads=1)
        steps = 1
    common = dict(batch=1, samples=16, lists=4, listwise=1.0, kl_top=32, dtype="float32", train_base=trains_base)
    recipe, results = dataclasses.replace(PAPER, **sizes, **common), []
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(Path(folder) / "model", "llama", **shape)
        for name, forced in (("triton", "triton" if bench.small else None), ("reference", "reference")):
            with ops_take(forced) as calls:
                trainer = make_trainer(bench, model, recipe, Path(folder) / name, vocab=256)
                results.append([trainer.step(i) for i in range(steps)])
            assert calls >= {(op, name) for op in OPS}, f"steps took the kernels {sorted(calls)}"
    wrong = 0.0
    for step, expected in zip(*results, strict=True):
        assert step.keys() == expected.keys() and ("kl" in step) == trains_base, f"parts {sorted(step)}"
        for name in ("loss", "grad_norm"):
            wrong = max(wrong, abs(step[name] - expected[name]) / abs(expected[name]))
    assert math.isfinite(wrong) and wrong < 0.02, f"losses and gradients differ by {wrong:.3g}: {results}"
    yield bench.row("loss and gradient norm, largest difference", wrong, "of the reference's")


class RandomRows:
    """Random rows ``[length]`` of token ids, the same in every object."""

    fingerprint = "random"

    def __init__(self, length: int, vocab: int):
        self.length, self.vocab = length, vocab

    def __getitem__(self, row: int) -> torch.Tensor:
        """Return a row."""
        return torch.randint(self.vocab, (self.length,), generator=torch.Generator().manual_seed(row))


class RandomTrainer(Trainer):
    """Trainer of a frozen model whose folder has no weights: random ones are made on the device."""

    def _base(self, model, sharded: bool) -> torch.nn.Module:
        config = config_to_load(model, self.recipe.distils)
        with self.process.device:
            base = AutoModelForCausalLM.from_config(
                config, dtype=getattr(torch, self.recipe.dtype), attn_implementation=NAME
            )
        base.config.use_cache = False
        return base.eval()


def make_trainer(
    bench: Bench, model: str | Path, recipe: Recipe, out: Path, vocab: int, kind: type[Trainer] = Trainer
) -> Trainer:
    """Return a trainer, whose steps are taken one by one, with the teacher that its recipe needs."""
    process = Process(device=torch.device(bench.device))
    teacher = OnlineTeacher(model, recipe, process) if recipe.distils else None
    rows = RandomRows(recipe.length, vocab)
    return kind(model, recipe, out, rows, teacher=teacher, process=process, quiet=True)


def step_times(bench: Bench, trains_base: bool) -> Iterator[dict]:
    """Yield the median time of a step of a random model, and the peak memory."""
    recipe = dataclasses.replace(PAPER, length=LENGTH, batch=1, train_base=trains_base)
    with tempfile.TemporaryDirectory() as folder:
        with torch.device(bench.device):
            AutoModelForCausalLM.from_config(CONFIG, dtype=bench.dtype).save_pretrained(Path(folder) / "model")
        torch.cuda.empty_cache()
        trainer = make_trainer(bench, Path(folder) / "model", recipe, Path(folder) / "out", CONFIG.vocab_size)
        yield from _steps_of(bench, trainer, None)


def large_step_times(bench: Bench) -> Iterator[dict]:
    """Yield the same of scorers alone of a random model of Qwen3-8B's shape; memory is next to the memory model's."""
    recipe = dataclasses.replace(PAPER, length=LONG, batch=1, train_base=False)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(QWEN3_8B))
        expected = sum(Run(Sizes.of(folder, recipe), recipe).peak()[1].values())
        vocab = QWEN3_8B["vocab_size"]
        trainer = make_trainer(bench, folder, recipe, Path(folder) / "out", vocab, RandomTrainer)
        yield from _steps_of(bench, trainer, expected)


def _steps_of(bench: Bench, trainer: Trainer, expected: int | None) -> Iterator[dict]:
    """Yield the median time of a step, and the peak memory, next to the bytes that are expected unless that is None."""
    torch.cuda.empty_cache()
    steps, length = itertools.count(), trainer.recipe.length
    torch.cuda.reset_peak_memory_stats()
    value = milliseconds(lambda: trainer.step(next(steps)))
    peak = torch.cuda.max_memory_allocated()
    if expected is not None:
        wrong = abs(peak / expected - 1)
        bench.check(wrong <= MARGIN, f"the peak memory differs by {wrong:.0%} from the memory model's")
    yield bench.row("tokens a second", 1e3 * length / value, "1/s")
    yield bench.row("a step", value, "ms")
    yield bench.row("peak memory", peak / (1 << 30), "GiB", None if expected is None else expected / (1 << 30))
