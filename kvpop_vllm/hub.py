"""Names of the Hugging Face hub wherever a folder is taken.

Bad input raises a :class:`~kvpop_vllm.config.ConfigError` that names what to change.
"""

import errno
import re
from pathlib import Path

from kvpop_vllm.config import ConfigError

_SNAPSHOT = re.compile(r".*/models--(?P<owner>[^/]+?)--(?P<name>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})/?")
_NAME = re.compile(r"(?P<repo>[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*?)(?:@(?P<revision>[\w./-]+))?")
FILES = ("*.json", "*.safetensors")
"""Files of a scorer, a cartridge or a checkpoint. No code is downloaded."""
MODEL = (*FILES, "*.txt", "*.model", "*.jinja")
"""Files of a model and its tokenizer."""
COPIES = ("original/*", "metal/*", "consolidated*", "*/*.safetensors")
"""Further copies of a model's weights, in other formats or folders, which are not wanted."""
PICKLES = ("*.bin", "*.pt", "*.pth")
"""Files that ``kvpop import`` reads as well."""


def local_folder(
    name: str | Path, *, cache_dir: str | None = None, revision: str | None = None, files: tuple[str, ...] = FILES
) -> Path:
    """Return the folder that a name stands for, downloaded into the hub's cache where it is a name of the hub.

    A path that exists wins. A name of the hub is ``OWNER/NAME`` or ``OWNER/NAME@REVISION``. Any other is returned as it
    is. Files in the hub's cache are used without a network, as vLLM and transformers do.

    Args:
        name: path or name.
        cache_dir: the hub's cache, by default that of the environment.
        revision: branch, tag or commit, by default that in the name.
        files: patterns of the files that are wanted.
    """
    path, match = Path(name), _NAME.fullmatch(str(name))
    # offline use needs no hub, and no import of its client
    if path.exists() or match is None:
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    revision = revision or match["revision"]
    try:
        return Path(
            snapshot_download(
                match["repo"],
                revision=revision,
                cache_dir=cache_dir,
                allow_patterns=list(files),
                ignore_patterns=list(COPIES),
            )
        )
    except HFValidationError:
        return path
    except Exception as error:  # a proxy's errors are of the HTTP client
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
            raise ConfigError(
                f"{name} cannot be kept in the hub's cache ({error}): make room, or set HF_HOME"
            ) from None
        # before huggingface_hub 1.0, LocalEntryNotFoundError is an HfHubHTTPError too
        answered = isinstance(error, HfHubHTTPError) and not isinstance(error, LocalEntryNotFoundError)
        reason = (
            "the hub has none of this name and revision, or asks for a login"
            if answered
            else "the hub cannot be reached"
        )
        raise ConfigError(
            f"{name} is no folder here, and {reason}, nor does its cache hold it: check the name, or give a folder"
        ) from None


def model_folder(name: str) -> str:
    """Return the folder of a model with its weights and tokenizer. A path that exists is returned as it is given."""
    if Path(name).exists():
        return name
    folder = local_folder(name, files=MODEL)
    if folder.is_dir() and not any(folder.glob("*.safetensors")):
        raise ConfigError(
            f"{name} has no weights in the format of safetensors on the hub, or its cache has none: give a folder that has some"
        )
    return str(folder)


def config_folder(name: str) -> str:
    """Return the folder of a model's configs, without weights. A path that exists is returned as it is given."""
    return name if Path(name).exists() else str(local_folder(name, files=("*.json",)))


def name_of(folder: str | Path) -> str:
    """Return ``OWNER/NAME@COMMIT`` of a folder in the hub's cache, wherever that lies, and of others their path."""
    path = str(folder)
    match = _SNAPSHOT.fullmatch(path.replace("\\", "/"))
    return f"{match['owner']}/{match['name']}@{match['commit']}" if match else path
