"""Train a small model that reasons in long written steps: 1.7M parameters, on problems of `kvpop eval --task reasoning`.

    python examples/reasoner/train.py runs/reasoner --threads 2 --dtype bfloat16

made examples/reasoner/model in an hour on two cores.

Run the same command again to continue an interrupted training. The folder then holds the model with its tokenizer.
Problems grow as they are solved, from a few steps to the size that is tested.
"""

import argparse
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import Dataset, SequentialSampler
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import get_last_checkpoint

from kvpop_vllm.evaluation.examples import prompt_ids
from kvpop_vllm.evaluation.problems import KINDS, SEEDS, WORDS, make_problem

SPECIAL = "<pad>", "<s>", "</s>"
TEMPLATE = "{% for m in messages %}{% if loop.first %}<s> {% endif %}{{ m['content'] }} {% endfor %}"
"""Chat template: the question, then the solution."""
LEAST, FIRST = 2, 3
"""Steps of the smallest problems, and of the largest ones in the beginning."""
GROWS_AT = 0.4
"""Share of solutions without a wrong token, each after right ones, from which problems grow."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per word of the problems."""
    vocabulary = {word: i for i, word in enumerate((*SPECIAL, *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = dict(zip(("pad_token", "bos_token", "eos_token"), (SPECIAL[0], SPECIAL[1], "end"), strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE, **names)


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return a Llama of 4 layers with drawn weights; 8 query heads share 2 KV heads of 32."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            initializer_range=0.07,  # with the default of 0.02 so small a model takes far longer
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},  # names are looked up over 1,300 tokens
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


class Curriculum(TrainerCallback, ExportableState):
    """Sizes of the problems, which grow as the model solves them; saved in the checkpoints.

    The first kind begins alone: what it teaches, above all to look a name up, the others need too.

    Args:
        kinds: kinds of problems.
        sizes: largest size of each kind so far, 0 for a kind that has not begun.
        accuracies: moving average of each kind's share of right solutions.
    """

    def __init__(self, kinds: list[str], sizes: list[float] | None = None, accuracies: list[float] | None = None):
        self.kinds = kinds
        self.sizes = sizes or [float(FIRST)] + [0.0] * (len(kinds) - 1)
        self.accuracies = accuracies or [0.0] * len(kinds)

    def state(self) -> dict:
        """Return what a checkpoint holds."""
        return {"args": {"kinds": self.kinds, "sizes": self.sizes, "accuracies": self.accuracies}, "attributes": {}}

    def draw(self, draw: random.Random) -> tuple[int, int]:
        """Return the number of a kind that has begun, and a size.

        It is the largest so far, or one below, or, once all kinds have begun, any: numbers of late lines, and
        distances, are learned from problems that are too long to be solved yet.
        """
        kind, choice = draw.choice([i for i, size in enumerate(self.sizes) if size]), draw.random()
        largest = round(self.sizes[kind])
        if choice < 0.4:
            return kind, largest
        return kind, draw.randint(LEAST, KINDS[self.kinds[kind]].size if choice < 0.8 and all(self.sizes) else largest)

    def see(self, kind: int, size: int, accuracy: float) -> None:
        """Count a batch; grow its kind's problems if enough solutions of the largest size are right."""
        if size != round(self.sizes[kind]):
            return
        self.accuracies[kind] += 0.1 * (accuracy - self.accuracies[kind])
        if self.accuracies[kind] < GROWS_AT:
            return
        self.sizes[kind] = min(self.sizes[kind] * 1.02 + 0.06, float(KINDS[self.kinds[kind]].size))
        if kind == 0 and self.sizes[0] > FIRST + 1:
            self.sizes = [size or float(FIRST) for size in self.sizes]

    def on_log(self, arguments, state, control, logs=None, **options) -> None:
        """Print sizes and accuracies."""
        columns = zip(self.kinds, self.sizes, self.accuracies, strict=True)
        print("  ".join(f"{kind} {size:.1f} ({right:.3f})" for kind, size, right in columns), flush=True)


class Batches(Dataset):
    """Batches of problems of one kind and size.

    Args:
        tokenizer: of :func:`make_tokenizer`.
        curriculum: draws kinds and sizes.
        batches: number of batches.
        tokens: maximum tokens of a batch.
    """

    def __init__(self, tokenizer, curriculum: Curriculum, batches: int, tokens: int):
        self.tokenizer, self.curriculum, self.batches, self.tokens = tokenizer, curriculum, batches, tokens

    def __len__(self) -> int:
        return self.batches

    def __getitem__(self, index: int) -> dict:
        """Return ``input_ids`` and ``labels`` ``[rows, S]``, kind and size; prompts and padding have no labels."""
        draw = random.Random(index)
        kind, size = self.curriculum.draw(draw)
        rows, used = [], 0
        while not rows or used + len(rows[0][0]) <= self.tokens:
            rows.append(self._row(self.curriculum.kinds[kind], draw.choice(SEEDS["train"]), size))
            used += len(rows[-1][0])
        longest = max(len(ids) for ids, _ in rows)
        pad = self.tokenizer.pad_token_id
        inputs = torch.tensor([ids + [pad] * (longest - len(ids)) for ids, _ in rows])
        labels = [[-100] * n + ids[n:] + [-100] * (longest - len(ids)) for ids, n in rows]
        return {"input_ids": inputs, "labels": torch.tensor(labels), "problems": (kind, size)}

    def _row(self, kind: str, seed: int, size: int) -> tuple[list[int], int]:
        problem = make_problem(kind, seed, size)
        prompt = prompt_ids(self.tokenizer, problem.prompt)
        return prompt + self.tokenizer(problem.solution)["input_ids"], len(prompt)


class CurriculumTrainer(Trainer):
    """Trainer that takes the batches in order and tells the curriculum how many solutions were right."""

    def _get_train_sampler(self, *args, **kwargs):
        return SequentialSampler(self.train_dataset)

    @property
    def curriculum(self) -> Curriculum:
        """The callback, which a continued run restores from its checkpoint."""
        curriculum = next(callback for callback in self.callback_handler.callbacks if isinstance(callback, Curriculum))
        self.train_dataset.curriculum = curriculum
        return curriculum

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Return the mean cross-entropy of the solutions' tokens."""
        kind, size = inputs.pop("problems")
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
        expected = inputs["labels"][:, 1:]
        right = ((outputs.logits[:, :-1].argmax(-1) == expected) | (expected < 0)).all(1)
        self.curriculum.see(kind, size, right.float().mean().item())
        return (loss, outputs) if return_outputs else loss


def main(words: list[str] | None = None) -> None:
    """Train, or continue, and write the model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["ledgers", "programs"])
    parser.add_argument("--batches", type=int, default=8000)
    parser.add_argument("--tokens", type=int, default=2700, help="of a batch")
    parser.add_argument("--rate", type=float, default=1e-3, help="peak learning rate")
    parser.add_argument("--save-every", type=int, default=250, help="batches between checkpoints")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of matrix products")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(words)
    if options.threads:
        torch.set_num_threads(options.threads)
    set_seed(options.seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    arguments = TrainingArguments(
        str(options.folder / "checkpoints"),
        max_steps=options.batches,
        per_device_train_batch_size=1,
        learning_rate=options.rate,
        lr_scheduler_type="warmup_stable_decay",
        lr_scheduler_kwargs={"num_decay_steps": options.batches // 4},
        warmup_steps=100,
        weight_decay=0.05,
        adam_beta2=0.95,
        logging_steps=50,
        save_steps=options.save_every,
        save_total_limit=1,
        use_cpu=not torch.cuda.is_available(),
        bf16=options.dtype == "bfloat16",
        report_to="none",
        restore_callback_states_from_checkpoint=True,
        remove_unused_columns=False,
        disable_tqdm=True,
        seed=options.seed,
    )
    curriculum = Curriculum(options.kinds)
    data = Batches(tokenizer, curriculum, options.batches, options.tokens)
    collate = {"train_dataset": data, "data_collator": lambda batches: batches[0]}
    trainer = CurriculumTrainer(model, arguments, callbacks=[curriculum], **collate)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(arguments.output_dir) if options.folder.exists() else None)
    model.to(torch.bfloat16).save_pretrained(str(options.folder))
    tokenizer.save_pretrained(str(options.folder))


if __name__ == "__main__":
    main()
