"""Inductor's CPU scheduler, which forgets that a reader waits for additions (torch 2.11 to 2.14).

`index_put(accumulate=True)`, which sums gradients of captured tensors in the reference, adds to a
buffer of zeros. Under Inductor the sums have a name of their own, and a reader depends on that
name; its loop names the buffer. If loops are fused or split, the dependencies of a node are read
from its loop again, and only 2.15 then renames them. A reader without its dependency may come
before the additions, and then reads zeros.
"""

from __future__ import annotations

import functools
from typing import Any

from torch._inductor.dependencies import StarDep, WeakDep
from torch._inductor.scheduler import SchedulerNode
from torch.utils._ordered_set import OrderedSet

from flexhop.compat import torch_version

__all__ = ["keep_renames"]


def keep_renames() -> None:
    """From now on, keep the dependencies of nodes whose loops change."""
    if torch_version() >= (2, 15):
        return
    recompute = SchedulerNode.recompute_size_and_body

    @functools.wraps(recompute)
    def recompute_and_rename(self: Any, *args: Any, **kwargs: Any) -> None:
        # Those that no loop shows, which 2.11 drops.
        added = OrderedSet(d for d in self.read_writes.reads if isinstance(d, (WeakDep, StarDep)))
        recompute(self, *args, **kwargs)
        self.set_read_writes(self.read_writes.with_read(added).rename(self.mutation_renames))

    SchedulerNode.recompute_size_and_body = recompute_and_rename  # type: ignore[method-assign]
