"""Our models as models of transformers: `from_pretrained`, `generate`, the `Trainer`, the Hub.

    model = from_run("runs/lm")                         or, untrained, PolyheadForCausalLM(PolyheadConfig(settings))
    to_folder("runs/lm", "exported")                    config.json, model.safetensors, the tokenizer, README.md
    AutoModelForCausalLM.from_pretrained("exported")    wherever polyhead.compat.huggingface has been imported

The configuration is our `TransformerConfig` as JSON, whose fields are all checked; a file runs no code.  Parameters
have our names after "model.".
"""

import pathlib
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from polyhead.spec.optional import optional

with optional("polyhead.compat.huggingface", "polyhead[hf]"):
    import transformers
    from transformers import (
        AutoConfig,
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForImageClassification,
        AutoModelForSequenceClassification,
    )
    from transformers.modeling_outputs import (
        BaseModelOutputWithPast,
        CausalLMOutputWithPast,
        ImageClassifierOutput,
        SequenceClassifierOutputWithPast,
    )
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if int(transformers.__version__.split(".")[0]) < 5:  # older versions load and tie differently
        raise ImportError(f"version 5, not {transformers.__version__}", name="transformers")

from polyhead.compat.huggingface.base import PolyheadPreTrainedModel, reads, reads_tokens
from polyhead.compat.huggingface.cache import PolyheadCache, own
from polyhead.compat.huggingface.card import card
from polyhead.compat.huggingface.config import PolyheadConfig
from polyhead.compat.huggingface.tokens import tokenizer_of
from polyhead.config import Classes, Logits, Patches
from polyhead.models.initialise import initialise
from polyhead.tasks.text.tokens import codec_of
from polyhead.train.store.checkpoint import load_model
from polyhead.train.store.folder import read_config


class PolyheadModel(PolyheadPreTrainedModel):
    """The blocks without outputs: the stream after the last norm, for tokens or images.

    >>> settings = TransformerConfig(Tokens(256), Logits(256), dim=32, heads=[Softmax(2), Hyla(2)], causal=True)
    >>> model = PolyheadModel(PolyheadConfig(settings)).eval()
    >>> out = model(torch.tensor([[72, 105, 33]]), output_hidden_states=True, output_attentions=True)
    >>> out.last_hidden_state.shape, len(out.hidden_states), out.attentions[0].shape
    (torch.Size([1, 3, 32]), 3, torch.Size([1, 4, 3, 3]))

    `attentions` are the latent codes of all pairs (b h t s), layer by layer; `hidden_states` are the inputs of the
    blocks, and last the result.  Raises ValueError for a model with an encoder, or one that reads vectors.
    """

    def __init__(self, config: PolyheadConfig) -> None:
        settings = config.settings
        if not (reads_tokens(settings) or isinstance(settings.inputs, Patches)):
            raise ValueError(
                f"PolyheadModel: a model of Tokens or Patches, without an encoder, was wanted but {reads(settings)}"
            )
        super().__init__(config, outputs=False)
        if isinstance(settings.inputs, Patches):
            self.main_input_name = "pixel_values"
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: transformers.Cache | None = None,
        inputs_embeds: Tensor | None = None,
        *,
        pixel_values: Tensor | None = None,
        position_ids: Tensor | None = None,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
        **others: Any,
    ) -> BaseModelOutputWithPast | tuple[Tensor, ...]:
        """The inputs are those of `PolyheadForCausalLM`, or `pixel_values` (b channels height width)."""
        looks = self._look(others)
        if isinstance(self.config.settings.inputs, Patches):
            cache, x = None, self._images(pixel_values, looks)
        else:
            given = (input_ids, attention_mask, past_key_values, inputs_embeds)
            lazy = not isinstance(self.model.outputs, nn.Identity)  # see PolyheadForCausalLM.base_model
            x, cache = self._read(
                *given, looks=looks, others=others, position_ids=position_ids, use_cache=use_cache, lazy=lazy
            )
        output = BaseModelOutputWithPast(
            last_hidden_state=x, past_key_values=cache, hidden_states=looks.states, attentions=looks.codes
        )
        return output.to_tuple() if return_dict is False else output


