"""What checks of results, captured tensors and meshes find; flexhop.errors exports these, too."""

from __future__ import annotations

from flexhop.errors.base import FlexhopError, FlexhopWarning


class WrongResultError(FlexhopError, AssertionError):
    """FLEXHOP_VERIFY found a wrong result, and FLEXHOP_STRICT is set."""

    message = "FLEXHOP_VERIFY found a wrong result. {check}."


class CaptureChangedError(FlexhopError, RuntimeError):
    """A captured tensor that was written to between forward and backward, without compilation."""

    message = (
        "A tensor that {mod} captured was written to before backward, which computes the scores "
        "again. Capture a clone of it."
    )


class WrongResultWarning(FlexhopWarning):
    """FLEXHOP_VERIFY found a result that is too far from the reference."""

    message = (
        "FLEXHOP_VERIFY found a wrong result. {check}. Please report it with that file. "
        "FLEXHOP_STRICT=1 makes it an error."
    )


class NanWarning(FlexhopWarning):
    """FLEXHOP_VERIFY found a NaN."""

    message = "FLEXHOP_VERIFY found a NaN in a call of {shape}: {origin}."


class UncheckedWarning(FlexhopWarning):
    """FLEXHOP_VERIFY had no memory for a check."""

    message = (
        "FLEXHOP_VERIFY did not check a call with a query of {shape}: there was not enough "
        "memory. Leave some free, or unset FLEXHOP_VERIFY."
    )


class PlanError(FlexhopError, ValueError):
    """Masks, numbers or a mesh that allow no plan, or that do not match a plan."""

    message = "{argument} {found}, but {expected}."


class ShardedCallError(FlexhopError, ValueError, RuntimeError):
    """A call inside context_parallel that the plan does not cover."""

    message = "Inside context_parallel, {argument} {found}, but {expected}."


class RankDisagreementError(FlexhopError, RuntimeError, ValueError):
    """Ranks called with different arguments, found before anything was exchanged."""

    message = "The ranks of the mesh disagree about {subject}: {found}. {hint}."


class PlacementError(FlexhopError, ValueError, NotImplementedError):
    """DTensor operands whose placements keep ranks from computing their parts alone."""

    message = "{argument} is placed as {found}, but {expected}. {hint}."
