"""Engines on models with layers of several kinds, compared with the oracle of kinds."""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import pytest
import torch
from engine.driving import Job, Watched, watched
from engine.image_models import without_images
from engine.judge import first_difference
from engine.tiny_engine import answers, running
from transformers import AutoModelForCausalLM

from kvpop_vllm import plan
from kvpop_vllm.cli import make_parser
from kvpop_vllm.hf import KVpopCache
from kvpop_vllm.supported import POLICY_LAYERS
from kvpop_vllm.testing import BFLOAT16, KindsOracle, OraclePolicy, write_random_scorer

BUDGET, BLOCK, TOLERANCE, MEMORY = 56, 32, 1e-5, 32 << 20
CLOSE = 2e-3
"""Bound on differences of log-probabilities that go through fits of two layers, which solve systems of equations."""
ROUNDED = 6
"""Models with rounded weights, of which at least one decides near-ties as an engine does."""


def options_of(kind: str) -> dict:
    """Return the options of engines of a family."""
    dtype = "bfloat16" if kind in BFLOAT16 else "float32"
    return {"block_size": BLOCK, "dtype": dtype, "kv_cache_memory_bytes": MEMORY}


def imports(kind: str) -> AbstractContextManager:
    """Return the context in which vLLM imports a family's model: its module of Qwen3.5 has models with images too."""
    return without_images() if kind == "qwen3_5_text" else nullcontext()


@contextmanager
def serving(folder: str, settings: dict, kind: str = "", **options) -> Iterator[Watched]:
    """Yield an engine whose freed blocks are overwritten, and check that it leaks nothing."""
    options = options_of(kind) | options
    with imports(kind), pytest.MonkeyPatch.context() as patch, watched(folder, settings, **options) as engine:
        engine.poison(patch)
        yield engine
        engine.engine.reset_prefix_cache()
        assert not engine.leaks()


@dataclass
class Served:
    """An engine whose freed blocks are overwritten, with the oracle and the policy that judge it.

    Attributes:
        tolerance: largest difference of log-probabilities.
        by_inputs: True if the oracle's policy decides by the engine's queries, keys and values, and its gate by the input
            of the engine's attention block, so that ties that rounding decides, which are more after recurrent layers and
            in bfloat16, do not matter.
    """

    engine: object
    oracle: KindsOracle
    policy: OraclePolicy
    tolerance: float = TOLERANCE
    by_inputs: bool = False
    settings: dict = field(default_factory=dict)
    runs: dict = field(default_factory=dict)

    def serve(self, jobs: list[Job], chunk: int | None = None, each_step=None, protect: bool | int = 0) -> dict:
        """Serve jobs with prompts in chunks, and compare the answers with the oracle."""
        self.engine.chunk(chunk)
        answers = self.engine.serve(jobs, each_step)
        for name, answer in answers.items():
            self.check(name, answer, protect)
        return answers

    def check(self, name: str, answer, protect: bool | int = 0) -> None:
        """Compare tokens and log-probabilities of an answer, of a request with this internal id, with the oracle."""
        prompt, out = answer.prompt_token_ids, answer.outputs[0]
        fed = *prompt, *out.token_ids[:-1]
        key = fed, protect
        if key not in self.runs or self.by_inputs:
            policy = self.policy.protecting(protect, len(prompt))
            inputs = self.inputs(name, len(fed)) if self.by_inputs else None
            self.runs[key] = self.oracle.logprobs(fed, policy, inputs)
        exact = self.runs[key]
        assert distance(answer, exact) <= self.tolerance
        for i, token in enumerate(out.token_ids):
            row = exact[len(prompt) - 1 + i]
            assert float(row.max() - row[token]) <= 2 * self.tolerance

    def check_retained(self, name: str, answer) -> None:
        """Compare the tokens that heads retain after each step of a request with the oracle's."""
        fed = *answer.prompt_token_ids, *answer.outputs[0].token_ids[:-1]
        run = self.oracle.run(fed, self.policy, inputs=self.inputs(name, len(fed)))
        assert first_difference(run, self.engine.recorder.retained[name]) is None

    def check_plan(self, prompt: int, new: int, *words: str) -> None:
        """Serve a request, and compare the pool's blocks, and the most that the request held, with those of `kvpop plan`.

        Args:
            prompt: tokens of the prompt.
            new: tokens of the answer.
            words: further options of the plan.
        """
        config = self.engine.engine.vllm_config
        sizes = ["--kv-memory", str(MEMORY), "--block-size", str(BLOCK), "--budget", str(BUDGET)]
        sizes += ["--max-model-len", str(prompt + new), "--prompt-length", str(prompt), *words]
        if (dtype := config.cache_config.mamba_ssm_cache_dtype) != "auto":  # which depends on the processor
            sizes += ["--mamba-ssm-cache-dtype", dtype]
        if "scorer" in self.settings:
            sizes += ["--scorer", self.settings["scorer"]]
        planned = plan.compute(make_parser().parse_args(["plan", "--model", config.model_config.model, *sizes]))
        self.engine.engine.reset_prefix_cache()
        self.serve([Job(prompt, new=new, scored=False)], protect="--protect-prompt" in words)
        pool, steps = self.engine.recorder.pool, self.engine.recorder.blocks
        assert pool.num_gpu_blocks == MEMORY // planned.pool.block_bytes
        blocks = max(pool.num_gpu_blocks - 1 - step.free for step in steps[2:])  # after the prompt's
        assert blocks == planned.requests[self.settings["policy"], BUDGET].blocks, (prompt, new)

    def inputs(self, name: str, length: int) -> dict[int, tuple]:
        """Return queries, keys and values of a request in each layer of the policy, as the engine had them last.

        With a gate, the input of the attention block follows them.
        """
        tensors = self.engine.recorder.tensors
        layers = {layer for request, layer, _ in tensors if request == name}

        def whole(layer: int, part: str) -> torch.Tensor:
            return torch.cat(tensors[name, layer, part])[-length:].double()

        def hidden(layer: int) -> list[torch.Tensor]:
            return [whole(layer, "hidden")] if (name, layer, "hidden") in tensors else []

        inputs = "query", "key", "value"
        return {layer: (*(whole(layer, part).transpose(0, 1) for part in inputs), *hidden(layer)) for layer in layers}


