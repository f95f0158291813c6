"""The dial FLEXHOP_DEBUG."""

from collections.abc import Iterator

import pytest
import torch

from flexhop.errors import OptionValueError
from flexhop.options import debug
from tests.programs import run_code


@pytest.fixture
def dial(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    yield monkeypatch
    monkeypatch.delenv(debug.VARIABLE, raising=False)
    debug.reread()


@pytest.mark.parametrize(
    ("value", "stages"),
    [
        ("", set()),
        ("graph", {"graph"}),
        (" problem, kernel ,", {"problem", "kernel"}),
        ("graph,problem,kernel,source", set(debug.STAGES)),
    ],
)
def test_stages_are_read_from_the_environment(dial, value: str, stages: set[str]):
    dial.setenv(debug.VARIABLE, value)
    assert debug.reread() == stages


def test_an_unknown_stage_is_refused(dial):
    dial.setenv(debug.VARIABLE, "graph,kernels")
    with pytest.raises(OptionValueError, match=r"FLEXHOP_DEBUG value 'kernels'.*source"):
        debug.reread()


def test_the_environment_is_read_once(dial):
    debug.reread()
    dial.setenv(debug.VARIABLE, "source")
    assert debug.wanted() == set()


def test_a_wrong_stage_is_refused_at_import():
    code = "import os; os.environ['FLEXHOP_DEBUG'] = 'grpah'; import flexhop"
    result = run_code(code)
    assert "OptionValueError" in result.stderr


def test_only_wanted_stages_are_written(dial, capsys: pytest.CaptureFixture[str]):
    dial.setenv(debug.VARIABLE, "kernel")
    debug.reread()
    debug.show("graph", "score", lambda: pytest.fail("nobody asked"))
    debug.show("kernel", "forward", lambda: "tile\n")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "--- flexhop kernel: forward\ntile\n")


def test_code_has_the_users_argument_names():
    graph = torch.fx.Graph()
    score, _, h, _, _, table = (graph.placeholder(f"arg{i}_1") for i in range(6))
    first = graph.call_function(torch.ops.aten.index.Tensor, (table, [h]))
    graph.output(graph.call_function(torch.ops.aten.add.Tensor, (score, first)))
    code = debug.mod_code(torch.fx.GraphModule({}, graph), "score")
    assert code == (
        "def score_mod(score, b, h, q_idx, kv_idx, capture_0):\n"
        "    index_tensor = aten.index.Tensor(capture_0, [h])\n"
        "    add_tensor = aten.add.Tensor(score, index_tensor)\n"
        "    return add_tensor"
    )
