"""Warnings; flexhop.errors exports these classes too."""

from __future__ import annotations

from flexhop.errors.base import Worded


class FlexhopWarning(Worded, UserWarning):
    """Base class of flexhop's warnings; `warnings.warn(EagerWarning())`."""

    message = "flexhop warns."


class EagerWarning(FlexhopWarning):
    """A call without torch.compile, which is slow."""

    message = (
        "flex_attention called without torch.compile: it computes the scores in plain PyTorch, "
        "which is meant for debugging. Use torch.compile(flex_attention) for the fused kernels."
    )


class KernelFallbackWarning(FlexhopWarning):
    """A kernel failed to compile, so another one, or none, is used."""

    message = (
        "A flexhop kernel failed to compile, so another one runs instead, perhaps more slowly. "
        "Please report this with the mod and the shapes: {candidate}. FLEXHOP_STRICT=1 makes it "
        "an error."
    )


class OptionIgnoredWarning(FlexhopWarning):
    """Options that tune only PyTorch's kernels."""

    message = "Kernel options that tune only PyTorch's own kernels were ignored: {names}."


class TorchVersionWarning(FlexhopWarning):
    """A PyTorch version that flexhop was not tested with."""

    message = "flexhop supports torch {supported}, but this is {found}; it may not work."


class ReturnLseDeprecationWarning(FlexhopWarning, FutureWarning):
    """A deprecated argument."""

    message = "return_lse is deprecated; pass return_aux=AuxRequest(lse=True) instead."
