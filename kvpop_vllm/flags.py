"""Settings of a fixed-size cache: names, types, defaults and help, in one table.

vLLM's flags, the keys of ``additional_config``, the arguments of ``KVpopCache``, the keys of a request, options of
``kvpop`` and the tables of ``docs/flags.md`` come from it. It imports nothing heavy.
"""

import os.path
from dataclasses import dataclass

ENGINE, CACHE, REQUEST = "engine", "KVpopCache", "request"
"""Places where a setting applies: vLLM's engine, the cache for transformers, a single request."""


@dataclass(frozen=True)
class Setting:
    """A setting.

    Attributes:
        name: key of ``additional_config["kv_policy"]`` and argument of ``KVpopCache``, or key of a request.
        kind: type on vLLM's command line. Dict for one or more NAME=VALUE.
        metavar: what the help and the documents call the value.
        meaning: one line of help.
        default: what holds where it is not given, as the help says it.
        detail: what the help adds to the meaning, beginning with ": " or "; ".
        minimum: smallest number, or None if any finite number will do.
        choices: allowed strings.
        files_go_to: flag that takes files of this kind, if a file was once allowed instead of a choice.
        protects: True for a number of protected tokens, or ``all`` for the prompt.
        applies_to: any of ENGINE, CACHE and REQUEST.
    """

    name: str
    kind: type
    metavar: str
    meaning: str
    default: str = ""
    detail: str = ""
    minimum: int | None = 1
    choices: tuple[str, ...] = ()
    files_go_to: str = ""
    protects: bool = False
    applies_to: tuple[str, ...] = (ENGINE, CACHE)

    @property
    def flag(self) -> str:
        """Flag of vLLM's command line."""
        return f"--kv-{self.name.replace('_', '-')}"

    def refusal(self, value: object) -> str | None:
        """Return what a value must be if it is none of the choices."""
        if not self.choices or value in self.choices:
            return None
        is_file = self.files_go_to and isinstance(value, str) and os.path.isfile(value)
        remedy = f": give {self.files_go_to} {value} instead" if is_file else ""
        return f"must be one of {', '.join(self.choices)}, got {value!r}{remedy}"

    @property
    def help(self) -> str:
        """Help of the flag."""
        return self.meaning + self.detail + (f"; default: {self.default}." if self.default else ".")


