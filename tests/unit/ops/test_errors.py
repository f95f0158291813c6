"""Bad input: every mistake raises our error with its numbers, compiled or not."""

import functools
import importlib.util
import re

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flexhop import (
    AuxRequest,
    BlockMask,
    KernelOptions,
    Tile,
    errors,
    flex_attention,
    plugin,
    varlen_attention,
)
from flexhop.ops.call import Call
from tests.unit.ops.support import (
    HEADS,
    LENGTH,
    causal,
    causal_mask,
    compiled,
    operands,
    quiet,
)

pytestmark = quiet
RUN = pytest.mark.parametrize("run", [lambda f: f, compiled], ids=["eager", "compiled"])


def tensor(*shape, **keywords):
    return torch.randn(*shape, **keywords)


QKV = (tensor(2, 2, 24, 8), tensor(2, 2, 24, 8), tensor(2, 2, 24, 8))


def changed(position, value):
    return (*QKV[:position], value, *QKV[position + 1 :])


def mask_for(batch=None, heads=None, query=LENGTH, key=LENGTH):
    from flexhop import create_block_mask

    return create_block_mask(causal, batch, heads, query, key, device="cpu", BLOCK_SIZE=16)


OPERANDS = {
    "rank": (changed(0, tensor(2, 24, 8)), {}, errors.RankError, ["query", "4", "3"]),
    "device": (changed(1, QKV[1].to("meta")), {}, errors.DeviceError, ["meta", "cpu"]),
    "dtype": (changed(1, QKV[1].half()), {}, errors.DtypeError, ["float16", "float32"]),
    "int dtype": (
        tuple(t.int() for t in QKV), {}, errors.UnsupportedDtypeError, ["query", "int32"],
    ),
    "heads": (
        changed(0, tensor(2, 4, 24, 8)), {}, errors.HeadCountError, ["4", "2", "enable_gqa"],
    ),
    "group": (
        changed(0, tensor(2, 5, 24, 8)), {"enable_gqa": True}, errors.GroupSizeError, ["5", "2"],
    ),
    "value heads": (changed(2, tensor(2, 1, 24, 8)), {}, errors.KeyValueHeadsError, ["2", "1"]),
    "head dim": (changed(1, tensor(2, 2, 24, 16)), {}, errors.HeadDimError, ["8", "16"]),
    "large head dim": (
        (tensor(1, 1, 4, 577), tensor(1, 1, 4, 577), tensor(1, 1, 4, 8)), {},
        errors.HeadDimRangeError, ["query", "577", "576", "Project"],
    ),
    "large value": (
        (tensor(1, 1, 4, 8), tensor(1, 1, 4, 8), tensor(1, 1, 4, 577)), {},
        errors.HeadDimRangeError, ["value", "577", "576", "concatenate"],
    ),
    "length": (changed(2, tensor(2, 2, 25, 8)), {}, errors.LengthMismatchError, ["24", "25"]),
    "no keys": (
        (QKV[0], *[tensor(2, 2, 0, 8)] * 2), {}, errors.SequenceLengthError,
        ["key must be greater than 0, but is 0"],
    ),
    "batch": (changed(1, tensor(3, 2, 24, 8)), {}, errors.BatchError, ["2", "3"]),
    "mask length": (
        QKV, {"block_mask": mask_for(query=32)}, errors.BlockMaskLengthError, ["32", "24"],
    ),
    "mask batch": (QKV, {"block_mask": mask_for(batch=3)}, errors.BlockMaskBatchError, ["3", "2"]),
    "mask heads": (QKV, {"block_mask": mask_for(heads=5)}, errors.BlockMaskHeadsError, ["5", "2"]),
    "mask device": (
        QKV, {"block_mask": mask_for().to("meta")}, errors.BlockMaskDeviceError, ["meta", "cpu"],
    ),
    "mask type": (QKV, {"block_mask": 3}, errors.BlockMaskTypeError, ["int"]),
    "unknown option": (
        QKV, {"kernel_options": {"BLOCK_MM": 64}}, errors.UnknownOptionError, ["BLOCK_MM"],
    ),
    "option value": (
        QKV, {"kernel_options": {"BLOCK_M": 48}}, errors.OptionValueError, ["48"],
    ),
    "two requests": (
        QKV, {"return_lse": True, "return_aux": AuxRequest(lse=True)}, errors.AuxConflictError, [],
    ),
    "options tuple": (
        QKV, {"kernel_options": (64,)}, errors.OptionValueError, ["kernel_options", "tuple"],
    ),
    "options text": (QKV, {"kernel_options": "fast"}, errors.OptionValueError, ["options", "str"]),
    "scale": (QKV, {"scale": 1j}, errors.OptionValueError, ["scale"]),
    "scale tensor": (QKV, {"scale": tensor(())}, errors.OptionValueError, ["scale", "Tensor"]),
    "scale bool": (QKV, {"scale": True}, errors.OptionValueError, ["scale", "bool"]),
    "enable_gqa": (QKV, {"enable_gqa": "yes"}, errors.OptionValueError, ["enable_gqa", "str"]),
    "return_lse": (QKV, {"return_lse": ""}, errors.OptionValueError, ["return_lse", "str"]),
    "no tensor": (changed(0, None), {}, errors.OptionValueError, ["query", "NoneType"]),
    "a list": (changed(2, [[1.0]]), {}, errors.OptionValueError, ["value", "list"]),
    "no heads": (
        tuple(t[:, :0] for t in QKV), {}, errors.OptionValueError, ["query", "(2, 0, 24, 8)"],
    ),
    "return_aux": (QKV, {"return_aux": True}, errors.OptionValueError, ["return_aux", "bool"]),
}  # fmt: skip


