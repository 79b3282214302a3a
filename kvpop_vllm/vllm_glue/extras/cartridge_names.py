"""Names of cartridges at the front end of an engine.

A cartridge is served under its name, as a LoRA adapter is: vLLM's front end lists it next to its base model, and hands
what it is over with each request that names it. The request's prompt then begins with the cartridge's slots.

Bad input raises a :class:`~kvpop_vllm.config.ConfigError` that names what to change.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.utils.weak import WeakIdKeyDictionary
from vllm.exceptions import VLLMNotFoundError, VLLMValidationError
from vllm.logger import init_logger
from vllm.lora.request import LoRARequest

from kvpop_vllm.cache.pages import BLOCK_SLOTS
from kvpop_vllm.compaction.base_model import check_base
from kvpop_vllm.compaction.cartridge import read_cartridge
from kvpop_vllm.compaction.prompt_place import begin_of_text
from kvpop_vllm.config import ConfigError
from kvpop_vllm.hub import local_folder
from kvpop_vllm.requests import BUDGET, CARTRIDGES, Placed, RequestSlots, UnknownCartridge, named, resolve
from kvpop_vllm.vllm_glue.start.cuda import check_drafts
from kvpop_vllm.vllm_glue.start.engine_policy import engine_policy, requested

logger = init_logger("vllm.kvpop_vllm")

SALT = "kvpop "
"""Beginning of the cache salt of requests with cartridges, which no client may use."""
CHAT = "kvpop_chat"
"""Key that marks an input of the engine as a chat's."""
_names = WeakIdKeyDictionary()
"""Names of each config."""


class NamedCartridge(LoRARequest):
    """Cartridge in the place of the LoRA adapter that a request names as its model."""


@dataclass(frozen=True)
class ServedCartridge:
    """Cartridge that requests may name: its folder, its digest and number of slots, and ids that it begins with."""

    folder: str
    placed: Placed
    head: tuple[int, ...]


class CartridgeNames:
    """Cartridges of an engine, by name.

    Args:
        vllm_config: config of the engine, whose policy names the first cartridges.
    """

    def __init__(self, vllm_config):
        self.vllm_config, self.policy = vllm_config, engine_policy(vllm_config)
        self.served: dict[str, ServedCartridge] = {}
        for name, folder in (self.policy.settings.cartridge or {}).items():
            self.served[name] = self.read(name, folder)

    @property
    def placed(self) -> dict[str, Placed]:
        """Digest and slots of each cartridge, by name."""
        return {name: cartridge.placed for name, cartridge in self.served.items()}

    def read(self, name: str, folder: str) -> ServedCartridge:
        """Read and check a cartridge that is to be served under a name."""
        model, cache = self.vllm_config.model_config, self.vllm_config.cache_config
        if name in self.served or name == model.served_model_name:
            raise ConfigError(f"the name {name!r} is taken: give the cartridge another")
        if self.policy.compresses:
            raise ConfigError(
                f"--kv-policy {self.policy.name} gives up what stands before a prompt's end: choose another policy, or leave"
                " --kv-cartridge out"
            )
        if not cache.enable_prefix_caching:
            raise ConfigError(
                "requests share cartridges as prefixes: leave --no-enable-prefix-caching, or cartridges, out"
            )
        # nobody would write the cartridges again after a wake-up
        if model.enable_sleep_mode:
            raise ConfigError(
                "a sleeping engine throws its KV cache away: leave --enable-sleep-mode out to load cartridges"
            )
        cartridge = read_cartridge(folder)
        weights = model.model if Path(model.model).is_dir() else None
        if weights is None:
            logger.warning("%s is not a folder: that %s was made with its weights is not checked", model.model, folder)
        check_base(cartridge.config, model.hf_text_config, str(folder), weights=weights)
        slots, size = cartridge.config.slots, cache.block_size if cache.user_specified_block_size else BLOCK_SLOTS
        if slots % size:
            raise ConfigError(
                f"{folder} has {slots} slots, no multiple of --block-size {size}: lower it to a divisor of {BLOCK_SLOTS}"
            )
        if slots >= model.max_model_len:
            raise ConfigError(f"{folder} has {slots} slots: raise --max-model-len {model.max_model_len} above them")
        placed = Placed(cartridge.digest, slots)
        return ServedCartridge(str(local_folder(folder).resolve()), placed, tuple(cartridge.config.head))


def names_of(vllm_config) -> CartridgeNames:
    """Return the cartridges of an engine, read once per config and process."""
    if vllm_config not in _names:
        _names[vllm_config] = CartridgeNames(vllm_config)
    return _names[vllm_config]


def render_chat(original, self, *args, **kwargs):
    """Wrap the rendering of chats: mark the engine's inputs that are made of them."""
    return _marked(self.config, original(self, *args, **kwargs))


async def render_chat_async(original, self, *args, **kwargs):
    """Wrap it in servers."""
    return _marked(self.config, await original(self, *args, **kwargs))


def _marked(vllm_config, rendered):
    conversations, inputs = rendered
    for engine_input in inputs if requested(vllm_config) else ():
        engine_input[CHAT] = True
    return conversations, inputs


