r"""The only room that uses PyTorch's private names.

Each function states which versions differ; `git grep 'torch\._'` outside this folder finds
nothing.

| private name | 2.11 | since | our answer |
| --- | --- | --- | --- |
| `TritonTemplate(always_freeze_layout=)` | absent | 2.13 | `inductor.make_template` |
| `autotune_select_algorithm` returns | node | 2.13: (node, choice) | `inductor.select` |
| `TritonTemplateKernel.modification(input_dtypes=)` | absent | 2.13 | `inductor.TemplateKernel` |
| `SizeVarAllocator.size_hint` | present | gone in 2.13 | `optimization_hint`, in all |
| `speculate_subgraph(supports_input_input_aliasing=)` | absent | 2.15 | `subgraph.speculate` |
| derivative of `aten.sgn` under symbolic sizes | fails | 2.13 | `signs` |
| `_inductor.fx_utils` warns for operators it does not know | no | 2.13 | filter in `inductor` |
"""

from __future__ import annotations

import importlib.util
import warnings

import torch

from flexhop.errors import TorchVersionWarning

SUPPORTED = ((2, 11), (2, 15))


def torch_version() -> tuple[int, int]:
    """Major and minor version of PyTorch."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def has_triton() -> bool:
    """Whether Triton is installed; it need not have a GPU."""
    return importlib.util.find_spec("triton") is not None


def check_torch_version() -> None:
    """Warn outside the supported range."""
    low, high = SUPPORTED
    if not low <= torch_version() <= high:
        text = f"{low[0]}.{low[1]} to {high[0]}.{high[1]}"
        warnings.warn(TorchVersionWarning(supported=text, found=torch.__version__), stacklevel=3)
