"""Tiny models that take images too, with the language model of a tiny text model, and without torchvision.

vLLM's modules of these models import processors of images, and those import torchvision, which an environment of this
project lacks. What takes its place has no function, so nothing that looks at an image can run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

MODULES = "", ".transforms", ".transforms.v2", ".transforms.functional", ".transforms.v2.functional"
VISION = {"hidden_size": 32, "intermediate_size": 64, "image_size": 28, "patch_size": 14}
IMAGE = {"image_token_index": 250, "boi_token_index": 251, "eoi_token_index": 252}
QWEN = {"image_token_id": 256, "video_token_id": 257, "vision_start_token_id": 258, "vision_end_token_id": 259}
LAYERS = {"num_hidden_layers": 1, "num_attention_heads": 2}
KINDS = {
    "gemma3": {"vision_config": VISION | LAYERS, "mm_tokens_per_image": 4} | IMAGE,
    "gemma4": {
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
            "num_key_value_heads": 2, "head_dim": 16, "patch_size": 14, "position_embedding_size": 16,
        },
        "audio_config": None, "image_token_id": 250, "boi_token_id": 251, "eoi_token_id": 252,
    },
    "llama4": {
        "vision_config": VISION
        | LAYERS
        | {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32, "pixel_shuffle_ratio": 0.5}
    }
    | IMAGE,
    "qwen2_5_vl": {
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 64, "depth": 1, "num_heads": 2, "patch_size": 14,
            "out_hidden_size": 128, "window_size": 112, "fullatt_block_indexes": [0],
        }
    } | QWEN,
    "qwen3_vl": {
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 64, "depth": 1, "num_heads": 2, "patch_size": 16,
            "out_hidden_size": 128, "deepstack_visual_indexes": [0], "num_position_embeddings": 16,
        }
    } | QWEN,
}  # fmt: skip
"""Keys of the config of each model type, without its text config."""


def write_image_model(folder: Path, kind: str, text: str | Path) -> Path:
    """Write a tiny float32 model that takes images, whose language model is the one of a folder; return the new folder."""
    config = AutoConfig.from_pretrained(text).to_dict()
    if kind.startswith("qwen"):
        config["rope_parameters"] |= {"mrope_section": [4, 6, 6]}
        del config["model_type"]
    if kind == "gemma4":
        config["use_bidirectional_attention"] = "vision"
    config = CONFIG_MAPPING[kind](text_config=config, tie_word_embeddings=False, **KINDS[kind])
    config.dtype = torch.float32
    model = AutoModelForImageTextToText.from_config(config).float()
    tensors = model.state_dict()
    for name, weight in AutoModelForCausalLM.from_pretrained(text, dtype=torch.float32).state_dict().items():
        names = name, f"model.language_model.{name.removeprefix('model.')}", f"language_model.{name}"
        next(tensors[spelling] for spelling in names if spelling in tensors).copy_(weight)
    model.save_pretrained(folder)
    return folder


def write_processor(folder: Path, kind: str) -> None:
    """Write the processor of images of a Qwen model; its tokenizer's tokens are bytes, and those of images after them."""
    import transformers as hf

    backend = Tokenizer(models.BPE({f"<0x{byte:02X}>": byte for byte in range(256)}, [], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"])
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<0x00>", pad_token="<0x00>")
    patch = KINDS[kind]["vision_config"]["patch_size"]
    images = hf.Qwen2VLImageProcessor(patch_size=patch, merge_size=2, min_pixels=56**2, max_pixels=128**2)
    processor, videos = {
        "qwen2_5_vl": (hf.Qwen2_5_VLProcessor, hf.Qwen2VLVideoProcessor),
        "qwen3_vl": (hf.Qwen3VLProcessor, hf.Qwen3VLVideoProcessor),
    }[kind]
    options = {"video_processor": videos(patch_size=patch), "chat_template": "{{ messages }}"}
    processor(image_processor=images, tokenizer=tokenizer, **options).save_pretrained(folder)


@contextmanager
def without_images() -> Iterator[None]:
    """Have vLLM import models that take images, in this process, with a torchvision that has no function."""
    from vllm.model_executor.models import registry

    modules = {f"torchvision{name}": ModuleType(f"torchvision{name}") for name in MODULES}
    for name, module in modules.items():
        module.__spec__, module.__path__ = ModuleSpec(name, None, is_package=True), []
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    modules["torchvision.transforms.v2.functional"].InterpolationMode = SimpleNamespace(BICUBIC=3)
    sys.modules.update(modules)  # what is imported meanwhile stays
    try:
        with mock.patch.object(registry, "_run_in_subprocess", lambda look: look()):
            yield
    finally:
        for name in modules:
            del sys.modules[name]