@RUN
@pytest.mark.parametrize(("inputs", "keywords", "kind", "words"), OPERANDS.values(), ids=OPERANDS)
def test_operands(inputs, keywords, kind, words, run):
    with pytest.raises(kind) as caught:
        run(functools.partial(flex_attention, **keywords))(*inputs)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert isinstance(caught.value, errors.FlexhopError)


@RUN
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors(run):
    rows = [torch.randn(n, 2, 8) for n in (3, 5)]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged)
    with pytest.raises(errors.NestedOperandError, match="query is ragged in dimension 1"):
        run(flex_attention)(nested, nested, nested)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_are_not_packed_ones():
    rows = [torch.randn(n, 8) for n in (3, 5)]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged)
    with pytest.raises(errors.NestedTensorError, match=r"query is one"):
        varlen_attention(nested, nested, nested, torch.tensor([0, 3, 8]))


# masks without query blocks


def without_query_blocks():
    mask = causal_mask()
    return BlockMask.from_kv_blocks(
        mask.kv_num_blocks, mask.kv_indices, BLOCK_SIZE=16, mask_mod=causal,
        compute_q_blocks=False, seq_lengths=(LENGTH, LENGTH),
    )  # fmt: skip


@RUN
def test_missing_query_blocks_are_noticed_at_the_forward_call(run):
    mask = without_query_blocks()
    function = run(lambda *x: flex_attention(*x, block_mask=mask))
    with pytest.raises(errors.MissingQueryBlocksError, match="compute_q_blocks=True"):
        function(*operands(grad=True))
    function(*operands())
    with torch.no_grad():
        function(*operands(grad=True))


def test_missing_query_blocks_where_only_a_capture_needs_a_gradient():
    mask, slope = without_query_blocks(), torch.ones(HEADS, requires_grad=True)
    with pytest.raises(errors.MissingQueryBlocksError):
        compiled(flex_attention)(*operands(), lambda s, b, h, q, k: s * slope[h], mask)


# tiles, determinism, Triton


@RUN
@pytest.mark.parametrize("field", ["forward", "grad_query", "grad_key_value"])
def test_a_tile_must_divide_the_blocks(run, field):
    options = KernelOptions(**{field: Tile(32, 16)})
    function = run(lambda *x: flex_attention(*x, block_mask=causal_mask(), kernel_options=options))
    with pytest.raises(errors.TileError, match=f"the {field} kernel was asked for BLOCK_M=32"):
        function(*operands(grad=True))
    if field != "forward":
        function(*operands())


def test_compiling_for_a_gpu_needs_triton(monkeypatch):
    with FakeTensorMode():
        query = torch.empty(1, 1, 16, 16, device="cuda")
    request = tuple(Call(None, False, None, False, None))
    plugin._prepare(query, query, query, (), request)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(errors.NoTritonError, match="pip install triton"):
        plugin._prepare(query, query, query, (), request)
    on_cpu = torch.empty(1, 1, 16, 16)
    plugin._prepare(on_cpu, on_cpu, on_cpu, (), request)


# mods


@RUN
def test_arity_of_lambdas_made_outside_and_inside(run):
    mod = lambda s, b, h, q: s  # noqa: E731
    expected = r"score_mod .* is called as \(score, b, h, q_idx, kv_idx\), but .* \(s, b, h, q\)"
    with pytest.raises(errors.ModArityError, match=expected):
        run(flex_attention)(*operands(), mod)
    with pytest.raises(errors.ModArityError, match=expected):
        run(lambda *x: flex_attention(*x, lambda s, b, h, q: s))(*operands())


class Wrong:
    def method(self, score, b, h, q_idx):
        return score

    def __call__(self, score, b, h, q_idx):
        return score


