"""``kvpop serve`` and ``kvpop doctor``: whether the servers of this environment have the plugin, and what it would do."""

import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import NoReturn

from kvpop_vllm import __version__
from kvpop_vllm.config import ConfigError, check_version
from kvpop_vllm.supported import TRANSFORMERS, VLLM
from kvpop_vllm.vllm_glue.start import contract, fallback

GROUP, NAME, REGISTER = "vllm.general_plugins", "kvpop", "kvpop_vllm.vllm_glue.plugin:register"
"""Entry point of the plugin, as in ``pyproject.toml``."""


def serve(options: Sequence[str]) -> NoReturn:
    """Become ``vllm serve`` with these options, so that signals and the exit code are its own.

    Raises:
        ConfigError: that server would not have the plugin.
    """
    check_installed()
    command = vllm_command()
    sys.stdout.flush()
    os.execv(command, [command, "serve", *options])


def vllm_command() -> str:
    """Return the path of the ``vllm`` command that belongs to this command or this Python.

    Raises:
        ConfigError: there is none; one that is found elsewhere may have other packages.
    """
    program = Path(sys.argv[0])
    folders = [*([str(program.resolve().parent)] if program.is_file() else []), sysconfig.get_path("scripts")]
    command = shutil.which("vllm", path=os.pathsep.join(folders))
    if command is None:
        raise ConfigError(f"there is no command vllm in {folders[-1]}: install vllm{VLLM} next to kvpop_vllm")
    return command


def check_installed() -> None:
    """Check, without importing vLLM, that it has a supported version and loads the plugin.

    Raises:
        ConfigError: it does not; the message says what to change.
    """
    installed = version("vllm")
    if installed is None:
        raise ConfigError(f"vLLM is not installed for {sys.executable}: install vllm{VLLM} there")
    contract.check_version(installed)
    if (NAME, REGISTER) not in {(entry.name, entry.value) for entry in metadata.entry_points(group=GROUP)}:
        raise ConfigError(
            "vLLM does not find the plugin, since kvpop_vllm is not installed: run pip install in its folder"
        )
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and NAME not in allowed.split(","):
        raise ConfigError(f"VLLM_PLUGINS={allowed!r} leaves the plugin out: add {NAME} to it, or unset it")


def version(package: str) -> str | None:
    """Return the installed version of a package, None if there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def doctor(options: Sequence[str]) -> int:
    """Print versions, whether the plugin acts, kernels, and what a policy would keep of a model.

    Args:
        options: a model and options of ``vllm serve``, or nothing.

    Returns:
        0 if all is right, 1 if a line says that something is not.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # the report says what is wrong
    wrong = 0
    for topic, text, right in report(options):
        wrong += not right
        print(f"{' ' if right else '!'} {topic:<12} {' '.join(text.split())}", flush=True)
    print(f"{wrong} wrong, see the lines with !" if wrong else "all right")
    return min(wrong, 1)


def report(options: Sequence[str]) -> Iterator[tuple[str, str, bool]]:
    """Yield the lines of ``kvpop doctor``: topic, text, and whether it is as it should be."""
    yield "kvpop", f"{__version__} in {Path(__file__).parents[3]}", True
    yield "Python", f"{platform.python_version()}, {sys.executable}", True
    for name in ("vLLM", "torch", "triton"):
        installed = version(name.lower())
        yield name, installed or "not installed", installed is not None or name == "triton"
    yield "transformers", *_transformers()
    yield from _kernels()
    try:
        check_installed()
        yield "plugin", _loaded(), True
    except ConfigError as error:
        yield "plugin", str(error), False
        return
    if options:
        yield from _policy(options)


def _transformers() -> tuple[str, bool]:
    """Return the version of transformers, or what to install instead, and whether it is supported."""
    installed = version("transformers")
    if installed is None:
        return f"not installed: install transformers{TRANSFORMERS}", False
    try:
        check_version("transformers", installed, TRANSFORMERS)
    except ConfigError as error:
        return str(error), False
    return installed, True


def _kernels() -> Iterator[tuple[str, str, bool]]:
    import torch

    from kvpop_vllm.kernels.dispatch import load_extension

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    yield (
        "CPU",
        f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads",
        True,
    )
    try:
        extension = load_extension()
        yield "C++ kernels", f"{extension.current_isa()} of {', '.join(extension.isa_levels())}", True
    except ImportError as error:
        yield "C++ kernels", f"{error}; on a CPU the slow reference kernels serve", gpu is not None
    triton = version("triton")
    if gpu is None:
        yield "Triton", "no GPU, so not used", True
    else:
        yield "Triton", f"{triton} on {gpu}" if triton else "not installed, and needed on a GPU", triton is not None


def _loaded() -> str:
    """Load vLLM's plugins as a server does; return how the own one has fared.

    Raises:
        ConfigError: it does nothing, or would refuse a policy.
    """
    try:
        import vllm
        from vllm.plugins import load_general_plugins

        load_general_plugins()
    except Exception as error:  # of another plugin, or of vLLM itself
        raise ConfigError(f"vLLM cannot load its plugins: {type(error).__name__}: {error}") from None
    if fallback.reason is not None:
        raise ConfigError(f"does nothing: {fallback.reason}")
    contract.check_imports(Path(vllm.__file__).parent)
    plugins = sorted({entry.name for entry in metadata.entry_points(group=GROUP)} - {NAME})
    return f"loaded by vLLM {vllm.__version__}" + (f", next to {', '.join(plugins)}" if plugins else "")


def _policy(options: Sequence[str]) -> Iterator[tuple[str, str, bool]]:
    """Yield what a policy would keep of a model, resolved as a server does it before it loads weights."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from kvpop_vllm.vllm_glue.start.engine_policy import describe, requested

    parser = FlexibleArgumentParser(prog="vllm")
    ServeSubcommand().subparser_init(parser.add_subparsers())
    args = parser.parse_args(["serve", *options])
    args.model = args.model_tag or args.model
    try:
        config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
        yield "model", f"{', '.join(config.model_config.architectures)}, {args.model}", True
        if not requested(config):
            yield "policy", "none asked for (--kv-policy): a dense cache", True
            return
        for line in describe(config):
            yield "policy", line, True
    except Exception as error:  # also those of vLLM about the model
        yield "policy", f"refused: {error}", False