def distance(answer, exact: torch.Tensor) -> float:
    """Return the largest difference of an answer's log-probabilities from exact ones ``[S, V]``."""
    prompt, rows = answer.prompt_token_ids, [*(answer.prompt_logprobs or [None])[1:]]
    rows = [None] * (len(prompt) - 1 - len(rows)) + rows + list(answer.outputs[0].logprobs)
    entries = [(row, token, entry.logprob) for row, top in enumerate(rows) for token, entry in (top or {}).items()]
    assert all(math.isfinite(logprob) for *_, logprob in entries)
    return max(abs(logprob - float(exact[row, token])) for row, token, logprob in entries)


def roles(policy: str, folder: str, scorer, oracle: KindsOracle) -> tuple[dict, OraclePolicy]:
    """Return the settings of a policy and the oracle's policy."""
    if policy == "kvpop":
        layers = [i for i, kind in enumerate(oracle.kinds) if kind in POLICY_LAYERS]
        layers = layers if len(layers) < len(oracle.kinds) else ()
        write_random_scorer(scorer, folder, layers=layers, sinks=4, window=16, topk=BUDGET - 20)
        return {"policy": policy, "scorer": str(scorer)}, OraclePolicy.from_scorer(scorer)
    if policy == "h2o":
        settings = {"policy": policy, "budget": BUDGET, "sinks": 0, "window": BUDGET // 2}
        return settings, OraclePolicy("mean mass", 0, BUDGET // 2, BUDGET - BUDGET // 2)
    settings = {"policy": policy, "budget": BUDGET, "sinks": 4}
    return settings, OraclePolicy.streaming(4, BUDGET - 4, 0)


def distance_of_engine(folder: str, kind: str, policy: dict | None, oracle: KindsOracle) -> float:
    """Return the largest difference of an engine's log-probabilities from the oracle's, which keeps all tokens."""
    with imports(kind), running(folder, policy, **options_of(kind), enable_prefix_caching=False) as llm:
        served = answers(llm, 24)
    fed = [[*answer.prompt_token_ids, *answer.outputs[0].token_ids[:-1]] for answer in served]
    return max(distance(answer, oracle.logprobs(tokens)) for answer, tokens in zip(served, fed, strict=True))


def check_made_slots(folder: str, settings: dict, answers: dict) -> None:
    """Compare answers under a policy that makes slots with a KVpopCache, and show that other slots would give others.

    Where rounding decides which tokens are chosen, the cache of a model whose weights it changed has the answer.
    """
    models = [disturbed(folder, seed) for seed in range(ROUNDED + 1)]
    for answer in answers.values():
        assert any(distance_of_cache(model, settings, answer) < CLOSE for model in models)
        if len(answer.prompt_token_ids) > BUDGET:
            other = {"policy": "snapkv", "budget": BUDGET}
            assert min(distance_of_cache(model, other, answer) for model in models) > 10 * CLOSE


@torch.no_grad()
def disturbed(folder: str, seed: int):
    """Return a model in float32 whose weights differ by rounding, for a seed of 0 as they are."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    draw = torch.Generator().manual_seed(seed)
    for weight in model.parameters() if seed else ():
        weight *= 1 + 1e-7 * torch.randn(weight.shape, generator=draw)
    return model


@torch.no_grad()
def distance_of_cache(model, settings: dict, answer) -> float:
    """Return the largest difference of an answer's log-probabilities from those of a model with a KVpopCache."""
    prompt, new = answer.prompt_token_ids, answer.outputs[0]
    cache = KVpopCache(model, **settings, prompt=len(prompt))
    logits = model(torch.tensor([[*prompt, *new.token_ids[:-1]]]), past_key_values=cache).logits[0]
    rows = zip(logits[len(prompt) - 1 :].log_softmax(-1), new.logprobs, strict=True)
    return max(abs(entry.logprob - float(row[token])) for row, top in rows for token, entry in top.items())
