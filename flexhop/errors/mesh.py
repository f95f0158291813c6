"""Errors of attention that is sharded over the ranks of a mesh."""

from __future__ import annotations

from flexhop.errors.base import FlexhopError


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
