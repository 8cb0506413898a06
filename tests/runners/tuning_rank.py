"""One of two ranks that tune together: ``python -m tests.runners.tuning_rank RANK FOLDER``."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from compile_backend.runners.autotune import autotune_flashinfer
from tests.flashinfer_stand_in import AutoTuner, modules
from tests.runners.models import Decoder, make_world


class Tunable(Decoder):
    """Has a kernel that is measured, and a collective that every rank must enter."""

    rank = 0

    def after(self, h, batch):
        AutoTuner.get().measure("gemm", f"rank {self.rank} measured")
        total = torch.tensor([1])
        dist.all_reduce(total)
        assert total == dist.get_world_size()
        return h


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    sys.modules.update(modules())
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=2)
    world = make_world(Tunable)
    world.model.rank = rank
    name = "measured.json" if rank == 0 else "other.json"
    runner = world.runner(warm=False, flashinfer_autotune_cache=str(folder / name))
    with torch.no_grad():
        autotune_flashinfer(runner.decode)
    tuner = AutoTuner.get()
    print(", ".join(f"{key}: {tuner.measure(key, None)}" for key in ("old", "gemm")))  # noqa: T201
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
