"""Train a small model that reasons in long written steps: 1.4M parameters, on problems of `kvpop eval --task reasoning`.

    python examples/reasoner/train.py runs/reasoner --threads 1

Run the same command again to continue an interrupted training. The folder then holds the model with its tokenizer.
Problems grow with training, from a few steps to the size that is tested.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import Dataset, SequentialSampler
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

from kvpop_vllm.evaluation.reasoning import KINDS, SEEDS, WORDS, judge, make_problem

SPECIAL = "<pad>", "<s>", "</s>"
LEAST = 2
"""Steps of the smallest problems."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per word of the problems."""
    vocabulary = {word: i for i, word in enumerate((*SPECIAL, *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = dict(zip(("pad_token", "bos_token", "eos_token"), (SPECIAL[0], SPECIAL[1], "end"), strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


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
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


class Curriculum(Dataset):
    """Batches of problems of one kind and size; the largest size grows over the first part of training.

    Args:
        tokenizer: of :func:`make_tokenizer`.
        kinds: kinds of problems, drawn for each batch.
        batches: number of batches.
        tokens: maximum tokens of a batch.
        grows: share of the batches over which the largest size grows.
    """

    def __init__(self, tokenizer, kinds: list[str], batches: int, tokens: int, grows: float):
        self.tokenizer, self.kinds, self.batches, self.tokens, self.grows = tokenizer, kinds, batches, tokens, grows

    def __len__(self) -> int:
        return self.batches

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return ``input_ids`` and ``labels`` ``[rows, S]``; prompts and padding have no labels."""
        draw = random.Random(index)
        kind = draw.choice(self.kinds)
        most = LEAST + (KINDS[kind].size - LEAST) * min(1.0, index / (self.grows * self.batches))
        # half of the batches at the largest size, the others at any size below
        size = round(most if draw.random() < 0.5 else draw.uniform(LEAST, most))
        rows, used = [], 0
        while not rows or used + len(rows[0][0]) <= self.tokens:
            rows.append(self._row(kind, draw.choice(SEEDS["train"]), size))
            used += len(rows[-1][0])
        longest = max(len(ids) for ids, _ in rows)
        pad = self.tokenizer.pad_token_id
        inputs = torch.tensor([ids + [pad] * (longest - len(ids)) for ids, _ in rows])
        labels = [[-100] * n + ids[n:] + [-100] * (longest - len(ids)) for ids, n in rows]
        return {"input_ids": inputs, "labels": torch.tensor(labels)}

    def _row(self, kind: str, seed: int, size: int) -> tuple[list[int], int]:
        problem = make_problem(kind, seed, size)
        prompt, solution = (self.tokenizer(text)["input_ids"] for text in (problem.prompt, problem.solution))
        prompt = [self.tokenizer.bos_token_id, *prompt]
        return prompt + solution, len(prompt)


class InOrder(Trainer):
    """Trainer that takes the batches in order."""

    def _get_train_sampler(self, *args, **kwargs):
        return SequentialSampler(self.train_dataset)


@torch.inference_mode()
def exact(model: LlamaForCausalLM, tokenizer, kind: str, size: int, count: int) -> float:
    """Return the share of validation problems whose answers greedy decoding gets right."""
    problems = [make_problem(kind, SEEDS["validation"][i], size) for i in range(count)]
    tokenizer.padding_side = "left"
    prompts = tokenizer([f"{tokenizer.bos_token} {p.prompt}" for p in problems], return_tensors="pt", padding=True)
    longest = max(len(p.solution.split()) for p in problems) + 8
    out = model.eval().generate(**prompts, max_new_tokens=longest, do_sample=False)
    texts = tokenizer.batch_decode(out[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(judge(p, text).exact for p, text in zip(problems, texts, strict=True)) / count


def main() -> None:
    """Train, or continue, and write the model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--batches", type=int, default=6000)
    parser.add_argument("--tokens", type=int, default=8192, help="of a batch")
    parser.add_argument("--grows", type=float, default=0.6, help="share of training over which problems grow")
    parser.add_argument("--rate", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
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
        save_steps=250,
        save_total_limit=1,
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
        seed=options.seed,
    )
    data = Curriculum(tokenizer, options.kinds, options.batches, options.tokens, options.grows)
    trainer = InOrder(model, arguments, train_dataset=data, data_collator=lambda batches: batches[0])
    trainer.train(resume_from_checkpoint=get_last_checkpoint(arguments.output_dir) if options.folder.exists() else None)
    trainer.save_model(str(options.folder))
    tokenizer.save_pretrained(str(options.folder))
    for kind in options.kinds:
        print(
            f"{kind}: {exact(model, tokenizer, kind, KINDS[kind].size, 32):.2f} of 32 validation problems", flush=True
        )


if __name__ == "__main__":
    main()
