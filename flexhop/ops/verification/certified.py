"""FLEXHOP_VERIFY=N: compiled calls that check themselves, one of every N.

    FLEXHOP_VERIFY=100 python train.py

The option `verify` of an operator makes its lowering (lowering/certify.py) put the operator
`flexhop::certify` after the kernels. It counts calls in Python. One call of every N compares some
rows with the reference; the others launch nothing and wait for nothing.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import random
import secrets
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flexhop.compat.operators import transforms
from flexhop.errors import (
    NanWarning,
    OptionValueError,
    UncheckedWarning,
    WrongResultError,
    WrongResultWarning,
)
from flexhop.ops.args import BackwardArgs
from flexhop.ops.verification.checking import CallCheck, Verification, check_results, write_call
from flexhop.ops.verification.sampled import Sample, key_length, some_places

__all__ = ["OPTION", "Site", "add_site", "verified", "verify_option"]

OPTION = "verify"
VARIABLE, FOLDER = "FLEXHOP_VERIFY", "FLEXHOP_VERIFY_DIR"
# A check costs no more than this, whatever the size of the call.
ROWS, KEYS, BATCHES, HEADS = 16, 16, 2, 2
KEPT = 1000  # checks that `verified` returns
# Graphs in Inductor's caches name sites of the process that compiled them, so the option differs.
_PROCESS = secrets.token_hex(4)


def verify_option() -> dict[str, str]:
    """The operator's option, if FLEXHOP_VERIFY requests checks.

    Raises:
        OptionValueError: it is not a number of calls.
    """
    text = os.environ.get(VARIABLE, "")
    if text in ("", "0") or torch.compiler.is_exporting():
        return {}
    if not text.isdecimal():
        raise OptionValueError(
            name=VARIABLE, value=text, allowed="a number of calls; 100 checks one of 100"
        )
    return {OPTION: f"{int(text)} {_PROCESS}"}


@dataclasses.dataclass
class Site:
    """One operator in compiled code.

    Args:
        rebuild: from the tensors and numbers of a call to its operands.
        names: of the results.
        every: one call of so many is checked: the first, then one at a random place of each
            `every`. Layers that share a site are thus all checked, whatever their number.
        number: of the site; random numbers follow from it.
    """

    rebuild: Callable[[Sequence[Any]], Any]
    names: tuple[str, ...]
    every: int
    number: int
    calls: int = 0
    due: int = 0
    has_nan: bool = False

    def __post_init__(self) -> None:
        self.random = random.Random(self.number)

    def is_due(self) -> bool:
        """Count a call; whether to check it."""
        number = self.calls
        self.calls += 1
        if number < self.due:
            return False
        self.due = (number // self.every + 1) * self.every + self.random.randrange(self.every)
        return True

    def check(self, values: Sequence[Any]) -> None:
        """Check one call."""
        count = len(self.names)
        results = dict(zip(self.names, values[:count], strict=True))
        args = self.rebuild(values[count:])
        try:
            with transforms.outside():
                check = check_results(args, results, self._sample(args))
        except torch.OutOfMemoryError:
            warnings.warn(UncheckedWarning(shape=str(list(args.query.shape))), stacklevel=2)
            return
        if not check.ok:
            folder = os.environ.get(FOLDER)
            path = write_call(args, results, check, Path(folder) if folder else None)
            check = dataclasses.replace(check, reproducer=path)
        _CHECKS.append(check)
        _report(check, is_new_nan=bool(check.origin) and not self.has_nan)
        self.has_nan = bool(check.origin)

    def _sample(self, args: Any) -> Sample:
        generator = torch.Generator().manual_seed(self.random.randrange(2**31))
        batches, heads = (
            torch.randperm(n, generator=generator)[:most].sort().values
            for n, most in ((args.query.size(0), BATCHES), (args.key.size(1), HEADS))
        )
        rows = some_places(args.query.size(2), ROWS, generator)
        keys = some_places(key_length(args), KEYS, generator)
        return Sample(*(t.to(args.query.device) for t in (batches, heads, rows, keys)))


def _report(check: CallCheck, *, is_new_nan: bool) -> None:
    if not check.ok:
        if os.environ.get("FLEXHOP_STRICT", "0") not in ("", "0"):
            raise WrongResultError(check=str(check))
        warnings.warn(WrongResultWarning(check=str(check)), stacklevel=3)
    elif is_new_nan:
        warnings.warn(NanWarning(origin=check.origin, shape=check.shape), stacklevel=3)


_SITES: list[Site] = []
_CHECKS: collections.deque[CallCheck] = collections.deque(maxlen=KEPT)


def add_site(
    option: str, kind: type[Any], rebuild: Callable[[Sequence[Any]], Any], captured: Sequence[int]
) -> int:
    """Register an operator that will check itself; its number.

    Args:
        option: the operator's option `verify`.
        kind: of its operands.
        rebuild: see Site.
        captured: positions of the captured tensors that get a gradient.
    """
    names = ("out", "lse", "max_scores")
    if kind is BackwardArgs:
        learned = (f"grad_capture_{n}" for n in captured)
        names = ("grad_query", "grad_key", "grad_value", *learned)
    number = len(_SITES)
    _SITES.append(Site(rebuild, names, int(option.split()[0]), number))
    return number


def verified() -> Verification:
    """The checks that FLEXHOP_VERIFY made in this process: the latest 1000, in order."""
    return Verification(tuple(_CHECKS))


_LIBRARY = torch.library.Library("flexhop", "FRAGMENT")
# It marks its first argument as written, though it is not: nothing may then drop or move the call.
_LIBRARY.define("certify(Tensor(a!) marked, Tensor[] tensors, SymInt[] sizes, int site) -> ()")


def _certify(marked: Tensor, tensors: Sequence[Tensor], sizes: Sequence[int], site: int) -> None:
    """Check a call of a site, if it is its turn."""
    found = _SITES[site]
    if found.is_due():
        found.check((*tensors, *sizes))


_LIBRARY.impl("certify", _certify, "CompositeExplicitAutograd")
torch.library.register_fake("flexhop::certify", lambda *_: None, lib=_LIBRARY)
