"""A model of transformers under torch.compile: graphs, compilations and masks, counted."""

import os
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._inductor.utils import get_first_incompatible_cudagraph_node

from flexhop.compat.graphs.retry import merge_repeated

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

os.environ["HF_HUB_OFFLINE"] = "1"
from flexhop.integrations import transformers as integration  # noqa: E402
from flexhop.integrations import transformers_masks as masks  # noqa: E402
from flexhop.integrations import transformers_rows as rows  # noqa: E402
from tests.unit.test_transformers import CACHE, PLAIN, close, decoder, padding, tokens  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning")


def step(model: Any, run: Any, length: int, **inputs: Any) -> tuple[Any, list[Any]]:
    """Loss and gradients of one training step."""
    model.zero_grad()
    ids = tokens(2, length)
    loss = run(input_ids=ids, labels=ids, **inputs).loss
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("is_packed", [False, True])
def test_training_is_one_graph(is_packed: bool) -> None:
    model = decoder("llama", num_hidden_layers=1)
    model.set_attn_implementation("flexhop")
    torch._dynamo.reset()
    counters.clear()
    run = torch.compile(model, backend="eager", fullgraph=True)
    for length in (20, 33, 150):
        inputs: dict[str, Any] = {"use_cache": not is_packed}
        if is_packed:
            halves = [torch.arange(length // 2), torch.arange(length - length // 2)]
            inputs["position_ids"] = torch.cat(halves)[None].expand(2, -1).contiguous()
        loss, gradients = step(model, run, length, **inputs)
    model.set_attn_implementation("eager")
    wanted, wanted_gradients = step(model, model, length, **inputs)
    close(loss, wanted)
    scale = max(float(gradient.abs().max()) for gradient in wanted_gradients)
    for gradient, expected in zip(gradients, wanted_gradients, strict=True):
        close(gradient, expected, scale)
    assert counters["stats"]["unique_graphs"] == 2  # of one length, and of every length


@pytest.mark.parametrize(("name", "kinds"), [("llama", 1), ("gemma3", 2)])
def test_a_step_makes_one_mask_per_kind(
    name: str, kinds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = decoder(name)
    model.set_attn_implementation(PLAIN)
    made: list[Any] = []

    def counted(*arguments: Any, **named: Any) -> Any:
        made.append(create(*arguments, **named))
        return made[-1]

    create = masks.create_block_mask
    monkeypatch.setattr(masks, "create_block_mask", counted)
    step(model, model, 43, attention_mask=padding("left"))
    assert len(made) == kinds


def test_masks_are_shared_by_batches() -> None:
    arguments = {"batch_size": 3, "q_length": 300, "kv_length": 300}
    causal = integration.block_mask(**arguments)
    sliding = transformers.masking_utils.sliding_window_causal_mask_function(7)
    documents = torch.arange(300).expand(3, -1) // 100
    packed = transformers.masking_utils.packed_sequence_mask_function(documents)
    assert causal is not None
    assert causal.kv_num_blocks.shape[0] == 1
    found = [integration.block_mask(**arguments, mask_function=f) for f in (sliding, packed)]
    assert [mask.kv_num_blocks.shape[0] for mask in found if mask is not None] == [1, 3]


def decode_masks(model: Any, cache: Any, padded: torch.Tensor) -> Any:
    """The masks of the next token, as `generate` makes them before a compiled call."""
    return transformers.masking_utils.create_masks_for_generate(
        config=model.config,
        inputs_embeds=torch.empty(len(padded), 1, 0, device=padded.device),
        attention_mask=padded,
        **{CACHE: cache},
    )


def two_kinds(layers: int) -> Any:
    """A model of pairs of layers, one with a window and one without."""
    pairs = ["sliding_attention", "full_attention"] * (layers // 2)
    return decoder("gemma3", num_hidden_layers=layers, layer_types=pairs)


def test_a_decode_step_can_be_a_cuda_graph() -> None:
    """On the meta device: what the graph would do on a CPU, or wait for, has no place there."""
    graphs: list[Any] = []

    def keep(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    model = two_kinds(4).to("meta")
    model.set_attn_implementation("flexhop")
    cache = transformers.StaticCache(config=model.config, max_cache_len=300)
    for layer in cache.layers:
        layer.lazy_initialization(*torch.zeros(2, 2, 2, 1, 12, device="meta"))
    ids = torch.zeros(2, 1, dtype=torch.long, device="meta")
    torch._dynamo.reset()
    run = torch.compile(model, backend=aot_autograd(fw_compiler=keep), fullgraph=True)
    with torch.no_grad():
        found = decode_masks(model, cache, torch.ones(2, 6, device="meta"))
        run(input_ids=ids, attention_mask=found, position_ids=ids, **{CACHE: cache})
    (graph,) = graphs
    made = [node.meta.get("val") for node in graph.graph.nodes]
    assert {value.device.type for value in made if isinstance(value, torch.Tensor)} == {"meta"}
    assert get_first_incompatible_cudagraph_node(graph) is None
    assert all(isinstance(node.meta["val"], torch.Tensor) for node in graph_inputs(graph))
    merge_repeated(graph.graph)  # as Inductor will
    reductions = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.amax.default)
    assert len(reductions) == 2  # layers of a kind share their lists


def graph_inputs(graph: Any) -> list[Any]:
    return graph.graph.find_nodes(op="placeholder")


def test_compiled_generation() -> None:
    model = two_kinds(2)
    how = transformers.CompileConfig(backend="aot_eager", mode="default", fullgraph=True)
    how._compile_all_devices = True
    call: dict[str, Any] = {
        "input_ids": tokens(), "attention_mask": padding("left"), "do_sample": False,
        "max_new_tokens": 12, "min_new_tokens": 12, "cache_implementation": "static",
    }  # fmt: skip
    model.set_attn_implementation("eager")
    wanted = model.generate(**call)
    model.set_attn_implementation(PLAIN)
    torch._dynamo.reset()
    counters.clear()
    assert torch.equal(model.generate(**call, compile_config=how), wanted)
    # Two: a sliding cache counts in Python, and its number becomes a symbol with the second token.
    assert counters["stats"]["unique_graphs"] == 2


MASKS_OF_A_STEP: dict[str, Any] = {
    "causal": transformers.masking_utils.causal_mask_function,
    "sliding": transformers.masking_utils.sliding_window_causal_mask_function(50),
    "chunked": transformers.masking_utils.chunked_causal_mask_function(
        64, torch.tensor([7, 0], dtype=torch.int32)
    ),
}


@torch.no_grad()
@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("kind", MASKS_OF_A_STEP)
def test_rows_of_one_query(kind: str, is_padded: bool) -> None:
    """Lengths around blocks: a row, and its lists, say what the mask says of each key."""
    function = MASKS_OF_A_STEP[kind]
    for position, first, length in ((0, 0, 1), (127, 0, 128), (128, 0, 300), (299, 180, 128)):
        tokens_so_far = torch.ones(2, position + 1, dtype=torch.bool)
        tokens_so_far[0, :7] = False
        row = integration.block_mask(
            batch_size=2, q_length=1, kv_length=length, q_offset=torch.tensor(position),
            kv_offset=first, mask_function=function,
            attention_mask=tokens_so_far if is_padded else None,
        )  # fmt: skip
        b, kv = torch.arange(2)[:, None], first + torch.arange(length)
        wanted = function(b, 0 * b, torch.tensor(position), kv).expand(2, length).clone()
        if is_padded:
            inside = torch.nn.functional.pad(tokens_so_far, (0, 600 - position))
            wanted &= inside[:, first : first + length]
        assert isinstance(row, torch.Tensor)
        assert torch.equal(row.expand(2, 1, 1, length)[:, 0, 0], wanted)
        blocks = rows.row_blocks(row, rows.block_lists(row)).to_dense().expand(2, 1, 1, -1)
        padded = torch.nn.functional.pad(wanted, (0, -length % 128)).unflatten(1, (-1, 128))
        assert torch.equal(blocks[:, 0, 0].bool(), padded.any(2))


@torch.no_grad()
def test_the_newest_token_needs_no_mask() -> None:
    """If it sees every key of a cache that grows; a static cache and padding keep the row."""
    tokens = torch.ones(2, 300, dtype=torch.bool)
    left, short = tokens.clone(), tokens[:, :299]
    left[0, 0] = False

    def made(position: Any = 299, keep: Any = tokens, **more: Any) -> Any:
        more = {"kv_length": 300, "allow_is_causal_skip": True, **more}
        return integration.block_mask(2, 1, q_offset=position, attention_mask=keep, **more)

    assert made() is None and made(keep=None) is None and made(local_size=301) is None
    assert made(keep=left, kv_offset=180, kv_length=120) is None
    rows_of = [made(keep=left), made(keep=short), made(298), made(torch.tensor(299))]
    rows_of += [made(allow_is_causal_skip=False), made(local_size=300)]
    assert all(isinstance(row, torch.Tensor) for row in rows_of)
    assert [int(row.sum()) for row in rows_of[:2]] == [599, 598]


def test_users_rows_are_read_anew() -> None:
    """A tensor that the user overwrites between steps is another mask."""
    row = torch.zeros(1, 1, 1, 300, dtype=torch.bool)
    query, key = torch.randn(1, 6, 1, 8), torch.randn(1, 2, 300, 8)
    for place in (5, 290):
        row.zero_()[..., place] = True
        out, _ = integration.uncompiled_attention(torch.nn.Module(), query, key, key, row)
        close(out[0, 0], key[0, :, place].repeat_interleave(3, 0))
