"""Dispatch modes that Dynamo does not compile, without its wrapper."""

import pytest
import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback, set_eval_frame

from flexhop.compat.modes import DispatchMode


class Callbacks(DispatchMode):
    """Notes Dynamo's callback at every operator."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found.append(get_eval_frame_callback())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("callback", [None, False])
def test_dynamo_rests_meanwhile(callback):
    mode, before = Callbacks(), set_eval_frame(callback)
    try:
        with mode, mode:
            torch.ones(2)
        after = get_eval_frame_callback()
    finally:
        set_eval_frame(before)
    assert mode.found[0] is None
    assert after is callback


def test_it_goes_on_after_an_error():
    before = get_eval_frame_callback()
    with pytest.raises(ZeroDivisionError), Callbacks():
        raise ZeroDivisionError
    assert get_eval_frame_callback() is before
