"""A model of transformers under torch.compile: graphs, compilations and masks, counted."""

import os
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

os.environ["HF_HUB_OFFLINE"] = "1"
from flexhop.integrations import transformers as integration  # noqa: E402
from flexhop.integrations import transformers_masks as masks  # noqa: E402
from tests.unit.test_transformers import PLAIN, close, decoder, padding, tokens  # noqa: E402

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
