"""Draw what KVpop's paper shows of its policy, on the reasoner: Figures 5 to 8 and the targets of Appendix D.3.

    python examples/reasoner/compare.py runs --only kvpop kvpop-immediate dms
    python examples/reasoner/figures.py runs

reads the policies that the first command has trained, runs them on validation problems at one budget, and writes into
runs/figures a figure for each, and figures.md with the numbers:

- figure-5.png: accuracy of the next token on eight held-out problems over the steps of training, with delayed scores and
  with immediate ones;
- figure-6.png: share of heads that hold a word at the end of a solution, by layer and class of word, and of the last 112
  words that could have been evicted;
- figure-7.png: recall of the teacher's retained tokens, by layer and head. Prompts are evicted too there, in which the
  policy was not trained;
- figure-8.png: share of tokens that each head has evicted under DMS, median over problems, where its gates alone decide;
- targets from log-normalisers of the sparse pass and from exact ones: their rank correlation, and how many of the
  long-range tokens they have in common.
"""

import argparse
import functools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from kvpop_vllm.argument_types import positive
from kvpop_vllm.config import ConfigError
from kvpop_vllm.distill.run import load_tokenizer
from kvpop_vllm.distill.sparse_attention import Pass, Sparse, dense_attention
from kvpop_vllm.distill.targets import retention_target
from kvpop_vllm.evaluation.backends import TransformersBackend
from kvpop_vllm.evaluation.output import markdown_table
from kvpop_vllm.evaluation.policies import ResolvedPolicy, learned
from kvpop_vllm.evaluation.problems import KINDS, SEEDS, make_problem
from kvpop_vllm.evaluation.runner import Setting, evaluate
from kvpop_vllm.files import write_figure, write_whole
from kvpop_vllm.model_hook import decoder_of
from kvpop_vllm.roles import Retention
from kvpop_vllm.scorers.checkpoint import CONFIG_NAME

HERE = Path(__file__).parent
LAST = 112
"""Words of the map of single words (KVpop Figure 6)."""
CLASSES = {
    "numbers of lines": lambda word: word.startswith("#"),
    "digits": str.isdigit,
    "names": lambda word: len(word) == 2 and word.isalpha(),
    "+ and =": lambda word: word in "+=",
    "marks": lambda word: word in ":;,",
    "other words": lambda word: True,
}
"""Classes of words, of which the first that fits counts."""


ACCURACY = "validation_accuracy"
"""Measure of held-out rows in a training's metrics."""


class Row(NamedTuple):
    """Problem with its solution.

    Attributes:
        tokens: ``[S]``.
        prompt: tokens of its prompt.
        words: word of each token.
    """

    tokens: torch.Tensor
    prompt: int
    words: list[str]


def class_of(word: str) -> str:
    """Return the class of a word of a solution, of :data:`CLASSES`."""
    return next(name for name, fits in CLASSES.items() if fits(word))


class Trained:
    """Policy that compare.py has trained, with its model and a budget.

    Args:
        folder: its folder.
        setting: length and budget.
        longest: most tokens of a row.

    Raises:
        SystemExit: it is not trained.
    """

    def __init__(self, folder: Path, setting: Setting, longest: int):
        if not (folder / CONFIG_NAME).is_file():
            sys.exit(f"{folder} is not trained: run compare.py {folder.parent} --only {folder.name}")
        self.setting = setting
        self.backend = TransformersBackend(str(folder / "model"), torch.float32, longest)
        self.spec, _ = learned(str(folder), str(folder / "model"))

    def resolve(self, protect: int) -> ResolvedPolicy:
        """Return the policy at the budget with equal shares.

        Args:
            protect: first tokens that are never evicted.
        """
        spec = replace(self.spec, protect=protect, allocator="uniform")
        return self.setting.resolve(spec, self.backend.shape, torch.float32)

    def held(self, row: Row) -> torch.Tensor:
        """Return which words of a solution are held at its end, ``[layers, H, T]`` booleans, without sinks and window."""
        resolved = self.resolve(row.prompt)
        everything = self.backend.held(resolved, row.tokens)
        return everything[..., row.prompt : row.tokens.shape[0] - resolved.roles.window]


