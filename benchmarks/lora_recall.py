"""Recall of a scorer under a LoRA adapter of its base model: train one on a text, and compare both models.

    python benchmarks/lora_recall.py OUT --data data/held-out/shakespeare.jsonl --scorer examples/scorers/smollm2-135m-kvpop

Writes the adapter and the merged model into OUT, prints how far the adapter went, and runs `kvpop eval` on both models
with the same rows. The adapter learns from documents of the training split; rows of the eval come from the test split.
"""

import json
import shutil
import subprocess
import sys
from itertools import islice
from pathlib import Path

import record
import torch
from engines import DEMO_MODEL, check_model, say
from safetensors.torch import save_file
from torch.nn.utils import parametrize
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvpop_vllm.evaluation.haystack import documents, text_of

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


class LowRank(torch.nn.Module):
    """Sum of a weight and a product of two thin matrices, which begins at the weight."""

    def __init__(self, weight: torch.Tensor, rank: int):
        super().__init__()
        out, width = weight.shape
        self.a = torch.nn.Parameter(torch.randn(rank, width) / width**0.5)
        self.b = torch.nn.Parameter(torch.zeros(out, rank))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the adapted weight."""
        return weight + self.b @ self.a


def main() -> int:
    """Train, write both folders, and run the eval twice."""
    parser = record.parser_of(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default=str(DEMO_MODEL))
    parser.add_argument("--data", required=True, help="JSONL text that the adapter learns and recall is measured on")
    parser.add_argument("--scorer", required=True)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=512, help="of a step")
    parser.add_argument("--rate", type=float, default=2e-3, help="of learning")
    parser.add_argument("--length", type=int, default=1024, help="of the rows of the eval")
    parser.add_argument("--rows", type=int, default=2)
    options = parser.parse_args()
    check_model(options)
    if options.out.exists():
        parser.error(f"{options.out} exists: name another folder")
    merged = train(options)
    for model in (options.model, str(merged)):
        say(f"recall on {model}")
        command = [sys.executable, "-m", "kvpop_vllm.cli", "eval", "--model", model, "--data", options.data]
        command += ["--scorer", options.scorer, "--length", str(options.length), "--rows", str(options.rows)]
        subprocess.run([*command, "--share", "4", "--allocator", "uniform", "--threads", "1"], check=True)
    return 0


def train(options) -> Path:
    """Train an adapter of the attention projections, and return the folder of the merged model."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).requires_grad_(False)
    text = "".join(text_of(document) for document in islice(documents([options.data], "train"), 4))
    ids = torch.tensor(tokenizer(text)["input_ids"])
    layers = {name: each for name, each in model.named_modules() if name.endswith(PROJECTIONS)}
    for layer in layers.values():
        parametrize.register_parametrization(layer, "weight", LowRank(layer.weight, options.rank))
    adapted = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(adapted, lr=options.rate, weight_decay=0)
    losses = []
    for step in range(options.steps):
        at = torch.randint(len(ids) - options.tokens, ()).item()
        row = ids[None, at : at + options.tokens]
        loss = model(input_ids=row, labels=row).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(adapted, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 10 == 9:
            say(f"step {step + 1}: loss {sum(losses[-10:]) / 10:.3f}")
    return write(options, model, layers)


@torch.no_grad()
def write(options, model, layers) -> Path:
    """Write the adapter as vLLM reads it and the merged model; return the merged model's folder."""
    lora, merged = options.out / "adapter", options.out / "merged"
    lora.mkdir(parents=True)
    tensors, changes = {}, {}
    for name, layer in layers.items():
        low = layer.parametrizations.weight[0]
        tensors |= {f"base_model.model.{name}.lora_A.weight": low.a.detach().clone()}
        tensors |= {f"base_model.model.{name}.lora_B.weight": low.b.detach().clone()}
        before = layer.parametrizations.weight.original
        changes.setdefault(name.rsplit(".", 1)[1], []).append(float((low.b @ low.a).norm() / before.norm()))
        parametrize.remove_parametrizations(layer, "weight")
    say(
        "norm of the change by that of the weight: "
        + ", ".join(f"{k} {sum(v) / len(v):.3f}" for k, v in changes.items())
    )
    save_file(tensors, lora / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": options.rank, "lora_alpha": options.rank}
    config |= {"target_modules": list(PROJECTIONS), "bias": "none"}
    (lora / "adapter_config.json").write_text(json.dumps(config))
    model.to(torch.bfloat16).save_pretrained(merged)
    for file in Path(options.model).glob("*token*"):
        shutil.copy(file, merged)
    return merged


if __name__ == "__main__":
    sys.exit(main())
