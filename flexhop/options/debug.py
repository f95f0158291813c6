"""FLEXHOP_DEBUG: print the stages of a call as they happen.

    FLEXHOP_DEBUG=graph,kernel python train.py

| stage | what it prints, when |
| --- | --- |
| graph | each user function as an FX graph, and its joint graph, when AOTAutograd traces it |
| problem | the facts of a call, when Inductor lowers it |
| kernel | tile, shared memory, reason and constants of each kernel, when it is chosen |
| source | the Triton source of each candidate, before Inductor fuses what follows into it |

Stages go to stderr. A graph from one of PyTorch's caches is not lowered again and prints nothing;
`TORCHINDUCTOR_FORCE_DISABLE_CACHES=1` disables the caches.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Callable

from torch import fx

from flexhop.errors import OptionValueError

VARIABLE = "FLEXHOP_DEBUG"
STAGES = ("graph", "problem", "kernel", "source")

_INDICES = ("b", "h", "q_idx", "kv_idx")
_ARGUMENTS = {
    "score": ("score", *_INDICES),
    "mask": _INDICES,
    "joint": ("score", *_INDICES, "grad_score"),
}


@functools.cache
def wanted() -> frozenset[str]:
    """The stages that the environment requests; read once per process.

    Raises:
        OptionValueError: an unknown stage.
    """
    words = [word.strip() for word in os.environ.get(VARIABLE, "").split(",")]
    stages = frozenset(word for word in words if word)
    for stage in sorted(stages - {*STAGES}):
        raise OptionValueError(name=VARIABLE, value=stage, allowed=f"one of {', '.join(STAGES)}")
    return stages


def reread() -> frozenset[str]:
    """Read the environment again, for a program that changes it."""
    wanted.cache_clear()
    return wanted()


def show(stage: str, title: str, text: Callable[[], str]) -> None:
    """Print one stage if requested; `text` is called only then."""
    if stage in wanted():
        print(f"--- flexhop {stage}: {title}\n{text().rstrip()}", file=sys.stderr, flush=True)


def show_graph(kind: str, graph: fx.GraphModule) -> None:
    """Print a traced user function; kinds as in `mod_code`."""
    show("graph", kind, lambda: mod_code(graph, kind))


def mod_code(graph: fx.GraphModule, kind: str) -> str:
    """Python text of a traced user function, with its own argument names.

    Args:
        graph: takes the arguments of its kind, then the captured values.
        kind: "score", "mask" or "joint".

    Returns:
        A function definition; captured values are called capture_0, capture_1 and so on.
    """
    named = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    arguments = _ARGUMENTS[kind]
    for position, node in enumerate(graph.graph.find_nodes(op="placeholder")):
        capture = f"capture_{position - len(arguments)}"
        name = arguments[position] if position < len(arguments) else capture
        copies[node] = named.placeholder(name)
    named.output(named.graph_copy(graph.graph, copies))
    text = named.python_code("self").src.strip()
    text = re.sub(r";  (?:\w+ = )+None", "", text)  # frees memory early; noise for a reader
    text = re.sub(r"\n\n+", "\n", text)
    # Same text on every version: omit the types of arguments and results.
    head, _, body = text.partition("\n")
    inputs = ", ".join(node.name for node in named.find_nodes(op="placeholder"))
    head = f"def {'joint' if kind == 'joint' else kind + '_mod'}({inputs}):"
    return f"{head}\n{body.replace('torch.ops.aten.', 'aten.')}"
