"""The function of a group of heads: the op of its mechanism or a user's function, each with its code.

    out = attend(q, k, v, ..., keep=)        (b t h e)
    a   = code(q, k, ...)                    (b h t s): the code from which `attend` computes, before dropout

Both are set together: `group.use(attend, code=code)`.  `coder(group)` gives the code, or raises if it is unknown;
`attended` calls a group, and checks that a user's function applies dropout.  A group that torch.compile wraps computes
the same function; any other wrapper counts as a user's function.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from polyhead.layers.heads.sizes import Sizes
from polyhead.layers.projection import computes
from polyhead.ops.call import AttentionCall
from polyhead.ops.readable import is_readable
from polyhead.ops.registry import code_of, resolve

# The code (b h t s) of a call, before dropout.
Code = Callable[[AttentionCall], Tensor]


@dataclass(frozen=True)
class Functions:
    """A function and its code, which takes a call or, for a user's function, q, k and limits; None: unknown."""

    attend: Callable[..., Tensor]
    code: Callable[..., Tensor] | None
    is_user_defined: bool = False


@dataclass(frozen=True)
class UserCode:
    """A user's code function: it gets the limits that `attend` got, and its result must have the shape of a code.

    If the code is unknown, it holds the reason, which is raised as ValueError when the code is needed.
    """

    group: str
    function: Callable[..., Tensor] | str
    limits: AttentionCall | None = None  # if given, its limits replace those of the call

    def __call__(self, call: AttentionCall) -> Tensor:
        if isinstance(self.function, str):
            raise ValueError(self.function)
        code = self.function(call.q, call.k, **limits_of(self.limits or call))
        expected = (call.q.shape[0], call.q.shape[2], *call.lengths)
        if code.shape != expected:
            shape = tuple(code.shape)
            raise ValueError(
                f"{self.group}: {_name(self.function)} must return (b h t s) = {expected} but gave {shape}"
            )
        return code


def limits_of(call: AttentionCall) -> dict[str, Any]:
    """What a call adds to scores and hides, by the names of the arguments of ops and of users' functions."""
    return {"bias": call.bias, **call.masks.by_name(), "scale": call.scale}


class HeadGroup(nn.Module):
    """The base class of all groups: a function, its code, and `forward`, which calls the function."""

    kind: str
    normalise: str
    act: str
    depth = 1  # layers of the value network
    option_names: tuple[str, ...] = ()  # attributes that are passed to the function as options
    attend: Callable[..., Tensor]
    functions: Functions

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.value_weight: Tensor | None = None

    def begin(self, op: str, impl: str) -> None:
        """Set the function to the op of the mechanism."""
        self.attend = resolve(op, impl)
        self.functions = Functions(self.attend, code_of(op))

    def extra_repr(self) -> str:
        """Heads and widths, as `repr` of a group shows them."""
        return str(self.sizes)

    def use(self, attend: Callable[..., Tensor], code: Callable[..., Tensor] | None = None) -> None:
        """Compute `attend` in place of the mechanism's op, with `code` as its code.

        Assigning to `group.attend` sets a function without a code.

        >>> heads = MultiHeadAttention(64, Softmax(4)).groups[0]
        >>> heads.use(ops.linear_attention, code=partial(ops.latent_code, normalise="identity"))

        Args:
            attend: Takes the arguments of the op and returns (b t h e).
            code: Takes q, k, bias, mask, causal, window, cu_seqlens and scale, and returns the numbers (b h t s) that
                `attend` multiplies by `keep`.  Without `code`, everything that needs the code raises ValueError.
        """
        self.attend = attend
        self.functions = Functions(attend, code, is_user_defined=True)

    @property
    def extras(self) -> dict[str, Any]:
        """Fields of an `AttentionCall` that this group sets beside `normalise` and `act`."""
        return {}

    def options(self, call: AttentionCall) -> dict[str, Any]:
        """Keyword arguments of the function for a call, other than its tensors and limits."""
        return {name: getattr(self, name) for name in self.option_names}

    def arrays(self, call: AttentionCall) -> list[Tensor]:
        """The positional arguments of the function."""
        return [call.q, call.k, call.v]

    def forward(self, call: AttentionCall) -> Float[Tensor, "b t h e"]:
        """The function's output for the tensors of a call."""
        return self.attend(*self.arrays(call), keep=call.keep, **limits_of(call), **self.options(call))


def compiled(group: Any) -> Any:
    """The module that torch.compile wraps, or the group itself."""
    if isinstance(group, nn.Module):
        return group._modules.get("_orig_mod", group)
    return group


