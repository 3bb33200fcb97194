"""placeholder"""

from torch import Tensor

from polyhead.ops.code import Inputs


def refusal(inputs: Inputs) -> str | None:
    return "is not written yet"


def worth(inputs: Inputs) -> bool:
    return False


def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    raise NotImplementedError