class PolyheadForCausalLM(PolyheadPreTrainedModel, transformers.GenerationMixin):
    """A causal language model: any heads, with `generate` on our cache.

    >>> settings = TransformerConfig(Tokens(256), Logits(256), dim=32, heads=Hyla(4), causal=True)
    >>> model = PolyheadForCausalLM(PolyheadConfig(settings)).eval()
    >>> model.generate(torch.tensor([[72, 105]]), max_new_tokens=3, do_sample=False).shape
    torch.Size([1, 5])

    Raises ValueError for a model that is not causal between tokens and logits, or that has an encoder.
    """

    def __init__(self, config: PolyheadConfig) -> None:
        settings = config.settings
        if not (reads_tokens(settings) and isinstance(settings.outputs, Logits) and settings.causal):
            encoder = "with an encoder" if settings.encoder is not None else f"causal={settings.causal}"
            raise ValueError(
                "PolyheadForCausalLM: a causal model between Tokens and Logits, without an encoder, was wanted but it "
                f"is between {settings.inputs} and {settings.outputs}, {encoder}"
            )
        super().__init__(config)
        self.post_init()

    @property
    def base_model(self) -> PolyheadModel:
        """The backbone with the same parameters; some trainers call it and compute logits themselves."""
        kept = self.__dict__.get("_backbone")  # not registered as a submodule
        if kept is None or kept.model is not self.model:
            with torch.device("meta"):
                kept = PolyheadModel(self.config)
            kept.model = self.model
            self.__dict__["_backbone"] = kept
        kept.training = self.training
        return kept

    def _prepare_cache_for_generation(  # type: ignore[override]  # its last arguments differ between versions
        self, generation_config: Any, model_kwargs: dict[str, Any], *_: Any
    ) -> None:
        """Use our cache instead of the library's default."""
        who, early = type(self).__name__, generation_config.assistant_early_exit
        if (kind := generation_config.cache_implementation) not in (None, "dynamic"):
            raise ValueError(f"{who}: its cache is its own, so cache_implementation must be None, not {kind!r}")
        if early is not None:
            raise ValueError(f"{who}: it computes all its layers, so assistant_early_exit must be None, not {early!r}")
        if (given := own(who, model_kwargs.get("past_key_values"))) is not None:
            given._is_user_defined = True
        elif generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = PolyheadCache(len(self.model.blocks))

    def init_continuous_batching(self, *_: object, **__: object) -> NoReturn:
        """Raises ValueError before any request is read: continuous batches need the library's paged cache."""
        raise ValueError(f"{type(self).__name__}: its cache is its own, so continuous batches cannot be: use generate")

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: transformers.Cache | None = None,
        labels: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        position_ids: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        **others: Any,
    ) -> CausalLMOutputWithPast | tuple[Tensor, ...]:
        """Logits (b t c), and with `labels` (b t; -100: not scored) the mean loss of each next token.

        `attention_mask` (b s), s counting the tokens in `past_key_values`, too, is 0 at padding, on either side.
        `inputs_embeds` (b t m) replaces tokens by rows of `get_input_embeddings()` or by other vectors.  `position_ids`
        (b|1 t) are by default the number of real tokens before each; if those of one row (1 t) restart at 0 and there
        is no mask, they mean several packed sequences.  `others`: `output_hidden_states`, `output_attentions`, see
        `PolyheadModel`.  All other options go to `loss_function`.

        Raises ValueError for a mask that contradicts the cache, and for packed sequences with a cache or padding.
        """
        looks = self._look(others)
        given = (input_ids, attention_mask, past_key_values, inputs_embeds)
        tail = logits_to_keep if isinstance(logits_to_keep, int) and logits_to_keep > 0 else None
        logits, cache = self._read(
            *given, looks=looks, others=others, position_ids=position_ids, use_cache=use_cache, tail=tail
        )
        if isinstance(logits_to_keep, Tensor):
            logits = logits[:, logits_to_keep]
        share, compared, items = 1.0, others.get("shift_labels"), others.get("num_items_in_batch")
        if labels is not None and compared is None:
            compared = labels[..., 1:]
        if compared is not None and items is not None:  # the losses of several batches are added up: so is the balance
            others["num_items_in_batch"] = items = torch.as_tensor(items).clamp(min=1)
            share = (compared != -100).sum() / items
        loss = self._loss(labels, share, compared, logits=logits, vocab_size=logits.shape[-1], **others)
        output = CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=cache, hidden_states=looks.states, attentions=looks.codes
        )
        return output.to_tuple() if return_dict is False else output


