"""Models that PEFT has wrapped."""

import warnings

import peft
import torch
from torch import nn


def adapted(model, fill=True, **options):
    """With LoRA of rank 2; one matrix of each adapter begins as 0 unless all are drawn (`fill`)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about saving and merging
        wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, **options))
    torch.manual_seed(1)
    for key, parameter in wrapped.named_parameters():
        if fill and "lora_" in key:
            nn.init.normal_(parameter, std=0.2)
    return wrapped
