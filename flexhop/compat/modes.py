"""Dispatch modes without Dynamo. torch 2.11 to 2.15."""

from __future__ import annotations

from typing import Any, Self

from torch._C._dynamo.eval_frame import set_eval_frame
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["DispatchMode"]


class DispatchMode(TorchDispatchMode):
    """A mode while which Dynamo rests.

    PyTorch wraps other modes' `__torch_dispatch__`, lest Dynamo compile it. The wrapper imports
    Dynamo, which takes more than a second in a process that compiles nothing, and costs each
    operator microseconds.
    """

    def __init__(self) -> None:
        super().__init__()
        self._callbacks: list[Any] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __enter__(self) -> Self:
        self._callbacks.append(set_eval_frame(None))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        set_eval_frame(self._callbacks.pop())
