"""Quotients, sums and limits are recognised once, and bounds hold in calls of other sizes."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from flexhop.analysis import INDICES, AtLeast, Ends, Form, analyse, quotient_of, truth_of
from flexhop.compat.mods.indexing import IndexMode


def found_in(mod):
    examples = [torch.zeros((), dtype=torch.int32) for _ in INDICES]
    with IndexMode(), torch.no_grad():
        graph = make_fx(mod, tracing_mode="fake", _allow_non_fake_inputs=True)(*examples)
    return analyse(graph, INDICES, {"b": 1, "h": 1, "q": 2**23, "k": 2**23})


EIGHTHS = {
    "floor_divide": lambda x: x // 8,
    "shift": lambda x: x >> 3,
    "div": lambda x: torch.div(x, 8, rounding_mode="floor"),
    "tensor": lambda x: x // torch.full((), 8),
    "bits": lambda x: torch.bitwise_right_shift(x, 3),
}


@pytest.mark.parametrize("eighth", EIGHTHS.values(), ids=EIGHTHS)
def test_the_spelling_of_a_quotient_does_not_matter(eighth):
    found = found_in(lambda b, h, q, k: eighth(q))
    assert quotient_of(found.forms, found.mod.result) == (found.mod.inputs["q"], 8, True, False)
    found = found_in(lambda b, h, q, k: eighth(q - k) >= 2)
    truth = truth_of(found.forms, found.mod.result)
    q_idx, kv_idx = (found.mod.inputs[name] for name in "qk")
    assert truth == AtLeast(Form({q_idx: 1, kv_idx: -1}, -16))


OTHERS = {
    "remainder": (lambda q: q % 8, (8, True, True)),
    "to_zero": (lambda q: torch.div(q, 8, rounding_mode="trunc"), (8, False, False)),
    "all_bits": (lambda q: q >> 40, (2**31, True, False)),
    "of_floats": (lambda q: q / 8, None),
    "negative": (lambda q: q // -8, None),
    "by_a_position": (lambda q: q // (q + 1), None),
    "product": (lambda q: q * 8, None),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_operators(name):
    mod, expected = OTHERS[name]
    found = found_in(lambda b, h, q, k: mod(q))
    quotient = quotient_of(found.forms, found.mod.result)
    assert (None if quotient is None else quotient[1:]) == expected


INDICES_OF_TABLES = [
    lambda q, k: q - k + 7,
    lambda q, k: q // 8 - k // 16,
    lambda q, k: 3 * ((q + 5) // 4) - (k >> 2),
    lambda q, k: (q % 8) * 2 - k,
    lambda q, k: (q // 4) // 3,
]


@pytest.mark.parametrize("number", range(len(INDICES_OF_TABLES)))
def test_bounds_of_other_sizes_are_reached(number):
    mod = INDICES_OF_TABLES[number]
    found = found_in(lambda b, h, q, k: mod(q, k))
    ends = Ends(found.forms, {"b": 0, "h": 0, "q": 39, "k": 47})
    values = [mod(q, k) for q, k in itertools.product(range(40), range(48))]
    assert ends.of(found.mod.result) == (min(values), max(values))


def test_numbers_that_no_index_bounds():
    found = found_in(lambda b, h, q, k: (q * 3).clamp(10, 5000))
    given = {"b": 0, "h": 0, "q": 39, "k": 47}
    assert Ends(found.forms, given).of(found.mod.result) == (10, 5000)
    assert Ends(found.forms, given, widest=4096).of(found.mod.result) is None


def test_a_product_in_a_sum_is_no_form():
    """Floats round it, although the sum may be small."""
    found = found_in(lambda b, h, q, k: torch.addcmul(q.float(), k.float(), k.float() * 0 + 3))
    assert found.forms.form(found.mod.result) is None