def begin_of_prompt(prompt, ids: Sequence[int], tokenizer) -> list[int]:
    """Return the special ids before a prompt that a tokenizer or a chat template wrote, none before a client's own ids.

    Args:
        prompt: input of the engine, or a prompt that is none yet.
        ids: its ids.
        tokenizer: the engine's, None if it has none.
    """
    if tokenizer is None:
        return []
    if not isinstance(prompt, Mapping):
        return begin_of_text(tokenizer, ids, prompt) if isinstance(prompt, str) else []
    if prompt.get(CHAT):
        return begin_of_text(tokenizer, ids, None)
    text = prompt.get("prompt") if "type" in prompt or "prompt_token_ids" not in prompt else None
    return begin_of_text(tokenizer, ids, text) if text else []


def resolved(
    vllm_config, params, prompt: Sequence, adapter: LoRARequest | None, begin: Callable[[], Sequence[int]] = tuple
) -> tuple[RequestSlots, tuple[int, ...]]:
    """Return the slots of a request, and the head of its cartridges.

    The head are ids with which the prompt begins. Its cartridges begin with them too, and hold them. After cartridges
    in front of everything they are those of ``begin``, which the fit of a cartridge has not.

    Args:
        vllm_config: config of the engine.
        params: sampling parameters of the request.
        prompt: its prompt tokens, or their embeddings, empty if they are not known yet.
        adapter: what the request names as its model, if that is not a base model.
        begin: returns the result of :func:`begin_of_prompt`.

    Raises:
        VLLMNotFoundError: the request names a cartridge that does not exist.
        VLLMValidationError: the request asks for something else that it cannot have.
    """
    options, names = dict(params.extra_args or {}), names_of(vllm_config)
    if isinstance(adapter, NamedCartridge):
        if options.get(CARTRIDGES) is not None:
            raise VLLMValidationError(
                f"the model {adapter.lora_name!r} is a cartridge: name all of them in {CARTRIDGES}"
            )
        options[CARTRIDGES] = [adapter.lora_name]
    try:
        placed = named(options, names.placed)
        head = _head_of([(name, names.served[name].head) for name in placed], prompt, begin)
        prompt_length = max(0, len(prompt) - len(head))
        slots = resolve(names.policy, options, prompt_length, tuple(placed.values()))
        check_drafts(vllm_config, slots.window, BUDGET)
    except UnknownCartridge as error:
        raise VLLMNotFoundError(str(error)) from None
    except ConfigError as error:
        raise VLLMValidationError(str(error)) from None
    if slots.cartridges:
        _check(slots, params, prompt_length, adapter, vllm_config.model_config.max_model_len)
    return slots, head


def _head_of(
    heads: Sequence[tuple[str, tuple[int, ...]]], prompt: Sequence, begin: Callable[[], Sequence[int]]
) -> tuple[int, ...]:
    """Return the ids of a prompt's beginning that cartridges stand for.

    Args:
        heads: name and ids of each cartridge, in order.
        prompt: see :func:`resolved`.
        begin: see :func:`resolved`.
    """
    if len({head for _, head in heads}) > 1:
        names = " and ".join(name for name, _ in heads)
        raise ConfigError(f"{names} were made with different system messages or places: name one of them")
    name, head = heads[0] if heads else ("", ())
    if heads and not head:
        head = tuple(begin())
    if head and len(prompt) and tuple(prompt[: len(head)]) != head:
        raise ConfigError(
            f"the cartridge {name!r} stands in the first message of a chat: begin with a message of the user, after the system"
            " message that it was made with, if any, and without blanks or line ends at the beginning; for other prompts make it with 'kvpop compact --place front'"
        )
    if head and len(prompt) == len(head):
        raise ConfigError("the prompt ends where the cartridge begins: send a message after it")
    return head


def _check(slots: RequestSlots, params, prompt: int, adapter: LoRARequest | None, longest: int) -> None:
    """Check that a request that begins with cartridges can be served.

    Raises:
        VLLMValidationError: it cannot.
    """
    if params.prompt_logprobs is not None:
        raise VLLMValidationError("prompt_logprobs need a prompt of tokens alone: leave them or the cartridge out")
    if adapter is not None and not isinstance(adapter, NamedCartridge):
        raise VLLMValidationError("a cartridge was made with the base model: name the base model, not an adapter")
    if slots.made_slots + prompt >= longest:
        raise VLLMValidationError(
            f"{slots.made_slots} slots of cartridges and a prompt of {prompt} tokens leave no room within"
            f" --max-model-len {longest}: shorten the prompt, or name fewer cartridges"
        )


def prepend(request, slots: RequestSlots, head: int, longest: int) -> None:
    """Begin a request's prompt with a placeholder for each slot of its cartridges, in place of what they hold of it.

    Placeholders repeat the first token after them, so that penalties of prompt tokens see no other. Blocks after the
    cartridges are hashed with the cartridges' digests, and with the request's own salt.

    Args:
        request: an ``EngineCoreRequest``, changed in place.
        slots: slots of the request.
        head: number of the prompt's first tokens that the cartridges hold.
        longest: ``--max-model-len``.

    Raises:
        VLLMValidationError: the prompt is not a list of tokens.
    """
    if request.prompt_token_ids is None or request.prompt_embeds is not None or request.mm_features:
        raise VLLMValidationError(
            "a cartridge needs a prompt of tokens alone: leave embeddings and media, or the cartridge, out"
        )
    prompt_tokens = list(request.prompt_token_ids[head:])
    request.prompt_token_ids = prompt_tokens[:1] * slots.made_slots + prompt_tokens
    digests = "+".join(placed.digest for placed in slots.cartridges)
    request.cache_salt = f"{SALT}{digests} {request.cache_salt or ''}"
    params = request.sampling_params
    params.max_tokens = min(params.max_tokens, longest - len(request.prompt_token_ids))
