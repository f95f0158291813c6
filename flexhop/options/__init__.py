"""Kernel options: KernelOptions, and the tiles in it.

    flex_attention(q, k, v, kernel_options=KernelOptions(forward=Tile(128, 64, num_warps=8)))

Options change speed and rounding, never semantics. No option is required: every field has a
default that lets flexhop decide. The dictionary that PyTorch's flex_attention takes works too
(`KernelOptions.of`).
"""

from __future__ import annotations

import dataclasses
import difflib
import warnings
from collections.abc import Mapping
from typing import Any, Literal, Self, TypedDict

from flexhop.errors import (
    OptionConflictError,
    OptionIgnoredWarning,
    OptionValueError,
    UnknownOptionError,
)
from flexhop.options.tiles import TILE_RULES, Rule, Tile, TileRequest, check

Pass = Literal["forward", "decode", "grad_query", "grad_key_value"]
WireValue = int | str | bool | float

# The registry of dialects, families of kernels in folders of their own: the preferred one first,
# and last one that serves every GPU. flexhop/lowering/dialect.py says what each must provide.
DIALECTS = {
    "hopper": "flexhop.lowering.hopper",
    "triton": "flexhop.lowering.portable",
}
PASSES: tuple[Pass, ...] = ("forward", "decode", "grad_query", "grad_key_value")


def backends() -> tuple[tuple[str, ...], str]:
    """The values of `KernelOptions.backend`, and the same in words."""
    names = ("auto", *reversed(DIALECTS))
    *others, last = map(repr, names)
    return names, f"{', '.join(others)} or {last}"


