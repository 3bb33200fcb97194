"""Operations, memory traffic and peak memory of a training step, counted op by op on PyTorch's fake tensors.

The step is the trainer's own code: forward pass, loss and backward pass, with autocast, checkpointing, lazy logits and
accumulation.  The shapes and dtypes of each op give its operations (PyTorch's formulas for matrix products, ours below
for attention), the bytes it reads and writes, and its allocations.  A storage counts until it is freed.  The inside of
a fused kernel is not visible; its tiles do not allocate memory.
"""

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from polyhead.config import Batch, Hyla, Mechanism, Relational, Run, TransformerConfig
from polyhead.models.build import build
from polyhead.models.transformer import Transformer
from polyhead.ops import cross_entropy  # noqa: F401  (registers its operators)
from polyhead.ops.call import AttentionCall
from polyhead.ops.custom_op_rules import LEARNED
from polyhead.ops.dispatch import BACKENDS, resolve
from polyhead.ops.hyla import triton as hyla_triton
from polyhead.spec import amount
from polyhead.train.evaluation import answers
from polyhead.train.throughput import visible

Kernels = tuple[tuple[int, int, bool, int], ...]
"""Groups of equal kernels: operations, bytes moved, whether in half precision, count."""

aten = torch.ops.aten


@dataclass(frozen=True)
class StepCounts:
    """The counts of one micro-batch on one device; all sizes in bytes."""

    sequences: int
    tokens: int
    parameters: int
    buffers: int
    inputs: int
    kept: int
    """Bytes that the forward pass saves for the backward pass."""
    beside: int
    """The peak, without parameters, buffers, inputs and gradients."""
    most: int
    """The peak of all memory."""
    forward: Kernels
    backward: Kernels

    @property
    def operations(self) -> int:
        return sum(kind[0] * kind[3] for kind in (*self.forward, *self.backward))


def count(run: Run, sequences: int, sample: Batch, *, card: bool = False) -> StepCounts:
    """Count one micro-batch of `sequences` sequences like those of `sample`; with accumulation, one after the first.

    `card`: use the implementations that "auto" chooses on a GPU.  Raises ValueError for a data-dependent step.
    """
    run = replace(run, model=on_card(run.model, run.train.precision)) if card else run
    tally = _Tally()
    try:
        with FakeTensorMode(), tally:
            model = build(run.model).train()
            parameters, buffers = (size_of(group) for group in (model.parameters(), model.buffers()))
            batch = sample.map(lambda x: torch.empty((sequences, *x.shape[1:]), dtype=x.dtype))
            inputs = tally.now - parameters - buffers
            for _ in range(min(run.train.accumulate, 2)):
                tally.begin()
                loss = loss_of(model, run, batch)
                kept, forward = tally.now - tally.before, tally.kernels()
                loss.backward()
                del loss
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            most, beside = tally.most(), tally.most(without=gradients) - parameters - buffers - inputs
    except RuntimeError as error:
        what = str(error).strip().partition("\n")[0]
        raise ValueError(f"plan: {run.name} cannot be counted without its data: {what}") from error
    tokens = sequences * (batch.inputs.shape[1] if batch.inputs.ndim < 4 else run.task.length)
    return StepCounts(
        sequences, tokens, parameters, buffers, inputs, kept, beside, most, forward, tally.kernels(besides=forward)
    )


def loss_of(model: nn.Module, run: Run, batch: Batch) -> Tensor:
    """The loss of a batch, as in the trainer."""
    outputs = answers(model, run.task, batch, run.train.precision)
    loss = run.task.loss(outputs, batch)
    return loss + model.auxiliary_loss() if isinstance(model, Transformer) else loss


