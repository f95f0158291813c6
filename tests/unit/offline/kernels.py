"""Hand-written kernels in the form in which Inductor writes template kernels."""

import textwrap

from flexhop.offline.kernel import Kernel, read_kernel

_HEAD = """
import triton
import triton.language as tl
from torch._inductor.runtime import triton_heuristics, triton_helpers
from torch._inductor.runtime.triton_helpers import libdevice, math as tl_math
triton_helpers.set_driver_to_gpu()
"""

_DECORATOR = """
@triton_heuristics.template(
    num_stages=2,
    num_warps=4,
    triton_meta={{'signature': {signature}, 'constants': {{}}, 'configs': [{{}}]}},
)
@triton.jit
"""


def kernel(signature: dict[str, str], body: str, helpers: str = "") -> Kernel:
    """A kernel named `kernel` with these arguments and this body."""
    source = "\n".join(
        (
            _HEAD,
            textwrap.dedent(helpers),
            _DECORATOR.format(signature=signature),
            f"def kernel({', '.join(signature)}):",
            textwrap.indent(textwrap.dedent(body).strip("\n"), "    "),
        )
    )
    return read_kernel("kernel", source)


POINTERS = {"x": "*fp32", "out": "*fp32"}