def rows_of(kinds: Sequence[str], count: int, tokenizer, size: int | None = None) -> list[Row]:
    """Return validation problems of a size with their solutions, as many of each kind."""
    rows = []
    for problem in (make_problem(kind, seed, size) for seed in SEEDS["validation"][:count] for kind in kinds):
        prompt, tokens = (
            tokenizer(text)["input_ids"] for text in (problem.prompt, f"{problem.prompt} {problem.solution}")
        )
        words = tokenizer.convert_ids_to_tokens(tokens)
        rows.append(Row(torch.tensor(tokens), len(prompt), words))
    return rows


def figure_5(figure, folder: Path) -> list[dict]:
    """Draw the accuracy of held-out problems over steps; return the last one of each policy."""
    lines, axis = [], figure.subplots()
    for name in ("kvpop", "kvpop-immediate"):
        path = folder / name / "run" / "metrics.jsonl"
        records = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
        judged = [record for record in records if ACCURACY in record]
        if not judged:
            sys.exit(
                f"{path} has no {ACCURACY}: remove {folder / name}, its records and calibrations, and train it again"
            )
        steps, accuracies = zip(*((record["step"], record[ACCURACY]) for record in judged), strict=True)
        axis.plot(steps, accuracies, label="immediate scores" if name.endswith("immediate") else "delayed scores")
        lines.append({"policy": name, "step": steps[-1], "accuracy": accuracies[-1]})
    axis.set(xlabel="step", ylabel="accuracy of the next token")
    axis.legend()
    return lines


def figure_6(figure, kvpop: Trained, rows: list[Row]) -> list[dict]:
    """Draw the share of heads that hold a word, by layer and class, and for the last words of the first problem."""
    held_words: dict[str, list[torch.Tensor]] = {name: [] for name in CLASSES}
    maps = []
    for row in rows:
        of_heads = kvpop.held(row).float().mean(1)
        words = row.words[row.prompt :][: of_heads.shape[1]]
        maps.append((words[-LAST:], of_heads[:, -LAST:]))
        for word, of_layers in zip(words, of_heads.T, strict=True):
            held_words[class_of(word)].append(of_layers)
    by_class = {name: torch.stack(values).mean(0) for name, values in held_words.items() if values}
    above, below = figure.subplots(2)
    image = above.imshow(torch.stack(list(by_class.values())).T, aspect="auto", vmin=0, vmax=1)
    figure.colorbar(image, ax=[above, below], label="share of heads that hold a word")
    above.set(xticks=range(len(by_class)), xticklabels=list(by_class), ylabel="layer")
    words, of_heads = maps[0]
    below.imshow(of_heads, aspect="auto", vmin=0, vmax=1)
    below.set_xticks(range(len(words)), words, rotation=90, fontsize=3)
    below.set(ylabel="layer")
    lines = []
    for name, shares in by_class.items():
        of_layers = {f"layer {layer}": share for layer, share in enumerate(shares.tolist())}
        lines.append({"class": name, "words": len(held_words[name]), "held": shares.mean().item()} | of_layers)
    return lines


def figure_7(figure, kvpop: Trained, rows: list[Row]) -> list[dict]:
    """Draw the recall of the teacher's retained tokens, by layer; return its mean and range over heads."""
    runs = [(kvpop.resolve(0), [kvpop.setting])]
    tokens = [row.tokens for row in rows]
    records = evaluate(kvpop.backend.model, tokens, [kvpop.setting.length], runs)
    recalls = torch.tensor([record["teacher_by_layer"] for record in records if "teacher_by_layer" in record]).mean(0)
    axis = figure.subplots()
    axis.boxplot(list(recalls), positions=range(len(recalls)))
    axis.set(xlabel="layer", ylabel="recall of the teacher's tokens", ylim=(0, 1))
    return [
        {"layer": layer, "recall": values.mean().item(), "least": values.min().item(), "most": values.max().item()}
        for layer, values in enumerate(recalls)
    ]


def figure_8(figure, dms: Trained, rows: list[Row]) -> list[dict]:
    """Draw the share of tokens that each head has evicted at the end, median over problems."""
    evicted = torch.stack([1 - dms.held(row).float().mean(-1) for row in rows]).quantile(0.5, 0)
    axis = figure.subplots()
    figure.colorbar(axis.imshow(evicted, vmin=0, vmax=1), label="share of tokens evicted")
    axis.set(xlabel="KV head", ylabel="layer", xticks=range(evicted.shape[1]), yticks=range(len(evicted)))
    return [
        {"layer": layer} | {f"head {head}": share for head, share in enumerate(shares)}
        for layer, shares in enumerate(evicted.tolist())
    ]