def has_user_function(group: Any) -> bool:
    """Whether a function other than the mechanism's op computes the output of a group."""
    group = compiled(group)
    if not isinstance(group, HeadGroup) or group.functions.is_user_defined:
        return True
    return not (computes(group, HeadGroup.forward) and _is_same(group.attend, group.functions.attend))


def _is_same(first: Any, second: Any) -> bool:
    """Whether two functions are the same.  An op with a named impl is a partial; torch.compile may copy it."""
    if isinstance(first, partial) and isinstance(second, partial):
        return first.func is second.func and first.args == second.args and first.keywords == second.keywords
    return first is second


def coder(group: Any) -> Code:
    """The code function of a group in its current state.  Raises ValueError if the code is unknown."""
    group = compiled(group)
    name = type(group).__name__
    if not has_user_function(group):
        assert group.functions.code is not None
        settings = {"normalise": group.normalise, "act": getattr(group, "relation_act", group.act)}
        return partial(code_with, group.functions.code, settings | group.extras)
    if isinstance(group, HeadGroup) and computes(group, HeadGroup.forward):
        functions = group.functions
        if functions.is_user_defined and functions.code is not None and group.attend is functions.attend:
            return UserCode(name, functions.code)
    function = _name(_function_of(group))
    raise ValueError(
        f"{name}: the code of {function} is not known: give it with the function, group.use({function}, code=...)"
    )


def code_with(code: Code, settings: dict[str, Any], call: AttentionCall) -> Tensor:
    """The code of a call that has these fields in place of its own."""
    return code(replace(call, **settings))


def coder_of_call(group: Any, call: AttentionCall) -> Code:
    """`coder` for use after `call`: if the code is unknown, calling the result raises ValueError.

    A user's code function gets the limits of `call`.  Ours may be called for some pairs, with limits cut to those.
    """
    try:
        code = coder(group)
    except ValueError as error:
        return UserCode(type(group).__name__, str(error))
    if isinstance(code, UserCode):
        return replace(code, limits=replace(call, scale=None, keep=None))
    return code


def attended(group: nn.Module, call: AttentionCall) -> Float[Tensor, "b t h e"]:
    """The output of a group for a call; a user's function gets `keep` in the dtype of q.

    Raises:
        ValueError: If a user's function ignores `keep`.
    """
    if call.keep is not None and has_user_function(group):
        call = replace(call, keep=call.keep.to(call.q.dtype))
        _check_applies_keep(group, call)
    return group(call)


def _check_applies_keep(group: Any, call: AttentionCall) -> None:
    """Check once per function that its output is 0 where `keep` is 0.  The test inputs use no random generator."""
    assert call.keep is not None
    function = _function_of(compiled(group))
    kind, name = type(compiled(group)).__name__, _name(function)
    if getattr(group, "applies_keep", (None,))[0] is function or call.keep.is_meta:
        return
    if torch.compiler.is_compiling():
        raise ValueError(f"{kind}: call the layer once before torch.compile, which checks that {name} applies keep")
    if not (is_readable(call.keep) and is_readable(call.q)):  # under vmap, or recorded; the next plain call checks it
        return
    # Test inputs are positive, so an output that ignores `keep` is unlikely to be 0 by chance.
    tensors = {"q": call.q, "k": call.k, "v": call.v, "q_rel": call.q_rel, "k_rel": call.k_rel}
    tests: dict[str, Any] = {}
    for argument, tensor in tensors.items():
        if tensor is not None:
            values = torch.linspace(1, 2, tensor.numel(), device=tensor.device)
            tests[argument] = values.to(tensor.dtype).view(tensor.shape)
    with torch.no_grad():
        masks = replace(call.masks, mask=None)
        y = group(replace(call, **tests, bias=None, masks=masks, keep=torch.zeros_like(call.keep)))
    if y.numel() == 0:  # an empty batch shows nothing
        return
    if y.ne(0).any():  # NaN as well
        raise ValueError(f"{kind}: {name} must multiply its code by keep, but its output is not 0 where keep is 0")
    group.applies_keep = (function,)  # in a tuple, so that a module is not registered twice


def _function_of(group: Any) -> Any:
    """The function that computes the output: `attend`, or the `forward` of a subclass or a wrapper."""
    if isinstance(group, HeadGroup) and computes(group, HeadGroup.forward):
        return group.attend
    return getattr(group.forward, "__func__", group.forward)


def _name(function: Any) -> str:
    function = getattr(function, "func", function)  # of a partial
    return getattr(function, "__name__", type(function).__name__)
