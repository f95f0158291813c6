"""Compilations that take long say so, once, and only if there is attention in them."""

import gc
import importlib.util
import sys
import time

import pytest
import torch

import flexhop
from flexhop.compat.dynamo import compiling
from flexhop.options import progress


def slow(seconds):
    """A backend that takes its time and compiles nothing."""

    def backend(graph, inputs):
        time.sleep(seconds)
        return graph

    return backend


def attend(query):
    return flexhop.flex_attention(query, query, query)


def compile_for(seconds, function=attend):
    torch.compiler.reset()
    torch.compile(function, backend=slow(seconds))(torch.randn(1, 1, 16, 8))
    time.sleep(0.3)  # a line that comes too late would come now


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr(progress, "SECONDS", 0.2)


@pytest.mark.usefixtures("soon")
def test_a_long_compilation_says_what_it_does(capsys):
    compile_for(0.6)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in lines] == ["flexhop"]
    assert "tracing a model with attention" in lines[0]


def test_a_short_one_says_nothing(capsys):
    compile_for(0.0)
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("soon")
def test_one_without_attention_says_nothing(capsys):
    compile_for(0.6, torch.sin)
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("soon")
def test_it_can_be_switched_off(capsys, monkeypatch):
    monkeypatch.setenv("FLEXHOP_PROGRESS", "0")
    compile_for(0.6)
    assert capsys.readouterr().err == ""


@pytest.fixture
def none_set_aside(monkeypatch):
    """No objects set aside; pytest's own process may have some."""
    monkeypatch.setattr(compiling.OldObjects, "user_has_some", False)
    gc.unfreeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("none_set_aside")
def test_old_objects_are_not_searched_meanwhile():
    """A quarter of a second for all of PyTorch's objects."""
    counts = []

    def backend(graph, inputs):
        counts.append(gc.get_freeze_count())
        return graph

    torch.compiler.reset()
    torch.compile(attend, backend=backend)(torch.randn(1, 1, 16, 8))
    assert counts[0] > 100_000
    assert gc.get_freeze_count() == 0


@pytest.mark.usefixtures("none_set_aside")
def test_objects_that_the_user_has_set_aside_stay():
    gc.freeze()
    compile_for(0.0)
    assert gc.get_freeze_count() > 0


def test_what_the_user_has_set_aside_is_counted_once(monkeypatch):
    """Python looks at each of these objects, of which this process has millions."""
    counts = []
    monkeypatch.setattr(gc, "get_freeze_count", lambda: counts.append(1) or 1)
    monkeypatch.setattr(compiling.OldObjects, "user_has_some", False)
    for _ in range(3):
        compile_for(0.0)
    assert len(counts) == 1


def test_one_that_fails_ends():
    def backend(graph, inputs):
        assert progress.PROGRESS.is_watching
        raise ZeroDivisionError

    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="ZeroDivisionError"):
        torch.compile(attend, backend=backend)(torch.randn(1, 1, 16, 8))
    assert not progress.PROGRESS.is_watching


@pytest.mark.usefixtures("soon")
@pytest.mark.skipif(importlib.util.find_spec("tqdm") is None, reason="tqdm is not installed")
def test_a_terminal_gets_a_clock(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    compile_for(1.6)
    text = capsys.readouterr().err
    shown = [part for part in text.split("\r") if part]
    assert len(shown) >= 2 and all(part.startswith("flexhop: compiling") for part in shown)
    assert text.count("\n") == 1 and text.endswith("\n")  # all on one line
