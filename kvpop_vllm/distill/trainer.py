"""Training of scorers, gates and the base model, for one process or many under torchrun with FSDP2."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

from kvpop_vllm.config import ConfigError, check_head_shares
from kvpop_vllm.distill.checkpoints import Checkpoints, barrier, is_main
from kvpop_vllm.distill.decays import fit_decays
from kvpop_vllm.distill.recipe import FORMER_NAMES, Recipe
from kvpop_vllm.distill.sharding import Process, empty_model, policy_of, read_weights, shard_layers
from kvpop_vllm.distill.student import Student, Teacher
from kvpop_vllm.distill.training_loop import Loop, check_settings, cosine, only_run_in, read_settings
from kvpop_vllm.files import replacing, write_whole
from kvpop_vllm.hub import name_of
from kvpop_vllm.kernels.transfers import to_device
from kvpop_vllm.model_hook import borrow_channel, check_positions, load_model, show_hidden_states
from kvpop_vllm.model_shape import BORROWED, borrows_channel, folder_sizes
from kvpop_vllm.scorers import Decay, ScorerConfig, build, make_config
from kvpop_vllm.scorers.base import log_gamma
from kvpop_vllm.scorers.checkpoint import CONFIG_NAME, read_scorer, write_scorer

NUMERICS = 2
"""Version of how a run in mixed precision computes: 1 was torch's autocast, 2 is a bfloat16 copy of each parameter."""


@dataclasses.dataclass(frozen=True)
class Validation:
    """Rows that are not trained on, and how often they are judged.

    Attributes:
        every: optimiser steps from one time to the next; the last step is followed by one too.
        rows: ``[S]`` tokens each, the same in all processes.
        prompts: number of tokens of each row's prompt.
    """

    every: int
    rows: list[torch.Tensor]
    prompts: list[int]


