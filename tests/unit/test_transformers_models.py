"""attn_implementation="flexhop" for models that ask more of attention than a mask and a scale."""

import os
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

os.environ["HF_HUB_OFFLINE"] = "1"
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402

from flexhop.integrations import transformers as integration  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning")

PLAIN = "flexhop_plain"  # by definition: nothing is compiled here
integration.register(PLAIN, compiled=False)
LENGTH = 41

# Set if a configuration has them.
SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 64, "vocab_size": 128, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "sliding_window": 16,
    "max_position_embeddings": 256, "image_size": 32, "patch_size": 8, "moe_intermediate_size": 32,
    "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16, "v_head_dim": 16, "first_k_dense_replace": 1, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "index_topk": 8, "index_n_heads": 4,
    "index_head_dim": 32, "num_experts": 4, "shared_expert_intermediate_size": 32,
    "keep_window_size": 8, "index_topk_blocks": 2, "index_block_size": 8,
}  # fmt: skip


SPARSE = {"minimax_m3_vl_text": "minimax_m3_sparse"}  # kinds of layers that are not the default


def shrink(config: Any) -> Any:
    for name, value in SIZES.items():
        if getattr(config, name, None) is not None:
            setattr(config, name, value)
    if getattr(config, "layer_types", None):
        kinds = list(dict.fromkeys(config.layer_types))
        kinds += [SPARSE[kind] for kind in SPARSE if config.model_type == kind]
        config.layer_types = (kinds * 3)[: config.num_hidden_layers]
    for part in vars(config).values():
        if isinstance(part, transformers.PretrainedConfig):
            shrink(part)
    return config


def model(kind: str) -> Any:
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    config = shrink(CONFIG_MAPPING[kind]())
    torch.manual_seed(0)
    found = transformers.AutoModel.from_config(config, attn_implementation="eager").eval()
    if found._supports_sdpa:  # pads as flexhop does, which indexers of some models see
        found.set_attn_implementation("sdpa")
    for parameter in found.parameters():  # attention that is far from uniform
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    return found


@pytest.mark.parametrize("padding", [0, 7])
@pytest.mark.parametrize(
    "kind",
    [
        "axk2", "deepseek_v32", "deepseek_v4", "doge", "git", "glm_moe_dsa", "hy_v4",
        "inkling2_text", "minimax_m3_vl_text", "mistral_large4_text", "t5gemma2",
    ],
)  # fmt: skip
def test_hidden_states(kind: str, padding: int):
    attention = model(kind)
    tokens = torch.randint(3, 100, (2, LENGTH))
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, :padding] = 0
    inputs = {"input_ids": tokens, "attention_mask": mask}
    if attention.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = tokens[:, :19]
    seen = slice(None) if attention.config.is_encoder_decoder else mask.bool()
    with torch.no_grad():
        expected = attention(**inputs).last_hidden_state[seen]
        attention.set_attn_implementation(PLAIN)
        found = attention(**inputs).last_hidden_state[seen]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
