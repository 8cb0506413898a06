"""Options are checked once, with messages whose advice works."""

import dataclasses
import os

import pytest
import torch

from compile_backend import ConfigError, GraphbufBackend, GraphbufConfig, explain


def test_options_win_over_the_environment_which_wins_over_defaults():
    env = {
        "GRAPHBUF_STRICT": "1",
        "GRAPHBUF_CUDAGRAPH_CAPTURE_SIZES": "1,4",
        "GRAPHBUF_MAX_NUMBER_VALUES": "7",
        "GRAPHBUF_SPLITTING_OPS": "aten::mm, aten::bmm",
        "GRAPHBUF_INDUCTOR_OPTIONS": "max_autotune=true,benchmark_kernel=false",
        "HOME": "/",
    }
    config = GraphbufConfig.check({"cudagraph_capture_sizes": [2, 8]}, env=env)
    assert config.cudagraph_capture_sizes == (2, 8)
    assert (config.strict, config.max_number_values) == (True, 7)
    assert config.splitting_ops == ("aten::mm", "aten::bmm")
    assert config.inductor_options == {"max_autotune": True, "benchmark_kernel": False}
    assert config.engine == "auto"


def test_an_unknown_option_lists_the_valid_ones():
    with pytest.raises(ConfigError) as caught:
        GraphbufConfig.check({"capture_sizes": [1]}, env={})
    for option in dataclasses.fields(GraphbufConfig):
        assert option.name in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strict": 1}, "pass True or False"),
        ({"engine": "gpu"}, "host_strict"),
        ({"cudagraph_capture_sizes": [4, 2]}, r"2 follows 4.*\[2, 4\]"),
        ({"cudagraph_capture_sizes": [2, 2]}, "2 follows 2"),
        ({"cudagraph_capture_sizes": [0, 2]}, "positive"),
        ({"cudagraph_capture_sizes": [True]}, "bool"),
        ({"cudagraph_capture_sizes": []}, "empty"),
        ({"cudagraph_capture_sizes": "1,2"}, "str"),
        ({"cudagraph_capture_sizes": 8}, "int"),
        ({"max_exact_captures": -1}, "at least 0"),
        ({"max_number_values": 1.5}, "float"),
        ({"splitting_ops": "aten::mm"}, "list of operator names"),
        ({"splitting_ops": ["mm"]}, "namespace::name"),
        ({"inductor_options": ["max_autotune"]}, "dict"),
        ({"debug_dump_path": 3}, "directory"),
    ],
)
def test_a_bad_value_is_named_with_its_option(options, message):
    (name,) = options
    with pytest.raises(ConfigError, match=message) as caught:
        GraphbufConfig.check(options, env={})
    assert name in str(caught.value)


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("GRAPHBUF_STRICT", "maybe"),
        ("GRAPHBUF_CUDAGRAPH_CAPTURE_SIZES", "1;2"),
        ("GRAPHBUF_MAX_EXACT_CAPTURES", "many"),
        ("GRAPHBUF_INDUCTOR_OPTIONS", "max_autotune"),
        ("GRAPHBUF_NO_SUCH_OPTION", "1"),
    ],
)
def test_a_bad_environment_variable_is_named(variable, text):
    with pytest.raises(ConfigError, match=variable):
        GraphbufConfig.check(env={variable: text})


def test_the_environment_reaches_a_compiled_function(monkeypatch):
    monkeypatch.setitem(os.environ, "GRAPHBUF_ENGINE", "none")
    monkeypatch.setitem(os.environ, "GRAPHBUF_COMPILER", "eager")
    run = torch.compile(torch.relu, backend="graphbuf")
    with torch.inference_mode():
        run(torch.ones(3))
    assert explain(run).hits == 0
    assert explain(run).uncaptured == 1


def test_torch_compile_raises_for_a_bad_option_at_the_first_call():
    run = torch.compile(torch.relu, backend="graphbuf", options={"capture_sizes": [1]})
    with pytest.raises(Exception, match="option 'capture_sizes' is unknown"):
        run(torch.ones(3))


def test_a_splitting_op_that_does_not_exist_is_refused_with_a_near_name():
    options = {"compiler": "eager", "splitting_ops": ["aten::addm"]}
    run = torch.compile(torch.relu, backend="graphbuf", options=options)
    with pytest.raises(Exception, match="aten::addmm"), torch.inference_mode():
        run(torch.ones(3))


def test_a_misspelt_vouched_operator_is_refused_too():
    options = {"compiler": "eager", "rowwise_ops": ["nolib::nothing_like_it"]}
    run = torch.compile(torch.relu, backend="graphbuf", options=options)
    with pytest.raises(Exception, match="rowwise_ops names 'nolib::nothing_like_it'"):
        run(torch.ones(3))


def test_a_value_from_the_environment_is_named_with_its_variable():
    with pytest.raises(ConfigError, match=r"GRAPHBUF_COMPILER: option 'compiler' is 'eagr'"):
        GraphbufConfig.check(env={"GRAPHBUF_COMPILER": "eagr"})
    assert GraphbufConfig.check({"compiler": "eager"}, env={"GRAPHBUF_COMPILER": "eagr"})


def test_an_unknown_option_suggests_a_near_one():
    with pytest.raises(ConfigError, match=r"did you mean 'cudagraph_capture_sizes'"):
        GraphbufConfig.check({"cudagraph_capture_size": [1]}, env={})


def test_a_backend_object_takes_options_itself_and_no_others():
    backend = GraphbufBackend({"compiler": "eager"})
    run = torch.compile(torch.relu, backend=backend)
    with torch.inference_mode():
        run(torch.ones(3))
    assert explain(run).calls == explain(backend).calls == 1
    torch._dynamo.reset()
    run = torch.compile(torch.relu, backend=backend, options={"strict": True})
    with pytest.raises(Exception, match=r"has its configuration.*strict"):
        run(torch.ones(3))


def test_what_mode_means():
    plain = GraphbufConfig.for_mode(None, {}, env={})
    assert GraphbufConfig.for_mode("reduce-overhead", {}, env={}) == plain
    assert GraphbufConfig.for_mode("max-autotune", {}, env={}).inductor_options == {
        "max_autotune": True
    }
    assert not GraphbufConfig.for_mode("max-autotune-no-cudagraphs", {}, env={}).captures
    with pytest.raises(ConfigError, match="reduce-overhead"):
        GraphbufConfig.for_mode("fast", {}, env={})


def test_mode_reaches_the_backend():
    run = torch.compile(torch.relu, backend="graphbuf", mode="max-autotune-no-cudagraphs")
    with torch.inference_mode():
        torch.testing.assert_close(run(torch.tensor([-1.0, 2.0])), torch.tensor([0.0, 2.0]))
    assert explain(run).uncaptured == 1