class Trainer(Loop):
    """One run of a recipe in a folder; the same call continues a run that was stopped.

    Args:
        model: folder of the base model.
        recipe: see :class:`Recipe`.
        out: folder of the results; ``out/run`` holds checkpoints and metrics.
        rows: ``rows[j]`` is row j of all processes, ``[S]`` int64; ``rows.fingerprint`` changes with them;
            ``rows.in_other_order()`` gives those that decays are fitted on.
        teacher: see :data:`Teacher`; needed if the recipe has a KL.
        process: see :class:`Process`.
        save_every: optimiser steps between checkpoints.
        validation: held-out rows that are judged meanwhile, or None.
        loop: ``quiet`` and ``track``; see :class:`Loop`.

    Raises:
        ConfigError: the batch cannot be divided among the processes, or the folder holds another run.
    """

    def __init__(
        self,
        model: str | Path,
        recipe: Recipe,
        out: str | Path,
        rows,
        *,
        teacher: Teacher | None = None,
        process: Process | None = None,
        save_every: int = 50,
        validation: Validation | None = None,
        **loop,
    ):
        self.recipe, self.out, self.rows, self.teacher = recipe, Path(out), rows, teacher
        self.validation = validation
        self.process = process or Process()
        if recipe.batch % self.process.world:
            raise ConfigError(
                f"batch {recipe.batch} cannot be shared by {self.process.world} processes evenly: change one"
            )
        if (share := recipe.batch // self.process.world) % recipe.micro_batch:
            raise ConfigError(
                f"a process has {share} rows of a batch, which are no multiple of --micro-batch {recipe.micro_batch}: change one"
            )
        # locked, since another run could write its settings between the look and ours
        with only_run_in(self.out / "run"):
            self._check_same_run(str(Path(model).resolve()))
        torch.manual_seed(recipe.seed)  # new scorers are equal in all processes
        options = {"source": "the recipe"} | recipe.scorer_options()
        sizes = folder_sizes(model)
        if recipe.shares is not None:
            check_head_shares(recipe.shares, sizes["num_layers"], sizes["num_kv_heads"], "the recipe")
        self.config = make_config(sizes, **options) if recipe.has_scorers else None
        self.student = self._student(model)
        loop |= {"clip": recipe.clip, "save_every": save_every}
        super().__init__(self.student, self._optimiser(), self.out / "run", recipe.steps, **loop)

    def _check_same_run(self, model: str) -> None:
        """Check that the folder holds nothing but this run, because a checkpoint found there is continued.

        Raises:
            ConfigError: the folder holds a run with other settings, or other results.
        """
        path = self.out / "run" / "run.json"
        started = bool(Checkpoints(path.parent).steps())
        for name in () if started else ("kvpop_config.json", "model"):
            if (self.out / name).exists():
                raise ConfigError(
                    f"{self.out} holds {name} of something else, which would be overwritten: choose another --out"
                )
        settings = json.loads(
            json.dumps({"model": name_of(model)} | self.recipe.to_json() | {"data": self.rows.fingerprint})
        )
        if path.exists() and started:
            # options that are newer than a run have their default there
            read = {FORMER_NAMES.get(name, name): value for name, value in read_settings(path).items()}
            settings_before = self.recipe.defaults() | read
            if "data" not in settings_before:
                raise ConfigError(
                    f"{self.out} holds a run of an older version, which shuffled text in another order: choose another"
                    " --out, or go on with that version"
                )
            if self._mixed and settings_before.get("numerics", 1) != NUMERICS:
                raise ConfigError(
                    f"{self.out} holds a run of another version, which computed in bfloat16 in another way: choose another"
                    " --out, or go on with that version"
                )
            # the data last, because it depends on some of the others
            check_settings(
                self.out, {name: settings_before.get(name) for name in settings} | {"data": settings["data"]}, settings
            )
            if settings_before["data"] != settings["data"]:
                raise ConfigError(
                    "the data is not what the checkpoint was made with (files, tokenizer, length, split or seed have"
                    " changed): restore it or start another run"
                )
        elif is_main():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(settings | {"numerics": NUMERICS}, indent=1))
        barrier()

    @property
    def _mixed(self) -> bool:
        """Whether parameters in float32 are computed with in bfloat16."""
        return self.recipe.trains_base and self.recipe.dtype == "bfloat16"

    def _student(self, model) -> Student:
        """Return the model with frozen parameters in the recipe's dtype and trained ones in float32.

        Trained parameters are computed with in the recipe's dtype, from copies of one layer after another. That and
        what several processes share are FSDP's.
        """
        recipe, device = self.recipe, self.process.device
        if borrows_channel(model):
            raise ConfigError(
                f"{model} gives up a query channel (DMS), which training does not do: give --model the one that it was made of"
            )
        mixed = self._mixed
        sharded = mixed or self.process.world > 1
        base = self._base(model, sharded)
        if recipe.moves_rows:
            check_positions(base, recipe.positions)
        if recipe.trains_gates:
            show_hidden_states(base)
        if recipe.gate_reads == "query":
            borrow_channel(base)
        base.requires_grad_(recipe.trains_base).train(recipe.distils)
        if recipe.activation_checkpointing and recipe.distils:
            base.gradient_checkpointing_enable({"use_reentrant": False})
        sizes = recipe.scorer_sizes()
        scorers = [build(self.config, **sizes) for _ in range(self.config.num_layers)] if self.config else []
        student = Student(base, scorers, recipe)
        if not sharded:
            return student.to(device)
        mesh, policy = self.process.mesh, policy_of(mixed)
        shard_layers(base, mesh, policy)
        for scorer in student.scorers:
            fully_shard(scorer, mesh=mesh)
        # the teacher's logits go into the root and stay as they are
        fully_shard(student, mesh=mesh, mp_policy=dataclasses.replace(policy, cast_forward_inputs=False))
        register_fsdp_forward_method(student, "read")
        if any(parameter.is_meta for parameter in base.parameters()):
            read_weights(base, model, device)
        return student

    def _base(self, model, sharded: bool) -> torch.nn.Module:
        """Return the base model; one that is sharded has no weights yet, if they can be read by shards."""
        recipe = self.recipe
        dtype = torch.float32 if recipe.trains_base else getattr(torch, recipe.dtype)
        base = empty_model(model, dtype, recipe.distils) if sharded else None
        return load_model(model, dtype, recipe.distils) if base is None else base

    def _optimiser(self) -> torch.optim.Optimizer:
        recipe = self.recipe
        groups = [{"params": list(self.student.scorers.parameters()), "lr": recipe.lr_new, "new": True}]
        if recipe.trains_base:
            groups.append({"params": list(self.student.base.parameters()), "lr": recipe.lr_base, "new": False})
        groups = [g for g in groups if g["params"]]
        return torch.optim.AdamW(groups, betas=(recipe.beta1, recipe.beta2), weight_decay=recipe.weight_decay)

    def rate(self, step: int, peak: float, end: float | None) -> float:
        """Return a learning rate (KVpop Table 3).

        It is that of :func:`cosine`. Without an end it is constant.
        """
        return peak if end is None else cosine(step, self.recipe.steps, self.recipe.warmup, peak, end)

    def run(self) -> dict[str, float]:
        """Train as :meth:`Loop.run`; a process that is alone then leaves the group that it has joined for this."""
        try:
            return super().run()
        finally:
            self.process.leave_own()

    def finish(self, last: dict[str, float]) -> dict[str, float]:
        """Fit decays if asked, write what was trained, and return the metrics, with ``lost_mass`` of fitted decays."""
        config, decays = self.config, None
        if self.recipe.has_fitted_decays:
            config, decays, lost = self._fitted()
            last = last | {"lost_mass": lost}
        self._export(config, decays)
        return last

    def _fitted(self) -> tuple[ScorerConfig, torch.Tensor, float]:
        """Fit the decays and write ``decays.json``.

        Returns:
            The scorers' config with the range of fitted decays, the decays' parameter, and the lost mass.
        """
        decay, shuffled = Decay(self.recipe.decay_step, *self.recipe.fitted_range), self.rows.in_other_order()
        rows = [shuffled[row] for row in range(self.recipe.fit_decay_rows)]
        prompts = [0 if self.recipe.pack else shuffled.prompt_length(row) for row in range(len(rows))]
        logits, lost = fit_decays(self.student, rows, decay, prompts)
        if is_main():
            decays = torch.stack([log_gamma(layer, decay) for layer in logits]).exp()
            notes = {"lost_mass": lost, "decays": [[round(g, 6) for g in layer] for layer in decays.tolist()]}
            write_whole(self.out / "run" / "decays.json", json.dumps(notes) + "\n")
        return dataclasses.replace(self.config, decay=decay), logits, lost

    def notes(self) -> dict:
        """Return the place in a stream of rows, if rows are streamed."""
        return {"rows": self.rows.state()} if hasattr(self.rows, "state") else {}

    def restore(self, notes: dict) -> None:
        """Take up the place in a stream of rows."""
        if "rows" in notes:
            self.rows.restore(notes["rows"])

    def rates(self, step: int) -> list[float]:
        """Return the learning rate of each group of parameters in a step."""
        recipe = self.recipe
        rates = {True: (recipe.lr_new, recipe.lr_new_end), False: (recipe.lr_base, recipe.lr_base_end)}
        return [self.rate(step, *rates[group["new"]]) for group in self.optimiser.param_groups]

    def backward(self, step: int) -> dict[str, torch.Tensor]:
        """Add the gradient of a step's rows, and return ``loss`` and its parts, means of the rows.

        Each pass's gradients are added to those of the shards, so that no process holds a whole model's.
        """
        recipe, process = self.recipe, self.process
        rows = recipe.micro_batch
        passes = recipe.batch // process.world // rows
        total: dict[str, torch.Tensor] = {}
        for i in range(passes):
            # a step has the same rows for any number of processes
            row = step * recipe.batch + (i * process.world + process.rank) * rows
            for name, value in self.one_pass(row, passes).items():
                total[name] = total.get(name, 0.0) + value / passes
        return self._mean(total)

    def one_pass(self, row: int, passes: int) -> dict[str, torch.Tensor]:
        """Add the gradient of a micro-batch that begins with ``row``, one of ``passes``; return ``loss`` and its parts."""
        recipe = self.recipe
        tokens = to_device(torch.stack([self.rows[row + i] for i in range(recipe.micro_batch)]), self.process.device)
        self.tokens += tokens.numel() * self.process.world
        prompt = 0 if recipe.pack else self.rows.prompt_length(row)
        top = None if self.teacher is None else self._targets(tokens, row)  # before the model has gathered anything
        loss, losses = self.student(tokens, row, top, prompt)
        (loss / passes).backward()
        return {name: value.double() for name, value in ({"loss": loss.detach()} | losses).items()}

    def judge(self, step: int) -> dict[str, float]:
        """Return ``validation_loss`` and its parts after ``step`` steps, means of the held-out rows, if they are due.

        Their parts are those of training and ``accuracy``, see :meth:`Student.forward`. No process judges a row of
        another one, and each has as many passes as the others.
        """
        validation = self.validation
        if validation is None or (step % validation.every and step != self.recipe.steps):
            return {}
        process, count = self.process, len(validation.rows)
        self.student.eval()
        total: dict[str, torch.Tensor] = {}
        for first in range(0, count, process.world):
            # without a row of its own a process judges the last one with weight 0: a sharded model needs all processes
            row = min(first + process.rank, count - 1)
            weight = float(first + process.rank < count)
            for name, value in self._judged(validation.rows[row], row, validation.prompts[row], step).items():
                total[name] = total.get(name, 0.0) + weight * value * process.world / count
        self.student.train()
        self.student.base.train(self.recipe.distils)
        return {f"validation_{name}": value for name, value in self.numbers(self._mean(total)).items()}

    @torch.no_grad()
    def _judged(self, tokens: torch.Tensor, row: int, prompt: int, step: int) -> dict[str, torch.Tensor]:
        """Return loss and parts of a held-out row, the first of which has number 0."""
        tokens = to_device(tokens.unsqueeze(0), self.process.device)
        top = None if self.teacher is None else self._targets(tokens, row)
        loss, losses = self.student(tokens, row, top, prompt, held_out_at=step - 1)
        if isinstance(self.student, FSDPModule):
            self.student.reshard()  # which only a backward pass does by itself
        return {name: value.double() for name, value in ({"loss": loss} | losses).items()}

    def _targets(self, tokens: torch.Tensor, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the teacher's top logits of a micro-batch, and their indices."""
        tops = [self.teacher(tokens[i : i + 1], row + i)[:2] for i in range(len(tokens))]
        return tops[0] if len(tops) == 1 else tuple(map(torch.cat, zip(*tops, strict=True)))

    def _mean(self, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if self.process.world == 1:
            return values
        stacked = torch.stack(list(values.values()))
        dist.all_reduce(stacked)
        return dict(zip(values, stacked / self.process.world, strict=True))

    def _export(self, config: ScorerConfig | None, decays: torch.Tensor | None) -> None:
        """Write the adapter folder and, if the base model was trained, its folder.

        Args:
            config: config of the scorers, None if there are none.
            decays: fitted decays that replace the trained ones, or None.
        """
        # a frozen base would be gathered into the memory of each host
        options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
        state = get_model_state_dict(self.student, options=options)
        if is_main():
            if self.recipe.trains_base:
                prefix, dtype, base = "base.", getattr(torch, self.recipe.dtype), self.student.base
                tensors = {n[len(prefix) :]: t.to(dtype) for n, t in state.items() if n.startswith(prefix)}
                # the same tensor as the embeddings, which a file must not hold twice
                if base.config.tie_word_embeddings:
                    tensors.pop("lm_head.weight", None)
                # training runs without the model's cache, and generation with it
                base.config.dtype, base.config.use_cache = dtype, True
                if self.recipe.gate_reads == "query":
                    setattr(base.config, BORROWED, True)
                with replacing(self.out / "model") as draft:
                    base.save_pretrained(draft, state_dict=tensors)
                base.config.use_cache = False
            if config:
                layers = [self._tensors(state, i) for i in range(config.num_layers)]
                if decays is not None:
                    layers = [tensors | {"decay_logit": d} for tensors, d in zip(layers, decays.unbind(), strict=True)]
                self._write_scorers(config, layers)
        barrier()

    def _write_scorers(self, config: ScorerConfig, layers: list[dict[str, torch.Tensor]]) -> None:
        """Write the adapter folder, unless the same scorers are there: since then shares may have been measured for them."""
        if (self.out / CONFIG_NAME).exists():
            previous, tensors = read_scorer(self.out)
            same = all(torch.equal(a[name], b[name]) for a, b in zip(layers, tensors, strict=True) for name in a)
            if same and dataclasses.replace(previous, shares=config.shares) == config:
                return
        write_scorer(self.out, config, layers)

    @staticmethod
    def _tensors(state, layer):
        prefix = f"scorers.{layer}.scorer."
        return {name[len(prefix) :]: t.float().contiguous() for name, t in state.items() if name.startswith(prefix)}
