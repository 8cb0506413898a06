"""What a replay costs and what it must not do: enter Dynamo, allocate, or overlap another step."""

import gc
import random
import sys
import threading

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from compile_backend.attention import TorchNativeBackend
from tests.runners.models import close, make_world

FEW = {"cudagraph_capture_sizes": (4, 8), "prefill_capture_sizes": (8,)}


def dynamo_calls(call):
    """Functions of Dynamo that ``call`` enters, but for what torch wraps each custom operator's
    kernel in to keep Dynamo out; and what it returns."""
    entered: list[str] = []

    def watch(frame, event, arg):
        name = frame.f_code.co_name
        is_dynamo = event == "call" and "_dynamo" in frame.f_code.co_filename
        if is_dynamo and name not in ("_fn", "_callback_from_stance"):
            entered.append(f"{frame.f_code.co_filename}:{name}")

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        result = call()
    finally:
        sys.setprofile(before)
    return entered, result


def test_a_replay_enters_no_dynamo_frame(engine):
    world = make_world()
    runner = world.runner(engine=engine, **FEW)
    requests = world.cached(8)
    runner.forward(world.decode(requests))
    runner.forward(world.extend((5, 3))[1])
    torch._dynamo.reset()  # whoever asked Dynamo now would find nothing
    for n in (8, 3, 5):
        for batch in (world.decode(requests[:n]), world.extend((n,))[1]):
            want = world.eagerly(batch)
            entered, out = dynamo_calls(lambda: runner.forward(batch))
            close(out.hidden_states, want)
            assert out.reason is None
            assert entered == []
    assert runner.explain().hits == 8


class Allocations(TorchDispatchMode):
    """The storages that operators make which none of their arguments had, in bytes."""

    def __init__(self):
        super().__init__()
        self.bytes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {t.untyped_storage().data_ptr() for t in tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        self.bytes += [
            (str(func), t.untyped_storage().nbytes())
            for t in tensors(result)
            if t.untyped_storage().data_ptr() not in given
        ]
        return result


def tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def test_a_fill_allocates_nothing(engine):
    world = make_world()
    runner = world.runner(engine=engine, **FEW)
    requests = world.cached(8)
    for n in (5, 8, 5):
        batch = world.decode(requests[:n])
        runner.forward(batch)
        with Allocations() as seen:
            for each in (runner.decode, runner.eager):
                each.load_batch(batch)
        assert [each for each in seen.bytes if each[1] > 8] == []  # the longest length is a number


def test_replays_keep_no_memory(engine):
    """After each size has come, tensors alive and bytes held stay what they are."""
    world = make_world(num_slots=2048)
    runner = world.runner(engine=engine, **FEW)
    requests = world.cached(8)

    def alive():
        gc.collect()
        kept = [o for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter)]
        dense = [tensor for tensor in kept if tensor.layout is torch.strided]
        return len(dense), sum(tensor.nbytes for tensor in dense)

    counts = []
    for k in range(40):
        runner.forward(world.decode(requests[: 1 + k % 8]))
        pairs, batch = world.extend((1 + k % 8,))
        runner.forward(batch)
        world.finish(pairs[0][0])
        del batch
        if k in (23, 31, 39):
            counts.append(alive())
    assert len({count for count, _ in counts}) == 1
    assert len({size for _, size in counts}) == 1


# --- one step at a time -----------------------------------------------------------------------


def hammer(workers):
    """Run each function on a thread of its own; raises the first error."""
    errors, start = [], threading.Barrier(len(workers))

    def run(work):
        try:
            start.wait()
            work()
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=run, args=(work,)) for work in workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    if errors:
        raise errors[0]


@pytest.mark.parametrize("num_runners", [1, 2])
def test_two_threads_never_mix_their_steps(engine, num_runners):
    """On one runner, and on two that share slots: results are copied out within the step."""
    worlds = [make_world(num_slots=2048, max_requests=64) for _ in range(num_runners)]
    for world in worlds[1:]:
        for parameter in world.model.parameters():
            parameter.data.mul_(0.5)
    runners = [world.runner(engine=engine, copy_outputs=True, **FEW) for world in worlds]
    plans = []
    for i in range(2):
        world, runner = worlds[i % num_runners], runners[i % num_runners]
        requests, rng = world.cached(4), random.Random(i)
        steps = []
        for _ in range(25):
            if rng.random() < 0.6:
                batch = world.decode(rng.sample(requests, rng.randint(1, 4)))
            else:
                batch = world.extend((rng.randint(2, 8),))[1]
            # the keys and values that the steps before it leave are there when it runs
            steps.append((batch, world.eagerly(batch, keep=True)))
        plans.append((runner, steps))

    def work(runner, steps):
        for batch, want in steps:
            out = runner.forward(batch)
            assert out.reason is None
            close(out.hidden_states, want)

    hammer([lambda plan=plan: work(*plan) for plan in plans])
    assert sum(runner.explain().hits for runner in runners) == 50


class Watches(TorchNativeBackend):
    """Looks at the slots of another runner while a step is running."""

    def init_forward_metadata(self, forward_batch, *, graph_key=None):
        hook = vars(self).get("hook")
        if hook is not None:
            hook(forward_batch)
        return super().init_forward_metadata(forward_batch, graph_key=graph_key)


def test_a_second_thread_waits_until_the_step_is_over(engine):
    """While one step is planning, the slots hold its batch and nobody else's."""
    world = make_world(backend=Watches)
    runner = world.runner(engine=engine, **FEW)
    requests = world.cached(8)
    first, second = world.decode(requests[:4]), world.decode(requests[4:])
    wanted = world.eagerly(first), world.eagerly(second)
    other = {}

    def hook(view):
        if "thread" not in other:
            thread = threading.Thread(target=lambda: other.update(out=runner.forward(second)))
            other["thread"] = thread
            thread.start()
            thread.join(timeout=0.2)
            assert thread.is_alive()  # it waits for this step
            assert torch.equal(view.input_ids[:4], first.input_ids)

    world.backend.hook = hook
    out = runner.forward(first)
    got = out.hidden_states.clone() if engine == "host" else None
    other["thread"].join()
    if got is not None:
        close(got, wanted[0])
    close(other["out"].hidden_states, wanted[1])
    assert runner.explain().hits == 2