SETTINGS = (
    Setting(
        "policy", str, "NAME",
        "Keep a fixed number of tokens per KV head, chosen by this policy ('kvpop policies' lists them)",
    ),
    Setting("budget", int, "B", "Tokens kept per KV head", "what the scorer's config says"),
    Setting("compression", float, "C", "Set the budget to max-model-len / C"),
    Setting("sinks", int, "S", "First tokens that are always kept", "the scorer's, or the policy's own", minimum=0),
    Setting(
        "window", int, "W", "Most recent tokens that are always kept",
        "what the scorer was trained with at this budget, or the policy's own",
    ),
    Setting(
        "threshold", float, "X", "Score of a gate below which a token is evicted when it leaves the window, even if slots are free",
        "0 for dms, none for kvzap", "; other policies have none", minimum=None,
    ),
    Setting(
        "scorer", str, "DIR", "Folder with kvpop_config.json and kvpop_scorer.safetensors, or its name on the hub",
        "the checkpoint's own",
    ),
    Setting(
        "map", str, "FILE", "How to read the scorer of a full checkpoint of other authors, as 'kvpop inspect-checkpoint' writes it",
        "the only reading that fits",
    ),
    Setting(
        "calibration", str, "DIR|FILE",
        "Folder of 'kvpop calibrate', or a JSON file with shares of heads such as a scorer's config: shares of layers and heads, windows, and statistics of queries for triattention", "none",
        "; with --kv-policy auto also the policy and the budget",
    ),
    Setting(
        "correction", str, "NAME", "How outputs are corrected for evicted tokens", "none, but for momentkv",
        ": 'moment' adds to every output what the moments of the evicted tokens say of theirs (MomentKV), under policies that evict and do not compress prompts; "
        "'none' does not",
        choices=("none", "moment"),
    ),
    Setting(
        "allocator", str, "NAME", "How layers and heads share the budget", "as the scorer's config says, or uniform",
        ": 'uniform'; 'pyramid', more in lower layers (PyramidKV), under policies that evict; 'ada', the heads of a layer divide "
        "theirs at a prompt's end (Ada-KV), under policies that compress it",
        choices=("uniform", "pyramid", "ada"), files_go_to="--kv-calibration",
    ),
    Setting(
        "protect_prompt", str, "all|N", "Never evict the prompt, or the first N tokens of a conversation, answers included",
        "all under random, vase and rkv, 0 elsewhere",
        "; these are shared by vLLM's prefix cache. For chats give N, the length of the system prompt rounded up: under 'all' "
        "a later turn never goes on from an earlier one, whose answers it computes again", protects=True,
    ),
    Setting(
        "max_budget", int, "B", "Largest budget that a request may ask for (kv_budget)", "the server's own",
        applies_to=(ENGINE,),
    ),
    Setting(
        "max_protect", str, "all|N", "Most tokens that a request may ask to protect (kv_protect_prompt)",
        "what --kv-protect-prompt says", protects=True, applies_to=(ENGINE,),
    ),
    Setting(
        "reserve", bool, "", "Begin a request only when all blocks that the policy's layers will ever hold for it are free, so that none is preempted for these",
        "off", applies_to=(ENGINE,),
    ),
    Setting(
        "inspect", bool, "", "Serve a page at /inspect, for this machine alone, that shows prompts and what each head has kept of them",
        "off", "; every step is then slower", applies_to=(ENGINE,),
    ),
    Setting(
        "cartridge", dict, "NAME=DIR", "Compact caches that requests may name as their model (kvpop compact), by folder or name on the hub. Repeatable",
        "none", "; without --kv-policy everything after them is kept",
    ),
    Setting("max_length", int, "N", "Longest text, for compression, full and models with sliding windows that are as long", "the model's", applies_to=(CACHE,)),
    Setting("seed", int, "N", "Seed of the draws of random and vase", "0", applies_to=(CACHE,)),
    Setting("prompt", int, "N", "Tokens that snapkv, pyramidkv, adakv and attention-matching compress", "the text of a call", applies_to=(CACHE,)),
    Setting("device", str, "DEVICE", "Device of pages and kernels", "the model's", applies_to=(CACHE,)),
    Setting(
        "kv_budget", int, "an integer", "B of this request. The window is resolved as for a server with that B",
        applies_to=(REQUEST,),
    ),
    Setting(
        "kv_protect_prompt", str, '"all" or an integer', "This prompt, or the first tokens of prompt and answer, are never evicted", protects=True,
        applies_to=(REQUEST,),
    ),
    Setting(
        "kv_cartridges", list, "a list of names", "Cartridges in front of the prompt, in this order",
        "the one that the request names as its model", applies_to=(REQUEST,),
    ),
    Setting(
        "kv_seed", int, "a 64-bit integer", "Seed of the draws", "the `seed` of the sampling parameters",
        applies_to=(REQUEST,),
    ),
    Setting(
        "kv_report", int, "0 or 1", "Whether the response says what the cache did", "0", applies_to=(REQUEST,),
    ),
)  # fmt: skip
"""All settings, in the order of the help and the documents."""


def settings_of(target: str) -> dict[str, Setting]:
    """Return the settings that apply to ENGINE, CACHE or REQUEST, by name."""
    return {setting.name: setting for setting in SETTINGS if target in setting.applies_to}


FLAGS = {name: setting.flag for name, setting in settings_of(ENGINE).items()}
"""Command-line flag of each setting of an engine."""
