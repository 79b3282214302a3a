"""What kvpress keeps of a prompt, in its own environment (`make peers`); the other end of press_parity.py. Imports nothing of ours.

Reads one JSON object from standard input: the model's folder, the prompt's tokens, window, budget, and the name of a press. Writes
``kept``, per layer and head the positions of the prompt's tokens that are in the cache behind the press.
"""

import json
import os
import sys

import torch
from kvpress import AdaKVPress, PyramidKVPress, SnapKVPress
from transformers import AutoModelForCausalLM, DynamicCache


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed
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
    """Per layer and head the positions that are left, filled while the press works."""
    found, compress = [], press.compress

    def noting(module, hidden_states, keys, values, attentions, kwargs):
        left, left_values = compress(module, hidden_states, keys, values, attentions, kwargs)
        masked = getattr(module, "masked_key_indices", None)
        heads = []
        for h in range(keys.shape[1]):
            if masked is not None:  # a press of unequal heads hides keys instead of taking them out
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
