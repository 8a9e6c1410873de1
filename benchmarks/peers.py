"""Other people's models of the same size, for comparison."""

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, RwkvConfig, RwkvForCausalLM
from x_transformers import Decoder, TransformerWrapper

from lm.config import ModelConfig


def gpt2(config: ModelConfig, positions: int) -> GPT2LMHeadModel:
    """Hugging Face GPT-2 with the same layers, width, heads and feed-forward width, on torch's fused attention."""
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=config.vocab_size, n_positions=positions, n_embd=config.width, n_layer=config.layers,
            n_head=config.heads, n_inner=config.feedforward, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
            attn_implementation="sdpa", bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


def transformer_xl(config: ModelConfig, fused: bool = True) -> nn.Module:
    """x-transformers' decoder with Transformer-XL recurrence: the same sizes, segment and window, rotary, fused attention."""
    return TransformerWrapper(
        num_tokens=config.vocab_size, max_seq_len=config.segment, max_mem_len=config.window, tie_embedding=True,
        attn_layers=Decoder(
            dim=config.width, depth=config.layers, heads=config.heads, attn_dim_head=config.width // config.heads,
            ff_mult=config.feedforward / config.width, rotary_pos_emb=True, attn_flash=fused,
        ),
    )  # fmt: skip


def transformer_xl_loss(
    model: nn.Module, tokens: torch.Tensor, segment: int, memory: list[torch.Tensor] | None = None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Summed loss over the segments of `tokens [b, k * t + 1]` behind `memory`, and the memory after.

    Its states are carried from segment to segment without gradient, as its authors have it.
    """
    total = torch.zeros(())
    for first in range(0, tokens.shape[1] - 1, segment):
        logits, memory = model(tokens[:, first : first + segment], mems=memory, return_mems=True)
        targets = tokens[:, first + 1 : first + segment + 1]
        total = total + nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    assert memory is not None
    return total, memory


def rwkv(config: ModelConfig, context: int) -> RwkvForCausalLM:
    """Hugging Face RWKV-4 with the same layers, width and feed-forward width, embedding and output tied."""
    return RwkvForCausalLM(
        RwkvConfig(
            vocab_size=config.vocab_size, context_length=context, hidden_size=config.width, num_hidden_layers=config.layers,
            attention_hidden_size=config.width, intermediate_size=config.feedforward, rescale_every=0, tie_word_embeddings=True,
            bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip
