"""Assembly whose registers hold several numbers, in numpy."""

import numpy as np
import pytest

from flexhop.offline.packed_assembly import run_packed

WORDS = np.array([[0x0201, 0x0403], [0x0605, 0x0807]], np.uint16)


def test_bytes_move_within_a_register():
    even, odd = run_packed(
        "{ prmt.b32 $0, $2, 0, 0x2404; prmt.b32 $1, $2, 0, 0x3414; }",
        2, [WORDS], [np.dtype(np.uint16)] * 2,
    )  # fmt: skip
    assert even.tolist() == [[0x0100, 0x0300], [0x0500, 0x0700]]
    assert odd.tolist() == [[0x0200, 0x0400], [0x0600, 0x0800]]


def test_a_result_may_take_two_registers():
    numbers = np.arange(-4, 4, dtype=np.int8).reshape(2, 4)
    text = """{
        .reg .b32 bytes, one;
        xor.b32 bytes, $2, 0x80808080;
        mov.b32 one, 0x64806480;
        prmt.b32 $0, bytes, 0x64646464, 0x5140;
        sub.f16x2 $0, $0, one;
        prmt.b32 $1, bytes, 0x64646464, 0x5342;
        sub.f16x2 $1, $1, one;
    }"""
    (halves,) = run_packed(text, 4, [numbers], [np.dtype(np.float16)])
    assert halves.tolist() == numbers.astype(np.float16).tolist()


def test_halves_of_a_register_have_names():
    text = "{ mov.b32 {low, high}, $1; cvt.rn.f16x2.e4m3x2 $0, high; }"
    numbers = np.array([0x0000, 0x7F38], np.uint16)  # 1.0 and NaN in float8_e4m3fn
    (halves,) = run_packed(text, 2, [numbers], [np.dtype(np.float16)])
    np.testing.assert_array_equal(halves, np.array([1.0, np.nan], np.float16))


@pytest.mark.parametrize("text", ["popc.b32 $0, $1;", "prmt.b32 $0, $1, 0, 0x8888;"])
def test_what_is_unknown_is_refused(text):
    with pytest.raises(NotImplementedError, match=r"popc|sign of a byte"):
        run_packed(text, 2, [WORDS], [np.dtype(np.uint16)])
