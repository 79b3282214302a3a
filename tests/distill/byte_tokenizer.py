"""A tokenizer whose tokens are the text's bytes, so that rows can be checked without it; EOS 256, BOS 257."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, processors
from transformers import PreTrainedTokenizerFast

EOS, BOS = 256, 257
CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>\n{% endfor %}"


def byte_tokenizer(template: str | None = CHAT, eos: str | None = "<eos>", bos: bool = False):
    """Return the tokenizer.

    Args:
        template: chat template.
        eos: end-of-text token.
        bos: True if texts begin with BOS.
    """
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    backend = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(["<eos>", "<bos>"])
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=eos, bos_token="<bos>" if bos else None, chat_template=template
    )
