"""kvpress's own evaluation, with the policies of this package next to its presses.

    git clone https://github.com/NVIDIA/kvpress    # its evaluation is not in its wheel
    make peers
    PYTHONPATH=. build/peers/bin/python examples/kvpress_eval.py kvpress/evaluation \\
        --dataset ruler --data_dir 4096 --model MODEL --press_name kvpop_vllm.tova --compression_ratio 0.75

The options are those of its evaluate.py; press names that begin with ``kvpop_vllm.`` are ours. ``--scorer DIR`` is for
the policies that have one.

A press compresses a context of S tokens to ``(1 - compression_ratio) * S`` and keeps the question and the answer
in addition. Our budget is that number of tokens, and the question and the answer share it.
"""

import argparse
import copy
import sys
from dataclasses import dataclass

import kvpress
from transformers import AutoModelForCausalLM
from transformers.pipelines import PIPELINE_REGISTRY

from kvpop_vllm import policies
from kvpop_vllm.hf import KVpopCache

PREFIX = "kvpop_vllm."


@dataclass
class PolicyPress:
    """Policy in the place of a press.

    Attributes:
        policy: registered name.
        scorer: scorer folder, or None.
        compression_ratio: share of a context's tokens that the budget has no room for; kvpress sets it.
    """

    policy: str
    scorer: str | None = None
    compression_ratio: float = 0.0

    def cache(self, model, tokens: int) -> KVpopCache:
        """Return a cache for a context of so many tokens; kvpress's rounding is up to one token lower."""
        budget = None if self.policy == "full" else round((1 - self.compression_ratio) * tokens)
        prompt = {"prompt": tokens} if policies.get(self.policy).compresses else {"protect_prompt": False}
        return KVpopCache(model, self.policy, scorer=self.scorer, budget=budget, **prompt)


class PolicyPipeline(kvpress.KVPressTextGenerationPipeline):
    """kvpress's pipeline, whose ``press`` may be a `PolicyPress` and whose ``cache`` a ``KVpopCache``."""

    def _forward(self, input_tensors, max_new_tokens=50, press=None, cache=None):
        if isinstance(press, PolicyPress):
            press, cache = None, press.cache(self.model, input_tensors["context_ids"].shape[1])
        return super()._forward(input_tensors, max_new_tokens, press, cache)

    def generate_answer(self, question_ids, cache, context_length, max_new_tokens):
        """Answer one question; a ``KVpopCache`` is copied, because what it evicts while answering is gone for good."""
        if isinstance(cache, KVpopCache):
            cache = copy.deepcopy(cache)
        return super().generate_answer(question_ids, cache, context_length, max_new_tokens)

    def _remove_answer_from_cache(self, cache, cache_seq_lengths):
        if not isinstance(cache, KVpopCache):
            super()._remove_answer_from_cache(cache, cache_seq_lengths)


PIPELINE_REGISTRY.register_pipeline(
    "kv-press-text-generation", pipeline_class=PolicyPipeline, pt_model=AutoModelForCausalLM
)


def main() -> None:
    """Add the policies to kvpress's registry of presses and run its evaluation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("evaluation", help="folder `evaluation` of a checkout of kvpress")
    parser.add_argument("--scorer", help="scorer folder")
    options, unknown_words = parser.parse_known_args()
    sys.path.insert(0, options.evaluation)
    import evaluate
    import evaluate_registry
    from fire import Fire

    for name in policies.known():
        scorer = options.scorer if policies.get(name).scorer_kind else None
        evaluate_registry.PRESS_REGISTRY[PREFIX + name] = PolicyPress(name, scorer)
    Fire(evaluate.CliEntryPoint, command=unknown_words)


if __name__ == "__main__":
    main()
