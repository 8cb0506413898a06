"""The trees engine: what it asks of torch on any machine, and what it does on a device."""

import gc
import inspect
import threading

import pytest
import torch

from compile_backend.engines import (
    CudaEngine,
    StrictHostEngine,
    TreesEngine,
    inductor_graphs,
    inductor_policy,
)
from compile_backend.engines.trees_adapter import (
    MANAGER_ATTRIBUTES,
    fitted,
    load_trees,
    tree_calls,
    tree_pool,
)
from compile_backend.errors import CaptureError, ConfigError, ReplayError

# --- what the installed torch offers ------------------------------------------------------------


@pytest.fixture
def trees():
    load_trees()
    from torch._inductor import cudagraph_trees

    return cudagraph_trees


def test_the_call_fits_the_installed_torch_and_copies_nothing(trees):
    inputs = [torch.ones(1), torch.ones(2)]
    traces = []
    args, kwargs = tree_calls(trees.cudagraphify, list, inputs, device=3, stack_traces=traces)
    bound = inspect.signature(trees.cudagraphify).bind(*args, **kwargs)
    bound.apply_defaults()
    assert bound.arguments["inputs"] is inputs
    assert bound.arguments["static_input_idxs"] == (0, 1)
    assert bound.arguments["stack_traces"] is traces, "the model fills it while it runs"
    assert bound.arguments["mutated_input_idxs"] == (), "a written input is captured all the same"
    assert bound.arguments["device_index"] == 3
    assert bound.arguments["is_inference"]
    assert not bound.arguments["is_backward"]
    names = [each.name for each in bound.arguments["placeholders"]]
    assert names == ["static input 0", "static input 1"]


def test_the_manager_has_what_is_read_and_set(trees):
    set_in_init = set(trees.CUDAGraphTreeManager.__init__.__code__.co_names)
    assert set(MANAGER_ATTRIBUTES) <= set_in_init
    assert {"function_id", "new_inputs"} <= set(
        inspect.signature(trees.CUDAGraphTreeManager.run).parameters
    )
    inspect.signature(trees.get_manager).bind(0, create_if_none_exists=False)
    assert callable(trees.CUDAGraphNode.remove_node_cached_tensors)
    assert hasattr(trees.get_container(0), "tree_manager")
    assert callable(trees.get_container(0).get_tree_manager)
    assert callable(torch.compiler.cudagraph_mark_step_begin)


def test_the_setting_that_records_at_the_first_call_exists():
    import torch._inductor.config as inductor_config

    with inductor_config.patch({"triton.skip_cudagraph_warmup": True}):
        assert inductor_config.triton.skip_cudagraph_warmup
    assert not inductor_config.triton.force_cudagraphs_warmup


def test_every_thread_has_state_of_its_own(trees):
    found = []
    thread = threading.Thread(target=lambda: found.append(tree_pool(0)))
    thread.start()
    thread.join()
    assert found == [None]
    assert tree_pool(0) is None


def test_an_argument_that_a_torch_does_not_know_is_left_out_if_it_can_be():
    def older(model, inputs, static_input_idxs=(), *, device_index, is_backward, is_inference):
        """Without the arguments that came later."""

    def newer(model, inputs, static_input_idxs, *, device_index, **rest):
        """That takes whatever is given."""

    def stranger(model, inputs, static_input_idxs, *, device):
        """With another name for what is needed."""

    wanted = {"device_index": 0, "is_backward": False, "is_inference": True, "compile_id": None}
    positional = (list, [], ())
    optional = frozenset({"compile_id"})
    assert set(fitted(older, positional, wanted, dispensable=optional)) == set(wanted) - optional
    assert fitted(newer, positional, wanted, dispensable=optional) == wanted
    with pytest.raises(ConfigError, match=r"stranger\(.*device.*engine='cuda'"):
        fitted(stranger, positional, wanted, dispensable=optional)


# --- under plain Inductor -----------------------------------------------------------------------


def _has_policy() -> bool:
    import torch._inductor.config as inductor_config

    return hasattr(inductor_config, "cudagraph_policy")


without_policy = pytest.mark.skipif(not _has_policy(), reason="this torch has no cudagraph_policy")


@pytest.mark.skipif(_has_policy(), reason="this torch has cudagraph_policy")
def test_a_torch_without_the_setting_is_an_error_that_says_so():
    with pytest.raises(ConfigError, match=r"no torch._inductor.config.cudagraph_policy.*2\.13"):
        inductor_policy(StrictHostEngine())


