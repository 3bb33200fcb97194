"""Our models as models of transformers: `from_pretrained`, `generate`, the `Trainer`, the Hub."""

import copy
import dataclasses
import pathlib
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.generic import can_return_tuple

from polyhead.compat.huggingface.cache import CACHE_NAME, PolyheadCache, select_cache
from polyhead.compat.huggingface.config import PolyheadConfig
from polyhead.compat.huggingface.inputs import place_tokens
from polyhead.compat.huggingface.tokens import tokenizer_of
from polyhead.config import Logits
from polyhead.layers.positions import Constant
from polyhead.layers.taps import Taps
from polyhead.models.inputs_outputs import TiedOutput
from polyhead.models.transformer import Transformer
from polyhead.tasks.text.tokens import codec_of
from polyhead.train.store.checkpoint import load_model
from polyhead.train.store.folder import read_config


class PolyheadModel(transformers.PreTrainedModel):
    """The blocks without outputs: the stream after the last norm.

    >>> settings = TransformerConfig(Tokens(256), Logits(256), dim=32, heads=[Softmax(2), Hyla(2)], causal=True)
    >>> model = PolyheadModel(PolyheadConfig(settings)).eval()
    >>> out = model(torch.tensor([[72, 105, 33]]), output_hidden_states=True, output_attentions=True)
    >>> out.last_hidden_state.shape, len(out.hidden_states), out.attentions[0].shape
    (torch.Size([1, 3, 32]), 3, torch.Size([1, 4, 3, 3]))

    `hidden_states` are the inputs of the blocks, and last the result.  Parameters have our names, after "model.".
    """

    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["TransformerBlock"]  # noqa: RUF012 (as the library declares it)
    _skip_keys_device_placement = ["past_key_values", "cache"]  # noqa: RUF012
    config: PolyheadConfig
    model: Transformer

    def __init__(self, config: PolyheadConfig, *, outputs: bool = False) -> None:
        super().__init__(config)
        self.model = Transformer(config.settings, outputs=outputs)
        # A backbone reads the file of a whole model, and does not miss its outputs.
        if not outputs:
            self._keys_to_ignore_on_load_unexpected = [r"^model\.outputs\."]
        self.gradient_checkpointing = config.settings.checkpoint
        # Further names of a parameter -> its first name: the table of tokens and logits, or what a user's layers share.
        self._tied_weights_keys = {}
        first_names: dict[Tensor, str] = {}
        for name, parameter in self.model.named_parameters(prefix="model", remove_duplicate=False):
            if first_names.setdefault(parameter, name) != name:
                self._tied_weights_keys[name] = first_names[parameter]
        for tensor in self.model.state_dict(keep_vars=True).values():
            if not tensor.is_meta:  # already initialised by our own rules
                tensor._is_hf_initialized = True
        self.post_init()

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Further names of tied parameters -> their first names."""
        return dict(self._tied_weights_keys or {})

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Compute constants, which `from_pretrained` leaves empty.  Raises ValueError for other empty parameters."""
        if isinstance(module, Constant):
            module.to(module.value.device)  # recomputes the value
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.is_meta and not getattr(parameter, "_is_hf_initialized", False):
                raise ValueError(f"{type(self).__name__}: the file must have {name} of each {type(module).__name__}")

    def _set_gradient_checkpointing(self, enable: bool = True, *_: Any, **__: Any) -> None:
        """Set `checkpoint` of our configuration: activation checkpointing of all blocks."""
        self.gradient_checkpointing = enable
        self.model.config = dataclasses.replace(self.model.config, checkpoint=enable)

    def get_input_embeddings(self) -> nn.Module:
        """The token table."""
        return self.model.inputs.table  # type: ignore[return-value]

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args: Any, **options: Any) -> Any:
        """Our vocabulary has one size.  Raises ValueError for another."""
        multiple = options.get("pad_to_multiple_of") or 1
        if new_num_tokens not in (None, self.config.vocab_size) or self.config.vocab_size % multiple:
            raise ValueError(f"{type(self).__name__}: the vocabulary must stay of {self.config.vocab_size} tokens")
        return self.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module | None:
        """The output map with `weight` and `bias`, or None; its logits are multiplied by `config.logit_scale`."""
        outputs = self.model.outputs
        return outputs if isinstance(outputs, TiedOutput) else getattr(outputs, "linear", None)

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
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        **options: Any,
    ) -> Any:
        """The stream for tokens or embeddings; on request the cache, hidden states, and latent codes of all pairs.

        Args:
            attention_mask: Shape (b s), 0 at padding; s counts the tokens in the cache, too.
            past_key_values: Another name of `cache`.
            position_ids: Shape (b|1 t), by default the number of real tokens before each.  Where those of one row (1 t)
                without padding restart at 0, another packed sequence begins.

        Raises:
            ValueError: For a mask that contradicts the cache, for packed sequences with a cache or padding, and for
                other arguments, unless they are None or False.
        """
        name = type(self).__name__
        for option, value in options.items():
            if value is not None and value is not False:
                raise ValueError(f"{name}: it takes no argument {option}")
        present = [inputs for inputs in (input_ids, inputs_embeds) if inputs is not None]
        if len(present) != 1:
            raise ValueError(f"{name}: give input_ids (b t) or inputs_embeds (b t m)")
        cached = select_cache(name, cache, past_key_values)
        if use_cache and cached is None:
            cached = PolyheadCache(len(self.model.blocks))
        b = present[0].shape[0]
        if cached is not None and cached.batch_size not in (-1, b):
            raise ValueError(f"{name}: its cache holds {cached.batch_size} sequences (beams are several), got {b}")
        # What an argument does not say, the configuration does.
        if output_hidden_states is None:
            output_hidden_states = getattr(self.config, "output_hidden_states", False)
        if output_attentions is None:
            output_attentions = getattr(self.config, "output_attentions", False)
        mask, positions, cu_seqlens = place_tokens(name, present[0], attention_mask, position_ids, cached)
        stream: list[Tensor] | None = [] if output_hidden_states else None
        taps: list[Taps] | None = [] if output_attentions else None
        arguments = {"mask": mask, "positions": positions, "cu_seqlens": cu_seqlens, "cache": cached}
        x = self.model(present[0], **arguments, taps=taps, stream=stream, outputs=False)
        fields: dict[str, Any] = {CACHE_NAME: cached, "hidden_states": stream and tuple(stream)}
        if taps is not None:
            codes = []
            for layer in taps:
                codes.append(torch.cat([group.code() for group in layer.groups], dim=1))
            fields["attentions"] = tuple(codes)
        return BaseModelOutputWithPast(last_hidden_state=x, **fields)


