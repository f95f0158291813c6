"""KernelOptions and Tile: what is accepted, what is refused and in which words, and the wire."""

import dataclasses
import json
import pickle
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexhop.errors import (
    OptionConflictError,
    OptionIgnoredWarning,
    OptionValueError,
    UnknownOptionError,
)
from flexhop.options import KernelOptions, Tile, TileRequest

blocks = st.sampled_from([16, 32, 64, 128, 256])
warps = st.sampled_from([1, 2, 4, 8, 16])
stages = st.integers(1, 8)
tiles = st.builds(Tile, blocks, blocks, warps, stages)
requests = st.builds(
    TileRequest,
    *(st.none() | values for values in (blocks, blocks, warps, stages)),
)
any_tile = st.none() | tiles | requests
any_options = st.builds(
    KernelOptions,
    backend=st.sampled_from(["auto", "triton"]),
    forward=any_tile,
    decode=any_tile,
    short_queries=st.sampled_from(["auto", "decode", "forward"]),
    splits=st.sampled_from([None, 1, 7, 256]),
    grad_query=any_tile,
    grad_key_value=any_tile,
    float32_precision=st.sampled_from(["ieee", "tf32", None]),
    prescale_qk=st.booleans(),
    rows_guaranteed_safe=st.booleans(),
    deterministic=st.booleans(),
)


def test_defaults_let_flexhop_choose():
    options = KernelOptions.of(None)
    assert options == KernelOptions() == KernelOptions.of({}) == KernelOptions.of(options)
    assert options.backend == "auto"
    assert options.forward is options.grad_query is options.grad_key_value is None
    assert options.decode is options.splits is None
    assert options.short_queries == "auto"
    assert options.float32_precision is None
    assert options.to_wire() == {}


def test_options_are_frozen_and_hashable():
    options = KernelOptions(forward=Tile(64, 64))
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.prescale_qk = True  # pyright: ignore[reportAttributeAccessIssue]
    assert hash(options) == hash(KernelOptions(forward=Tile(64, 64, 4, 2)))
    assert pickle.loads(pickle.dumps(options)) == options


@pytest.mark.parametrize("field", ["block_m", "block_n"])
@pytest.mark.parametrize("value", [0, 8, 48, -16, 2048, 16.0, True, "64"])
@pytest.mark.parametrize("kind", [Tile, TileRequest])
def test_blocks_are_powers_of_two_from_16(kind, field, value):
    with pytest.raises(OptionValueError) as caught:
        kind(**{"block_m": 64, "block_n": 64, field: value})
    assert str(caught.value) == (
        f"Invalid {field} value {value!r}: it must be a power of two from 16 to 1024."
    )


@pytest.mark.parametrize("value", [0, 3, 32, True, None])
def test_warps_are_powers_of_two_up_to_16(value):
    with pytest.raises(OptionValueError, match=r"num_warps value .* must be 1, 2, 4, 8 or 16"):
        Tile(64, 64, num_warps=value)


@pytest.mark.parametrize("value", [0, 9, 2.0, True])
def test_stages_are_1_to_8(value):
    with pytest.raises(OptionValueError, match=r"num_stages value .* an integer from 1 to 8"):
        Tile(64, 64, num_stages=value)


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("backend", "flash", "'auto', 'triton' or 'hopper'"),
        ("forward", (64, 64), "a Tile, a TileRequest or None"),
        ("grad_query", 64, "a Tile, a TileRequest or None"),
        ("float32_precision", "bf16x3", "'ieee', 'tf32' or None"),
        ("prescale_qk", 1, "True or False"),
        ("rows_guaranteed_safe", "yes", "True or False"),
    ],
)
def test_fields_are_checked(field, value, allowed):
    with pytest.raises(OptionValueError) as caught:
        KernelOptions(**{field: value})
    assert caught.value.facts == {"name": field, "value": value, "allowed": allowed}


def test_equal_meaning_is_one_form():
    assert KernelOptions(forward=TileRequest(64, 32, 4, 2)).forward == Tile(64, 32)
    assert KernelOptions(forward=TileRequest()).forward is None


