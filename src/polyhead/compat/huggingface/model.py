"""Our models as models of transformers: `from_pretrained`, `generate`, the `Trainer`, the Hub.

    model = from_run("runs/lm")                         or, untrained, PolyheadForCausalLM(PolyheadConfig(settings))
    to_folder("runs/lm", "exported")                    config.json, model.safetensors, the tokenizer
    AutoModelForCausalLM.from_pretrained("exported")    wherever polyhead.compat.huggingface has been imported

Parameters have our names after "model.".
"""

import pathlib
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.generic import can_return_tuple

from polyhead.compat.huggingface.base import CACHE_NAME, PolyheadPreTrainedModel, select_cache
from polyhead.compat.huggingface.cache import PolyheadCache
from polyhead.compat.huggingface.config import PolyheadConfig
from polyhead.compat.huggingface.tokens import tokenizer_of
from polyhead.config import Logits
from polyhead.tasks.text.tokens import codec_of
from polyhead.train.store.checkpoint import load_model
from polyhead.train.store.folder import read_config

LOSS_OPTIONS = ("num_items_in_batch", "shift_labels", "ignore_index")
"""Arguments of a forward pass that go to `loss_function`."""


class PolyheadModel(PolyheadPreTrainedModel):
    """The blocks without outputs: the stream after the last norm.

    >>> settings = TransformerConfig(Tokens(256), Logits(256), dim=32, heads=[Softmax(2), Hyla(2)], causal=True)
    >>> model = PolyheadModel(PolyheadConfig(settings)).eval()
    >>> out = model(torch.tensor([[72, 105, 33]]), output_hidden_states=True, output_attentions=True)
    >>> out.last_hidden_state.shape, len(out.hidden_states), out.attentions[0].shape
    (torch.Size([1, 3, 32]), 3, torch.Size([1, 4, 3, 3]))

    `hidden_states` are the inputs of the blocks, and last the result.  Raises ValueError for a model with an encoder,
    or one that reads vectors.
    """

    def __init__(self, config: PolyheadConfig) -> None:
        super().__init__(config, outputs=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: transformers.Cache | None = None,
        inputs_embeds: Tensor | None = None,
        *,
        cache: transformers.Cache | None = None,
        position_ids: Tensor | None = None,
        use_cache: bool | None = None,
        **options: Any,
    ) -> BaseModelOutputWithPast:
        """The inputs are those of `PolyheadForCausalLM`."""
        caches, lazy = (cache, past_key_values), not isinstance(self.model.outputs, nn.Identity)  # of `base_model`
        x, fields = self._read(
            input_ids, attention_mask, caches, inputs_embeds, position_ids, use_cache, options, (), lazy=lazy
        )
        return BaseModelOutputWithPast(last_hidden_state=x, **fields)


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
        if not (isinstance(settings.outputs, Logits) and settings.causal):
            raise ValueError(
                "PolyheadForCausalLM: the model must be causal and end in Logits, "
                f"got causal={settings.causal} and {settings.outputs}"
            )
        super().__init__(config)
        self.post_init()

    @property
    def base_model(self) -> PolyheadModel:
        """The backbone with the same parameters; some trainers call it and compute logits themselves."""
        backbone = self.__dict__.get("_backbone")  # not registered as a submodule
        if backbone is None or backbone.model is not self.model:
            # The parts of the backbone are made without memory and then replaced by those of this model.
            with torch.device("meta"):
                backbone = PolyheadModel(self.config)
            backbone.model = self.model
            self.__dict__["_backbone"] = backbone
        backbone.training = self.training
        return backbone

    def _prepare_cache_for_generation(  # type: ignore[override]  # its last arguments differ between versions
        self, generation_config: Any, model_kwargs: dict[str, Any], *_: Any
    ) -> None:
        """Use our cache instead of the library's default."""
        cache = select_cache(type(self).__name__, model_kwargs.get("cache"), model_kwargs.get("past_key_values"))
        if cache is not None:
            cache._is_user_defined = True
        elif generation_config.use_cache is not False:
            cache = PolyheadCache(len(self.model.blocks))
        for argument in ("cache", "past_key_values"):
            model_kwargs.pop(argument, None)
        if cache is not None:
            model_kwargs[CACHE_NAME] = cache

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: transformers.Cache | None = None,
        labels: Tensor | None = None,
        *,
        cache: transformers.Cache | None = None,
        inputs_embeds: Tensor | None = None,
        position_ids: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **options: Any,
    ) -> CausalLMOutputWithPast:
        """Logits (b t c), and with `labels` (b t; -100: not scored) the mean loss of each next token.

        `attention_mask` (b s), s counting the tokens in the cache, too, is 0 at padding, on either side.  `cache` is
        also called `past_key_values`.  `position_ids` (b|1 t) are by default the number of real tokens before each.  If
        those of one row (1 t) without padding restart at 0, they mean several packed sequences.

        Raises ValueError for a mask that contradicts the cache, for packed sequences with a cache or padding, and for
        other arguments.
        """
        tail = logits_to_keep if isinstance(logits_to_keep, int) and logits_to_keep > 0 else None
        caches = (cache, past_key_values)
        logits, fields = self._read(
            input_ids, attention_mask, caches, inputs_embeds, position_ids, use_cache, options, LOSS_OPTIONS, tail=tail
        )
        # An integer is a number of last tokens, a tensor holds indices of tokens.
        if isinstance(logits_to_keep, Tensor):
            logits = logits[:, logits_to_keep]

        loss = None if labels is None else self._loss(logits, labels, options)
        return CausalLMOutputWithPast(loss=loss, logits=logits, **fields)

    def _loss(self, logits: Tensor, labels: Tensor, options: dict[str, Any]) -> Tensor:
        """The loss by `loss_function`, 0 if no label is scored, and in training the load-balance loss of experts."""
        compared = options.get("shift_labels")
        if compared is None:
            compared = labels[..., 1:]
        # The losses of several batches are added up, each divided by the labels of all.  So is the balance of experts.
        balance_share: Tensor | float = 1.0
        if options.get("num_items_in_batch") is not None:
            num_items = torch.as_tensor(options["num_items_in_batch"]).clamp(min=1)
            options["num_items_in_batch"] = num_items
            balance_share = (compared != -100).sum() / num_items
        # The library chooses the loss by the class and the configuration; a user may have set another.
        loss: Tensor = self.loss_function(logits=logits, labels=labels, vocab_size=logits.shape[-1], **options)
        # A mean over no label is 0 / 0, but a micro-batch without labels adds nothing.
        loss = torch.where((compared != -100).any(), loss, 0.0)
        return loss + balance_share * self.model.auxiliary_loss() if self.training else loss


MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[PolyheadConfig.model_type] = PolyheadForCausalLM.__name__
"""By this table the Trainer knows whose labels to shift when it smooths them."""

AutoConfig.register(PolyheadConfig.model_type, PolyheadConfig, exist_ok=True)
AutoModel.register(PolyheadConfig, PolyheadModel, exist_ok=True)
AutoModelForCausalLM.register(PolyheadConfig, PolyheadForCausalLM, exist_ok=True)


def from_run(folder: str | pathlib.Path) -> PolyheadForCausalLM:
    """The trained model of a run folder, in eval mode on the CPU.  Raises ValueError for a run of another kind of
    model."""
    run, trained = load_model(folder)
    with torch.random.fork_rng(devices=[]):
        model = PolyheadForCausalLM(PolyheadConfig(run.transformer))
    model.model.load_state_dict(trained.state_dict())
    return model.eval()


def to_folder(run: str | pathlib.Path, path: str | pathlib.Path, **options: Any) -> None:
    """Write the model of a run folder to `path`, for `from_pretrained`, and for a run on text its tokenizer.

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
