"""Uninitialised memory holds NaN, so that a number which nobody wrote is noticed."""

import contextlib
from unittest import mock

import torch


@contextlib.contextmanager
def poisoned():
    """In this block `torch.empty` and `torch.empty_like` are filled with NaN."""

    def poison(make):
        def fill(*args, **options):
            x = make(*args, **options)
            # What a compiler traces is no torch.Tensor: torch 2.11 has no way to put a number into it.
            is_traced = torch.compiler.is_compiling() or type(x) is not torch.Tensor
            if not (is_traced or x.is_meta) and x.is_floating_point():
                x.detach().fill_(float("nan"))  # which a leaf allows, too
            return x

        return fill

    with mock.patch.multiple(torch, empty=poison(torch.empty), empty_like=poison(torch.empty_like)):
        yield
