"""Tokens that kvpress keeps of a prompt, for press_parity.py.

This script runs in its own environment (`make peers`) and imports nothing of this repository. It reads one
JSON object from standard input: the model's folder, the prompt's tokens, window, budget, and the name of a
press. It writes ``kept``: for each layer and head, the positions of the prompt's tokens that are in the cache
after the press.
"""

import json
import os
import sys

import torch
from kvpress import AdaKVPress, PyramidKVPress, SnapKVPress
from transformers import AutoModelForCausalLM, DynamicCache


def main() -> None:
    """Read the request, run the press and write the kept positions."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # other output goes to stderr
    told = json.load(sys.stdin)
    model = AutoModelForCausalLM.from_pretrained(told["model"], dtype=torch.float32).eval()
    tokens = torch.tensor([told["tokens"]])
    ratio = 1 - told["budget"] / tokens.shape[1]
    options = {"compression_ratio": ratio, "window_size": told["window"], "kernel_size": 5}
    press = PyramidKVPress(**options) if told["press"] == "pyramidkv" else SnapKVPress(**options)
    if told["press"] == "adakv":
        press = AdaKVPress(press, alpha_safeguard=0.2)
    kept = recorded(press)
    with torch.inference_mode(), press(model):
        model.model(tokens, past_key_values=DynamicCache(config=model.config))
    print(json.dumps({"kept": kept}), file=replies)


def recorded(press) -> list[list[list[int]]]:
    """Return a list that receives the kept positions of each layer and head while the press works."""
    found, compress = [], press.compress

    def noting(module, hidden_states, keys, values, attentions, kwargs):
        left, left_values = compress(module, hidden_states, keys, values, attentions, kwargs)
        masked = getattr(module, "masked_key_indices", None)
        heads = []
        for h in range(keys.shape[1]):
            if masked is not None:  # a press of unequal heads masks keys instead of removing them
                gone = set(masked[2][masked[1] == h].tolist())
                heads.append([t for t in range(keys.shape[2]) if t not in gone])
                continue
            same = (left[0, h].unsqueeze(1) == keys[0, h].unsqueeze(0)).all(-1)
            assert (same.sum(1) == 1).all(), "two tokens have one key"
            heads.append(sorted(same.int().argmax(1).tolist()))
        found.append(heads)
        return left, left_values

    press.compress = noting
    return found


if __name__ == "__main__":
    main()
