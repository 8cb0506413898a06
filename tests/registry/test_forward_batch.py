"""The batch types."""

import pytest
import torch

from compile_backend.forward_batch import ForwardBatch, ForwardMode, PPProxyTensors


@pytest.mark.parametrize("mode", ForwardMode)
def test_every_mode_either_extends_or_could_run_in_a_decode_graph(mode):
    assert mode.is_extend() != mode.is_decode_or_idle()
    assert mode.is_decode() == (mode is ForwardMode.DECODE)
    assert mode.is_idle() == (mode is ForwardMode.IDLE)
    assert mode.is_mixed() == (mode is ForwardMode.MIXED)


def test_an_empty_batch_has_no_tokens_and_no_fields():
    batch = ForwardBatch()
    assert batch.num_tokens == 0
    assert batch.seq_lens is None


def test_tokens_are_counted_on_the_first_field_there_is():
    assert ForwardBatch(input_ids=torch.zeros(3)).num_tokens == 3
    assert ForwardBatch(positions=torch.zeros(4)).num_tokens == 4
    assert ForwardBatch(input_embeds=torch.zeros(5, 2)).num_tokens == 5


def test_proxy_tensors_are_read_by_name():
    hidden = torch.zeros(2)
    proxies = PPProxyTensors({"hidden_states": hidden})
    assert proxies["hidden_states"] is hidden
    assert "hidden_states" in proxies
    assert "residual" not in proxies
    assert (list(proxies), len(proxies)) == (["hidden_states"], 1)
    assert list(proxies.items()) == [("hidden_states", hidden)]
    with pytest.raises(KeyError):
        proxies["residual"]
