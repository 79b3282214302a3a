"""Child process of a peer: plain transformers, or kvpress on it, one request at a time.

It is the counterpart of `child.EngineChild`. It runs in an environment of its own (`make peers`),
because kvpress needs an older transformers than vLLM, and imports nothing of this repository.
"""

import json
import sys
import time
from contextlib import nullcontext

from child import Child


class Peer(Child):
    """One model with the commands and replies of `child.EngineChild`."""

    def __init__(self, options: dict):
        super().__init__()
        self.options, self.budget = options, options.get("kvpress_budget")

    def start(self) -> dict:
        """Load the model; return the seconds that it took."""
        begin = time.monotonic()
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(self.options["threads"])
        folder, dtype = self.options["model"], getattr(torch, self.options["dtype"])
        self.torch, self.tokenizer = torch, AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        return {"seconds": time.monotonic() - begin, "pool_bytes": 0}

    def _press(self, context: int):
        """Return a context in which the cache is compressed to the budget.

        This happens after the prompt and again every few tokens. For plain transformers it does nothing.
        """
        if self.budget is None:
            return nullcontext()
        from kvpress import DecodingPress, KnormPress, PrefillDecodingPress

        decoding = DecodingPress(
            KnormPress(),
            compression_interval=self.options["interval"],
            target_size=self.budget,
            hidden_states_buffer_size=0,
        )
        # half a token more, because kvpress rounds the number of kept tokens down
        ratio = 1 - (self.budget + 0.5) / context
        prefilling = KnormPress(compression_ratio=ratio) if context > self.budget else None
        return PrefillDecodingPress(prefilling_press=prefilling, decoding_press=decoding)(self.model)

    def _forward(self, tokens: list[int], position: int):
        torch = self.torch
        ids, positions = torch.tensor([tokens]), torch.arange(position, position + len(tokens))[None]
        with torch.inference_mode():
            out = self.model(ids, past_key_values=self.cache, position_ids=positions, use_cache=True, logits_to_keep=1)
        return out.logits[0, -1].float().log_softmax(-1)

    def _begin(self, tokens: list[int]):
        from transformers import DynamicCache

        self.cache, self.position = DynamicCache(), len(tokens)
        return self._forward(tokens, 0)

    def _next(self, logprobs):
        token = int(logprobs.argmax())
        logprobs = self._forward([token], self.position)
        self.position += 1
        return logprobs

    def short(self) -> list:
        """Return greedy tokens of the short prompts.

        Each has its log-probability and its lead over the second.
        """
        return [self._greedy(self.tokenizer(prompt)["input_ids"]) for prompt in self.options["short_prompts"]]

    def _greedy(self, tokens: list[int]) -> list:
        with self._press(len(tokens)):
            logprobs, answer = self._begin(tokens), []
            for _ in range(24):
                first, second = logprobs.topk(2).values.tolist()
                answer.append({"token": int(logprobs.argmax()), "logprob": first, "gap": first - second})
                logprobs = self._next(logprobs)
        return answer

    def prefill(self, lengths: list[int], new: int) -> dict:
        """Read a random prompt, the only one of ``lengths``; return the seconds that it took."""
        (context,) = lengths
        begin = time.monotonic()
        self.press = self._press(context)
        self.press.__enter__()
        self.logprobs = self._begin(self.random_tokens(context, context))
        return {"seconds": time.monotonic() - begin, "tokens": context}

    def keep(self, requests: int) -> dict:
        """Return the bytes that the cache holds, or end the request if ``requests`` is 0.

        Raises:
            RuntimeError: the number of tokens in kvpress's cache does not fit its budget.
        """
        if requests == 0:
            self.press.__exit__(None, None, None)
            self.cache = None
            return {}
        layers, budget = self.cache.layers, self.budget
        longest = max(layer.keys.shape[2] for layer in layers)
        if budget is not None and not min(budget, self.position) <= longest <= budget + self.options["interval"]:
            raise RuntimeError(f"kvpress holds {longest} tokens, not its budget of {budget}")
        return {"held_bytes": sum(t.numel() * t.element_size() for layer in layers for t in (layer.keys, layer.values))}

    def step(self) -> int:
        """Generate one token, of the only request."""
        self.logprobs = self._next(self.logprobs)
        return 1

    def compress(self, prompts: list, policy: str, budget: int, window: int, new: int = 0, stop: int | None = None):
        """Compress prompts at their ends, and generate greedily.

        Args:
            prompts: token ids of each.
            policy: one of ours that kvpress has.
            budget: tokens that a head keeps.
            window: newest tokens, whose queries vote.
            new: most generated tokens of each.
            stop: token that ends an answer.

        Returns:
            ``kept``, for each prompt, layer and head the positions of the prompt's tokens in the cache, and
            ``answers``, token ids without ``stop``.
        """
        from kvpress import AdaKVPress, PyramidKVPress, SnapKVPress

        positions, answers = [], []
        for prompt in prompts:
            kind = PyramidKVPress if policy == "pyramidkv" else SnapKVPress
            press = kind(compression_ratio=1 - budget / len(prompt), window_size=window, kernel_size=5)
            if policy == "adakv":
                press = AdaKVPress(press, alpha_safeguard=0.2)
            positions.append(recorded(press))
            with press(self.model):
                logprobs, answer = self._begin(prompt), []
                while len(answer) < new and (token := int(logprobs.argmax())) != stop:
                    answer.append(token)
                    logprobs = self._next(logprobs)
            answers.append(answer)
        return {"kept": positions, "answers": answers}


def recorded(press) -> list[list[list[int]]]:
    """Return a list that receives the kept positions of each layer and head while the press works."""
    layers, compress = [], press.compress

    def noting(module, hidden_states, keys, values, attentions, kwargs):
        left, left_values = compress(module, hidden_states, keys, values, attentions, kwargs)
        masked = getattr(module, "masked_key_indices", None)
        heads = []
        for h in range(keys.shape[1]):
            if masked is not None:  # a press of unequal heads masks keys instead of removing them
                gone = set(masked[2][masked[1] == h].tolist())
                heads.append([t for t in range(keys.shape[2]) if t not in gone])
                continue
            equal = (left[0, h].unsqueeze(1) == keys[0, h].unsqueeze(0)).all(-1)
            assert (equal.sum(1) == 1).all(), "two tokens have one key"
            heads.append(sorted(equal.int().argmax(1).tolist()))
        layers.append(heads)
        return left, left_values

    press.compress = noting
    return layers


if __name__ == "__main__":
    Peer(json.loads(sys.argv[1])).serve()
