"""Our configuration as a configuration of transformers: JSON whose fields are all checked, and which runs no code."""

from typing import Any

import transformers

from polyhead import config as configs

WHERE = "PolyheadConfig: transformer"


class PolyheadConfig(transformers.PretrainedConfig):
    """A `TransformerConfig` for transformers: `transformer` holds its JSON, `settings` is the dataclass.

    >>> config = PolyheadConfig(TransformerConfig(Tokens(256), Logits(256), heads=Hyla(4), causal=True))
    >>> config.vocab_size, config.transformer["heads"][0]["kind"], config.settings.heads[0].act
    (256, 'Hyla', 'relu')

    The sizes that transformers reads, such as `vocab_size`, are those of `transformer`, whatever else a file says.

    Raises:
        ValueError: For an unknown field or kind, and without `transformer`.
    """

    model_type = "polyhead"

    def __init__(self, transformer: Any = None, **others: Any) -> None:
        if not isinstance(transformer, configs.TransformerConfig):
            transformer = configs.from_dict(transformer, where=WHERE)
        self.transformer = configs.to_dict(transformer)
        # Attributes that the library reads; trainers that compute logits themselves multiply them by `logit_scale`.
        others = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, **others}
        is_tied = getattr(transformer.outputs, "tied", False)
        others |= {
            "vocab_size": getattr(transformer.inputs, "count", 0),
            "hidden_size": transformer.dim,
            "num_hidden_layers": transformer.layers,
            "num_attention_heads": configs.total_heads(transformer.layer_heads(0)),
            "max_position_embeddings": transformer.max_length,
            "tie_word_embeddings": is_tied,
            "logit_scale": transformer.dim**-0.5 if is_tied and transformer.outputs.scaled else None,
        }
        super().__init__(**others)

    @property
    def settings(self) -> configs.TransformerConfig:
        """The transformer's configuration."""
        return configs.from_dict(self.transformer, where=WHERE)
