"""The attention modules of the package `dual-attention` as groups of our heads, from their constructors' arguments.

Names and defaults are the package's.  An argument that is unknown, missing or without an equivalent raises ValueError,
which names it.  Widths that do not fit show in the shapes of tensors.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from polyhead import config
from polyhead.spec.shapes import one_of

Arguments = Mapping[str, Any]

# Activations by the package's names; its gelu is the tanh form.
FEEDFORWARD_ACTS = {"relu": "relu", "gelu": "gelu_tanh", "silu": "silu", "identity": "identity"}
RELATION_ACTS = {**FEEDFORWARD_ACTS, "sigmoid": "sigmoid", "tanh": "tanh", "softmax": "softmax"}

# Kinds of heads by `ra_type`, and by the class of the attention module.
KINDS = {"relational_attention": "ra", "rca": "rca", "disrca": "disrca"}
CLASSES = {
    "Attention": "sa",
    "RelationalAttention": "ra",
    "RelationalCrossAttention": "rca",
    "DisentangledRelationalCrossAttention": "disrca",
    "DualAttention": "dual",
}

# The optional arguments of the attention modules, with their defaults.
DUAL = {"sa_kwargs": None, "ra_kwargs": None, "ra_type": "relational_attention", "share_attn_params": False}
SENSORY = {"n_kv_heads": None, "add_bias_kv": False, "add_bias_out": False, "key_dim": None}
RELATED = {**SENSORY, "use_relative_positional_symbols": False}
OPTIONAL: dict[str, dict[str, Any]] = {
    "sa": SENSORY,
    "ra": {
        **RELATED,
        "rel_activation": "identity",
        "n_relations": None,
        "rel_proj_dim": None,
        "symmetric_rels": False,
    },
    "rca": {**RELATED, "activation": "softmax"},
    "disrca": {**RELATED, "rel_activation": "identity"},
}


def by_name(arguments: Any) -> Arguments:
    """Return the arguments.  Raises ValueError if they are no mapping."""
    if not isinstance(arguments, Mapping):
        raise ValueError(f"arguments must come by name, got {arguments!r}")
    return arguments


def with_defaults(arguments: Any, required: Iterable[str], optional: Arguments) -> dict[str, Any]:
    """Return the arguments with the defaults filled in."""
    required = tuple(required)
    for name in by_name(arguments):
        one_of("arguments", "name", name, (*required, *optional))
    missing = [name for name in required if name not in arguments]
    if missing:
        raise ValueError(f"{', '.join(missing)} missing")
    return {**optional, **arguments}


def nested(arguments: Arguments, name: str, required: Iterable[str], optional: Arguments) -> dict[str, Any]:
    """Return the arguments under one name of `arguments`, which may be None, with the defaults filled in."""
    try:
        return with_defaults(arguments[name] or {}, required, optional)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


@dataclass(frozen=True)
class PackageHeads:
    """Heads of one kind: the package's module, whose keys start with `prefix`, and ours.

    `kind`: "sa" (the package's Attention), or a value of KINDS.
    """

    prefix: str
    kind: str
    mechanism: config.Mechanism
    has_bias_kv: bool
    has_bias_out: bool


def heads_of(
    kind: str,
    num_heads: int,
    arguments: Arguments,
    prefix: str,
    *,
    source: config.SymbolSource | None = None,
    causal: bool = False,
    share: bool = False,
) -> PackageHeads:
    """Return heads of a kind, from the arguments of their module with all defaults."""
    if arguments["key_dim"] is not None:
        raise ValueError("key_dim must be None, for which keys have the width of heads")
    kv_heads = arguments["n_kv_heads"]
    if kv_heads == num_heads:
        kv_heads = None
    mechanism: config.Mechanism
    if kind == "sa":
        mechanism = config.Softmax(num_heads, kv_heads=kv_heads)
    else:
        assert source is not None
        act_name = "activation" if kind == "rca" else "rel_activation"
        act = RELATION_ACTS[one_of("ra_kwargs", act_name, arguments[act_name], RELATION_ACTS)]
        if act == "softmax" and causal and kind != "rca":
            raise ValueError(
                "ra_kwargs: the package's softmax of relations sees later tokens although causal, ours cannot"
            )
        if kind == "rca":
            mechanism = config.Abstractor(num_heads, kv_heads=kv_heads, symbols=source, act=act)
        elif kind == "disrca":
            mechanism = config.Disentangled(num_heads, kv_heads=kv_heads, symbols=source, share=share, relation_act=act)
        else:
            relations = arguments["n_relations"]
            mechanism = config.Relational(
                num_heads,
                kv_heads=kv_heads,
                symbols=source,
                share=share,
                relation_act=act,
                relations=None if relations == num_heads else relations,
                symmetric=arguments["symmetric_rels"],
            )
    return PackageHeads(prefix, kind, mechanism, arguments["add_bias_kv"], arguments["add_bias_out"])


def dual_groups(
    arguments: Arguments, prefix: str, source: config.SymbolSource, *, causal: bool
) -> tuple[PackageHeads, ...]:
    """Return the groups of a DualAttention, sensory heads first."""
    kind = KINDS[one_of("arguments", "ra_type", arguments["ra_type"], KINDS)]
    num_sensory = arguments["n_heads_sa"]
    num_relational = arguments["n_heads_ra"]
    share = arguments["share_attn_params"]
    groups = []
    if num_sensory:
        options = nested(arguments, "sa_kwargs", (), SENSORY)
        groups.append(heads_of("sa", num_sensory, options, f"{prefix}self_attention."))
    if num_relational:
        options = nested(arguments, "ra_kwargs", (), OPTIONAL[kind])
        module = f"{prefix}relational_attention."
        groups.append(heads_of(kind, num_relational, options, module, source=source, causal=causal, share=share))
    return tuple(groups)


def attention_groups(cls: str, arguments: Arguments, *, causal: bool) -> tuple[PackageHeads, ...]:
    """Return the groups of heads in an attention module of the package with these arguments."""
    kind = CLASSES[one_of("arguments", "cls", cls, CLASSES)]
    if kind == "dual":
        options = with_defaults(arguments, ("d_model", "n_heads_sa", "n_heads_ra", "dropout"), DUAL)
        relative = (options["ra_kwargs"] or {}).get("use_relative_positional_symbols")
    else:
        options = with_defaults(arguments, ("d_model", "n_heads"), {"dropout": 0.0, **OPTIONAL[kind]})
        relative = options.get("use_relative_positional_symbols")

    # The caller passes the symbols: this source says only whether they are a table by offset.
    source = config.RelativeSymbols() if relative else config.SymbolicAttention()
    if kind == "dual":
        return dual_groups(options, "", source, causal=causal)
    return (heads_of(kind, options["n_heads"], options, "", source=source, causal=causal),)