def wrong(score, b, h, q_idx, kv_idx, extra):
    return score


@RUN
@pytest.mark.parametrize(
    "mod",
    [Wrong().method, Wrong(), wrong, functools.partial(wrong, None, None)],
    ids=["method", "object", "function", "partial"],
)
def test_arity_of_other_callables(mod, run):
    with pytest.raises(errors.ModArityError):
        run(flex_attention)(*operands(), mod)


@RUN
def test_arity_of_a_mask_mod(run):
    mask = causal_mask()
    mask.mask_mod = lambda b, h, q: q > 0
    with pytest.raises(errors.ModArityError, match="mask_mod"):
        run(flex_attention)(*operands(), None, mask)


@RUN
def test_no_callable(run):
    with pytest.raises(
        errors.ModNotCallableError, match="score_mod must be callable, but is a int"
    ):
        run(flex_attention)(*operands(), 3)


ROWS = torch.randn(LENGTH, 3)
ARRAY = np.linspace(0, 1, LENGTH)
RESULTS = {
    "complex": (lambda s, b, h, q, k: s * 1j, r"dtype torch\.complex64"),
    "number": (lambda s, b, h, q, k: 3.0, "returned"),
    "nothing": (lambda s, b, h, q, k: None, "NoneType"),
    "pair": (lambda s, b, h, q, k: (s, s), "tuple"),
    "row": (lambda s, b, h, q, k: s + ROWS[q], r"one number per score.*shape \(3,\)"),
}


@RUN
@pytest.mark.parametrize(("mod", "words"), RESULTS.values(), ids=RESULTS)
def test_result_of_a_score_mod(mod, words, run):
    with pytest.raises(errors.ModResultError, match=words):
        run(flex_attention)(*operands(), mod)


@RUN
def test_result_of_a_mask_mod(run):
    mask = causal_mask()
    mask.mask_mod = lambda b, h, q, k: q - k
    with pytest.raises(
        errors.ModResultError, match=r"a bool tensor, but returned .* torch\.int32"
    ):
        run(flex_attention)(*operands(), None, mask)


def breaks(score, b, h, q_idx, kv_idx):
    torch._dynamo.graph_break()
    return score


def branches(score, b, h, q_idx, kv_idx):
    return score if q_idx > kv_idx else -score


def prints(score, b, h, q_idx, kv_idx):
    print(score)
    return score


def asks(score, b, h, q_idx, kv_idx):
    return score * ROWS[0, 0].item()


def asks_an_index(score, b, h, q_idx, kv_idx):
    return score * float(h)


def assigns(score, b, h, q_idx, kv_idx):
    ROWS[q_idx] = score
    return score


def draws(score, b, h, q_idx, kv_idx):
    return score + torch.rand(())


def picks_from_a_list(score, b, h, q_idx, kv_idx):
    return score * [0.5, 0.25][h]


def chooses_by_the_score(score, b, h, q_idx, kv_idx):
    return score and q_idx


def keeps_some(score, b, h, q_idx, kv_idx):
    return score + ROWS[ROWS > 0][q_idx]


LINES = {
    draws: ("drawing random numbers", "torch.rand(())", "dropout_p"),
    picks_from_a_list: (),
    chooses_by_the_score: ("as a Python number",),
    keeps_some: ("depends on data", "ROWS[ROWS > 0]"),
    breaks: ("graph_break", "torch._dynamo.graph_break()"),
    branches: ("Data-dependent branching", "return score if q_idx > kv_idx"),
    prints: ("print", "print(score)"),
    asks: ("Tensor.item", "return score * ROWS[0, 0].item()"),
    assigns: ("", "ROWS[q_idx] = score"),
}


UNPLACED = (picks_from_a_list, chooses_by_the_score)  # PyTorch does not say where


@pytest.mark.parametrize(("mod", "words"), LINES.items(), ids=lambda x: getattr(x, "__name__", ""))
def test_what_cannot_be_traced_is_named_with_its_line(mod, words):
    # 2.15 can trace the assignment, and refuses it as the write that it is.
    kinds = (errors.ModLoweringError, errors.CaptureMutationError)
    with pytest.raises(kinds) as caught:
        compiled(flex_attention)(*operands(), mod)
    message = str(caught.value)
    words = words if mod in UNPLACED else (*words, "test_errors.py")
    assert all(word in message for word in words), message


def from_numpy(score, b, h, q_idx, kv_idx):
    return score + ARRAY[q_idx]


@pytest.mark.parametrize("mod", [branches, asks_an_index, draws, picks_from_a_list, from_numpy])
def test_what_no_kernel_can_do_is_refused_without_one(mod):
    with pytest.raises(errors.ModLoweringError, match=rf"{mod.__name__}.*test_errors\.py:\d+ \("):
        flex_attention(*operands(), mod)


