"""Relational baselines: classifiers that compare objects by inner products (CoRelNet) or differences (PrediNet).

CoRelNet (Kerg, Mittal, Rolnick, Bengio, Richards, Lajoie 2022), with e_i = MLP(x_i):

    A_ij = softmax_j(e_i . e_j)     (or e_i . e_j)                         logits = MLP(A), with A as n^2 numbers

PrediNet (Shanahan et al. 2020, in our notation), with l_i = (x_i, place of i) and for each head h:

    q_h = Q_h (l_1 ... l_n),  q'_h = Q'_h (l_1 ... l_n)                     two queries from all objects, concatenated
    u_h = sum_i softmax_i(q_h . K l_i) l_i,   u'_h likewise with q'_h       retrieved objects; the heads share K
    r_h = (S u_h - S u'_h, place in u_h, place in u'_h)                     logits = MLP(r_1 ... r_H)

Both need a fixed number of objects: embedded patches of an image, vectors or tokens.  With `Patches(norm=True)` and dim
128 CoRelNet has the 215522 parameters of the published comparison (Altabaa and Lafferty 2024).  Our choices: CoRelNet's
last MLP has two hidden layers with relu; places go from -1 to 1, by row and column for a patch.
"""

from typing import Unpack

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from polyhead.config import CoRelNetConfig, Patches, PrediNetConfig
from polyhead.layers.device import Placement
from polyhead.layers.feedforward import MlpLayer
from polyhead.models.initialise import initialise
from polyhead.models.inputs_outputs import build_input
from polyhead.spec.shapes import shaped


class CoRelNet(nn.Module):
    """A classifier that reads only the inner products of its objects.

    >>> model = CoRelNet(CoRelNetConfig(Patches((3, 36, 36), (12, 12), norm=True), Classes(2)))
    >>> model(torch.randn(5, 3, 36, 36)).shape, sum(p.numel() for p in model.parameters())
    (torch.Size([5, 1, 2]), 215522)
    """

    def __init__(self, settings: CoRelNetConfig, **placement: Unpack[Placement]) -> None:
        super().__init__()
        self.config = settings
        dim, objects = settings.dim, settings.objects
        self.inputs = build_input(settings.inputs, dim, **placement)
        self.embed = MlpLayer(dim, settings.hidden, act="relu", **placement)
        self.compare = nn.Linear(objects**2, dim, **placement)
        self.hidden = nn.Linear(dim, dim, **placement)
        self.outputs = nn.Linear(dim, settings.outputs.count, bias=settings.outputs.bias, **placement)
        initialise(self, "cs336")

    @shaped
    def forward(
        self,
        inputs: Float[Tensor, "b t _"] | Int[Tensor, "b t"] | Float[Tensor, "b _ _ _"],
        *,
        mask: Bool[Tensor, "b _"] | None = None,
    ) -> Float[Tensor, "b 1 c"]:
        """Logits (b 1 c).  All objects must be real: `mask` is None."""
        e = self.embed(_objects("CoRelNet", self.inputs(inputs), self.config.objects, mask))
        similarity = e @ e.transpose(1, 2)  # (b t t)
        if self.config.softmax:
            similarity = similarity.softmax(dim=-1)
        x = self.hidden(self.compare(similarity.flatten(1)).relu()).relu()
        return self.outputs(x)[:, None]


class PrediNet(nn.Module):
    """A classifier whose heads each retrieve two objects and compare them along shared directions.

    >>> model = PrediNet(PrediNetConfig(Vectors(8), Classes(2), dim=32, length=3, heads=4))
    >>> model(torch.randn(5, 3, 8)).shape
    torch.Size([5, 1, 2])
    """

    def __init__(self, settings: PrediNetConfig, **placement: Unpack[Placement]) -> None:
        super().__init__()
        self.config = settings
        dim, heads, objects = settings.dim, settings.heads, settings.objects
        key_dim = settings.key_dim or max(1, dim // heads)
        self.places = 1
        if isinstance(settings.inputs, Patches):  # row and column
            self.places = 2
        width = dim + self.places
        self.inputs = build_input(settings.inputs, dim, **placement)
        self.query1 = nn.Linear(objects * width, heads * key_dim, bias=False, **placement)
        self.query2 = nn.Linear(objects * width, heads * key_dim, bias=False, **placement)
        self.key = nn.Linear(width, key_dim, bias=False, **placement)
        self.relations = nn.Linear(width, settings.relations, bias=False, **placement)
        related = heads * (settings.relations + 2 * self.places)
        self.hidden = nn.Linear(related, dim, **placement)
        self.outputs = nn.Linear(dim, settings.outputs.count, bias=settings.outputs.bias, **placement)
        initialise(self, "cs336")

    @shaped
    def forward(
        self,
        inputs: Float[Tensor, "b t _"] | Int[Tensor, "b t"] | Float[Tensor, "b _ _ _"],
        *,
        mask: Bool[Tensor, "b _"] | None = None,
    ) -> Float[Tensor, "b 1 c"]:
        """Logits (b 1 c).  All objects must be real: `mask` is None."""
        x = _objects("PrediNet", self.inputs(inputs), self.config.objects, mask)
        # l_i = (x_i, place of i), (b n m+places): queries, keys and retrieved objects are all made from it.
        coordinates = places(self.config, x.device).to(x.dtype).expand(x.shape[0], -1, -1)
        x = torch.cat((x, coordinates), dim=-1)
        first = self._find(self.query1, x)  # (b h m+places)
        second = self._find(self.query2, x)
        # S u - S u' (b h r) for the two retrieved objects, then the place at the end of each of them.
        compared = self.relations(first) - self.relations(second)
        related = torch.cat((compared, first[..., -self.places :], second[..., -self.places :]), dim=-1)
        return self.outputs(self.hidden(related.flatten(1)).relu())[:, None]

    def _find(self, query: nn.Linear, x: Tensor) -> Tensor:
        """The object (b h m) that each head retrieves by its query."""
        # Queries (b h d) and keys (b n d), which the heads share.  Scores have no scale, as in the equation above.
        q = query(x.flatten(1)).unflatten(-1, (self.config.heads, -1))
        return torch.einsum("bhd,btd->bht", q, self.key(x)).softmax(dim=-1) @ x


def places(settings: PrediNetConfig, device: torch.device) -> Float[Tensor, "t _"]:
    """The place of each object, from -1 to 1: row and column of a patch, or position in a sequence.

    >>> places(PrediNetConfig(Vectors(8), Classes(2), length=3), torch.device("cpu")).flatten()
    tensor([-1.,  0.,  1.])
    """
    if not isinstance(settings.inputs, Patches):
        return _line(settings.objects, device)[:, None]
    (_, height, width), (p, q) = settings.inputs.image, settings.inputs.patch
    # Row by row, as `PatchInput` orders the patches: (rows*columns, 2).
    return torch.cartesian_prod(_line(height // p, device), _line(width // q, device))


def _line(count: int, device: torch.device) -> Tensor:
    if count == 1:
        return torch.zeros(1, device=device)
    return torch.linspace(-1, 1, count, device=device)


def _objects(kind: str, x: Tensor, count: int, mask: Tensor | None) -> Tensor:
    """`x` (b t m) if it holds the right number of objects."""
    if mask is not None:
        raise ValueError(f"{kind}: it compares {count} objects, all of them there, so mask must be None")
    if x.shape[1] != count:
        raise ValueError(f"{kind}: the number of objects must be {count} (length), got {x.shape[1]}")
    return x