class PolyheadForCausalLM(PolyheadModel, transformers.GenerationMixin):
    """A causal language model, with `generate` on our cache.  Raises ValueError unless causal and with logits.

    >>> settings = TransformerConfig(Tokens(256), Logits(256), dim=32, heads=Hyla(4), causal=True)
    >>> model = PolyheadForCausalLM(PolyheadConfig(settings)).eval()
    >>> model.generate(torch.tensor([[72, 105]]), max_new_tokens=3, do_sample=False).shape
    torch.Size([1, 5])
    """

    def __init__(self, config: PolyheadConfig) -> None:
        causal, outputs = config.settings.causal, config.settings.outputs
        if not (isinstance(outputs, Logits) and causal):
            raise ValueError(f"PolyheadForCausalLM: the model must be causal and end in Logits ({causal=}, {outputs})")
        super().__init__(config, outputs=True)

    @property
    def base_model(self) -> PolyheadModel:
        """The backbone with the same parameters; some trainers call it and compute logits themselves."""
        backbone = copy.copy(self)
        backbone.__class__ = PolyheadModel  # type: ignore[assignment]
        for name in ("forward", "_compiled_call_impl"):  # what autocast or torch.compile puts around this model's own
            vars(backbone).pop(name, None)
        return backbone

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: Any, *_: Any, **__: Any) -> Any:
        """Use our cache instead of the library's default; its last arguments differ between versions."""
        caches = model_kwargs.pop("cache", None), model_kwargs.pop("past_key_values", None)
        cache = select_cache(type(self).__name__, *caches)
        if cache is not None:
            cache._is_user_defined = True  # type: ignore[attr-defined]  # the library's mark of what a caller gave
        elif generation_config.use_cache is not False:
            cache = PolyheadCache(len(self.model.blocks))
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
        logits_to_keep: int | Tensor = 0,
        **options: Any,
    ) -> CausalLMOutputWithPast:
        """Logits (b t c), and with `labels` the mean loss of each next token; other arguments are `PolyheadModel`'s.

        Args:
            labels: Shape (b t), -100 at tokens that are not scored.
            logits_to_keep: Number of last tokens that get logits (0: all of them), or the indices of tokens.
        """
        names = {"num_items_in_batch", "shift_labels", "ignore_index"} & options.keys()
        loss_options = {name: options.pop(name) for name in names}  # arguments of `loss_function`
        options |= {"cache": cache, "position_ids": position_ids, "return_dict": True}
        fields = dict(super().forward(input_ids, attention_mask, past_key_values, inputs_embeds, **options))
        rows = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.model.outputs(fields.pop("last_hidden_state")[:, rows])
        loss = None if labels is None else self._loss(logits, labels, loss_options)
        return CausalLMOutputWithPast(loss=loss, logits=logits, **fields)

    def _loss(self, logits: Tensor, labels: Tensor, options: dict[str, Any]) -> Tensor:
        """The loss by `loss_function`, 0 if no label is scored, and in training the load-balance loss of experts."""
        shifted = options.get("shift_labels")
        targets = labels[..., 1:] if shifted is None else shifted
        num_scored = (targets != options.get("ignore_index", -100)).sum()
        # The losses of several batches are added up, each divided by the labels of all.  So is the balance of experts.
        balance_share: Tensor | float = 1.0
        if options.get("num_items_in_batch") is not None:
            options["num_items_in_batch"] = torch.as_tensor(options["num_items_in_batch"]).clamp(min=1)
            balance_share = num_scored / options["num_items_in_batch"]
        # The library chooses the loss by the class and the configuration; a user may have set another.
        loss: Tensor = self.loss_function(logits=logits, labels=labels, vocab_size=logits.shape[-1], **options)
        # A mean over no label is 0 / 0, but a micro-batch without labels adds nothing.
        loss = torch.where(num_scored > 0, loss, 0.0)
        if self.training:
            loss = loss + balance_share * self.model.auxiliary_loss()
        return loss