def test_a_request_is_filled_from_the_table():
    table = Tile(128, 64, num_warps=8, num_stages=3)
    assert TileRequest(block_m=32, num_stages=1).fill(table) == Tile(32, 64, 8, 1)
    assert TileRequest().fill(table) == table
    assert Tile(16, 16).fill(table) == Tile(16, 16)


@given(any_options)
def test_wire_round_trip(options):
    wire = options.to_wire()
    assert KernelOptions.from_wire(wire) == options
    assert KernelOptions.from_wire(json.loads(json.dumps(wire))) == options
    assert all(type(value) in (int, str, bool) for value in wire.values())
    assert KernelOptions.from_wire(wire).to_wire() == wire


@given(any_options)
def test_own_names_in_a_dict(options):
    fields = {f.name: getattr(options, f.name) for f in dataclasses.fields(options)}
    assert KernelOptions.of(fields) == options


def test_wire_holds_only_what_was_chosen():
    options = KernelOptions(forward=Tile(64, 32), grad_query=TileRequest(num_warps=8))
    assert options.to_wire() == {
        "forward.block_m": 64,
        "forward.block_n": 32,
        "forward.num_warps": 4,
        "forward.num_stages": 2,
        "grad_query.num_warps": 8,
    }


# the dictionary of PyTorch


@pytest.mark.parametrize(
    ("given_options", "expected"),
    [
        ({"BLOCK_M": 64}, KernelOptions(forward=TileRequest(block_m=64))),
        (
            {"fwd_BLOCK_N": 32},
            KernelOptions(forward=TileRequest(block_n=32), decode=TileRequest(block_n=32)),
        ),
        (
            {"BLOCK_M": 64, "BLOCK_N": 32, "fwd_num_warps": 8, "fwd_num_stages": 3},
            KernelOptions(forward=Tile(64, 32, 8, 3), decode=TileRequest(None, 32, 8, 3)),
        ),
        (
            {"BLOCK_M1": 32, "bwd_BLOCK_N1": 64},
            KernelOptions(grad_key_value=TileRequest(32, 64)),
        ),
        ({"bwd_BLOCK_M2": 64, "BLOCK_N2": 32}, KernelOptions(grad_query=TileRequest(64, 32))),
        (
            {"num_warps": 8},
            KernelOptions(
                forward=TileRequest(num_warps=8),
                decode=TileRequest(num_warps=8),
                grad_query=TileRequest(num_warps=8),
                grad_key_value=TileRequest(num_warps=8),
            ),
        ),
        (
            {"bwd_num_stages": 1, "num_stages": 3},
            KernelOptions(
                forward=TileRequest(num_stages=3),
                decode=TileRequest(num_stages=3),
                grad_query=TileRequest(num_stages=1),
                grad_key_value=TileRequest(num_stages=1),
            ),
        ),
        (
            {"fwd_BLOCK_M": 16, "BLOCK_M": 128, "bwd_BLOCK_M1": 32, "BLOCK_M1": 64},
            KernelOptions(forward=TileRequest(16), grad_key_value=TileRequest(32)),
        ),
        ({"BACKEND": "TRITON"}, KernelOptions(backend="triton", short_queries="forward")),
        ({"BACKEND": "TRITON_DECODE"}, KernelOptions(backend="triton", short_queries="decode")),
        ({"BACKEND": "AUTO"}, KernelOptions()),
        ({"FORCE_USE_FLEX_ATTENTION": True}, KernelOptions(short_queries="forward")),
        ({"FORCE_USE_FLEX_ATTENTION": False}, KernelOptions()),
        ({"PRESCALE_QK": True}, KernelOptions(prescale_qk=True)),
        ({"bwd_PRESCALE_QK": True, "fwd_PRESCALE_QK": True}, KernelOptions(prescale_qk=True)),
        ({"ROWS_GUARANTEED_SAFE": True}, KernelOptions(rows_guaranteed_safe=True)),
        ({"FLOAT32_PRECISION": "'ieee'"}, KernelOptions(float32_precision="ieee")),
        ({"FLOAT32_PRECISION": "tf32"}, KernelOptions(float32_precision="tf32")),
    ],
    ids=str,
)
def test_names_of_pytorch(given_options, expected):
    before = dict(given_options)
    assert KernelOptions.of(given_options) == expected
    assert given_options == before


