"""Command-line flags, added to every parser of engine arguments and merged into ``additional_config``."""

import argparse
import functools

from kvpop_vllm.config import ADDITIONAL_CONFIG_KEY, ConfigError
from kvpop_vllm.flags import ENGINE, FLAGS, settings_of
from kvpop_vllm.vllm_glue.start import fallback


def add_cli_args(original, parser, *args, **kwargs):
    """Wrap the definition of vLLM's engine flags: ours come after them."""
    parser = original(parser, *args, **kwargs)
    add_to(parser)
    return parser


def from_cli_args(original, cls, args, *positional, **kwargs):
    """Wrap the making of engine arguments: flags are in their ``additional_config`` by then."""
    merge_into(args)
    return original(cls, args, *positional, **kwargs)


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the flag group to a parser, unless the parser has it already, and have the parser merge the flags.

    A server may hand parsed arguments to other processes. There vLLM reads ``additional_config`` from them before it
    loads the plugin, so the flags must be in it by then.
    """
    if any("--kv-policy" in action.option_strings for action in parser._actions):
        return
    group = parser.add_argument_group(title="KvPolicy", description="Fixed-budget KV cache (kvpop_vllm).")
    for setting in settings_of(ENGINE).values():
        takes = dict(type=setting.kind, metavar=setting.metavar)
        if setting.kind is bool:
            takes = dict(action=argparse.BooleanOptionalAction)
        elif setting.kind is dict:
            takes = dict(action="extend", nargs="+", metavar=setting.metavar)
        group.add_argument(setting.flag, **takes, default=None, help=setting.help)
    parse = parser.parse_known_args

    @functools.wraps(parse)
    def parse_and_merge(*args, **kwargs):
        namespace, unknown = parse(*args, **kwargs)
        merge_into(namespace)
        return namespace, unknown

    parser.parse_known_args = parse_and_merge


def merge_into(args: argparse.Namespace) -> None:
    """Merge the flags of parsed arguments into their ``additional_config``; without flags, change nothing."""
    if flags_in(args):
        with fallback.one_line_errors():
            args.additional_config = merge(args, getattr(args, "additional_config", {}))


def flags_in(args: argparse.Namespace) -> dict[str, object]:
    """Return the settings that flags of parsed arguments give, by name."""
    values = {name: getattr(args, f"kv_{name}", None) for name in FLAGS}
    return {name: value for name, value in values.items() if value is not None}


def merge(args: argparse.Namespace, additional_config: object) -> object:
    """Return ``additional_config`` with the flags of the command line merged in; flags win.

    Raises:
        ConfigError: ``additional_config``, or the policy settings in it, are not an object that flags can be
            merged into.
    """
    flags = flags_in(args)
    if not flags:
        return additional_config
    flag = FLAGS[next(iter(flags))]
    if not isinstance(additional_config, dict):
        raise ConfigError(f"{flag} is given, but --additional-config does not hold an object: {additional_config!r}")
    before = additional_config.get(ADDITIONAL_CONFIG_KEY, {})
    if not isinstance(before, dict):
        end = "null, which asks for no policy: leave one of the two out" if before is None else f"{before!r}, no object"
        raise ConfigError(f"{flag} is given, but --additional-config says {ADDITIONAL_CONFIG_KEY!r}: {end}")
    return {**additional_config, ADDITIONAL_CONFIG_KEY: {**before, **flags}}
