"""Our heads in a model of diffusers, by its attention processors: `pip install diffusers`, then

python examples/diffusers_processor.py
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import polyhead as ph


class Processor:
    """An attention processor that computes one of our ops in place of softmax attention.

    `model.set_attn_processor(Processor(ph.ops.hyla))` sets it in all layers.
    """

    def __init__(self, op: Callable[..., Tensor]) -> None:
        self.op = op

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        temb: Tensor | None = None,
    ) -> Tensor:
        unknown = [
            name for name in ("spatial_norm", "norm_cross", "norm_q", "added_kv_proj_dim") if getattr(attn, name)
        ]
        if unknown:
            raise ValueError(f"Processor: attention without {unknown[0]} was wanted but this has it")
        x = hidden_states.flatten(2).transpose(1, 2) if hidden_states.ndim == 4 else hidden_states
        if attn.group_norm is not None:
            x = attn.group_norm(x.transpose(1, 2)).transpose(1, 2)
        context = x if encoder_hidden_states is None else encoder_hidden_states
        maps = ((attn.to_q, x), (attn.to_k, context), (attn.to_v, context))
        q, k, v = (linear(y).unflatten(-1, (attn.heads, -1)) for linear, y in maps)
        bias = mask = None
        if attention_mask is not None:  # added to the scores
            b, t, s = len(x), x.shape[1], context.shape[1]
            given = attn.prepare_attention_mask(attention_mask, s, b)
            bias = given.view(b, attn.heads, -1, s).expand(-1, -1, t, -1)
            mask = bias > -9e3  # diffusers adds -1e4 to hide a key, which only a softmax takes for hidden
            bias = bias.masked_fill(~mask, 0)
        y = self.op(q, k, v, bias=bias, mask=mask, scale=attn.scale).flatten(2)
        y = attn.to_out[1](attn.to_out[0](y))
        if hidden_states.ndim == 4:
            y = y.transpose(1, 2).reshape(hidden_states.shape)
        return (y + hidden_states if attn.residual_connection else y) / attn.rescale_output_factor


def main() -> tuple[float, float]:
    """The largest change of a small network's output: by our softmax attention, and by HYLA."""
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    model = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(16, 32),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=24,
        attention_head_dim=4,
        norm_num_groups=4,
    ).eval()
    mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    given = {"timestep": 3, "encoder_hidden_states": torch.randn(2, 5, 24), "encoder_attention_mask": mask}
    x, found = torch.randn(2, 4, 8, 8), []
    with torch.no_grad():
        before = model(x, **given).sample
        for op in (ph.ops.softmax_attention, ph.ops.hyla):
            model.set_attn_processor(Processor(op))
            found.append((model(x, **given).sample - before).abs().max().item())
    print(f"softmax heads: outputs change by at most {found[0]:.1e}; HYLA heads: {found[1]:.2f}")
    return found[0], found[1]


if __name__ == "__main__":
    main()
