"""Engine with drafts that vLLM finds in texts, next to one without speculation and the oracle."""

from pathlib import Path

from engine.driving import Job, serving
from engine.matrix import make_case

from kvpop_vllm.testing import random_prompt

N_GRAMS = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
SUFFIXES = {"method": "suffix", "num_speculative_tokens": 5}


def check_drafts(model: str, folder: Path, config: dict) -> None:
    """Compare the answers of both engines, and those with drafts with the oracle's.

    Raises:
        AssertionError: they differ, or no draft was accepted.
    """
    setup, phrase = make_case(model, folder, "kvpop"), random_prompt(12, seed=3)
    prompts = [phrase * 9, [*random_prompt(30, seed=4), *phrase * 3]]
    jobs = [Job(prompt=prompt, new=60, scored=False) for prompt in prompts]
    texts = []
    for drafts in (None, config):
        with serving(setup, num_gpu_blocks_override=301, speculative_config=drafts) as engine:
            answers = engine.serve(jobs)
            engine.check(answers)
            texts.append([answers[engine.names[name]].outputs[0].token_ids for name in ("0", "1")])
            steps = min(len(engine.chunks(name)) for name in answers)
    assert texts[0] == texts[1] and steps < 60
