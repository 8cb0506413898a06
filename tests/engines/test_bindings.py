"""A recorded call may use torch's quicker binding only where that is exactly the same call."""

import pytest
import torch

from compile_backend.engines.bindings import quickest_callable

aten = torch.ops.aten


@pytest.mark.usefixtures("mode")
def test_a_binding_that_dispatches_to_the_same_call_is_used_and_nothing_runs():
    x = torch.ones(2, 2)
    name, call = quickest_callable(aten.add_.Tensor, (x, 1), {})
    assert (name, call) == ("Tensor_add_", torch._C.TensorBase.add_)
    assert x.tolist() == [[1, 1], [1, 1]]
    assert quickest_callable(aten.add.Tensor, (x, x), {"alpha": 2})[0] == "torch_add"
    assert quickest_callable(aten.gelu.default, (x,), {"approximate": "tanh"})[0] == "nn_gelu"
    nan = float("nan")
    assert quickest_callable(aten.fill_.Scalar, (x, nan), {})[0] == "torch_fill_"


@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.add.Scalar, (torch.ones(2), 2)),  # torch.add reaches add.Tensor
        (aten._to_copy.default, (torch.ones(2),)),  # has no binding of its own
    ],
    ids=lambda each: str(each) if callable(each) else "",
)
def test_any_other_call_keeps_the_operator(op, args):
    assert quickest_callable(op, args, {})[1] is op._op