@torch.inference_mode()
def sparse_targets(kvpop: Trained, rows: list[Row]) -> list[dict]:
    """Compare targets from log-normalisers of the sparse pass with exact ones (KVpop D.3), by layer."""
    resolved = kvpop.resolve(0)
    heads = slice(0, resolved.model.num_kv_heads)
    device = next(kvpop.backend.model.parameters()).device
    modules = [resolved.policy.module(layer, heads).to(device) for layer in range(resolved.model.num_layers)]
    agreements: dict[int, list[tuple[float, float]]] = {}

    def score(layer, k, v, roles):
        return modules[layer](k, v, window=roles.window), modules[layer].log_gamma()

    def compare(observed: Pass, roles: Retention) -> None:
        exact_lse = dense_attention(observed.q, observed.k, observed.v, observed.scale)[1]
        options = {"window": roles.window, "scale": observed.scale, "groups": "mean"}
        targets = [
            retention_target(observed.q, observed.k, lse, **options)[0, :, roles.sinks : -roles.window]
            for lse in (observed.lse, exact_lse)
        ]
        for of_head in zip(*targets, strict=True):
            ranks = torch.stack([target.argsort().argsort().double() for target in of_head])
            best = [set(target.topk(roles.topk).indices.tolist()) for target in of_head]
            agreement = torch.corrcoef(ranks)[0, 1].item(), len(set.intersection(*best)) / roles.topk
            agreements.setdefault(observed.layer, []).append(agreement)

    for row in rows:
        # as in training, the prompt is never evicted
        window, topk = resolved.roles.window, resolved.roles.topk
        roles = replace(resolved.roles, budget=row.prompt + window + topk, sinks=row.prompt)
        attend = Sparse(score, roles, functools.partial(compare, roles=roles))
        decoder_of(kvpop.backend.model)(input_ids=row.tokens[None].to(device), attend=attend)
    means = {layer: torch.tensor(values).mean(0).tolist() for layer, values in sorted(agreements.items())}
    return [
        {"layer": layer, "rank correlation": correlation, "tokens in common": common}
        for layer, (correlation, common) in means.items()
    ]


def main(words: list[str] | None = None) -> None:
    """Write the figures and the table."""
    from matplotlib.figure import Figure

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder of compare.py")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["programs", "ledgers"])
    parser.add_argument("--rows", type=positive, default=16, help="problems of each kind (default: 16)")
    parser.add_argument("--share", type=positive, default=4, help="a solution's tokens over the budget (default: 4)")
    parser.add_argument("--size", type=positive, help="steps of a problem (default: about 1,000 tokens)")
    options = parser.parse_args(words)
    rows = rows_of(options.kinds, options.rows, load_tokenizer(HERE / "model"), options.size)
    length, longest = min(len(row.tokens) for row in rows), max(len(row.tokens) for row in rows)
    budget = min(len(row.tokens) - row.prompt for row in rows) // options.share
    try:
        kvpop = Trained(options.folder / "kvpop", Setting(length, budget, None, None), longest)
        # with room for all tokens its gates alone decide
        dms = Trained(options.folder / "dms", Setting(longest, longest, None, None), longest)
        kvpop.resolve(0)
    except ConfigError as error:
        sys.exit(str(error))
    drawings: dict[str, Callable] = {
        "figure-5": lambda figure: figure_5(figure, options.folder),
        "figure-6": lambda figure: figure_6(figure, kvpop, rows),
        "figure-7": lambda figure: figure_7(figure, kvpop, rows),
        "figure-8": lambda figure: figure_8(figure, dms, rows),
    }
    out, tables = options.folder / "figures", {}
    out.mkdir(exist_ok=True)
    for name, draw in drawings.items():
        figure = Figure(layout="constrained")
        tables[name] = draw(figure)
        write_figure(out / f"{name}.png", figure)
    tables["sparse and exact targets"] = sparse_targets(kvpop, rows)
    sections = (f"{name}:\n\n{markdown_table(table, tuple(table[0]))}" for name, table in tables.items())
    write_whole(out / "figures.md", "\n".join(sections))
    print(f"{out} holds figures.md and {', '.join(f'{name}.png' for name in drawings)}")


if __name__ == "__main__":
    main()