# By this table the Trainer knows whose labels to shift when it smooths them.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[PolyheadConfig.model_type] = PolyheadForCausalLM.__name__
transformers.AutoConfig.register(PolyheadConfig.model_type, PolyheadConfig, exist_ok=True)
transformers.AutoModel.register(PolyheadConfig, PolyheadModel, exist_ok=True)
transformers.AutoModelForCausalLM.register(PolyheadConfig, PolyheadForCausalLM, exist_ok=True)


def from_run(folder: str | pathlib.Path) -> PolyheadForCausalLM:
    """The trained model of a run folder, in eval mode on the CPU.  Raises ValueError for another kind of model."""
    run, trained = load_model(folder)
    with torch.random.fork_rng(devices=[]):
        model = PolyheadForCausalLM(PolyheadConfig(run.transformer))
    model.model.load_state_dict(trained.state_dict())
    return model.eval()


def to_folder(run: str | pathlib.Path, path: str | pathlib.Path, **options: Any) -> None:
    """Write the model of a run folder to `path`, for `from_pretrained`, and for a run on text its tokenizer.

    Args:
        **options: Options of `save_pretrained`, such as `max_shard_size="1GB"`.

    Raises:
        ValueError: For a tokenizer that is not the one the model was trained with.
    """
    model, config = from_run(run), read_config(run)
    if hasattr(config.task, "codec"):
        tokenizer = tokenizer_of(codec_of(config, run), max_length=model.config.max_position_embeddings)
        assert model.generation_config is not None
        for holder in (model.config, model.generation_config):
            holder.eos_token_id = holder.pad_token_id = tokenizer.eos_token_id
        tokenizer.save_pretrained(path)
    model.save_pretrained(path, **options)