class PolyheadForSequenceClassification(PolyheadPreTrainedModel):
    """A classifier of texts: logits (b labels) from each sequence's last real token.

    >>> settings = TransformerConfig(Tokens(256), Logits(256), dim=32, heads=Hyla(4), causal=True)
    >>> model = PolyheadForSequenceClassification(PolyheadConfig(settings, num_labels=3, pad_token_id=0)).eval()
    >>> model(torch.tensor([[72, 105, 33], [72, 105, 0]])).logits.shape
    torch.Size([2, 3])

    It reads the folder of a language model and adds a new map to the labels, `score`.  A model that was trained from
    Tokens to Classes keeps its own map and its pooling: the mean, or the first token.  Raises ValueError for a model
    that reads no tokens, or that has an encoder.
    """

    accepts_loss_kwargs = False  # its loss is the mean of a batch, which the Trainer divides by the batches of a step

    def __init__(self, config: PolyheadConfig) -> None:
        settings = config.settings
        if not reads_tokens(settings):
            wanted = "a model of Tokens, without an encoder, was wanted"
            raise ValueError(f"PolyheadForSequenceClassification: {wanted} but {reads(settings)}")
        own = isinstance(settings.outputs, Classes)
        super().__init__(config, outputs=own)
        self.num_labels = config.num_labels or 0
        self.score = None if own else nn.Linear(settings.dim, self.num_labels, bias=False)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if module is self.score:
            initialise(module, self.config.settings.init)
        else:
            super()._init_weights(module)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: transformers.Cache | None = None,
        labels: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        position_ids: Tensor | None = None,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
        **others: Any,
    ) -> SequenceClassifierOutputWithPast | tuple[Tensor, ...]:
        """Logits (b labels), and the loss with `labels` (b), or (b labels) for several labels per sequence.

        The last real token is the last with `attention_mask` 1 or, without a mask, the last that is not `pad_token_id`.
        """
        looks = self._look(others)
        given = (input_ids, attention_mask, past_key_values, inputs_embeds)
        x, cache = self._read(*given, looks=looks, others=others, position_ids=position_ids, use_cache=use_cache)
        if self.score is None:
            logits = x[:, 0]
        else:
            last = self._last(input_ids, attention_mask, x)
            logits = self.score(x[torch.arange(len(x), device=x.device), last])
        loss = self._loss(labels, logits=logits, pooled_logits=logits, config=self.config)
        output = SequenceClassifierOutputWithPast(
            loss=loss, logits=logits, past_key_values=cache, hidden_states=looks.states, attentions=looks.codes
        )
        return output.to_tuple() if return_dict is False else output

    def _last(self, tokens: Tensor | None, mask: Tensor | None, x: Tensor) -> Tensor | int:
        """The index of each sequence's last real token."""
        if mask is not None:
            real = mask[:, -x.shape[1] :] != 0
        elif (pad := self.config.pad_token_id) is not None and tokens is not None:
            real = tokens != pad
        elif len(x) == 1:
            return -1
        else:
            raise ValueError(
                "PolyheadForSequenceClassification: attention_mask or config.pad_token_id was wanted, to find the last "
                f"token of {len(x)} sequences, but neither came"
            )
        return (real * torch.arange(x.shape[1], device=x.device)).argmax(-1)


