"""Other libraries' names of arguments: a call with one of them is an error that says ours."""

import inspect
from collections.abc import Collection, Iterable

HERE = {
    "heads": ("num_heads", "n_heads", "nhead", "n_head", "num_attention_heads"),
    "dim": ("embed_dim", "d_model", "hidden_size", "n_embd", "model_dim", "head_dim", "dim_head", "d_head", "d_k"),
    "value_dim": ("d_v", "v_head_dim"),
    "layers": ("num_layers", "n_layers", "n_layer", "num_hidden_layers", "depth"),
    "kv_heads": ("num_kv_heads", "n_kv_heads", "num_key_value_heads"),
    "hidden": ("intermediate_size", "d_ff", "dim_feedforward", "ffn_dim", "hidden_dim", "n_inner"),
    "count": ("vocab_size", "n_vocab", "num_embeddings", "num_classes", "num_labels"),
    "mask": ("attn_mask", "attention_mask", "key_padding_mask", "padding_mask"),
    "context": ("memory", "encoder_hidden_states"),
    "encoded": ("memory", "encoder_hidden_states"),
    "context_mask": ("memory_mask", "memory_key_padding_mask", "encoder_attention_mask"),
    "source_mask": ("memory_mask", "memory_key_padding_mask", "encoder_attention_mask", "src_key_padding_mask"),
    "source": ("src", "encoder_input_ids"),
    "inputs": ("input_ids", "inputs_embeds"),
    "x": ("hidden_states", "query"),
    "max_length": ("max_seq_len", "max_position_embeddings", "n_positions", "block_size", "context_length", "n_ctx"),
    "dropout": ("dropout_p", "attn_dropout", "attention_dropout", "attn_pdrop", "attn_drop"),
    "residual_dropout": ("resid_pdrop", "hidden_dropout_prob", "proj_drop"),
    "window": ("sliding_window", "window_size"),
    "cache": ("past_key_values", "past_key_value", "kv_cache"),
    "return_code": ("need_weights", "output_attentions", "return_weights", "return_attention"),
    "normalise": ("normalize",),
    "causal": ("is_causal",),
    "bias": ("attn_bias", "qkv_bias", "attention_bias", "use_bias"),
    "scale": ("softmax_scale",),
    "positions": ("position_ids", "pos_emb", "position_embedding"),
    "theta": ("rope_theta",),
    "act": ("activation", "hidden_act", "activation_function"),
    "norm_order": ("norm_first",),
    "norm_eps": ("layer_norm_eps", "rms_norm_eps", "layer_norm_epsilon"),
    "eps": ("layer_norm_eps", "rms_norm_eps", "layer_norm_epsilon"),
    "tied": ("tie_word_embeddings", "tie_weights"),
    "checkpoint": ("gradient_checkpointing", "use_checkpoint"),
    "steps": ("max_steps", "num_steps", "max_iters", "max_new_tokens", "num_train_steps"),
    "stop": ("eos_token_id",),
    "lr": ("learning_rate",),
    "warmup": ("warmup_steps", "num_warmup_steps", "warmup_iters"),
    "clip": ("max_grad_norm", "grad_clip", "gradient_clip_val"),
    "accumulate": ("gradient_accumulation_steps", "accumulate_grad_batches"),
}
"""Our name of an argument -> other libraries' names."""

ELSEWHERE = {
    name: tuple(ours for ours, them in HERE.items() if name in them) for them in HERE.values() for name in them
}
"""Another library's name -> ours: the first that a function has is meant."""

OF_A_HEAD = ("head_dim", "dim_head", "d_head", "d_k")
PARTS = {
    **dict.fromkeys(OF_A_HEAD, ("heads", "Softmax(8, dim=64)")),
    "value_dim": ("heads", "Softmax(8, value_dim=64)"),
    "kv_heads": ("heads", "Softmax(8, kv_heads=2)"),
    "hidden": ("feedforward", "Mlp(hidden=256)"),
    "act": ("feedforward", 'Mlp(act="silu")'),
    "theta": ("positions", "Rotary(theta=10000.0)"),
    "count": ("inputs", "Tokens(100)"),
    "tied": ("outputs", "Logits(100, tied=True)"),
}
"""An argument of a part -> the argument that takes the part, and an example."""

_PLACES = {"__init__": "the constructor", "forward": "the call", "__call__": "the call"}


def our_names(who: str, given: Iterable[str], names: Collection[str], kind: type | None = None) -> None:
    """Raise TypeError for an argument that has another name in this package, or another place.

    `names`: those of the arguments.  `kind`: the class that is made or called; the other may have the argument.
    """
    for name in given:
        if name not in names:
            _answer(who, name, names, kind)


def _answer(who: str, name: str, names: Collection[str], kind: type | None) -> None:
    of_a_head = name in OF_A_HEAD and "value_dim" not in names
    meant = () if of_a_head else ELSEWHERE.get(name, (name,))
    for ours in meant:
        if ours in names:
            meaning = ", True where attention is allowed" if ours.endswith("mask") else ""
            raise TypeError(f"{who}: {name} is called {ours} here{meaning}")
    for part in (name, *meant) if "mask" not in names else ():  # a call has `positions`, but as numbers
        if part in PARTS and PARTS[part][0] in names:
            raise TypeError(f"{who}: {name} belongs to a part, as in {'='.join(PARTS[part])}")
    for method, place in _PLACES.items():
        taken = inspect.signature(getattr(kind, method)).parameters if hasattr(kind, method) else ()
        for ours in meant:
            if ours in taken and kind is not None:
                called = "" if ours == name else f"is called {ours} here and "
                raise TypeError(f"{who}: {name} {called}belongs to {place}")
    if "dropout" in meant and "keep" in names:
        raise TypeError(f"{who}: {name} is not taken here; give keep=F.dropout(torch.ones(b, h, t, s), p)")
    if "settings" in names:
        field = next((ours for ours in meant if ours != name), name)
        raise TypeError(f"{who}: {name} is not taken here; fields of a model are TransformerConfig(..., {field}=...)")
    if name == "batch_first":
        raise TypeError(f"{who}: batch_first is not needed, the batch always comes first")
