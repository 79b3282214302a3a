"""The compactor of `examples/compactors` on text that it was not trained on: pieces of Hamlet."""

from pathlib import Path

import pytest
import torch
from compaction_kl import truncated, untrained

from kvpop_vllm.compaction.compactor_files import TENSORS_NAME, read_compactor
from kvpop_vllm.compaction.compactor_training import StillOptions, example_of, still_losses
from kvpop_vllm.compaction.run import load
from kvpop_vllm.distill.run import load_tokenizer

ROOT = Path(__file__).parents[2]
MODEL, COMPACTOR = ROOT / "models/SmolLM2-135M-Instruct", ROOT / "examples/compactors/smollm2-135m-still"
TEXT, PIECES = ROOT / "tests/data/hamlet.txt", 2


@pytest.mark.slow
def test_passages_are_found_again():
    """A passage of a window diverges less after its slots than after as many tokens, and text that goes on not much more."""
    config, compactor, _ = read_compactor(COMPACTOR, MODEL)
    assert (COMPACTOR / TENSORS_NAME).stat().st_size < 8_000_000
    model, tokenizer = load(str(MODEL), "float32"), load_tokenizer(str(MODEL))
    options = StillOptions(**config.provenance["arguments"])
    ways = truncated(config.slots), untrained(compactor, config), compactor
    lost = torch.zeros(2, len(ways))
    ids = torch.tensor(tokenizer(TEXT.read_text())["input_ids"])
    with torch.inference_mode():
        for number, piece in enumerate(ids.split(options.window + options.tokens_after)[:PIECES]):
            for again in (0, 1):
                tokens, size = example_of(piece, 2 * number + again, options)
                lost[again] += torch.stack([still_losses(model, way, tokens, size)[0] for way in ways])
    assert lost[1, 2] < 0.7 * lost[1, :2].min(), lost
    assert lost[0, 2] < 2 * lost[0, 0], lost
