"""Bound the gain of an mLSTM scorer that reads its kept tokens again, every m tokens, from its present state.

    python benchmarks/read_again.py runs/read-again.jsonl --scorer examples/scorers/reasoner-kvpop --calibration DIR

runs the reasoner on validation problems under masks that are simulated token by token, without a kernel of serving, and
prints the divergence of its output from the dense model's. Once m more tokens have come, each long-range token of a head
gets the score that the memory gives it now. Nothing is trained for that. Two decays are tried: by the age of a token, as the
rule has it, and by the time since its score was last read.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from statistics import fmean

import torch
import torch.nn.functional as F

from kvpop_vllm.argument_types import positive
from kvpop_vllm.distill.run import load_tokenizer
from kvpop_vllm.distill.shares import read_shares
from kvpop_vllm.evaluation.output import format_table
from kvpop_vllm.evaluation.problems import SEEDS, make_problem
from kvpop_vllm.evaluation.statistics import estimate
from kvpop_vllm.kernels import ops
from kvpop_vllm.model_hook import Dense, load_model
from kvpop_vllm.scorers import from_tensors
from kvpop_vllm.scorers.checkpoint import read_scorer
from kvpop_vllm.scorers.mlstm import MLSTMScorer

MODEL = Path(__file__).parents[1] / "examples" / "reasoner" / "model"
KINDS = "programs", "ledgers"
FIRST = 1000
"""First validation problem of each kind; those before are for calibrations."""
EPS = 1e-6
"""Least denominator of a readout before it is stabilised."""


class ReadAgain:
    """Attention of whole rows under evictions that are simulated one by one.

    Args:
        scorers: scorer of each layer.
        prompt: tokens that are never evicted.
        window: w.
        topk: ``[layers][H]``, k of each head.
        every: m, tokens between two readings; None to read a token once, when it leaves the window.
        since_read: True if scores decay since they were read, not since their token.
    """

    def __init__(
        self,
        scorers: list[MLSTMScorer],
        prompt: int,
        window: int,
        topk: list[list[int]],
        every: int | None,
        since_read: bool,
    ):
        self.scorers, self.prompt, self.window, self.topk = scorers, prompt, window, topk
        self.every, self.since_read = every, since_read

    def __call__(self, layer, q, k, v, scale):
        """Return the attention of one layer; see :class:`kvpop_vllm.model_hook.Attend`."""
        visible = self.visible(layer, k, v)
        logits = q.unflatten(1, (k.shape[1], -1)) @ k.unsqueeze(2).transpose(-1, -2) * scale
        weights = logits.masked_fill(~visible.unsqueeze(1), -torch.inf).softmax(-1)
        return (weights @ v.unsqueeze(2)).flatten(1, 2)

    def visible(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Return which tokens each query sees, ``[H, S, S]``."""
        scorer, length = self.scorers[layer], k.shape[2]
        weights, x = scorer.weights(), torch.cat([k, v], -1).float()
        score = scorer(k, v, window=self.window)[0].double()  # [H, S]
        again = dict(self.readings(weights, x)) if self.every else {}
        slots, log_gamma = torch.tensor(self.topk[layer]), scorer.log_gamma().double().unsqueeze(-1)
        t = torch.arange(length)
        read_at = (t + self.window).expand_as(score).clone()
        retained = torch.zeros(score.shape, dtype=torch.bool)
        visible = torch.zeros(len(score), length, length, dtype=torch.bool)
        for q in range(length):
            if q in again:
                score, read_at = torch.where(retained, again[q], score), torch.where(retained, q, read_at)
            if (leaving := q - self.window) >= self.prompt:
                retained[:, leaving] = True
                age = q - (read_at if self.since_read else t)
                effective = score + age * log_gamma
                lowest = effective.masked_fill(~retained, torch.inf).argmin(-1)  # of equal ones the oldest
                full = retained.sum(-1) > slots
                retained[full, lowest[full]] = False
            visible[:, q] = retained | ((t < self.prompt) | (t > q - self.window)) & (t <= q)
        return visible

    def readings(self, weights, x: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield each position at which scores are read again, and the scores ``[H, S]`` of all tokens up to it.

        Args:
            weights: the scorer's weights.
            x: ``[1, H, S, 2D]``, keys and values.
        """
        key, value, igate, fgate = weights.inputs(x)
        state, begin = None, 0
        for end in range(self.prompt + self.every, x.shape[2], self.every):
            part = slice(begin, end)
            inputs = key[:, :, part], key[:, :, part], value[:, :, part], igate[:, :, part], fgate[:, :, part]
            _, state = ops.delayed_mlstm(*inputs, delay=0, state=state)
            c, z, m = (tensor[0] for tensor in state)
            query = weights.query(x)[0]
            norm = (query @ z.unsqueeze(-1)) + EPS * torch.exp(-m.clamp(-60, 60))[:, None, None]
            yield end - 1, weights.score((query @ c / norm).unsqueeze(0), x)[0].double()
            begin = end


@torch.inference_mode()
def divergence(model, tokens: torch.Tensor, prompt: int, attend, exact: torch.Tensor) -> float:
    """Return the mean divergence of the predictions after the prompt from ``exact``, in nats."""
    inexact = model(tokens, attend=attend).logits[0, prompt - 1 : -1].log_softmax(-1)
    return float(F.kl_div(inexact, exact, reduction="none", log_target=True).sum(-1).double().mean())


def measure(options: argparse.Namespace) -> Iterator[dict]:
    """Yield the record of each problem, number of slots and way to read."""
    tokenizer, model = load_tokenizer(MODEL), load_model(MODEL, torch.float32).eval()
    config, layers = read_scorer(options.scorer)
    scorers = [from_tensors(config, tensors) for tensors in layers]
    shares = torch.ones(config.num_layers, config.num_kv_heads).double()
    if options.calibration:
        shares = torch.tensor(read_shares(options.calibration, MODEL, 1250)).double()
    shares = shares / shares.mean()
    readings = [(None, False), *product(options.every, (False, True))]
    for seed, kind in product(SEEDS["validation"][FIRST : FIRST + options.rows], KINDS):
        problem = make_problem(kind, seed)
        prompt = len(tokenizer(problem.prompt)["input_ids"])
        tokens = torch.tensor([tokenizer(problem.prompt + problem.solution)["input_ids"]])
        with torch.inference_mode():
            exact = model(tokens, attend=Dense()).logits[0, prompt - 1 : -1].log_softmax(-1)
        for compression, (every, since_read) in product(options.compressions, readings):
            mean = (tokens.shape[1] - prompt) // compression - config.window
            topk = (shares * mean).round().long().tolist()
            attend = ReadAgain(scorers, prompt, config.window, topk, every, since_read)
            kl = divergence(model, tokens, prompt, attend, exact)
            names = {"kind": kind, "seed": seed, "compression": compression, "every": every, "since read": since_read}
            yield names | {"kl": kl}


def summary(records: list[dict]) -> list[dict]:
    """Return a line for each number of slots and way to read, with the ratio to tokens that are read once."""
    cells: dict[tuple, list[float]] = {}
    for record in records:
        cells.setdefault((record["compression"], record["every"], record["since read"]), []).append(record["kl"])
    lines = []
    for (compression, every, since_read), losses in cells.items():
        decay = "since it was read" if since_read else "by age"
        line = {"times less": compression, "read every": every or "never again", "decay": decay, "kl": fmean(losses)}
        lines.append(line | estimate("over once", losses, cells[compression, None, False]))
    return lines


def main() -> None:
    """Measure, write the records into a new file, and print the summary."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="records, one a line")
    parser.add_argument("--scorer", required=True, help="folder of an mLSTM scorer of the shipped reasoner")
    parser.add_argument("--calibration", help="its shares (default: equal heads)")
    parser.add_argument("--rows", type=positive, default=8, help="validation problems of each kind")
    parser.add_argument("--every", type=positive, nargs="+", default=[16, 64, 256], metavar="M")
    parser.add_argument("--compressions", type=positive, nargs="+", default=[8, 12])
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    if options.out.exists():
        parser.error(f"{options.out} exists: name another file, or move it away")
    with options.out.open("x") as file:
        for record in measure(options):
            print(json.dumps(record), file=file, flush=True)
    records = [json.loads(line) for line in options.out.read_text().splitlines()]
    lines = summary(records)
    print(format_table(lines, tuple(lines[0])), file=sys.stdout)


if __name__ == "__main__":
    main()
