"""Write ``tests/data/kvzap``: gates in the files of kvpress's own class, and the scores that its press gives to tokens.

    build/peers/bin/python tests/data/kvzap.py      # after `make peers`

Each folder is what ``KVzapModel.save_pretrained`` writes, for the tiny models of the tests: two layers, a width of 64,
two KV heads. ``scores.safetensors`` has ``hidden [1, S, E]`` and, for each folder, ``scores [layers, H, S]`` float32.
The version of kvpress is in its metadata.
"""

from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import torch
from kvpress import KVzapPress
from kvpress.presses.kvzap_press import KVzapConfig, KVzapModel
from safetensors.torch import save_file

OUT = Path(__file__).with_name("kvzap")
LAYERS, HEADS, WIDTH, TOKENS = 2, 2, 64, 24
FOLDERS = {"mlp": (16, torch.float32), "linear": (None, torch.bfloat16)}


@torch.no_grad()
def main():
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, TOKENS, WIDTH, generator=draw)
    content = {"hidden": hidden}
    for name, (inner, dtype) in FOLDERS.items():
        model = KVzapModel(KVzapConfig(input_dim=WIDTH, output_dim=HEADS, hidden_dim=inner, n_modules=LAYERS))
        for tensor in model.parameters():
            spread = 0.3 if tensor.dim() == 1 else 2 / tensor.shape[1] ** 0.5
            tensor.copy_(spread * torch.randn(tensor.shape, generator=draw))
        model.to(dtype).save_pretrained(OUT / name)
        press = KVzapPress(model_type=name)
        press.kvzap_model = KVzapModel.from_pretrained(OUT / name)
        layers = [SimpleNamespace(layer_idx=i) for i in range(LAYERS)]
        scores = [press.score(layer, hidden, None, None, None, {})[0] for layer in layers]
        content[f"{name} scores"] = torch.stack(scores).contiguous()
    save_file(content, OUT / "scores.safetensors", metadata={"kvpress": version("kvpress")})


if __name__ == "__main__":
    main()
