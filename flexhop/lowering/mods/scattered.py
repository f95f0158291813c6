"""Masks that leave no block whole, because remainders of one position hide some of its scores.

`(q_idx % 3 != 1) & (q_idx >= kv_idx)` hides every third query everywhere. No block is full, so
kernels ask such a mask about every score that they compute.
"""

from __future__ import annotations

from torch import fx

from flexhop.analysis import INDICES, All, Forms, Truth, number_set, quotient_of, truth_of
from flexhop.lowering.mods.analysed import analysed, per_graph

_LARGEST = 64  # remainders by up to this take all their values in a block of 128


@per_graph
def is_scattered(mask: fx.GraphModule) -> bool:
    """Whether a mask_mod hides scores of every block by one position alone."""
    found = analysed(mask, INDICES)
    truth = truth_of(found.forms, found.mod.result)
    parts = truth.parts if isinstance(truth, All) else (truth,)
    return any(_hides_some_remainders(found.forms, part) for part in parts)


def _hides_some_remainders(forms: Forms, part: Truth) -> bool:
    """Whether a condition is about a remainder of one position, and false for some."""
    numbers = number_set(part)
    if numbers is None or len(numbers.form.terms) != 1:
        return False
    ((atom, factor),) = numbers.form.terms.items()
    remainder = quotient_of(forms, atom)
    if remainder is None or not remainder.is_remainder or remainder.divisor > _LARGEST:
        return False
    value = forms.affine(remainder.value)
    if value is None or sorted((abs(value.q), abs(value.k))) != [0, 1]:
        return False
    if forms.of_all(value.rest.terms) & {"q", "k"}:
        return False
    seen = [
        any(low <= factor * left <= high for low, high in numbers.numbers)
        for left in range(remainder.divisor)
    ]
    return not all(seen)