def indexes_by_the_score(score, b, h, q_idx, kv_idx):
    return score + ROWS[0, score]


def indexes_too_often(score, b, h, q_idx, kv_idx):
    return score + ROWS[b, h, q_idx]


@pytest.mark.parametrize(
    ("mod", "words"),
    [(indexes_by_the_score, "to(torch.int32)"), (indexes_too_often, "more indices than it has")],
)
@pytest.mark.parametrize("way", [lambda f: f, compiled], ids=["eager", "compiled"])
def test_a_wrong_index_is_named_with_its_line(mod, words, way):
    with pytest.raises(errors.ModLoweringError, match=r"test_errors\.py:\d+ \(") as caught:
        way(flex_attention)(*operands(), mod)
    assert words in str(caught.value)


def test_a_captured_tensor_elsewhere_is_refused_in_eager_calls():
    far = torch.ones(2, device="meta")

    def mod(score, b, h, q_idx, kv_idx, slopes=far):
        return score * slopes[h]

    with pytest.raises(errors.ModLoweringError, match="device of query"):
        flex_attention(*operands(), mod)


def adds_to_a_capture(score, b, h, q_idx, kv_idx):
    ROWS.add_(1)
    return score


def adds_to_a_row(score, b, h, q_idx, kv_idx):
    ROWS[0].view(-1).add_(1)
    return score


@pytest.mark.parametrize("mod", [adds_to_a_capture, adds_to_a_row])
def test_mutation_is_refused_at_its_line(mod):
    with pytest.raises(
        errors.CaptureMutationError, match=r"score_mod writes .*test_errors.*add_\(1\)"
    ):
        compiled(flex_attention)(*operands(), mod)


@pytest.mark.parametrize("mod", [adds_to_a_capture, assigns])
def test_mutation_is_refused_without_a_kernel(mod):
    with pytest.raises(errors.CaptureMutationError, match=rf"{mod.__name__}.*test_errors"):
        flex_attention(*operands(), mod)


def test_writing_to_a_value_of_its_own_is_no_mutation():
    def mod(score, b, h, q_idx, kv_idx):
        doubled = score * 2
        doubled.add_(1)
        return doubled

    inputs = operands()
    torch.testing.assert_close(
        compiled(flex_attention)(*inputs, mod), flex_attention(*inputs, mod)
    )


def test_an_error_in_a_mod_leaves_later_gradients_alone():
    def mod(score, b, h, q_idx, kv_idx):
        raise KeyError("missing")

    with pytest.raises(KeyError) as raised:
        flex_attention(*operands(grad=True), mod)
    assert raised.tb  # the error lives on, as in a notebook
    x = torch.tensor(3.0, requires_grad=True)
    assert torch.autograd.grad(x * x, x)[0] == 6


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_torchscript_is_refused():
    with pytest.raises(errors.UnsupportedFeatureError, match=r"torch\.jit\.trace .*torch\.export"):
        torch.jit.trace(lambda *inputs: flex_attention(*inputs), tuple(operands()))


def test_reductions_are_refused_by_the_lowering():
    from flexhop.offline import generate

    table = torch.randn(LENGTH, 80)
    code = generate(
        lambda *x: flex_attention(*x, lambda s, b, h, q, k: s + (table[q] - table[k]).sum()),
        *operands(),
    ).forward
    (text,) = set(re.findall(r"flexhop\.refuse\.default\(\w+, '(\w+)'\)", code))
    with pytest.raises(errors.ModLoweringError, match=r"score_mod .*aten\.sum.*test_errors\.py"):
        torch.ops.flexhop.refuse(torch.zeros(1), text)


# captures


@RUN
def test_captures_elsewhere(run):
    table = torch.randn(LENGTH, device="meta")
    words = "Captured tensor 0 of score_mod is on meta, but query is on cpu"
    with pytest.raises(errors.CaptureDeviceError, match=words):
        run(flex_attention)(*operands(), lambda s, b, h, q, k: s + table[q])


@RUN
@pytest.mark.parametrize("grad", [False, True])
def test_a_mask_has_no_gradient(grad, run):
    threshold = torch.randn(LENGTH, requires_grad=True)
    mask = causal_mask(mask_mod=lambda b, h, q, k: threshold[q] > 0)
    with pytest.raises(errors.MaskCaptureGradError, match="Captured tensor 0 of mask_mod"):
        run(flex_attention)(*operands(grad=grad), None, mask)
    with torch.no_grad():
        run(flex_attention)(*operands(grad=grad), None, mask)
