"""Token rows over the paged cache beside whole sequences without one."""

import dataclasses

import pytest
import torch

from compile_backend.declared import declaration_of
from examples.llama.batch import LlamaBatch
from examples.llama.model import Llama, LlamaConfig, load_model, save_weights
from examples.llama.scheduler import Chunk, Request, Scheduler, Sequence, build_batch


def sequence(model: Llama, tokens: list[int], row: int, pages: list[int]) -> Sequence:
    """A sequence that holds ``pages``, entered into the page table."""
    model.cache.page_table[row, : len(pages)] = torch.tensor(pages)
    return Sequence(
        index=0, row=row, pages=pages, tokens=tokens, prompt_len=len(tokens), max_new_tokens=1
    )


def pad(batch: LlamaBatch, padded: int, stale_id: int = 7) -> LlamaBatch:
    """The batch that a graph for ``padded`` rows sees, with each field's declared tail."""
    declaration = declaration_of(LlamaBatch)
    assert declaration is not None
    fields = {}
    for name, slot in declaration.slots.items():
        live = getattr(batch, name)
        fill = stale_id if name == "input_ids" else slot.pad_value or 0
        fields[name] = torch.cat([live, live.new_full((padded - len(live),), fill)])
    return LlamaBatch(**fields)


@pytest.mark.parametrize("length", [1, 2, 4, 5, 17, 64])
@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_rows_over_the_cache_equal_the_dense_forward(model, length, chunk):
    tokens = torch.randint(256, (length,), generator=torch.Generator().manual_seed(length))
    s = sequence(model, tokens.tolist(), row=3, pages=[5, 1, 9, 2, 16, 4, 30, 8, *range(17, 25)])
    with torch.inference_mode():
        parts = [
            model(build_batch([Chunk(s, start, min(start + chunk, length))], page_size=4))
            for start in range(0, length, chunk)
        ]
        dense = model.forward_dense(tokens[None])[0]
    torch.testing.assert_close(torch.cat(parts), dense, rtol=1e-4, atol=1e-3)


def test_requests_that_share_a_step_do_not_touch_each_other(model):
    a = sequence(model, [1, 2, 3, 4, 5, 6], row=1, pages=[3, 6])
    b = sequence(model, [9, 8, 7], row=2, pages=[4])
    with torch.inference_mode():
        mixed = model(build_batch([Chunk(b, 0, 3), Chunk(a, 0, 6)], page_size=4))
        want = torch.cat([model.forward_dense(torch.tensor([s.tokens]))[0] for s in (b, a)])
    torch.testing.assert_close(mixed, want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("padded", [7, 8, 16])
def test_padded_rows_are_finite_and_change_neither_live_rows_nor_their_cache(model, padded):
    s = sequence(model, [1, 2, 3, 4, 5, 6], row=1, pages=[3, 6])
    batch = build_batch([Chunk(s, 0, 6)], page_size=4)
    with torch.inference_mode():
        want = model(batch)
        want_k, want_v = model.cache.k.clone(), model.cache.v.clone()
        got = model(pad(batch, padded))
    assert got.isfinite().all()
    torch.testing.assert_close(got[:6], want, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(model.cache.k[:, 4:], want_k[:, 4:], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model.cache.v[:, 4:], want_v[:, 4:], rtol=1e-5, atol=1e-5)
    assert model.cache.k[:, :4].any()  # that is where the padded rows wrote


def test_every_field_of_the_batch_has_a_slot_on_the_token_axis():
    declaration = declaration_of(LlamaBatch)
    assert declaration is not None
    assert set(declaration.slots) == {field.name for field in dataclasses.fields(LlamaBatch)}
    assert {slot.axis for slot in declaration.slots.values()} == {"tokens"}


def test_saved_weights_load_as_they_were_up_to_bfloat16(model, tmp_path):
    path = tmp_path / "tiny.safetensors"
    save_weights(model, path, {"data": "none"})
    loaded = load_model(path)
    assert loaded.config == model.config
    assert not any(p.requires_grad for p in loaded.parameters())
    for name, tensor in loaded.state_dict().items():
        assert tensor.dtype is torch.float32
        assert torch.equal(tensor, model.state_dict()[name].bfloat16().float())


def test_the_cache_is_no_part_of_the_state_dict(model):
    assert not any(name.startswith(("cache", "rotary")) for name in model.state_dict())


def test_the_training_loss_reaches_every_weight():
    model = Llama(LlamaConfig(dim=16, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=24))
    model.forward_dense(torch.randint(256, (2, 9))).logsumexp(-1).sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


def test_a_scheduled_request_runs_as_the_dense_model_says(model):
    scheduler = Scheduler(model.cache, max_tokens=8, prefill_chunk=3)
    scheduler.add(Request(prompt="Hear, O Israel", max_new_tokens=5))
    while scheduler.has_work:
        chunks = scheduler.plan()
        with torch.inference_mode():
            token = int(model(build_batch(chunks, model.cache.page_size))[-1].argmax())
        scheduler.commit(chunks, [token] if chunks[0].samples else [])
    (done,) = scheduler.finished
    with torch.inference_mode():
        dense = model.forward_dense(torch.tensor([done.tokens[:-1]]))[0].argmax(-1)
    assert done.output == dense[done.prompt_len - 1 :].tolist()
