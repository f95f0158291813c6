"""The constants of each template: one dataclass per kernel; its fields are the template's
names."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class KeyConstants:
    """Constants that every kernel reads; names as in templates/README.md."""

    BLOCK_M: int
    BLOCK_N: int
    SPARSE_Q_BLOCK_SIZE: int
    SPARSE_KV_BLOCK_SIZE: int
    TILES_PER_KV_BLOCK: int
    HAS_BLOCKS: bool
    HAS_RANGES: bool
    HAS_FULL_BLOCKS: bool
    HAS_PARTIAL_BLOCKS: bool
    CHECK_KV: bool
    KEY_GROUP: int
    QK_HEAD_DIM: int
    QK_HEAD_DIM_ROUNDED: int
    V_HEAD_DIM: int
    V_HEAD_DIM_ROUNDED: int
    Q_HEADS: int
    GQA_GROUP: int
    KV_BATCH_SHARED: bool
    HAS_SCORE_MOD: bool
    ISOLATE_SCORE_MOD: bool
    SCALE_SCORES: bool
    SM_SCALE: float
    EXP_SCALE: float
    WEIGHING: str
    FLOAT32_PRECISION: str
    OFFSET_DTYPE: str


@dataclasses.dataclass(frozen=True, slots=True)
class SharedConstants(KeyConstants):
    """Further constants of the kernels whose query tiles have one head."""

    TILES_PER_Q_BLOCK: int
    CHECK_Q: bool
    BATCH_INNER: bool


@dataclasses.dataclass(frozen=True, slots=True)
class ForwardConstants(SharedConstants):
    """Constants of portable/forward.py.jinja."""

    HEADS_PER_SECTION: int
    KEEP_PRODUCTS: bool  # whether they are computed although score_mod ignores them
    MASK_LOOP: bool  # whether the tiles of partial blocks have a loop of their own
    PRESCALE_QK: bool
    ROWS_GUARANTEED_SAFE: bool
    RETURN_MAX: bool
    LN_2: float


@dataclasses.dataclass(frozen=True, slots=True)
class JvpForwardConstants(SharedConstants):
    """Constants of jvp_forward.py.jinja."""

    HEADS_PER_SECTION: int
    ISOLATE_PUSH: bool
    HAS_Q_DOT: bool
    HAS_K_DOT: bool
    HAS_V_DOT: bool
    HAS_CENTER: bool
    LN_2: float


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeConstants(KeyConstants):
    """Constants of portable/decode.py.jinja."""

    SPLITS: int
    PACKED_HEADS: int
    KEEP_PRODUCTS: bool
    ISOLATE_MASK_MOD: bool
    HAS_MERGED_LISTS: bool  # whether heads with lists of their own iterate over one
    PRESCALE_QK: bool
    ROWS_GUARANTEED_SAFE: bool
    RETURN_MAX: bool
    LN_2: float


@dataclasses.dataclass(frozen=True, slots=True)
class CacheConstants:
    """Further constants of forward and decode if they read a cache (portable/cache/)."""

    PAGE_SIZE: int  # 0: the cache is not paged
    ONE_PAGE: bool  # whether a tile lies within one page
    HAS_KEY_MOD: bool
    HAS_VALUE_MOD: bool
    HAS_KEY_FACTOR: bool
    HAS_VALUE_FACTOR: bool
    KEY_AS_BITS: bool
    VALUE_AS_BITS: bool
    AS_HALVES: bool  # whether products are in float16, and values are read in pairs
    SUM_LATE: bool  # whether weights are summed over a row once instead of in every tile


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeCombineConstants:
    """Constants of portable/decode_combine.py.jinja."""

    SPLITS: int
    SPLITS_ROUNDED: int
    SPLITS_PER_STEP: int
    Q_HEADS: int
    V_HEAD_DIM: int
    V_HEAD_DIM_ROUNDED: int
    RETURN_MAX: bool
    OFFSET_DTYPE: str
    EXP_SCALE: float
    WEIGHING: str
    LN_2: float


@dataclasses.dataclass(frozen=True, slots=True)
class GradQueryConstants(SharedConstants):
    """Constants of portable/grad_query.py.jinja."""

    HEADS_PER_SECTION: int
    MASK_LOOP: bool
    HAS_SCORE_GRAD: bool
    CHECK_RANGE: bool
    HAS_CAPTURED_GRADS: bool
    BRANCH_FOR_MASK: bool
    PRESCALE_QK: bool
    LSE_SCALE: float


@dataclasses.dataclass(frozen=True, slots=True)
class WideGradKeyValueConstants(SharedConstants):
    """Constants of portable/wide/grad_key_value.py.jinja."""

    HAS_SCORE_GRAD: bool
    KV_HEADS: int
    WRITES_KEY: bool
    WRITES_VALUE: bool
    OUT_HEAD_DIM: int
    OUT_HEAD_DIM_ROUNDED: int
    CHECK_RANGE: bool
    HAS_CAPTURED_GRADS: bool
    BRANCH_FOR_MASK: bool
    ISOLATE_MASK_MOD: bool  # whether mask_mod is evaluated in a branch
    PRESCALE_QK: bool
    LSE_SCALE: float


@dataclasses.dataclass(frozen=True, slots=True)
class GradKeyValueConstants(WideGradKeyValueConstants):
    """Constants of portable/grad_key_value.py.jinja."""

    BEGIN_WITH_DELTA: bool  # whether the product of values and grad_out begins with -delta
    WRITES_QUERY: bool  # whether a program has all keys, and so the gradients of queries


@dataclasses.dataclass(frozen=True, slots=True)
class JvpGradQueryConstants(SharedConstants):
    """Constants of portable/jvp_grad_query.py.jinja."""

    HEADS_PER_SECTION: int
    HAS_SCORE_GRAD: bool
    CHECK_RANGE: bool
    BRANCH_FOR_MASK: bool
    LSE_SCALE: float
    HAS_Q_DOT: bool
    HAS_K_DOT: bool
    HAS_V_DOT: bool
    HAS_DO_DOT: bool
    MOVES_SCORES: bool
    HAS_CAPTURED_GRADS: bool


@dataclasses.dataclass(frozen=True, slots=True)
class JvpGradKeyValueConstants(SharedConstants):
    """Constants of portable/jvp_grad_key_value.py.jinja."""

    HAS_SCORE_GRAD: bool
    KV_HEADS: int
    WRITES_KEY: bool
    OUT_HEAD_DIM: int
    OUT_HEAD_DIM_ROUNDED: int
    CHECK_RANGE: bool
    BRANCH_FOR_MASK: bool
    LSE_SCALE: float
    HAS_Q_DOT: bool
    HAS_K_DOT: bool
    HAS_V_DOT: bool
    HAS_DO_DOT: bool
    MOVES_SCORES: bool


@dataclasses.dataclass(frozen=True, slots=True)
class PieceConstants:
    """Further constants of portable/wide/: widths of the pieces of a head; REST is 0 for one."""

    QK_FIRST: int
    QK_REST: int
    V_FIRST: int
    V_REST: int


@dataclasses.dataclass(frozen=True, slots=True)
class DecodePieces(PieceConstants):
    """Further constants of portable/wide/decode.py.jinja."""

    VALUE_IS_KEY: bool  # whether tiles of values are the first piece, or all, of those of keys


@dataclasses.dataclass(frozen=True, slots=True)
class GradKeyValuePieces(PieceConstants):
    """Further constants of portable/wide/grad_key_value.py.jinja."""

    OUT_FIRST: int
    OUT_REST: int
