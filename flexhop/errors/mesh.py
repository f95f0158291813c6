"""What can go wrong when attention is divided among the ranks of a mesh."""

from __future__ import annotations

from flexhop.errors.base import FlexhopError


class PlanError(FlexhopError, ValueError):
    """Masks, numbers or a mesh from which no plan can be made, or that do not fit a plan."""

    message = "{argument} {found}, but {expected}."


class ShardedCallError(FlexhopError, ValueError, RuntimeError):
    """A call inside of context_parallel that the plan does not cover."""

    message = "Inside context_parallel, {argument} {found}, but {expected}."


class RankDisagreementError(FlexhopError, RuntimeError, ValueError):
    """Ranks that call with different things, found before anything is exchanged."""

    message = "The ranks of the mesh disagree about {subject}: {found}. {mend}."


class PlacementError(FlexhopError, ValueError, NotImplementedError):
    """DTensor operands that are placed so that no rank could compute its part alone."""

    message = "{argument} is placed as {found}, but {expected}. {mend}."
