"""Tokens that kvpress keeps of prompts, and what it generates, for press_parity.py and press_needles.py.

This script runs in its own environment (`make peers`) and imports nothing of this repository. It reads one
JSON object from standard input: the model's folder, ``prompts`` as token ids, window, budget, the name of a
press, and optionally ``new`` and ``stop``. It writes ``kept``: for each prompt, layer and head, the positions
of the prompt's tokens that are in the cache after the press. With ``new`` it also writes ``answers``: at most
so many greedy tokens after each prompt, up to the token ``stop``.
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
    kept, answers = [], []
    for prompt in told["prompts"]:
        tokens, cache = torch.tensor([prompt]), DynamicCache(config=model.config)
        ratio = 1 - told["budget"] / tokens.shape[1]
        options = {"compression_ratio": ratio, "window_size": told["window"], "kernel_size": 5}
        press = PyramidKVPress(**options) if told["press"] == "pyramidkv" else SnapKVPress(**options)
        if told["press"] == "adakv":
            press = AdaKVPress(press, alpha_safeguard=0.2)
        kept.append(recorded(press))
        with torch.inference_mode(), press(model):
            hidden = model.model(tokens, past_key_values=cache).last_hidden_state
            answers.append(generated(model, cache, hidden, len(prompt), told.get("new", 0), told.get("stop")))
    print(json.dumps({"kept": kept, "answers": answers}), file=replies)


def generated(model, cache, hidden, position: int, new: int, stop: int | None) -> list[int]:
    """Return at most ``new`` greedy tokens after a prompt whose last hidden states are given, without ``stop``."""
    found = []
    for i in range(position, position + new):
        token = int(model.lm_head(hidden[:, -1]).argmax())
        if token == stop:
            break
        found.append(token)
        at = torch.tensor([i])
        told = {"past_key_values": cache, "position_ids": at[None], "cache_position": at}
        hidden = model.model(torch.tensor([[token]]), **told).last_hidden_state
    return found


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
