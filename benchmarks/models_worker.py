"""One model of transformers with one attention implementation: a training step, or generation."""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

IMPLEMENTATIONS = ("sdpa", "flex_attention", "flexhop")
WIDTHS: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 16384,
    "pad_token_id": 0, "eos_token_id": None, "bos_token_id": 1,
}  # fmt: skip
TINY: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
    "num_hidden_layers": 2,
}  # fmt: skip
# What differs from WIDTHS. Gemma 2 has a window of 4096 in every other layer, and a soft cap.
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {"num_hidden_layers": 8},
    "Gemma2": {"num_hidden_layers": 6, "sliding_window": 4096, "query_pre_attn_scalar": 128},
}
TOKENS, TINY_TOKENS = 16384, 192
DOCUMENT = 1024  # mean length
PROMPT, NEW = 512, 512
GENERATING_LAYERS = 3
STEPS = 12


def build(name: str, implementation: str, *, on_gpu: bool, layers: int | None = None) -> Any:
    """A model with random weights, in bfloat16 on a GPU."""
    import transformers

    if implementation == "flexhop":
        import_module("flexhop.integrations.transformers")  # registers it
    sizes = WIDTHS | MODELS[name] | ({} if on_gpu else TINY)
    sizes |= {} if layers is None else {"num_hidden_layers": layers}
    config = getattr(transformers, f"{name}Config")(**sizes, attn_implementation=implementation)
    torch.manual_seed(0)
    with torch.device("cuda" if on_gpu else "cpu"):
        model = getattr(transformers, f"{name}ForCausalLM")(config)
    return model.to(torch.bfloat16) if on_gpu else model


def packed(length: int, vocabulary: int, device: str) -> dict[str, Tensor]:
    """Arguments of a training step: random documents in one row, told apart by their positions."""
    generator = torch.Generator().manual_seed(1)
    mean = min(DOCUMENT, length // 4)
    sizes = torch.randint(mean // 2, mean + mean // 2, (2 * length // mean,), generator=generator)
    positions = torch.cat([torch.arange(int(size)) for size in sizes])[None, :length]
    tokens = torch.randint(2, vocabulary, (1, length), generator=generator)
    inputs = {"input_ids": tokens, "labels": tokens, "position_ids": positions}
    return {key: value.to(device) for key, value in inputs.items()}


def settle(device: str, seconds: float) -> None:
    """Sleep as long as weights take to load, and forget the peak of the memory."""
    time.sleep(seconds)
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()


def seconds_of(step: Callable[[], Any], device: str) -> tuple[float, Any]:
    """How long a step takes until the device has done it, and what it returns."""
    start = time.perf_counter()
    result = step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start, result


def fresh_caches() -> tempfile.TemporaryDirectory[str]:
    """Caches of PyTorch and Triton that end with the process."""
    folder = tempfile.TemporaryDirectory(prefix="flexhop-models-", ignore_cleanup_errors=True)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder.name}/inductor"
    os.environ["TRITON_CACHE_DIR"] = f"{folder.name}/triton"
    return folder


def train(name: str, implementation: str, options: argparse.Namespace) -> dict[str, Any]:
    """The first training step and later ones: seconds, bytes at the peak, losses."""
    on_gpu = options.device == "cuda"
    with fresh_caches():
        model = build(name, implementation, on_gpu=on_gpu).train()
        inputs = packed(TOKENS if on_gpu else TINY_TOKENS, model.config.vocab_size, options.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=on_gpu)
        call = torch.compile(model) if options.compile else model

        def step() -> Tensor:
            loss = call(**inputs, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        settle(options.device, options.loading)
        first_seconds, first_loss = seconds_of(step, options.device)
        for _ in range(2):
            step()
        measured = [seconds_of(step, options.device) for _ in range(STEPS)]
    return {
        "first_seconds": first_seconds,
        "milliseconds": 1e3 * statistics.median(seconds for seconds, _ in measured),
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
        "first_loss": float(first_loss),
        "last_loss": float(measured[-1][1]),
    }


def generate(name: str, implementation: str, options: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second of the second call of ``generate`` with a static cache; the first's time.

    transformers compiles the model for single tokens.
    """
    on_gpu = options.device == "cuda"
    with fresh_caches(), torch.no_grad():
        layers = GENERATING_LAYERS if on_gpu else None
        model = build(name, implementation, on_gpu=on_gpu, layers=layers).eval()
        prompt, new = (PROMPT, NEW) if on_gpu else (16, 8)
        tokens = packed(prompt, model.config.vocab_size, options.device)["input_ids"]

        def call() -> Tensor:
            return model.generate(
                tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=new,
                min_new_tokens=new, do_sample=False, cache_implementation="static",
            )  # fmt: skip

        settle(options.device, options.loading)
        first_seconds, _ = seconds_of(call, options.device)
        again, _ = seconds_of(call, options.device)
    return {"first_seconds": first_seconds, "tokens_per_second": new / again}
