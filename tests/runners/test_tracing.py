"""The model is traced and compiled once, in warm-up; nothing compiles afterwards."""

import contextlib
import threading

import pytest
import torch
from torch._dynamo.utils import compilation_time_metrics, counters

from compile_backend import ForwardMode
from tests.runners.models import HIDDEN, Decoder, close, make_world


def num_compilations(runner) -> tuple[int, int, int]:
    """Graphs that Dynamo made in this process, attempts it recorded, graphs that runners hold."""
    held = len(runner.traced.graphs) + len(runner.logits.traced.graphs)
    attempts = len(compilation_time_metrics["_compile.compile_inner"])
    return counters["stats"]["unique_graphs"], attempts, held


def test_decode_extend_and_mixed_share_one_trace(engine):
    counters.clear()
    compilation_time_metrics.clear()
    runner = make_world().runner(engine=engine)
    assert [trace.name for trace in runner.explain().traces] == ["model#0", "lm_head#0"]
    assert num_compilations(runner) == (2, 2, 2)
    keys = {key.graph for each in runner.graph_runners for key in each.graphs.keys}
    assert keys == {"model#0"}


def test_a_deeper_model_compiles_no_more_pieces():
    traces = {}
    for num_layers in (3, 12):
        runner = make_world(Decoder, num_layers).runner(
            cudagraph_capture_sizes=(2,), prefill_capture_sizes=(4,), max_running_requests=4
        )
        traces[num_layers] = runner.explain().traces[0]
    assert [traces[n].num_pieces for n in (3, 12)] == [4, 13]
    assert [len(traces[n].cuts) for n in (3, 12)] == [3, 12]
    assert traces[3].num_compiled_pieces == traces[12].num_compiled_pieces == 3


def test_no_size_and_no_mode_recompiles_after_warm_up(engine):
    world = make_world()
    runner = world.runner(engine=engine)
    requests = world.cached(8)
    before = num_compilations(runner)
    for n in range(1, 9):
        assert world.serve(runner, requests[:n]).path == "decode"
    for mode in (ForwardMode.EXTEND, ForwardMode.MIXED):
        for n in range(1, 17):
            pairs, batch = world.extend((n,), mode)
            out = runner.forward(batch)
            world.check(out, pairs)
            assert out.path == "prefill"
            world.finish(pairs[0][0])
    assert num_compilations(runner) == before


# --- grad modes and threads -------------------------------------------------------------------


@contextlib.contextmanager
def grad_inside_inference_mode():
    with torch.inference_mode(), torch.inference_mode(False), torch.enable_grad():
        yield


GRAD_MODES = {
    "grad": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "grad inside inference": grad_inside_inference_mode,
}


@pytest.mark.parametrize("serve_in", GRAD_MODES)
@pytest.mark.parametrize("warm_in", ["grad", "inference"])
def test_any_grad_mode_may_warm_up_and_any_may_serve(warm_in, serve_in):
    """Strict: its memory is written by replays, which inference tensors forbid outside the mode."""
    world = make_world()
    runner = world.runner(
        warm=False,
        engine="host_strict",
        cudagraph_capture_sizes=(4,),
        prefill_capture_sizes=(8,),
    )
    with GRAD_MODES[warm_in]():
        runner.warmup()
    requests = world.cached(4)
    before = num_compilations(runner)
    for mode in (GRAD_MODES[serve_in], *GRAD_MODES.values(), GRAD_MODES[serve_in]):
        with mode():
            out = world.serve(runner, requests)
            assert (out.path, out.reason) == ("decode", None)
            assert not out.hidden_states.requires_grad
            pairs, batch = world.extend((3, 4))
            out = runner.forward(batch)
            world.check(out, pairs)
            assert (out.path, out.reason) == ("prefill", None)
            assert not out.logits.requires_grad
    assert num_compilations(runner) == before


def in_thread(call):
    """What ``call`` returns on a thread of its own; raises what it raises."""
    result = {}

    def run():
        try:
            result["value"] = call()
        except BaseException as error:  # noqa: BLE001 - raised again below
            result["error"] = error

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if "error" in result:
        raise result["error"]
    return result["value"]


