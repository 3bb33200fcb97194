"""The function of a group of heads: the op of its mechanism or a user's function, each with its code.

    out = attend(q, k, v, ..., keep=)        (b t h e)
    a   = code(q, k, ...)                    (b h t s): the code from which `attend` computes, before dropout

Both are set together: `group.use(attend, code=code)`.  Code is always computed by `coder(group)`, never directly by an
op; it raises if the code of a function is unknown.  Groups are always called by `attended`, which checks that a user's
function applies dropout.

A group may be wrapped; then the wrapper is called.  A group that torch.compile wraps computes the same function, so its
code is known.  Any other wrapper counts as a user's function.  A layer calls further methods of a group by `asked`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from polyhead.config.sizes import Sizes
from polyhead.ops.call import AttentionCall
from polyhead.ops.registry import code_of, resolve

HERE = __name__.rpartition(".")[0]

Code = Callable[[AttentionCall], Tensor]
"""The code (b h t s) of a call, before dropout."""


@dataclass(frozen=True)
class Functions:
    """A function and its code.  The code takes a call or, for a user's function, q, k and limits; None means
    unknown."""

    attend: Callable[..., Tensor]
    code: Callable[..., Tensor] | None
    own: bool = False  # a user's function


@dataclass(frozen=True)
class OwnCode:
    """A user's code function: it gets the limits that `attend` got, and its result must have the shape of a code.

    If the code is unknown, it holds the reason, which is raised as ValueError when the code is needed.
    """

    who: str
    function: Callable[..., Tensor] | str
    limits: AttentionCall | None = None  # if given, its limits replace those of the call

    def __call__(self, x: AttentionCall) -> Tensor:
        if isinstance(self.function, str):
            raise ValueError(self.function)
        own = x if self.limits is None else self.limits
        found = self.function(
            x.q, x.k, bias=own.bias, mask=own.mask, causal=own.causal, window=own.window, cu_seqlens=own.cu_seqlens,
            scale=own.scale,
        )  # fmt: skip
        wanted = (x.q.shape[0], x.q.shape[2], *x.lengths)
        if tuple(found.shape) != wanted:
            shape = tuple(found.shape)
            raise ValueError(f"{self.who}: {_name(self.function)} must return (b h t s) = {wanted} but gave {shape}")
        return found


class HeadGroup(nn.Module):
    """The base class of all groups: a function, its code, and `forward`, which calls the function."""

    kind: str
    normalise: str
    act: str
    depth = 1  # layers of the value network
    takes: tuple[str, ...] = ()  # names of attributes that are passed to the function as options
    attend: Callable[..., Tensor]
    functions: Functions

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.value_weight: Tensor | None = None

    def begin(self, op: str, impl: str) -> None:
        """Set the function to the op of the mechanism."""
        self.functions = Functions(resolve(op, impl), code_of(op))
        if not hasattr(type(self), "attend"):  # the method of a subclass
            self.attend = self.functions.attend

    def extra_repr(self) -> str:
        """Heads and widths, as `repr` of a group shows them."""
        return str(self.sizes)

    def use(self, attend: Callable[..., Tensor], code: Callable[..., Tensor] | None = None) -> None:
        """Compute `attend` in place of the mechanism's op, with `code` as its code.

        `attend` takes the arguments of the op and returns (b t h e).  `code` takes q, k, bias, mask, causal, window,
        cu_seqlens and scale, and returns (b h t s): the numbers that `attend` multiplies by `keep`.  Without `code`,
        everything that needs the code raises ValueError.  Assigning to `group.attend` sets a function without a code.

        >>> heads = MultiHeadAttention(64, Softmax(4)).groups[0]
        >>> heads.use(ops.linear_attention, code=partial(ops.latent_code, normalise="identity"))
        """
        self.attend = attend
        self.functions = Functions(attend, code, own=True)

    def code(
        self,
        q: Float[Tensor, "b t h d"],
        k: Float[Tensor, "b s g d"],
        *,
        bias: Tensor | None = None,
        mask: Tensor | None = None,
        causal: bool = False,
        window: int | None = None,
        cu_seqlens: Tensor | None = None,
        scale: float | None = None,
    ) -> Float[Tensor, "b h t s"]:
        """The code of all pairs, by the function that computes the output.  Raises ValueError if its code is
        unknown."""
        return _known(self)(AttentionCall(q, k, k, bias, mask, None, causal, window, cu_seqlens, scale=scale))

    def options(self) -> dict[str, object]:
        """Keyword arguments of the function, other than tensors and limits."""
        return {name: getattr(self, name) for name in self.takes}

    def forward(
        self,
        q: Float[Tensor, "b t h d"],
        k: Float[Tensor, "b s g d"],
        v: Float[Tensor, "b s g e"],
        *,
        bias: Tensor | None = None,
        mask: Tensor | None = None,
        causal: bool = False,
        window: int | None = None,
        cu_seqlens: Tensor | None = None,
        keep: Tensor | None = None,
    ) -> Float[Tensor, "b t h e"]:
        """The function's output for queries, keys and values."""
        return self.attend(
            q, k, v, bias=bias, mask=mask, causal=causal, window=window, cu_seqlens=cu_seqlens, scale=None, keep=keep,
            **self.options(),
        )  # fmt: skip