def test_every_name_of_flex_kernel_options_is_known():
    from torch.nn.attention.flex_attention import FlexKernelOptions

    values = {"BACKEND": "AUTO", "num_warps": 4, "num_stages": 2} | {
        f"BLOCK_{axis}": 64 for axis in ("M", "N", "M1", "N1", "M2", "N2")
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OptionIgnoredWarning)
        for name in FlexKernelOptions.__annotations__:
            KernelOptions.of({name: values.get(name, False)})


def test_names_that_tune_other_kernels_are_ignored_with_one_warning():
    with pytest.warns(OptionIgnoredWarning) as caught:
        given = {"USE_TMA": True, "bwd_kpack": 2, "WRITE_DQ": False, "IS_DIVISIBLE": False}
        options = KernelOptions.of(given)
    assert options == KernelOptions()
    assert [str(w.message) for w in caught] == [
        "Kernel options that tune only PyTorch's own kernels were ignored: "
        "WRITE_DQ, USE_TMA, IS_DIVISIBLE, bwd_kpack."
    ]


@pytest.mark.parametrize(
    ("typo", "close"),
    [
        ("BLOK_M", "BLOCK_M"),
        ("block_m", "BLOCK_M"),
        ("fwd_BLOCKM", "fwd_BLOCK_M"),
        ("bwd_BLOCK_M", "bwd_BLOCK_M2"),
        ("num_warp", "num_warps"),
        ("Backend", "backend"),
        ("prescale", "prescale_qk"),
        ("OUTPUT_LOGSUMEXP", None),
        ("zebra", None),
        (3, None),
    ],
)
def test_an_unknown_name_is_an_error_that_knows_better(typo, close):
    with pytest.raises(UnknownOptionError) as caught:
        KernelOptions.of({typo: 64})
    if close is not None:
        assert caught.value.facts["close"] == close
        assert f"Did you mean {close!r}?" in str(caught.value)
    assert "BLOCK_M1" in str(caught.value)


def test_an_unknown_keyword_is_a_type_error():
    with pytest.raises(TypeError, match="BLOK_M"):
        KernelOptions(BLOK_M=64)  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize("backend", ["FLASH", "INVALID", "triton", 1])
def test_backends_that_do_not_exist(backend):
    with pytest.raises(OptionValueError) as caught:
        KernelOptions.of({"BACKEND": backend})
    assert str(caught.value) == (
        f"Invalid BACKEND value {backend!r}: "
        "it must be 'AUTO', 'TRITON' or 'TRITON_DECODE', the backends of flexhop."
    )


def test_errors_name_the_option_as_the_user_wrote_it():
    with pytest.raises(OptionValueError, match="Invalid bwd_BLOCK_M1 value 48"):
        KernelOptions.of({"bwd_BLOCK_M1": 48})
    with pytest.raises(OptionValueError, match="Invalid PRESCALE_QK value 1:"):
        KernelOptions.of({"PRESCALE_QK": 1})


@pytest.mark.parametrize(
    ("given_options", "message"),
    [
        (
            {"BACKEND": "TRITON", "FORCE_USE_FLEX_ATTENTION": True},
            "BACKEND cannot be combined with legacy FORCE_USE_FLEX_ATTENTION: "
            "both select the kernel; keep BACKEND.",
        ),
        (
            {"BACKEND": "TRITON", "backend": "auto"},
            "BACKEND cannot be combined with another backend: they set backend to 'auto' and "
            "'triton', and all kernels share it.",
        ),
        (
            {"fwd_PRESCALE_QK": True, "bwd_PRESCALE_QK": False},
            "bwd_PRESCALE_QK cannot be combined with another prescale_qk: they set prescale_qk "
            "to True and False, and all kernels share it.",
        ),
        (
            {"forward": Tile(64, 64), "BLOCK_M": 32},
            "BLOCK_M cannot be combined with forward: forward already sets the whole tile.",
        ),
    ],
)
def test_contradictions(given_options, message):
    with pytest.raises(OptionConflictError) as caught:
        KernelOptions.of(given_options)
    assert str(caught.value) == message


def test_backend_beside_a_legacy_flag_that_is_off():
    options = KernelOptions.of({"BACKEND": "TRITON", "FORCE_USE_FLEX_ATTENTION": False})
    assert options == KernelOptions(backend="triton", short_queries="forward")
