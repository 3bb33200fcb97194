"""Our codecs as tokenizers of transformers, so that `AutoTokenizer.from_pretrained` finds one beside a model.

>>> from polyhead.tasks.text.tokens import Bytes
>>> tokenizer = tokenizer_of(Bytes())
>>> tokenizer("né")["input_ids"], tokenizer.decode([110, 195, 169])
([110, 195, 169], 'né')
"""

import tokenizers
import transformers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from polyhead.tasks.text.tokens import Bytes, Subwords

NUL = "\0"


def tokenizer_of(codec: Bytes | Subwords, *, max_length: int | None = None) -> transformers.PreTrainedTokenizerFast:
    """A tokenizer that is `codec`; the token between documents is its `eos_token` and, on the left, its padding."""
    rust = _bytes() if isinstance(codec, Bytes) else tokenizers.Tokenizer.from_str(codec.text)
    end = None if codec.end is None else rust.id_to_token(codec.end)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=rust,
        clean_up_tokenization_spaces=False,
        split_special_tokens=isinstance(codec, Subwords),  # "<|endoftext|>" in a text is no token
        model_input_names=["input_ids", "attention_mask"],
        model_max_length=max_length,
        padding_side="left",
        eos_token=end,
        pad_token=end,
    )


def _bytes() -> tokenizers.Tokenizer:
    """A tokenizer in which token i is byte i: a byte-level vocabulary without merges.

    The token that ends documents, NUL, keeps the name NUL: the printable character that replaces it in byte-level
    tokenizers may occur in a text, where it must not end a document.
    """
    vocabulary = {character: byte for byte, character in bytes_to_unicode().items()} | {NUL: 0}
    del vocabulary[bytes_to_unicode()[0]]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken(NUL, normalized=False)])
    return tokenizer
