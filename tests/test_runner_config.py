"""Runner settings are checked once, with messages whose advice works."""

import dataclasses
import math

import pytest
import torch

from compile_backend import ConfigError, RunnerConfig

EAGLE_TARGET = {
    "speculative_algorithm": "EAGLE",
    "speculative_role": "target",
    "speculative_num_draft_tokens": 4,
}
EAGLE_DRAFT = {**EAGLE_TARGET, "speculative_role": "draft", "speculative_num_steps": 3}


def test_the_defaults_are_legal_and_every_option_says_what_it_is():
    config = RunnerConfig.check()
    assert (config.max_running_requests, config.chunked_prefill_size) == (64, 2048)
    assert config == RunnerConfig()
    assert all(option.metadata["doc"] for option in dataclasses.fields(RunnerConfig))


def test_values_are_settled_and_frozen():
    config = RunnerConfig.check({"cudagraph_capture_sizes": [1, 4], "max_padding_waste": 3})
    assert config.cudagraph_capture_sizes == (1, 4)
    assert isinstance(config.max_padding_waste, float)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.pp_size = 2


def test_an_unknown_option_suggests_a_near_one_and_lists_the_valid_ones():
    with pytest.raises(ConfigError, match="did you mean 'max_running_requests'") as caught:
        RunnerConfig.check({"max_running_request": 8})
    for option in dataclasses.fields(RunnerConfig):
        assert option.name in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_running_requests": 0}, "at least 1"),
        ({"chunked_prefill_size": 1.5}, "float"),
        ({"chunked_prefill_size": True}, "bool"),
        ({"max_total_num_tokens": 0}, "at least 1"),
        ({"enable_dynamic_chunking": 1}, "pass True or False"),
        ({"speculative_algorithm": "NGRAM"}, "EAGLE, DFLASH, FROZEN_KV_MTP"),
        ({"speculative_role": None}, "none, target, draft"),
        ({"speculative_eagle_topk": 0}, "at least 1"),
        ({"dllm_block_size": 0}, "at least 1"),
        ({"cudagraph_capture_sizes": [4, 2]}, "2 follows 4"),
        ({"prefill_capture_sizes": [8, 8]}, "8 follows 8"),
        ({"max_padding_waste": 0.5}, "at least 1.0"),
        ({"max_padding_waste": math.nan}, "at least 1.0"),
        ({"max_padding_waste": "2"}, "str"),
        ({"engine": "gpu"}, "host_strict"),
        ({"compiler": "nvcc"}, "inductor"),
        ({"inductor_options": ["max_autotune"]}, "dict"),
        ({"debug_dump_path": 3}, "directory"),
        ({"embed_dtype": "bfloat16"}, "torch.dtype"),
        ({"cache_loc_dtype": torch.float32}, "torch.int64"),
        ({"encoder_lens_dtype": None}, "torch.int32"),
        ({"encoder_len_fill_value": -1}, "at least 0"),
    ],
)
def test_a_bad_value_is_named_with_its_option(options, message):
    ((name, value),) = options.items()
    with pytest.raises(ConfigError, match=message) as caught:
        RunnerConfig.check(options)
    assert repr(name) in str(caught.value)
    assert str(value).split("'")[0].strip("[]") in str(caught.value)


@pytest.mark.parametrize(
    ("options", "named", "remedy"),
    [
        ({"pp_rank": 1}, "pp_rank", {"pp_size": 2}),
        ({"attn_tp_size": 2, "attn_tp_rank": 2}, "attn_tp_rank", {"attn_tp_rank": 1}),
        ({"dp_rank": 3, "dp_size": 3}, "dp_rank", {"dp_size": 4}),
        ({"chunked_prefill_size": None}, "max_total_num_tokens", {"max_total_num_tokens": 99}),
        ({"chunked_prefill_size": -1}, "max_total_num_tokens", {"chunked_prefill_size": 64}),
        ({"require_mlp_tp_gather": True}, "enable_mlp_sync", {"enable_mlp_sync": True}),
        ({"speculative_role": "target"}, "speculative_algorithm", EAGLE_TARGET),
        ({"speculative_multi_layer_eagle": True}, "speculative_algorithm", EAGLE_DRAFT),
        ({"speculative_adaptive_max_draft_tokens": 8}, "speculative_algorithm", EAGLE_TARGET),
        ({"speculative_algorithm": "EAGLE"}, "speculative_role", EAGLE_TARGET),
        (
            {**EAGLE_TARGET, "speculative_num_draft_tokens": 0},
            "speculative_num_draft_tokens",
            {"speculative_num_draft_tokens": 1},
        ),
        (
            {**EAGLE_DRAFT, "speculative_num_steps": 0},
            "speculative_num_steps",
            {"speculative_num_steps": 1},
        ),
        (
            {**EAGLE_TARGET, "speculative_algorithm": "DFLASH", "speculative_eagle_topk": 2},
            "speculative_eagle_topk",
            {"speculative_eagle_topk": 1},
        ),
        (
            {
                **EAGLE_DRAFT,
                "speculative_algorithm": "FROZEN_KV_MTP",
                "speculative_multi_layer_eagle": True,
            },
            "speculative_multi_layer_eagle",
            {"speculative_algorithm": "EAGLE"},
        ),
        (
            {
                **EAGLE_TARGET,
                "speculative_adaptive_max_draft_tokens": 8,
                "enable_mlp_sync": True,
            },
            "speculative_adaptive_max_draft_tokens",
            {"enable_mlp_sync": False},
        ),
        (
            {**EAGLE_TARGET, "speculative_adaptive_max_draft_tokens": 3},
            "speculative_adaptive_max_draft_tokens",
            {"speculative_adaptive_max_draft_tokens": 4},
        ),
        ({**EAGLE_TARGET, "dllm_block_size": 8}, "dllm_block_size", {"dllm_block_size": None}),
    ],
)
def test_values_that_contradict_each_other_are_refused_and_the_advice_works(options, named, remedy):
    with pytest.raises(ConfigError, match=named) as caught:
        RunnerConfig(**options)
    assert all(name in str(caught.value) for name in remedy if name.startswith(named))
    RunnerConfig(**{**options, **remedy})


def test_a_dflash_draft_needs_no_steps():
    config = RunnerConfig(
        speculative_algorithm="DFLASH", speculative_role="draft", speculative_num_draft_tokens=8
    )
    assert config.speculative_num_steps == 0


def test_the_model_is_compiled_with_the_runners_settings_and_not_the_environments(monkeypatch):
    monkeypatch.setenv("GRAPHBUF_COMPILER", "aot_eager")
    config = RunnerConfig(
        engine="host_strict",
        compiler="eager",
        inductor_options={"max_autotune": True},
        debug_dump_path="dump",
        copy_outputs=True,
    )
    compiled = config.graphbuf_config(splitting_ops=["graphbuf::attention"])
    assert (compiled.engine, compiled.compiler) == ("host_strict", "eager")
    assert compiled.inductor_options == {"max_autotune": True}
    assert (compiled.debug_dump_path, compiled.copy_outputs) == ("dump", True)
    assert compiled.splitting_ops == ("graphbuf::attention",)
    assert not RunnerConfig().graphbuf_config(splitting_ops=()).copy_outputs