@pytest.mark.parametrize("warm_elsewhere", [False, True])
def test_another_thread_may_call_first(engine, warm_elsewhere):
    world = make_world()
    runner = world.runner(
        warm=False, engine=engine, cudagraph_capture_sizes=(4,), prefill_capture_sizes=(8,)
    )
    in_thread(runner.warmup) if warm_elsewhere else runner.warmup()
    requests = world.cached(4)
    before = num_compilations(runner)
    for call in (in_thread, lambda call: call()) * 2:
        assert call(lambda: world.serve(runner, requests)).path == "decode"
        pairs, batch = world.extend((8,))
        out = call(lambda: runner.forward(batch))
        assert out.path == "prefill"
        world.check(out, pairs)
    assert num_compilations(runner) == before


def test_two_threads_that_warm_up_at_once_warm_up_once(engine):
    runner = make_world().runner(
        warm=False, engine=engine, cudagraph_capture_sizes=(4,), prefill_capture_sizes=(8,)
    )
    facts = []
    threads = [threading.Thread(target=lambda: facts.append(runner.warmup())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(facts) == 2
    assert facts[0] is facts[1]


# --- optional fields --------------------------------------------------------------------------


class ThreePositions(Decoder):
    """Reads the three positions of an image's token where there are some."""

    def before(self, h, batch):
        if batch.mrope_positions is not None:
            h = h + 0.1 * batch.mrope_positions.to(h.dtype).t().mean(-1, keepdim=True)
        return h


class Embeds(Decoder):
    """Takes embeddings where there are some."""

    def before(self, h, batch):
        return h if batch.input_embeds is None else batch.input_embeds


MULTIMODAL = {"is_multimodal": True, "hidden_size": HIDDEN, "embed_dtype": torch.float32}


def test_a_step_with_images_changes_nothing_for_the_text_around_it(engine):
    """Text, image, text, in decode and prefill; presence is part of the trace, not of a branch."""
    world = make_world(ThreePositions)
    runner = world.runner(engine=engine, prefill_capture_sizes=(8, 16), **MULTIMODAL)
    requests = world.cached(8)
    before = num_compilations(runner)
    num_forwards = 0
    for n in (5, 3, 8):
        for has_image in (False, True, True, False):
            mrope = torch.randint(1, 20, (3, n)) if has_image else None
            pairs, extend = world.extend((n,), mrope_positions=mrope)
            for batch in (world.decode(requests[:n], mrope_positions=mrope), extend):
                want = world.eagerly(batch)
                out = runner.forward(batch)
                assert out.reason is None
                close(out.hidden_states, want)
                num_forwards += 1
            world.finish(pairs[0][0])
    assert runner.explain().hits == num_forwards
    assert num_compilations(runner) == before


@pytest.mark.parametrize("brings", [(False,), (True,), (False, True, False)], ids=str)
def test_embeddings_that_a_batch_brings_are_the_ones_that_are_used(engine, brings):
    """And a batch without any is embedded from its ids, whatever came before."""
    world = make_world(Embeds)
    runner = world.runner(
        engine=engine,
        prefill_capture_sizes=(8, 16),
        cudagraph_capture_sizes=(2,),
        input_embeds="from_batch",
        **MULTIMODAL,
    )
    for n in (8, 5, 16, 8):
        for has_embeds in brings:
            embeds = torch.randn(n, HIDDEN) if has_embeds else None
            batch = world.extend((n,), input_embeds=embeds)[1]
            want = world.eagerly(batch)
            close(runner.forward(batch).hidden_states, want)
    assert runner.explain().fallbacks == {}
    assert runner.explain().hits == 4 * len(brings)


# --- inductor ---------------------------------------------------------------------------------


@pytest.mark.inductor
def test_pieces_compiled_with_inductor_serve_decode_and_prefill(engine):
    world = make_world()
    runner = world.runner(
        engine=engine,
        compiler="inductor",
        cudagraph_capture_sizes=(1, 4),
        prefill_capture_sizes=(8,),
        max_padding_waste=8.0,
    )
    requests = world.cached(4)
    before = num_compilations(runner)
    with torch.inference_mode(False):
        for n in (3, 1, 4, 2, 3):
            assert world.serve(runner, requests[:n]).path == "decode"
        for lengths in ((3, 4), (8,), (1,)):
            pairs, batch = world.extend(lengths)
            out = runner.forward(batch)
            assert out.path == "prefill"
            world.check(out, pairs)
    assert num_compilations(runner) == before