class PolyheadForImageClassification(PolyheadPreTrainedModel):
    """A classifier of images: patches, any heads, logits (b classes).

    Raises ValueError unless the model reads patches and returns classes.
    """

    main_input_name = "pixel_values"
    input_modalities = "image"
    accepts_loss_kwargs = False  # as of sequences

    def __init__(self, config: PolyheadConfig) -> None:
        settings = config.settings
        if not (isinstance(settings.inputs, Patches) and isinstance(settings.outputs, Classes)):
            wanted = "a model between Patches and Classes was wanted"
            came = f"it is between {settings.inputs} and {settings.outputs}"
            raise ValueError(f"PolyheadForImageClassification: {wanted} but {came}")
        super().__init__(config)
        self.post_init()

    def forward(
        self,
        pixel_values: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        return_dict: bool | None = None,
        **others: Any,
    ) -> ImageClassifierOutput | tuple[Tensor, ...]:
        """Logits (b classes) of images (b channels height width), and with `labels` (b) the loss."""
        looks = self._look(others)
        logits = self._images(pixel_values, looks)[:, 0]
        loss = self._loss(labels, pooled_logits=logits, config=self.config, **others)
        output = ImageClassifierOutput(loss=loss, logits=logits, hidden_states=looks.states, attentions=looks.codes)
        return output.to_tuple() if return_dict is False else output


MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[PolyheadConfig.model_type] = PolyheadForCausalLM.__name__
"""By this table the Trainer knows whose labels to shift when it smooths them."""

_AUTO = {
    AutoModel: PolyheadModel,
    AutoModelForCausalLM: PolyheadForCausalLM,
    AutoModelForSequenceClassification: PolyheadForSequenceClassification,
    AutoModelForImageClassification: PolyheadForImageClassification,
}
AutoConfig.register(PolyheadConfig.model_type, PolyheadConfig, exist_ok=True)
for _auto, _kind in _AUTO.items():
    _auto.register(PolyheadConfig, _kind, exist_ok=True)

Exported = PolyheadForCausalLM | PolyheadForSequenceClassification | PolyheadForImageClassification


def from_run(folder: str | pathlib.Path) -> Exported:
    """The trained model of a run folder, in eval mode on the CPU.  Raises ValueError for a run of another kind of
    model."""
    run, trained = load_model(folder)
    settings = run.transformer
    kind: type[Exported] = PolyheadForCausalLM
    if isinstance(settings.outputs, Classes):
        kind = PolyheadForSequenceClassification if reads_tokens(settings) else PolyheadForImageClassification
    with torch.random.fork_rng(devices=[]):
        model = kind(PolyheadConfig(settings))
    model.model.load_state_dict(trained.state_dict())
    return model.eval()


def to_folder(run: str | pathlib.Path, path: str | pathlib.Path, **options: Any) -> None:
    """Write the model of a run folder to `path`, for `from_pretrained`, with a README and, for a run on text, its
    tokenizer.

    `options` go to `save_pretrained`: `max_shard_size="1GB"`.  Raises ValueError for a tokenizer that the library
    cannot read (see `tokenizer_of`) or that is not the one the model was trained with.
    """
    model, config = from_run(run), read_config(run)
    if hasattr(config.task, "codec"):
        tokenizer = tokenizer_of(codec_of(config, run), max_length=model.config.max_position_embeddings)
        assert model.generation_config is not None
        for holder in (model.config, model.generation_config):
            holder.eos_token_id = holder.pad_token_id = tokenizer.eos_token_id
        tokenizer.save_pretrained(path)
    model.save_pretrained(path, **options)
    (pathlib.Path(path) / "README.md").write_text(card(model, run), encoding="utf-8")
