"""Random problems: what their mods capture."""

from __future__ import annotations

import collections

import pytest
import torch

from tests.case_inputs import Random, Shape
from tests.fuzz.functions import Entry
from tests.fuzz.masks import MASKS
from tests.fuzz.plan import Plan
from tests.fuzz.problem import make_problem
from tests.fuzz.scores import SCORES


def _entries(monkeypatch, *captures):
    """A plan of score_mods with these captures."""
    names = tuple(f"new_{number}" for number in range(len(captures)))
    for name, captured in zip(names, captures, strict=True):
        entry = Entry(lambda c: lambda s, b, h, q, k: s + c.shared[h], captured)
        monkeypatch.setitem(SCORES, name, entry)
    return Plan(scores=names)


def test_one_name_for_two_tensors_is_an_error(monkeypatch):
    drawn = [lambda s, r: {"shared": r.normal(s.heads)}] * 2
    with pytest.raises(ValueError, match="capture different values as 'shared'"):
        make_problem(_entries(monkeypatch, *drawn), 0)
    halves = [
        lambda s, r, d=d: {"shared": torch.ones(s.heads, dtype=d)} for d in (None, torch.half)
    ]
    with pytest.raises(ValueError, match="capture different values as 'shared'"):
        make_problem(_entries(monkeypatch, *halves), 0)


def test_one_name_for_equal_tensors_is_one_capture(monkeypatch):
    equal = [lambda s, r: {"shared": torch.arange(s.heads)}] * 2
    problem = make_problem(_entries(monkeypatch, *equal), 0)
    assert torch.equal(problem.captures.shared, torch.arange(problem.plan.shape.heads))


def test_names_of_the_vocabulary_are_different():
    owners = collections.defaultdict(list)
    for entry_name, entry in (*MASKS.items(), *SCORES.items()):
        for name in entry.captures(Shape(2, 4, 2, 7, 9, 8, 16), Random(0)):
            owners[name].append(entry_name)
    assert {name: found for name, found in owners.items() if len(found) > 1} == {}