_FLAG = Rule((False, True), "True or False")
_FIELD_RULES = {
    "short_queries": Rule(("auto", "decode", "forward"), "'auto', 'decode' or 'forward'"),
    "splits": Rule((None, *range(1, 257)), "an integer from 1 to 256 or None"),
    "float32_precision": Rule(("ieee", "tf32", None), "'ieee', 'tf32' or None"),
    "prescale_qk": _FLAG,
    "rows_guaranteed_safe": _FLAG,
    "deterministic": _FLAG,
    "eager_kernels": Rule((None, True, False), "True, False or None"),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KernelOptions:
    """Options for the kernels of one call. Frozen, checked, comparable and hashable.

    Args:
        backend: "auto" selects the fastest kernel that supports the call; "triton" the portable
            kernels; "hopper" the Hopper forward kernel, or an error with the reason why it does
            not support the call, and the Hopper backward kernel if it does.
        forward: tile of the forward kernel; None lets flexhop choose.
        decode: tile of the decode kernel. Its rows are the queries of all query heads that share a
            key head.
        jvp_forward: tile of the kernel that computes output and tangent.
        jvp_gradients: tile of the kernels that compute second derivatives.
        short_queries: "auto" selects the decode kernel if a group has at most 128 queries and many
            keys; "decode" for any number of keys; "forward" never.
        splits: number of splits of the keys in the decode kernel, 1 to 256. None lets flexhop
            choose.
        grad_query: tile of the kernel that computes the gradient of query.
        grad_key_value: tile of the kernel that computes the gradients of key and value.
        float32_precision: "ieee" or "tf32" for float32 matrix products. None follows torch's
            setting. With "tf32", tensor cores ignore the last 13 bits of each operand.
        prescale_qk: multiply a query in half precision by the scale before the product, in forward
            and backward. Slightly faster, with one more rounding. Portable kernels only.
        rows_guaranteed_safe: a promise that every query sees at least one key. The kernel then
            skips the check for empty rows. A broken promise gives NaN.
        deterministic: bitwise reproducible gradients; use_deterministic_algorithms(True) implies
            it.
        eager_kernels: whether a call outside torch.compile runs kernels, compiled at their first
            call, instead of the reference in plain PyTorch. None follows `flexhop.eager_kernels`.

    Raises:
        OptionValueError: a value outside its range.
        TypeError: a name that does not exist.
    """

    backend: str = "auto"
    forward: Tile | TileRequest | None = None
    decode: Tile | TileRequest | None = None
    jvp_forward: Tile | TileRequest | None = None
    jvp_gradients: Tile | TileRequest | None = None
    short_queries: Literal["auto", "decode", "forward"] = "auto"
    splits: int | None = None
    grad_query: Tile | TileRequest | None = None
    grad_key_value: Tile | TileRequest | None = None
    float32_precision: Literal["ieee", "tf32"] | None = None
    prescale_qk: bool = False
    rows_guaranteed_safe: bool = False
    deterministic: bool = False
    eager_kernels: bool | None = None

    def __post_init__(self) -> None:
        for name, rule in {"backend": Rule(*backends()), **_FIELD_RULES}.items():
            check(name, getattr(self, name), rule)
        for name in (*PASSES, "jvp_forward", "jvp_gradients"):
            # One form per meaning, so that equal options compare equal and share kernels.
            object.__setattr__(self, name, _normal_tile(name, getattr(self, name)))

    @classmethod
    def of(cls, value: KernelOptions | Mapping[str, Any] | None) -> KernelOptions:
        """Convert any value of `kernel_options=`.

        Args:
            value: KernelOptions; None for the defaults; or a mapping with these field names or
                with the names of torch 2.13's FlexKernelOptions. There, `BLOCK_M` applies to the
                forward kernel, `BLOCK_N` to forward and decode, `BLOCK_M1`, `BLOCK_N1` to the
                gradients of key and value, `BLOCK_M2`, `BLOCK_N2` to the gradient of query; warps
                and stages apply to all. A prefix `fwd_` or `bwd_` restricts a name to one
                direction and overrides the bare name. `BACKEND` "TRITON_DECODE" means
                short_queries="decode", "TRITON" or FORCE_USE_FLEX_ATTENTION means "forward".

        Raises:
            UnknownOptionError: a name that no kernel reads.
            OptionValueError: a value outside its range.
            OptionConflictError: two names that contradict each other.

        Warns:
            OptionIgnoredWarning: names that tune only PyTorch's kernels and do not affect results.
        """
        if isinstance(value, KernelOptions):
            return value
        if value is not None and not isinstance(value, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            kind = type(value).__name__
            allowed = "a KernelOptions, a dictionary or None"
            raise OptionValueError(name="kernel_options", value=kind, allowed=allowed)
        fields, ignored = _translate(value or {})
        if ignored:
            warnings.warn(OptionIgnoredWarning(names=", ".join(ignored)), stacklevel=3)
        return cls(**fields)

    def to_wire(self) -> dict[str, WireValue]:
        """The fields that differ from the defaults, flat; a tile's fields as in
        "forward.block_m"."""
        wire: dict[str, WireValue] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, (Tile, TileRequest)):
                wire |= {f"{field.name}.{k}": v for k, v in _chosen(value).items()}
            elif value != field.default:
                wire[field.name] = value
        return wire

    @classmethod
    def from_wire(cls, wire: Mapping[str, WireValue]) -> Self:
        """The options that `to_wire` described."""
        fields: dict[str, Any] = {}
        tiles: dict[str, dict[str, Any]] = {}
        for name, value in wire.items():
            owner, _, part = name.partition(".")
            if part:
                tiles.setdefault(owner, {})[part] = value
            else:
                fields[owner] = value
        fields |= {owner: TileRequest(**parts) for owner, parts in tiles.items()}
        return cls(**fields)


def _chosen(tile: Tile | TileRequest) -> dict[str, int]:
    return tile.chosen() if isinstance(tile, TileRequest) else dataclasses.asdict(tile)


def _normal_tile(name: str, tile: object) -> Tile | TileRequest | None:
    """None for a request that sets nothing, a Tile for one that sets everything."""
    if not isinstance(tile, (Tile, TileRequest, type(None))):
        raise OptionValueError(name=name, value=tile, allowed="a Tile, a TileRequest or None")
    if not isinstance(tile, TileRequest):
        return tile
    chosen = tile.chosen()
    return Tile(**chosen) if len(chosen) == len(TILE_RULES) else tile if chosen else None


class FlexKernelOptions(TypedDict, total=False):
    """The keys of PyTorch's `kernel_options` dictionary, as `KernelOptions.of` reads them.

    For type annotations in code written for PyTorch; new code should use KernelOptions. The
    prefixes `fwd_` and `bwd_` work too, but a TypedDict cannot describe them.

    Source: torch.nn.attention.flex_attention.FlexKernelOptions (torch 2.13).
    """

    num_warps: int
    num_stages: int
    BLOCK_M: int
    BLOCK_N: int
    BLOCK_M1: int
    BLOCK_N1: int
    BLOCK_M2: int
    BLOCK_N2: int
    PRESCALE_QK: bool
    ROWS_GUARANTEED_SAFE: bool
    FLOAT32_PRECISION: str
    BACKEND: Literal["AUTO", "TRITON", "TRITON_DECODE"]
    BLOCKS_ARE_CONTIGUOUS: bool
    WRITE_DQ: bool
    FORCE_USE_FLEX_ATTENTION: bool
    USE_TMA: bool
    kpack: int
    matrix_instr_nonkdim: int
    waves_per_eu: int


# PyTorch's names, and the fields that they set.
_GRADS: tuple[Pass, ...] = ("grad_query", "grad_key_value")
_TORCH_TILE_NAMES: dict[str, tuple[str, tuple[Pass, ...]]] = {
    "BLOCK_M": ("block_m", ("forward",)),
    "BLOCK_N": ("block_n", ("forward", "decode")),
    "BLOCK_M1": ("block_m", ("grad_key_value",)),
    "BLOCK_N1": ("block_n", ("grad_key_value",)),
    "BLOCK_M2": ("block_m", ("grad_query",)),
    "BLOCK_N2": ("block_n", ("grad_query",)),
    "num_warps": ("num_warps", PASSES),
    "num_stages": ("num_stages", PASSES),
}
_TORCH_FLAGS = {
    "PRESCALE_QK": "prescale_qk",
    "ROWS_GUARANTEED_SAFE": "rows_guaranteed_safe",
    "FLOAT32_PRECISION": "float32_precision",
}
_TORCH_BACKENDS: dict[str, dict[str, str]] = {
    "AUTO": {"backend": "auto"},
    "TRITON": {"backend": "triton", "short_queries": "forward"},
    "TRITON_DECODE": {"backend": "triton", "short_queries": "decode"},
}
_TORCH_BACKEND = Rule(
    tuple(_TORCH_BACKENDS), "'AUTO', 'TRITON' or 'TRITON_DECODE', the backends of flexhop"
)
_TORCH_IGNORED = (
    "BLOCKS_ARE_CONTIGUOUS", "WRITE_DQ", "USE_TMA", "IS_DIVISIBLE", "INDEX_DTYPE", "SPLIT_KV",
    "SPARSE_Q_BLOCK_SIZE", "SPARSE_KV_BLOCK_SIZE", "num_consumer_groups", "num_buffers_warp_spec",
    "kpack", "matrix_instr_nonkdim", "waves_per_eu",
)  # fmt: skip
_FORCE_FORWARD = "FORCE_USE_FLEX_ATTENTION"
_DIRECTIONS: dict[str, tuple[Pass, ...]] = {"fwd_": ("forward", "decode"), "bwd_": _GRADS}


def _tile_words() -> dict[str, tuple[str, tuple[Pass, ...]]]:
    """Bare names first: a prefixed name comes later and wins."""
    words = dict(_TORCH_TILE_NAMES)
    for prefix, direction in _DIRECTIONS.items():
        for name, (field, passes) in _TORCH_TILE_NAMES.items():
            common: tuple[Pass, ...] = tuple(p for p in passes if p in direction)
            if common:
                words[prefix + name] = (field, common)
    return words


def _with_prefixes(names: Mapping[str, str]) -> dict[str, str]:
    return {prefix + n: m for prefix in ("", *_DIRECTIONS) for n, m in names.items()}


_TILE_WORDS = _tile_words()
_FLAG_WORDS = _with_prefixes(_TORCH_FLAGS)
_IGNORED_WORDS = _with_prefixes({name: name for name in _TORCH_IGNORED})
_OWN_WORDS = tuple(field.name for field in dataclasses.fields(KernelOptions))
_CHOICES = ("BACKEND", _FORCE_FORWARD)
_KNOWN = (*_OWN_WORDS, *_CHOICES, *_TORCH_TILE_NAMES, *_TORCH_FLAGS, *_TORCH_IGNORED)
_ALL_WORDS = (*_OWN_WORDS, *_CHOICES, *_TILE_WORDS, *_FLAG_WORDS, *_IGNORED_WORDS)


def _translate(options: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Translate a user's mapping to fields of KernelOptions, and list the ignored names."""
    for name in options:
        if name not in _ALL_WORDS:
            raise _unknown(name)
    fields: dict[str, Any] = {name: options[name] for name in _OWN_WORDS if name in options}
    _translate_backend(options, fields)
    _translate_flags(options, fields)
    _translate_tiles(options, fields)
    return fields, [name for name in _IGNORED_WORDS if name in options]


def _unknown(name: object) -> UnknownOptionError:
    """The error, with the most similar known name."""
    by_folded = {word.lower(): word for word in reversed(_ALL_WORDS)}
    close = difflib.get_close_matches(str(name).lower(), by_folded, n=1)
    return UnknownOptionError(
        name=name, close=by_folded[close[0]] if close else None, known=", ".join(_KNOWN)
    )


def _translate_backend(options: Mapping[str, Any], fields: dict[str, Any]) -> None:
    forced = options.get(_FORCE_FORWARD, False)
    check(_FORCE_FORWARD, forced, _FLAG)
    if "BACKEND" not in options:
        if forced:
            _put(fields, "short_queries", "forward", _FORCE_FORWARD)
        return
    if forced:
        raise OptionConflictError(
            first="BACKEND",
            second="legacy FORCE_USE_FLEX_ATTENTION",
            reason="both select the kernel; keep BACKEND",
        )
    check("BACKEND", options["BACKEND"], _TORCH_BACKEND)
    for field, value in _TORCH_BACKENDS[options["BACKEND"]].items():
        _put(fields, field, value, "BACKEND")


def _translate_flags(options: Mapping[str, Any], fields: dict[str, Any]) -> None:
    for name, field in _FLAG_WORDS.items():
        if name in options:
            value = options[name]
            if field == "float32_precision" and isinstance(value, str):
                value = value.strip("'")  # PyTorch pastes it as source text: "'ieee'"
            check(name, value, _FIELD_RULES[field])
            _put(fields, field, value, name)


def _put(fields: dict[str, Any], field: str, value: object, name: str) -> None:
    """Set a field once, or twice to the same value."""
    if fields.setdefault(field, value) != value:
        reason = f"they set {field} to {fields[field]!r} and {value!r}, and all kernels share it"
        raise OptionConflictError(first=name, second=f"another {field}", reason=reason)


def _translate_tiles(options: Mapping[str, Any], fields: dict[str, Any]) -> None:
    tiles: dict[Pass, dict[str, int]] = {}
    for name, (field, passes) in _TILE_WORDS.items():
        if name not in options:
            continue
        check(name, options[name], TILE_RULES[field])
        for target in passes:
            if fields.get(target) is not None:
                reason = f"{target} already sets the whole tile"
                raise OptionConflictError(first=name, second=target, reason=reason)
            tiles.setdefault(target, {})[field] = options[name]
    fields |= {target: TileRequest(**chosen) for target, chosen in tiles.items()}