@without_policy
def test_the_setting_holds_inside_the_block_only():
    import torch._inductor.config as inductor_config
    from torch._inductor.cudagraph_utils import CUDAGraphPolicy

    with inductor_graphs(StrictHostEngine()):
        assert isinstance(inductor_config.cudagraph_policy, CUDAGraphPolicy)
    assert inductor_config.cudagraph_policy is None


def _wrapped(model, static=(), mutated=(), **options):
    """``model`` as Inductor hands it to the policy, on the emulator of a device."""
    return inductor_policy(StrictHostEngine(), **options).cudagraphify(
        model,
        [],
        static,
        device_index=0,
        is_backward=False,
        is_inference=True,
        mutated_input_idxs=mutated,
        stack_traces=None,
        constants=(),
        placeholders=(),
    )


@without_policy
def test_an_inductor_graph_is_captured_at_its_second_call_and_replayed_after():
    runs = []

    def model(inputs):
        runs.append(1)
        weight, x, rows = inputs
        inputs.clear()
        return [x * weight, rows, None]

    weight = torch.full((2,), 3.0)
    call = _wrapped(model, static=(0,))
    kept = []
    for step in range(5):
        given = [weight, torch.full((2,), float(step)), 2]
        kept.append(call(given))
        assert given == [], "the list is consumed, as the graph does"
    assert len(runs) == 2
    assert [out[0].tolist() for out in kept] == [[3.0 * step] * 2 for step in range(5)]
    assert kept[-1][1:] == [2, None]

    given = [weight, torch.ones(3)[:2], 5]
    call(given)
    assert len(runs) == 3, "another number is another graph"


@without_policy
def test_a_replaced_weight_is_captured_again_and_captures_are_bounded():
    runs = []

    def model(inputs):
        runs.append(1)
        return [inputs[0] + inputs[1]]

    call = _wrapped(model, static=(0,), max_captures=1)
    weights = [torch.ones(2), torch.full((2,), 5.0)]
    for weight in weights * 3:
        assert call([weight, torch.ones(2)])[0].tolist() == (weight + 1).tolist()
    assert len(runs) == 2 + 3, "the second weight is beyond the bound"


@without_policy
def test_a_graph_that_writes_to_a_moving_input_runs_uncaptured(caplog):
    def model(inputs):
        inputs[0].add_(1)
        return [inputs[0] * 2]

    assert _wrapped(model, mutated=(0,)) is model
    assert "writes to inputs [0]" in caplog.text
    static = _wrapped(model, static=(0,), mutated=(0,))
    count = torch.zeros(1)
    for step in range(1, 5):
        assert static([count])[0].item() == 2 * step
        assert count.item() == step


# --- on a device --------------------------------------------------------------------------------


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")


def on_device(test):
    return pytest.mark.cuda(needs_cuda(test))


@pytest.fixture
def device():
    gc.collect()
    torch.cuda.empty_cache()
    with torch.device("cuda"):
        yield torch.cuda.current_device()
    torch.compiler.reset()


@on_device
def test_nothing_is_copied_and_the_function_runs_once(device):
    cache, x = torch.zeros(8), torch.ones(2)
    runs = []

    def append(x, cache):
        runs.append(x.data_ptr())
        cache[1:3].add_(x)
        return [cache.sum(), 5, x]

    replay = TreesEngine().capture(append, static_inputs=[x, cache])
    assert runs == [x.data_ptr()]
    assert cache[:4].tolist() == [0, 1, 1, 0]
    for step in (2, 3, 4):
        out = replay([x, cache])
        assert out[0].item() == 2 * step
        assert out[1] == 5
        assert out[2] is x
    assert len(runs) == 1
    assert tree_pool(device) is not None
    assert replay.num_entries == 1


@on_device
def test_warm_ups_are_the_captures_own_and_the_generator_is_put_back(device):
    runs = []

    def noisy(x):
        runs.append(1)
        return [x + torch.rand(4)]

    torch.manual_seed(3)
    replay = TreesEngine().capture(noisy, static_inputs=[torch.zeros(4)], warmups=2)
    first = replay.outputs[0].clone()
    second = replay()[0].clone()
    assert len(runs) == 3
    torch.manual_seed(3)
    assert torch.equal(first, torch.rand(4))
    assert torch.equal(second, torch.rand(4))


