"""CUDA graphs of calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def capture(call: Callable[..., Any], *operands: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of call(*operands), and the result that its replays write."""
    call(*operands)  # compiles
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # allocates what the call needs on another stream
        call(*operands)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call(*operands)
    return graph, result
