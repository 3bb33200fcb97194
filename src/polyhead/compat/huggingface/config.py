"""Our configuration as a configuration of transformers: JSON whose fields are all checked, and which runs no code."""

import dataclasses
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import transformers

from polyhead import config as configs
from polyhead.config import Classes, Logits, Patches, Tokens, TransformerConfig

SHIM = "modeling_polyhead"
"""The module written beside a saved model; it imports our classes for users who have not imported them."""

_CODE = '''"""Where transformers finds the classes of this model: in polyhead, which must be installed.

Run only by `trust_remote_code=True`.  Without it, `import polyhead.compat.huggingface` does the same.
"""

from polyhead.compat import huggingface


def __getattr__(name):
    return getattr(huggingface, name)
'''


class FindsItself:
    """Mixin of a configuration class: a saved folder names our classes by `auto_map` and a module that imports them.

    transformers ignores both if the classes are registered; otherwise it requires `trust_remote_code=True`.
    """

    auto_classes: Callable[[], dict[str, str]]
    """The name of our class for each Auto class."""

    def to_dict(self) -> dict[str, Any]:
        """As in the library, with our `auto_map` in place of one read from a file."""
        auto_map = {auto: f"{SHIM}.{kind}" for auto, kind in self.auto_classes().items()}
        return {**super().to_dict(), "auto_map": auto_map}  # type: ignore[misc]

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **options: Any
    ) -> None:
        """As in the library; also writes the module that `auto_map` names."""
        folder = pathlib.Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{SHIM}.py").write_text(_CODE, encoding="utf-8")
        super().save_pretrained(save_directory, push_to_hub, **options)  # type: ignore[misc]

    @classmethod
    def register_for_auto_class(cls, auto_class: object = "AutoConfig") -> None:
        """Does nothing: a saved folder finds this class through its shim and needs no copy of the source."""


class PolyheadConfig(FindsItself, transformers.PretrainedConfig):
    """A `TransformerConfig` for transformers: `transformer` holds its JSON, `settings` is the dataclass.

    >>> config = PolyheadConfig(TransformerConfig(Tokens(256), Logits(256), heads=Hyla(4), causal=True))
    >>> config.vocab_size, config.transformer["heads"][0]["kind"], config.settings.heads[0].act
    (256, 'Hyla', 'relu')

    Sizes are read from it and cannot be set, except `vocab_size`.  Raises ValueError for an unknown field or kind, and
    without `transformer`.
    """

    model_type = "polyhead"
    has_no_defaults_at_init = True
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "cache"]

    def __init__(self, transformer: Any = None, **others: Any) -> None:
        if transformer is None:
            raise ValueError(
                "PolyheadConfig: `transformer`, the JSON of a TransformerConfig, was wanted but there is none: "
                "this is no configuration of a polyhead model"
            )
        self.transformer = configs.to_dict(_settings(transformer))
        settings = self.settings
        for name in SIZES:  # which a file repeats
            size = others.pop(name, getattr(self, name))
            if size != getattr(self, name):
                raise ValueError(
                    f"PolyheadConfig: {name} is {getattr(self, name)!r} by its `transformer` but {size!r} came"
                )
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):  # the library reads these attributes
            others.setdefault(name, None)
        if isinstance(settings.outputs, Classes):
            others.setdefault("num_labels", settings.outputs.count)
        super().__init__(**others)
        if isinstance(settings.outputs, Classes) and self.num_labels != settings.outputs.count:
            raise ValueError(
                f"PolyheadConfig: {self.num_labels} labels but the model has {settings.outputs.count} classes"
            )

    def auto_classes(self) -> dict[str, str]:
        """Name of an Auto class -> our class, for the classes that these settings allow."""
        settings = self.settings
        kinds = {"AutoConfig": "Config", "AutoModel": "Model"}
        if isinstance(settings.inputs, Tokens):
            kinds["AutoModelForSequenceClassification"] = "ForSequenceClassification"
            if settings.causal and isinstance(settings.outputs, Logits):
                kinds["AutoModelForCausalLM"] = "ForCausalLM"
        elif isinstance(settings.inputs, Patches) and isinstance(settings.outputs, Classes):
            kinds["AutoModelForImageClassification"] = "ForImageClassification"
        return {auto: f"Polyhead{kind}" for auto, kind in kinds.items()}

    @property
    def settings(self) -> TransformerConfig:
        """The transformer's configuration."""
        return _settings(self.transformer)

    @property
    def vocab_size(self) -> int:
        """Size of the input vocabulary; 0 for a model that reads no tokens."""
        inputs = self.settings.inputs
        return inputs.count if isinstance(inputs, Tokens) else 0

    @vocab_size.setter
    def vocab_size(self, count: int) -> None:
        settings = self.settings
        names = ("inputs", "outputs") if isinstance(settings.outputs, Logits) else ("inputs",)  # not classes
        ends = {n: dataclasses.replace(getattr(settings, n), count=count) for n in names}
        self.transformer = configs.to_dict(dataclasses.replace(settings, **ends))

    @property
    def hidden_size(self) -> int:
        """The model width."""
        return self.settings.dim

    @property
    def num_hidden_layers(self) -> int:
        """Number of blocks."""
        return self.settings.layers

    @property
    def num_attention_heads(self) -> int:
        """Number of heads of the first layer, of all kinds."""
        return sum(group.heads for group in self.settings.layer_heads(0))

    @property
    def max_position_embeddings(self) -> int:
        """`max_length`."""
        return self.settings.max_length

    @property
    def tie_word_embeddings(self) -> bool:
        """Whether logits use the token table."""
        return isinstance(self.settings.outputs, Logits) and self.settings.outputs.tied

    @property
    def logit_scale(self) -> float | None:
        """The factor of the logits after the output map."""
        outputs = self.settings.outputs
        return self.hidden_size**-0.5 if isinstance(outputs, Logits) and outputs.tied and outputs.scaled else None


SIZES = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"),
    "tie_word_embeddings",
)


def _settings(transformer: Any) -> TransformerConfig:
    """The dataclass, from itself or from its JSON, whose fields are all checked."""
    if isinstance(transformer, TransformerConfig):
        return transformer
    if isinstance(transformer, Mapping):
        transformer = {"kind": "TransformerConfig", **transformer}
    settings = configs.from_dict(transformer, where="PolyheadConfig: transformer")
    if not isinstance(settings, TransformerConfig):
        raise ValueError(
            f"PolyheadConfig: transformer: a TransformerConfig was wanted but a {type(settings).__name__} came"
        )
    return settings
