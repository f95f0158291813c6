"""torch.export: one node with two subgraphs, saved, loaded and compiled."""

import io

import pytest
import torch
import torch._functorch.config

import flexhop
from flexhop import flex_attention
from tests.unit.ops.support import BATCH, HEADS, LENGTH, causal_mask, compiled, operands, quiet

pytestmark = [
    quiet,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    # torch 2.13 takes the mode that rewrites indices for a side effect of the model.
    pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects"),
    pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning"),
]
STRICT = pytest.mark.parametrize("strict", [True, False], ids=["strict", "non-strict"])


class Layer(torch.nn.Module):
    """Mods that capture a parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.randn(HEADS, LENGTH, LENGTH))
        self.register_buffer("offset", torch.randint(0, 3, (BATCH,), dtype=torch.int32))
        self.blocks = causal_mask(mask_mod=flexhop.noop_mask)

    def forward(self, query, key, value):
        mask = flexhop.BlockMask.from_kv_blocks(
            self.blocks.full_kv_num_blocks,
            self.blocks.full_kv_indices,
            BLOCK_SIZE=16,
            mask_mod=lambda b, h, q, k: q + self.offset[b] >= k,
            seq_lengths=(LENGTH, LENGTH),
        )
        return flex_attention(
            query, key, value, lambda s, b, h, q, k: s + self.bias[h, q, k], mask
        )


class Plain(torch.nn.Module):
    def forward(self, query, key, value):
        return flex_attention(query, key, value, lambda s, b, h, q, k: s * 2.0 + (q - k))


def calls(program):
    return [n.name for n in program.graph.nodes if n.op == "call_function" and "flexhop" in n.name]


@STRICT
def test_one_node_with_two_subgraphs(strict):
    layer, inputs = Layer(), operands()
    program = torch.export.export(layer, tuple(inputs), strict=strict)
    assert calls(program) == ["flexhop_attention"]
    attributes = program.graph.find_nodes(op="get_attr")
    graphs = [getattr(program.graph_module, node.target) for node in attributes]
    assert sum(isinstance(graph, torch.fx.GraphModule) for graph in graphs) == 2
    torch.testing.assert_close(program.module()(*inputs), layer(*inputs))


@STRICT
def test_saved_loaded_and_compiled(strict):
    layer, inputs = Layer(), operands()
    expected = layer(*inputs)
    file = io.BytesIO()
    torch.export.save(torch.export.export(layer, tuple(inputs), strict=strict), file)
    file.seek(0)
    loaded = torch.export.load(file)
    torch.testing.assert_close(loaded.module()(*inputs), expected)
    torch.testing.assert_close(loaded.run_decompositions().module()(*inputs), expected)
    flexhop.install(lowering=True)
    torch.testing.assert_close(compiled(loaded.module())(*inputs), expected)


@STRICT
def test_dynamic_shapes(strict):
    batch, length = torch.export.Dim("b", min=1, max=64), torch.export.Dim("s", min=8, max=4096)
    sizes = ({0: batch, 2: length},) * 3
    program = torch.export.export(Plain(), tuple(operands()), dynamic_shapes=sizes, strict=strict)
    inputs = operands(3, 40)
    torch.testing.assert_close(program.module()(*inputs), Plain()(*inputs))


class Documents(torch.nn.Module):
    """A mask that is made inside and reads a table."""

    def __init__(self, reads_in_steps=False):
        super().__init__()
        self.reads_in_steps = reads_in_steps

    def forward(self, query, key, value, document):
        def mask_mod(b, h, q, k):
            if self.reads_in_steps:
                return (q >= k) & (document[b][q] == document[b][k])
            return (q >= k) & (document[b, q] == document[b, k])

        sizes = query.shape[0], None, query.shape[2], key.shape[2]
        mask = flexhop.create_block_mask(mask_mod, *sizes, device=query.device)
        return flex_attention(query, key, value, block_mask=mask)


def documents(batch, length):
    """Operands, and which of the documents of 37 tokens each token is in."""
    inputs = [torch.randn(batch, 1, length, 8) for _ in range(3)]
    return *inputs, (torch.arange(length) // 37).expand(batch, length).contiguous()


@STRICT
@pytest.mark.parametrize(("exported_at", "reads_in_steps"), [(300, False), (77, True)])
def test_a_mask_made_inside_has_any_length(exported_at, reads_in_steps, strict):
    """Also of less than one block, and of one, however many the program was exported with."""
    batch, length = torch.export.Dim("b", min=1, max=64), torch.export.Dim("s", min=1, max=4096)
    sizes = (*({0: batch, 2: length},) * 3, {0: batch, 1: length})
    layer, inputs = Documents(reads_in_steps), documents(2, exported_at)
    program = torch.export.export(layer, inputs, dynamic_shapes=sizes, strict=strict).module()
    for batch, length in ((1, 1), (3, 50), (1, 128), (1, 129)):
        inputs = documents(batch, length)
        torch.testing.assert_close(program(*inputs), layer(*inputs))


class Cross(torch.nn.Module):
    def forward(self, query, key):
        lengths = query.shape[2], key.shape[2]
        mask = flexhop.create_block_mask(
            lambda b, h, q, k: q + 60 >= k, None, None, *lengths, "cpu", BLOCK_SIZE=32
        )
        return flex_attention(query, key, key, block_mask=mask)


@STRICT
@pytest.mark.parametrize("varies", [(True, False), (False, True), (True, True)])
def test_only_some_lengths_vary(varies, strict):
    inputs = torch.randn(1, 2, 70, 8), torch.randn(1, 2, 90, 8)
    sizes = tuple(
        {2: torch.export.Dim(f"s{n}", min=1, max=999)} if varies[n] else None for n in (0, 1)
    )
    program = torch.export.export(Cross(), inputs, dynamic_shapes=sizes, strict=strict).module()
    for length in (1, 31, 32, 33, 200):
        operands = [torch.randn(1, 2, length, 8) if varies[n] else inputs[n] for n in range(2)]
        torch.testing.assert_close(program(*operands), Cross()(*operands))


@STRICT
def test_sizes_of_an_earlier_program_do_not_count(strict):
    layer, inputs = Plain(), tuple(operands())
    torch.export.export(layer, inputs, strict=strict)
    batch, length = torch.export.Dim("b", min=1, max=64), torch.export.Dim("s", min=8, max=4096)
    sizes = ({0: batch, 2: length},) * 3
    program = torch.export.export(layer, inputs, dynamic_shapes=sizes, strict=strict)
    inputs = operands(3, 40)
    torch.testing.assert_close(program.module()(*inputs), layer(*inputs))


def window(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 40)


class Fixed(torch.nn.Module):
    def forward(self, query):
        lengths = query.shape[2], query.shape[2]
        mask = flexhop.create_block_mask(window, None, None, *lengths, "cpu", BLOCK_SIZE=32)
        return flex_attention(query, query, query, block_mask=mask)


@STRICT
def test_a_mask_made_inside_for_fixed_lengths(strict):
    inputs = (torch.randn(1, 2, 90, 8),)
    program = torch.export.export(Fixed(), inputs, strict=strict)
    torch.testing.assert_close(program.module()(*inputs), Fixed()(*inputs))
    file = io.BytesIO()
    torch.export.save(program.run_decompositions(), file)
    file.seek(0)
    torch.testing.assert_close(torch.export.load(file).module()(*inputs), Fixed()(*inputs))


@torch._functorch.config.patch(fake_tensor_propagate_real_tensors=True)
def test_a_trace_that_computes_values():
    """As in torch.export.draft_export: indices of a mod must be in range."""
    layer, inputs = Layer(), operands()
    program = torch.export.export(layer, tuple(inputs), strict=False)
    torch.testing.assert_close(program.module()(*inputs), layer(*inputs))


def test_an_exported_program_trains():
    layer, inputs = Layer(), operands(grad=True)
    program = torch.export.export(layer, tuple(inputs), strict=True).module()
    leaves = [*inputs, dict(program.named_parameters())["bias"]]
    found = torch.autograd.grad(program(*inputs).square().sum(), leaves)
    expected = torch.autograd.grad(layer(*inputs).square().sum(), [*inputs, layer.bias])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
