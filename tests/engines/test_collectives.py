"""Collectives: the ones that hand a Work object to Python cannot be recorded call by call."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch._C._distributed_c10d import _get_work_registry_size

from compile_backend.engines import HostEngine, StrictHostEngine
from compile_backend.errors import CaptureError

ENGINES = [pytest.param(kind, id=kind.name) for kind in (HostEngine, StrictHostEngine)]


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("kind", ENGINES)
def test_a_collective_that_is_waited_for_in_python_is_refused(kind):
    def reduce(x):
        y = x * 2
        dist.all_reduce(y)
        return [y + 1]

    with pytest.raises(CaptureError, match="functional one"):
        kind().capture(reduce, static_inputs=[torch.ones(3)])


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("kind", ENGINES)
def test_the_functional_one_is_replayed_on_fresh_values(kind):
    def reduce(x):
        total = funcol.all_reduce(x * 2, "sum", dist.group.WORLD)
        return [funcol.wait_tensor(total) + 1]

    x = torch.ones(3)
    replay = kind().capture(reduce, static_inputs=[x])
    for value in (2.0, 5.0):
        x.fill_(value)
        assert torch.equal(replay()[0], torch.full((3,), 2 * value + 1))
        assert _get_work_registry_size() == 0  # nothing is in flight that nobody waited for
