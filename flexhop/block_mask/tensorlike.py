"""Tensor methods of a mask: size, device, copies.

Frameworks treat masks like tensors and call these methods.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, Self

import torch
from torch import Tensor

from flexhop.block_mask.fields import TENSOR_FIELDS, MaskFields, MaskModKey
from flexhop.block_mask.lists import by_memory, in_memory
from flexhop.compat.mods.held import captured_tensors, map_captured
from flexhop.errors import BlockMaskFieldError


class TensorLikeMask(MaskFields):
    """Methods that a BlockMask shares with tensors.

    Copies include the tensors that mask_mod captured in closures, partials and objects, but not
    those in globals or modules.
    """

    @property
    def ndim(self) -> int:
        """4: batch, head, query, key; 2 without batch and head."""
        return len(self.shape)

    def dim(self) -> int:
        """Same as ndim."""
        return self.ndim

    def size(self, dim: int | None = None) -> Any:
        """The shape as a torch.Size, or one entry of it."""
        shape = torch.Size(self.shape)
        return shape if dim is None else shape[dim]

    @property
    def is_cuda(self) -> bool:
        """Whether the lists are on a GPU."""
        return self.device.type == "cuda"

    def is_contiguous(self) -> bool:
        """Whether every list is contiguous, or one that batches or heads share."""
        return all(in_memory(t).is_contiguous() for t in self._tensors())

    def contiguous(self) -> Self:
        """The mask with contiguous lists; itself if they are. Captured tensors stay."""
        return self if self.is_contiguous() else self._with_lists(by_memory(Tensor.contiguous))

    def to(self, *args: Any, **choices: Any) -> Self:
        """A mask on another device, with the tensors that mask_mod captured.

        Args:
            args, choices: those of Tensor.to: a device, a dtype or a tensor; `non_blocking`;
                `copy`. As in nn.Module.to, a dtype applies to floating-point tensors only, which
                are among those that mask_mod captured. Lists and captured integers keep theirs.
        """
        moved = torch.empty(0, dtype=torch.bool, device=self.device).to(*args, **choices)
        dtype = moved.dtype if moved.is_floating_point() else None
        names = ("non_blocking", "copy")
        flags = dict(zip(names, (a for a in args if isinstance(a, bool)), strict=False))
        flags |= {name: choices[name] for name in names if name in choices}

        def change(tensor: Tensor) -> Tensor:
            return tensor.to(moved.device, dtype if tensor.is_floating_point() else None, **flags)

        return self.map_tensors(by_memory(change))

    def cpu(self) -> Self:
        """Same as to("cpu")."""
        return self.to("cpu")

    def cuda(self, device: torch.device | str | int = "cuda", non_blocking: bool = False) -> Self:
        """Same as to(device)."""
        where = f"cuda:{device}" if isinstance(device, int) else device
        return self.to(where, non_blocking)

    def pin_memory(self) -> Self:
        """A mask in page-locked memory, for asynchronous copies to a GPU."""
        return self.map_tensors(by_memory(Tensor.pin_memory))

    def is_pinned(self) -> bool:
        """Whether every list is in page-locked memory."""
        return all(t.is_pinned() for t in self._tensors())

    def record_stream(self, stream: torch.Stream) -> None:
        """Mark all tensors as used by a CUDA stream: lists, and those that mask_mod captured."""
        for tensor in (*self._tensors(), *captured_tensors(self.mask_mod)):
            tensor.record_stream(stream)

    def clone(self) -> Self:
        """A copy that shares no tensor with this mask, with lists for each batch and head."""
        return self.map_tensors(Tensor.clone)

    def detach(self) -> Self:
        """A mask whose tensors are detached."""
        return self.map_tensors(Tensor.detach)

    def __copy__(self) -> Self:
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        clone = by_memory(Tensor.clone)

        def copied(tensor: Tensor) -> Tensor:
            if id(tensor) not in memo:
                memo[id(tensor)] = clone(tensor.detach()).requires_grad_(tensor.requires_grad)
            return memo[id(tensor)]

        made = self.map_tensors(copied)
        memo[id(self)] = made
        return made

    def copy_(self, source: MaskFields) -> Self:
        """Overwrite this mask with another one in place, as captured CUDA graphs require.

        Args:
            source: a BlockMask of the same lengths, block size, batches, heads and mask_mod. The
                values of its lists and of mask_mod's captured tensors may differ. Its rows of
                blocks may be narrower than this mask's.

        Raises:
            BlockMaskFieldError: it does not match; nothing has been copied.
        """
        pairs = [*self._matched_lists(source), *self._matched_captures(source)]
        for own, other in pairs:
            own.copy_(other)
        if self.full_kv_num_blocks is not None and source.full_kv_num_blocks is None:
            in_memory(self.full_kv_num_blocks).zero_()
            if self.full_q_num_blocks is not None:
                in_memory(self.full_q_num_blocks).zero_()
        return self

    def _matched_lists(self, source: MaskFields) -> list[tuple[Tensor, Tensor]]:
        for name in ("seq_lengths", "BLOCK_SIZE"):
            own, other = getattr(self, name), getattr(source, name)
            if own != other:
                _refuse(name, f"it is {other} in the source and {own} in the target")
        if self.full_kv_num_blocks is None and source.full_kv_num_blocks is not None:
            _refuse("full_kv_num_blocks", "the source lists full blocks, but the target does not")
        pairs = [self._matched_list(name, source) for name in TENSOR_FIELDS]
        return [pair for pair in pairs if pair is not None]

    def _matched_list(self, name: str, source: MaskFields) -> tuple[Tensor, Tensor] | None:
        """The target and source of one list; None if the target does not need it."""
        own: Tensor | None = getattr(self, name)
        other: Tensor | None = getattr(source, name)
        if own is None or (other is None and name.startswith("full_")):  # that becomes empty
            return None
        if other is None:
            _refuse(name, "the target has it, but the source does not")
        if name.endswith("_indices") and other.size(-1) < own.size(-1):
            own = own[..., : other.size(-1)]
        if own.shape != other.shape:
            _refuse(name, f"shape {tuple(other.shape)} does not fit into {tuple(own.shape)}")
        written = in_memory(own)
        if written is own:
            return own, other
        read = in_memory(other)
        if written.shape != read.shape:
            _refuse(name, "batches or heads share the target's lists, but not the source's")
        return written, read

    def _matched_captures(self, source: MaskFields) -> list[tuple[Tensor, Tensor]]:
        """Pairs of tensors that the two mask_mods captured."""
        if self.mask_mod is source.mask_mod:
            return []
        if _without_tensors(self.mask_mod) != _without_tensors(source.mask_mod):
            _refuse(
                "mask_mod", "the source has a different function, or captures different numbers"
            )
        own, other = captured_tensors(self.mask_mod), captured_tensors(source.mask_mod)
        for mine, theirs in zip(own, other, strict=True):
            if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
                _refuse(
                    "mask_mod",
                    f"it captured {theirs.dtype} of shape {tuple(theirs.shape)} in the source and "
                    f"{mine.dtype} of shape {tuple(mine.shape)} in the target",
                )
        return [(a, b) for a, b in zip(own, other, strict=True) if a is not b]

    def _tensors(self) -> list[Tensor]:
        return [t for name in TENSOR_FIELDS if (t := getattr(self, name)) is not None]

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> Self:
        """A mask with `change` applied to every list and every captured tensor of mask_mod."""
        made = self._with_lists(change)
        made.mask_mod = map_captured(self.mask_mod, change)
        return made

    def _with_lists(self, change: Callable[[Tensor], Tensor]) -> Self:
        """A shallow copy, subclass and further attributes included, with changed lists."""
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__)
        for name in TENSOR_FIELDS:
            if (tensor := getattr(self, name)) is not None:
                setattr(made, name, change(tensor))
        return made


def _without_tensors(mod: Any) -> MaskModKey:
    """A key that is equal for mods that differ only in captured tensors."""
    return MaskModKey(map_captured(mod, lambda _: _ANY_TENSOR))


_ANY_TENSOR = torch.empty(0)


def _refuse(field: str, reason: str) -> NoReturn:
    raise BlockMaskFieldError(field=field, reason=reason)
