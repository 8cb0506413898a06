"""What does one replay on the host engine cost per entry, beside calling the operators by hand?

Contenders, on operators too small to take time of their own, so that what is left is overhead:
the hand-written calls in one Python function, the FX graph of the same operators, eager modules,
the host engine with and without its check of input layouts, and the strict engine. The second
table has a Python custom operator, dispatched and as a replay calls it.

Run: ``python -m benchmarks.host_replay [--rounds N]`` from the root of the repository.
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import custom_op

from benchmarks._timing import compare
from compile_backend.engines import HostEngine, StrictHostEngine

NUM_LAYERS, SIZE = 25, 4


class Layer(nn.Module):
    """Four operators: a linear, a multiplication, an addition, an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)
        self.scale = nn.Parameter(torch.ones(SIZE))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x) * self.scale + x)


@custom_op("graphbuf_bench::mix", mutates_args=())
def mix(x: Tensor, y: Tensor) -> Tensor:
    """A kernel that takes next to no time."""
    return x + y


def by_hand(model: nn.Sequential) -> Callable[[Tensor], list[Tensor]]:
    """The same operator calls as straight-line code, weights in local names."""
    names: dict[str, object] = {"linear": torch._C._nn.linear}
    names |= {name: getattr(torch, name) for name in ("mul", "add", "relu")}
    lines = ["def run(x):"]
    for index, layer in enumerate(model):
        names |= {
            f"w{index}": layer.linear.weight,
            f"b{index}": layer.linear.bias,
            f"s{index}": layer.scale,
        }
        lines += [
            f"    y = linear(x, w{index}, b{index})",
            f"    y = mul(y, s{index})",
            "    y = add(y, x)",
            "    x = relu(y)",
        ]
    exec("\n".join([*lines, "    return [x]"]), names)
    return names["run"]  # type: ignore[return-value]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    torch.manual_seed(0)

    model = nn.Sequential(*(Layer() for _ in range(NUM_LAYERS)))
    x = torch.randn(SIZE, SIZE)
    with torch.inference_mode():
        hand = by_hand(model)
        graph = make_fx(lambda x: [model(x)])(x)
        replays = {
            "host engine": HostEngine(),
            "host engine, no input check": HostEngine(check_inputs=False),
            "strict engine": StrictHostEngine(),
        }
        contenders: dict[str, Callable[[], object]] = {
            "operators by hand": lambda: hand(x),
            "eager modules": lambda: model(x),
            "FX GraphModule": lambda: graph(x),
        }
        expected = model(x)
        assert torch.equal(hand(x)[0], expected)
        for name, engine in replays.items():
            replay = engine.capture(lambda x: [model(x)], static_inputs=[x])
            assert torch.equal(replay([x])[0], expected)
            print(f"{name}: {replay.num_entries} entries")
            contenders[name] = lambda replay=replay: replay([x])
        compare(contenders, rounds=rounds)

        print(f"\na custom operator, {NUM_LAYERS} times")

        def mixed(x: Tensor) -> list[Tensor]:
            for _ in range(NUM_LAYERS):
                x = mix(x, x)
            return [x]

        def kernels(x: Tensor) -> list[Tensor]:
            for _ in range(NUM_LAYERS):
                x = mix._init_fn(x, x)
            return [x]

        replay = HostEngine().capture(mixed, static_inputs=[x])
        assert torch.equal(replay([x])[0], mixed(x)[0])
        compare(
            {
                "kernels by hand": lambda: kernels(x),
                "dispatched": lambda: mixed(x),
                "host engine": lambda: replay([x]),
            },
            rounds=rounds,
        )

    print("\nmany inputs, one operator: what an input costs")
    inputs = [torch.randn(SIZE, SIZE) for _ in range(100)]
    others = [each.clone() for each in inputs]
    with torch.inference_mode():
        checked, unchecked = (
            HostEngine(check_inputs=check).capture(
                lambda *inputs: [inputs[0] + inputs[1]], static_inputs=inputs
            )
            for check in (True, False)
        )
        compare(
            {
                "100 inputs, not checked": lambda: unchecked(inputs),
                "100 captured tensors again, checked": lambda: checked(inputs),
                "100 other tensors, checked": lambda: checked(others),
            },
            rounds=rounds,
        )


if __name__ == "__main__":
    main()
