"""A tiny random model with a cache, for every test that does not need trained weights."""

import pytest
import torch

from examples.llama.model import Llama, LlamaConfig


@pytest.fixture
def model() -> Llama:
    torch.manual_seed(0)
    config = LlamaConfig(
        dim=24, num_layers=2, num_heads=6, num_kv_heads=2, ffn_dim=40, max_seq_len=64
    )
    model = Llama(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.mul_(8)  # logits far enough apart that greedy choices are not ties
    model.allocate_cache(num_pages=33, page_size=4, max_requests=8)
    return model