def size_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of these tensors; one that occurs twice counts once."""
    return sum({id(x): x.numel() * x.element_size() for x in tensors}.values())


# ----------------------------------------------------------------------------------------------------------- the tally
class _Tally(TorchDispatchMode):
    """Records the operations and traffic of every op, and when each storage is allocated and freed."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.before = 0
        self.live: dict[int, tuple[int, int]] = {}  # by address: number and bytes of a storage
        self.events: list[tuple[int, int]] = []  # number of a storage, bytes allocated or freed
        self.found: Counter[tuple[int, int, bool]] = Counter()
        self.numbers = itertools.count()  # one for each storage, because addresses are reused

    def begin(self) -> None:
        """Start a new micro-batch: existing storages do not count."""
        self.before = self.now
        self.events = list(self.live.values())
        self.found.clear()

    def kernels(self, besides: Kernels = ()) -> Kernels:
        left = self.found - Counter({(a, b, c): n for a, b, c, n in besides})
        return tuple((*kind, times) for kind, times in sorted(left.items()))

    def most(self, without: list[Tensor] | None = None) -> int:
        """The peak without the storages of these tensors."""
        keys = [x.untyped_storage()._cdata for x in without or []]
        hidden = {self.live[key][0] for key in keys if key in self.live}
        now = most = 0
        for number, change in self.events:
            now += 0 if number in hidden else change
            most = max(most, now)
        return most

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default:  # a range check: assume that nothing is out of range
            return 0.0 if args[0].dtype.is_floating_point else 0
        if func._overloadpacket in (aten.index, aten.index_put, aten.index_put_):
            args = (args[0], _everywhere(args[1]), *args[2:])
        out = func(*args, **kwargs)
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        came = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        new = [self._note(x) for x in came]
        if any(new) or func._schema.is_mutable:
            narrow = any(x.dtype in (torch.bfloat16, torch.float16) for x in given)
            work = _operations(func._overloadpacket, args, kwargs, out)
            moved = sum(x.numel() * x.element_size() for x in (*given, *came))
            self.found[work, moved, narrow] += 1
        return out

    def _note(self, x: Tensor) -> bool:
        """Record the storage of `x`; returns whether it is new."""
        storage = x.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self.live:
            return False
        self.live[key] = next(self.numbers), size
        self.now += size
        self.events.append(self.live[key])
        weakref.finalize(storage, self._drop, key).atexit = False
        return True

    def _drop(self, key: int) -> None:
        number, size = self.live.pop(key)
        self.now -= size
        self.events.append((number, -size))


def _everywhere(indices: list[Tensor | None]) -> list[Tensor | None]:
    """A mask selects an unknown number of positions: assume all."""
    found: list[Tensor | None] = []
    for x in indices:
        masks = x is not None and x.dtype == torch.bool
        found += [x.new_empty(x.numel(), dtype=torch.long)] * x.ndim if x is not None and masks else [x]
    return found


# ---------------------------------------------------------------------------------------- operations of fused attention
Formula = Callable[[Any, Mapping[str, Any]], int]
"""Gives the operations of a kernel from its arguments and options.

The arguments of our attention end with the tensors of `LEARNED` and those without a gradient, forward and backward.
"""

FORWARD, BACKWARD = "d + e", "3 d + 2 e"
"""Multiply-adds per pair and head.  Forward: scores, values.  Backward: scores again, dv, da, dq, dk."""


def _operations(op: Any, args: Any, options: Mapping[str, Any], out: Any) -> int:
    if (ours := FORMULAS.get(op)) is not None:
        return ours(args, options)
    known = flop_registry.get(op)
    return 0 if known is None else int(known(*args, **options, out_val=out))


def _pairs(q: Tensor, k: Tensor, causal: bool, window: int | None = None) -> int:
    """The visible pairs of a head in all sequences."""
    return len(q) * visible(q.shape[1], k.shape[1], causal=causal, window=window)


def _amount(formula: str, q: Any, v: Any, r: int = 0) -> int:
    return amount(formula, {"d": q.shape[-1], "e": v.shape[-1], "r": r})


def _sdpa(per_pair: str, first: int, args: Any, options: Mapping[str, Any]) -> int:
    """Scaled-dot-product attention on (b h t d); `first` is the index of the queries among the arguments."""
    q, k, v = args[first : first + 3]
    causal = options.get("is_causal", any(x is True for x in args))
    pairs = visible(q.shape[2], k.shape[2], causal=causal)
    return q.shape[0] * q.shape[1] * pairs * 2 * _amount(per_pair, q, v)


def _attention(per_pair: str, deep: str, args: Any, options: Mapping[str, Any]) -> int:
    """Softmax attention and HYLA; `deep` is the additional work of a value network with two layers."""
    (q, k, v), weight = args[-2][:3], args[-2][LEARNED.index("value_weight")]
    each = _amount(per_pair, q, v) + (_amount(deep, q, v) if weight.numel() else 0)
    return 2 * each * q.shape[2] * _pairs(q, k, options["causal"], options.get("window"))


def _relational(per_pair: str, per_relation: str, args: Any, options: Mapping[str, Any]) -> int:
    q, k, symbols, q_rel = args[-2][:4]
    r, p = q_rel.shape[-2:]
    each = q.shape[2] * _amount(per_pair, q, symbols, r=r) + amount(per_relation, {"r": r, "p": p})
    return 2 * each * _pairs(q, k, options["causal"], options.get("window"))


def _linear(times: int, args: Any, options: Mapping[str, Any]) -> int:
    """Linear attention in chunks of 16 queries: updating and reading states, and pairs within a chunk."""
    q, _, v = args[-2][:3]
    (b, t, h, d), (s, g, e) = q.shape, v.shape[1:]
    return times * 2 * b * (h * t * (d * e + 16 * (d + e)) + g * s * d * e)


def _made_of_reference(times: int, args: Any, options: Mapping[str, Any]) -> int:
    """Generic tiles: scores, values and relations of heads."""
    q, k, v, q_rel = args[-2][:4]
    each = _amount("d + e", q, v) + (q_rel.shape[-1] if q_rel.ndim == 4 else 0)
    return times * 2 * each * q.shape[2] * _pairs(q, k, options["causal"], options.get("window"))


def _entropy(products: int, first: int, args: Any, options: Mapping[str, Any]) -> int:
    """`products` matrix products of the size of x and weight, the arguments `first` and `first` + 1."""
    return 2 * products * args[first].numel() * args[first + 1].shape[0]


def _formulas() -> dict[Any, Formula]:
    for op in BACKENDS:
        resolve(op)  # registers its operators
    # Backward: scores and values again; then dy, da twice, dv, dq, dk.
    hyla = partial(_attention, "d + 2 e", "e e"), partial(_attention, "3 d + 5 e", "4 e e")
    relational = partial(_relational, "d + e + r", "r p"), partial(_relational, "3 d + 2 e + 2 r", "3 r p")
    tiles = partial(_made_of_reference, 1), partial(_made_of_reference, 3)
    tiled = [name for name, impls in BACKENDS.items() if "blocked" in impls and name not in ("hyla", "relational")]
    kernels: dict[str, tuple[Formula, Formula]] = {
        **dict.fromkeys(("hyla_blocked", "hyla_native"), hyla),
        **dict.fromkeys(("relational_blocked", "relational_native"), relational),
        **dict.fromkeys((f"{name}_blocked" for name in tiled), tiles),
        "linear_native": (partial(_linear, 1), partial(_linear, 3)),
        "softmax_native": (partial(_attention, FORWARD, ""), partial(_attention, BACKWARD, "")),
        "chunked_cross_entropy": (partial(_entropy, 1, 0), partial(_entropy, 3, 1)),
    }
    return {
        aten._scaled_dot_product_flash_attention_for_cpu: partial(_sdpa, FORWARD, 0),
        aten._scaled_dot_product_flash_attention_for_cpu_backward: partial(_sdpa, BACKWARD, 1),
        **{getattr(torch.ops.polyhead, name): forward for name, (forward, _) in kernels.items()},
        **{getattr(torch.ops.polyhead, f"{name}_backward"): backward for name, (_, backward) in kernels.items()},
    }


FORMULAS = _formulas()


# ----------------------------------------------------------------------------------------------- impls as on a GPU
def on_card(model: Any, precision: str) -> Any:
    """The model with heads that save what "auto" saves on a GPU: Triton kernels and tiles save their arguments."""
    if not isinstance(model, TransformerConfig):
        return model
    encoder = None if model.encoder is None else on_card(model.encoder, precision)
    layers = [model.layer_heads(i) for i in range(model.layers)]
    tiled = [tuple(_tiled(group, model, precision) for group in layer) for layer in layers]
    return replace(model, heads=tuple(tiled) if model.per_layer else tiled[0], encoder=encoder)


def _tiled(group: Mechanism, model: TransformerConfig, precision: str) -> Mechanism:
    if group.impl == "triton":
        return replace(group, impl="blocked" if isinstance(group, Hyla | Relational) else "chunked")
    if group.impl != "auto" or model.dropout:
        return group
    if isinstance(group, Relational) and group.relation_act not in ("identity", "softmax"):
        return replace(group, impl="blocked")
    return replace(group, impl="blocked") if isinstance(group, Hyla) and _kernels(group, model, precision) else group


def _kernels(group: Hyla, model: TransformerConfig, precision: str) -> bool:
    """Whether HYLA's kernels take such heads; in float32 only those that they take on every GPU."""
    width, dtype = group.dim or model.dim // group.heads, torch.float32 if precision == "fp32" else torch.bfloat16
    q = torch.empty(1, 1, group.heads, width, dtype=dtype, device="meta")
    deep = q if group.value_depth > 1 else None
    call = AttentionCall(q, q, q, normalise=group.normalise, act=group.act, value_weight=deep)
    if hyla_triton.unsupported_anywhere(call) is not None:
        return False
    return precision != "fp32" or hyla_triton.too_large_for(q, shared=0) is None