@on_device
def test_buckets_replay_in_any_order_out_of_a_pool_of_their_own(device):
    engine = TreesEngine()
    slots = torch.ones(8, 256)
    weight = torch.randn(256, 256)
    replays = {
        rows: engine.capture(lambda x, w: [x @ w], static_inputs=[slots[:rows], weight], warmups=1)
        for rows in (8, 4, 2, 1)
    }
    cuda = CudaEngine().capture(lambda x, w: [x @ w], static_inputs=[slots, weight], warmups=1)
    assert sum(each.pool_bytes for each in replays.values()) > 0
    for rows in (2, 8, 1, 8, 4, 2):
        slots.normal_()
        torch.testing.assert_close(replays[rows]()[0], slots[:rows] @ weight)
        torch.testing.assert_close(cuda()[0], slots @ weight)


@on_device
def test_an_output_that_was_overwritten_raises_and_names_its_recording(device):
    engine = TreesEngine()
    x = torch.ones(4)
    first = engine.capture(lambda x: [x + 1, x * 2], static_inputs=[x], label="decode bs=4")
    old = first.outputs[1]
    engine.capture(lambda x: [x + 3], static_inputs=[x], label="decode bs=2")
    with pytest.raises(RuntimeError, match=r"overwritten.*output 1 of 'decode bs=4'"):
        old.cpu()
    assert first()[1].tolist() == [2] * 4


@on_device
def test_another_thread_is_refused(device):
    replay = TreesEngine().capture(lambda x: [x + 1], static_inputs=[torch.ones(2)])
    errors = []

    def serve():
        try:
            replay()
        except ReplayError as error:
            errors.append(str(error))

    thread = threading.Thread(target=serve, name="server")
    thread.start()
    thread.join()
    assert len(errors) == 1
    assert "is replayed on 'server'" in errors[0]
    assert "engine='cuda'" in errors[0]
    assert replay()[0].tolist() == [2, 2]


@on_device
def test_recordings_of_one_step_read_each_others_outputs(device):
    engine = TreesEngine(mark_steps=False)
    x = torch.ones(1 << 20)
    engine.begin_step()
    first = engine.capture(lambda x: [x * 2], static_inputs=[x])
    second = engine.capture(lambda y: [(y.sin() + y.cos()) * 3], static_inputs=first.outputs)
    for value in (2.0, 3.0, 4.0):
        engine.begin_step()
        x.fill_(value)
        y = x * 2
        torch.testing.assert_close(second(first())[0], (y.sin() + y.cos()) * 3)


@on_device
def test_an_output_of_the_step_before_is_refused_as_an_input(device):
    engine = TreesEngine()
    first = engine.capture(lambda x: [x * 2], static_inputs=[torch.ones(4)])
    with pytest.raises(CaptureError, match=r"static input 0 .* mark_steps=False"):
        engine.capture(lambda y: [y + 1], static_inputs=first.outputs)
    assert first()[0].tolist() == [2] * 4


@on_device
@pytest.mark.parametrize("spoil", [False, True], ids=["raises", "host read"])
def test_a_failed_capture_leaves_all_as_found_and_a_retry_works(device, found_as_left, spoil):
    engine = TreesEngine()
    x = torch.ones(4)
    healthy = engine.capture(lambda x: [x * 3], static_inputs=[x])

    def function(x):
        y = x + torch.rand(4)
        return [y * y.sum().item()] if spoil else [y, 1 / 0]

    with found_as_left(), pytest.raises(CaptureError):
        engine.capture(function, static_inputs=[x])
    torch.rand(4)
    torch.empty(1 << 20).fill_(1)
    assert healthy()[0].tolist() == [3] * 4
    retry = engine.capture(lambda x: [x * 5], static_inputs=[x])
    assert retry()[0].tolist() == [5] * 4
    assert healthy()[0].tolist() == [3] * 4


@on_device
def test_reset_and_a_reset_of_torchs_own(device):
    engine = TreesEngine()
    x = torch.ones(4)
    first, second = (engine.capture(lambda x: [x + 1], static_inputs=[x]) for _ in range(2))
    first.reset()
    first.reset()
    with pytest.raises(ReplayError, match="was reset"):
        first()
    assert second()[0].tolist() == [2] * 4
    torch.compiler.reset()
    with pytest.raises(ReplayError, match=r"torch.compiler.reset\(\) has shut"):
        second()
    again = engine.capture(lambda x: [x + 1], static_inputs=[x])
    assert again()[0].tolist() == [2] * 4