def asked(group: Any, method: str) -> Callable[..., Any]:
    """A method of relational heads.  Raises ValueError if a wrapper does not pass it on."""
    if not hasattr(group, method):
        raise ValueError(f"{type(group).__name__}: relational heads must have a method {method}, wrapped ones as well")
    return getattr(group, method)


def compiled(group: Any) -> Any:
    """The module that torch.compile wraps, or the group itself."""
    return group._modules.get("_orig_mod", group) if isinstance(group, nn.Module) else group


def is_own(group: Any) -> bool:
    """Whether a function other than the mechanism's op computes the output of a group."""
    group = compiled(group)
    known = getattr(group, "functions", None)
    return known is None or known.own or not _same(group.attend, known.attend) or not _ours(group)


def _same(one: Any, other: Any) -> bool:
    """Whether two functions are the same.  An op with a named impl is a partial; torch.compile may copy it."""
    if isinstance(one, partial) and isinstance(other, partial):
        return one.func is other.func and one.args == other.args and one.keywords == other.keywords
    return one is other


def coder(group: Any) -> Code:
    """The code function of a group in its current state.  Raises ValueError if the code is unknown."""
    group = compiled(group)
    if getattr(type(group), "code", HeadGroup.code) is not HeadGroup.code and not _assigned(group):
        return OwnCode(type(group).__name__, group.code)  # the method of a subclass
    return _known(group)


def _known(group: Any) -> Code:
    who, known = type(group).__name__, getattr(group, "functions", None)
    if not is_own(group):
        assert known is not None
        assert known.code is not None
        return partial(_coded, known.code, group.normalise, getattr(group, "relation_act", group.act))
    if known is not None and known.own and known.code is not None and group.attend is known.attend:
        return OwnCode(who, known.code)
    name = _name(_computes(group))
    raise ValueError(f"{who}: the code of {name} is not known: give it with the function, group.use({name}, code=...)")


def _coded(code: Code, normalise: str, act: str, x: AttentionCall) -> Tensor:
    return code(replace(x, normalise=normalise, act=act))


def _assigned(group: Any) -> bool:
    """Whether `attend` of this group was replaced."""
    known, attend = getattr(group, "functions", None), {**vars(group), **group._modules}.get("attend")
    return known is not None and (known.own or attend not in (None, known.attend))


def seen_coder(group: Any, x: AttentionCall) -> Code:
    """`coder` for later use: if the code is unknown, calling the result raises ValueError.

    A user's code function gets the limits of the call `x`.  Ours may be called for some of the pairs, with limits cut
    to those.
    """
    try:
        found = coder(group)
    except ValueError as error:
        return OwnCode(type(group).__name__, str(error))
    return replace(found, limits=replace(x, scale=None, keep=None)) if isinstance(found, OwnCode) else found


def attended(group: nn.Module, x: AttentionCall) -> Float[Tensor, "b t h e"]:
    """The output of a group for a call.  Raises ValueError if a user's function ignores `keep`, which it gets in the
    dtype of q."""
    if x.keep is not None and is_own(group):
        keep = x.keep.to(x.q.dtype)
        x = replace(x, keep=keep)
        _heed(group, x, keep)
    return _run(group, x)


def _run(group: nn.Module, x: AttentionCall) -> Tensor:
    """Call a group (or its wrapper) with the tensors and limits of `x`."""
    related = {} if x.q_rel is None else {"q_rel": x.q_rel, "k_rel": x.k_rel}
    return group(
        q=x.q, k=x.k, v=x.v, **related, bias=x.bias, mask=x.mask, causal=x.causal, window=x.window,
        cu_seqlens=x.cu_seqlens, keep=x.keep,
    )  # fmt: skip


def _heed(group: Any, x: AttentionCall, keep: Tensor) -> None:
    """Check once per function that its output is 0 where `keep` is 0.  The test inputs use no random generator."""
    function = _computes(compiled(group))
    who, name = type(compiled(group)).__name__, _name(function)
    if getattr(group, "heeds", (None,))[0] is function or keep.is_meta:
        return
    if torch.compiler.is_compiling():
        raise ValueError(f"{who}: call the layer once before torch.compile, which checks that {name} applies keep")
    tried = replace(x, q=_drawn(x.q), k=_drawn(x.k), v=_drawn(x.v), bias=None, mask=None, keep=torch.zeros_like(keep))
    if x.q_rel is not None:
        tried = replace(tried, q_rel=_drawn(x.relation_qk[0]), k_rel=_drawn(x.relation_qk[1]))
    with torch.no_grad():
        y = _run(group, tried)
    if y.ne(0).any():  # NaN as well
        raise ValueError(f"{who}: {name} must multiply its code by keep, but its output is not 0 where keep is 0")
    group.heeds = (function,)  # in a tuple, so that a module is not registered twice


def _drawn(x: Tensor) -> Tensor:
    return torch.linspace(1, 2, x.numel(), device=x.device).to(x.dtype).view(x.shape)


def _ours(group: Any) -> bool:
    """Whether `forward` is defined in this folder: neither by a subclass nor by an assignment."""
    return (getattr(group.forward, "__module__", None) or "").startswith(f"{HERE}.")


def _computes(group: Any) -> Any:
    """The function that computes the output: `attend`, or a user's `forward`."""
    function = getattr(group, "attend", None) if _ours(group) else None
    function = group.forward if function is None else function
    return getattr(function, "__func__", function)


def _name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)
