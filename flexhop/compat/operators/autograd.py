"""Autograd functions, applied with less ado, and activation checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

__all__ = ["apply_plain", "checkpointed"]


def apply_plain(function: type[torch.autograd.Function], *inputs: Any) -> Any:
    """`function.apply` where no transform is active and no input is a transform's tensor.

    The method of torch 2.11 to 2.15 looks for both at every call. It takes three microseconds.
    """
    return super(torch.autograd.Function, function).apply(*inputs)


def checkpointed(function: Callable[..., Any], *inputs: Any) -> Any:
    """`function(*inputs)`, computed again in the backward pass.

    2.11 and 2.12: an error in the function leaves checkpoint's hooks active while its traceback
    lives. Later operations then save their tensors in its place, and fail in their backward pass.
    So checkpoint does not see an error of the first run. The second runs in the backward pass.
    """
    failed: list[BaseException] = []
    is_second = False

    def run(*inputs: Any) -> Any:
        try:
            return function(*inputs)
        except BaseException as error:
            if is_second:
                raise
            failed.append(error)
            return None

    result = checkpoint(run, *inputs, use_reentrant=False)
    is_second = True
    if failed:
        raise failed[0]
    return result
