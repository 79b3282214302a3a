"""Serve requests with images, in a process of its own: ``python -m engine.image_requests TORCHVISION MODEL TYPE OUT``.

TORCHVISION is a folder with torchvision, whose usual wheel is built for CUDA. Next to torch for a CPU its compiled ops are
missing, and without these its import fails. Here they are declared first. No processor of images calls one.

OUT gets tokens and log-probabilities, as of stock vLLM and with budgets, and what the model reads of the images.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from unittest import mock

import torch

NEW, SMALL = 40, 40
"""Tokens of an answer, and the budget that evicts."""
TEXT = "hello <|vision_start|><|image_pad|><|vision_end|> what is this? "


def declare_ops(folder: Path) -> torch.library.Library:
    """Declare torchvision's compiled ops without a kernel, and let it be imported from ``folder``."""
    text = (folder / "torchvision" / "_meta_registrations.py").read_text()
    library = torch.library.Library("torchvision", "DEF")
    for name in {*re.findall(r"torchvision::(\w+)", text), *re.findall(r'register_meta\("(\w+)"', text)}:
        library.define(f"{name}(Tensor input) -> Tensor")
    sys.path.insert(0, str(folder))
    return library


def main(torchvision: str, model: str, kind: str, out: str) -> None:
    """Write what engines answer to two requests, one of them with two images."""
    library = declare_ops(Path(torchvision))
    from engine.image_models import noise, write_processor
    from engine.kinds import BLOCK
    from engine.tiny_engine import quick, scores, stop
    from threads import one_thread
    from transformers import AutoProcessor
    from vllm import LLM, SamplingParams
    from vllm.model_executor.models import registry

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    write_processor(Path(model), kind)
    image = noise()
    params = SamplingParams(temperature=0, max_tokens=NEW, logprobs=0, ignore_eos=True)
    prompts = [{"prompt": TEXT * n, "multi_modal_data": {"image": [image] * n}} for n in (1, 2)]
    sizes = {"max_model_len": 512, "kv_cache_memory_bytes": 16 << 20, "dtype": "float32", "enforce_eager": True}
    sizes |= {"block_size": BLOCK, "limit_mm_per_prompt": {"image": 2, "video": 0}, "enable_prefix_caching": False}

    def answers(budget: int | None, **options) -> list[tuple[list[int], list[tuple[int, float]]]]:
        policy = {"policy": "streaming-llm", "sinks": 4, "budget": budget}
        with one_thread(), quick(), mock.patch.object(registry, "_run_in_subprocess", lambda look: look()):
            llm = LLM(model, additional_config={} if budget is None else {"kv_policy": policy}, **sizes | options)
            try:
                served = llm.generate(prompts, params, use_tqdm=False)
                return [(answer.prompt_token_ids, scores(answer)) for answer in served]
            finally:
                stop(llm)

    results = {
        "stock": answers(None),
        "whole": answers(512),
        "small": answers(SMALL),
        "chunks": answers(SMALL, long_prefill_token_threshold=16),
    }
    image_inputs = AutoProcessor.from_pretrained(model)(text=TEXT, images=[image], return_tensors="pt")
    torch.save(results | {"pixels": image_inputs["pixel_values"], "grid": image_inputs["image_grid_thw"]}, out)
    del library


if __name__ == "__main__":
    main(*sys.argv[1:])
