"""The packed sequences of a whole batch, as input of a plan."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from flexhop.mods.functions import MaskMod
from flexhop.sequences.ranges import window_mistake
from flexhop.sequences.row_tables import RowTables, Window, tabulate_rows


@dataclasses.dataclass(frozen=True, eq=False)
class PackedSequences:
    """The arguments of `varlen_attention` that define its mask, for the plan of a context-parallel
    batch.

    Inside the context, call varlen_attention with the same `cu_seqlens` tensor, which describes
    the whole batch, and the same options.

    Args:
        cu_seqlens: [S + 1] int32 or int64, where each sequence begins, and the end of the last.
        total: tokens of the whole batch; tokens after the last sequence are padding.
        is_causal: as for `varlen_attention`.
        window_size: as for `varlen_attention`.
        bottom_right: as for `varlen_attention`.
        mask_mod: as for `varlen_attention`.

    Raises:
        OptionValueError: as for `varlen_attention`, a window_size that is no pair of such numbers.
    """

    cu_seqlens: Tensor
    total: int
    is_causal: bool = False
    window_size: tuple[int | None, int | None] = (None, None)
    bottom_right: bool = True
    mask_mod: MaskMod | None = None

    def __post_init__(self) -> None:
        """Check the window, of which every call would otherwise make another mask."""
        mistake = window_mistake(self.window_size)
        if mistake is not None:
            raise mistake.error(**dict(mistake.facts))

    @property
    def window(self) -> Window:
        """The keys that a query sees around its own."""
        left, right = self.window_size
        return Window(left, 0 if self.is_causal else right, self.bottom_right)

    def tables(self) -> RowTables:
        """For each token of the whole batch: its sequence, its position, and the keys that it
        sees."""
        tables = tabulate_rows(self.cu_seqlens, self.cu_seqlens, self.total, self.window)
        return tables.with_keys(tables)
