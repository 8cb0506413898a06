"""The GPU benchmark and its script on a machine without a device: they run, and report failures."""

import dataclasses
import importlib
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks._decode_paths import (
    COMPILE,
    DRY_RUN,
    EAGER,
    HAND_WRITTEN,
    HandWrittenPath,
    PlainPath,
    path_makers,
)
from benchmarks._decode_report import PathReport, table
from benchmarks.gpu_decode import StoppedError, changing_sizes, main, measure
from compile_backend.engines import HostEngine

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "gpu_check.sh"
SMALL = dataclasses.replace(DRY_RUN, num_layers=1, num_changes=12, most_rounds=5, engines=())
ONE_WORKER = pytest.mark.xdist_group("gpu_decode")  # the dry run takes half a minute
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in (ROOT / "compile_backend").rglob("*.py")
)


def run_script(*arguments):
    return subprocess.run(
        [SCRIPT, *arguments],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"},
    )


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory):
    """The script's output, and the JSON of the benchmark that it ran."""
    out = tmp_path_factory.mktemp("results")
    done = run_script("--dry-run", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = out.glob("gpu_decode-*.json")
    return done.stdout, json.loads(file.read_text())


def eager(world):
    return PlainPath(world, world.stack)


# --- the dry run ----------------------------------------------------------------------------------


def test_the_script_is_valid_bash_and_refuses_unknown_options():
    subprocess.run(["bash", "-n", SCRIPT], check=True)
    done = run_script("--no-such-option")
    assert done.returncode == 2
    assert "usage:" in done.stderr


@ONE_WORKER
def test_the_scripts_dry_run_passes_and_collects_the_tests_marked_cuda(dry_run):
    stdout, _ = dry_run
    assert "all parts passed" in stdout
    for name in ("tests/engines/test_cuda.py", "tests/registry/test_fill_cuda.py"):
        assert f"{name}: " in stdout


@ONE_WORKER
def test_every_path_has_every_number(dry_run):
    _, result = dry_run
    assert result["setup"]["dry_run"] is True
    assert {"date", "device", "torch", "cuda", "triton", "python"} <= set(result["setup"])
    assert list(result["paths"]) == list(path_makers(DRY_RUN))
    sizes = [str(size) for size in DRY_RUN.batch_sizes]
    for name, path in result["paths"].items():
        assert set(path) == {field.name for field in dataclasses.fields(PathReport)}
        assert path["status"] == "ok", (name, path["error"])
        assert path["setup_seconds"] > 0
        assert path["pool_bytes"] >= 0
        assert path["largest_error"] <= DRY_RUN.tolerance
        assert list(path["fixed"]) == sizes
        for facts in (*path["fixed"].values(), path["changing"]):
            assert facts["step"]["median"] >= facts["step"]["best"] > 0
            assert facts["host"]["median"] > 0
            assert facts["launches"] is None  # nothing is launched on a CPU


@ONE_WORKER
def test_runners_are_compared_with_the_bare_replay_of_their_graph(dry_run):
    stdout, result = dry_run
    assert list(result["floor"]) == [str(size) for size in DRY_RUN.batch_sizes]
    for size, engines in result["floor"].items():
        assert list(engines) == list(DRY_RUN.engines)
        for engine, floor in engines.items():
            bare = result["bare"][size][f"bare replay, engine {engine}"]
            ours = result["paths"][f"graphbuf, engine {engine}"]["fixed"][size]
            assert floor["to_bare_replay"] == {
                kind: ours[kind]["median"] / bare[kind]["median"] for kind in ("step", "queued")
            }
            assert len(floor["to_hand_written"]) == 2
            assert f"batch {size}, engine {engine}: within 1.03 x the bare replay: " in stdout


@ONE_WORKER
def test_graphbuf_makes_nothing_anew_while_sizes_change(dry_run):
    _, result = dry_run
    for engine in DRY_RUN.engines:
        path = result["paths"][f"graphbuf, engine {engine}"]
        assert path["setup_compilations"] >= 1
        assert path["setup_recordings"] == len(DRY_RUN.buckets)
        assert path["changes"]["num_steps"] >= 12
        assert set(path["changes"]["compilations"] + path["changes"]["recordings"]) == {0}


# --- failures and counts --------------------------------------------------------------------------


def test_a_path_that_fails_is_reported_and_the_others_go_on(tmp_path):
    def cannot_be_set_up(world):
        raise ValueError("no such kernel")

    def fails_above_three_rows(world):
        step = eager(world)

        def run(batch):
            if batch.batch_size > 3:
                raise RuntimeError("four rows")
            return step(batch)

        return run

    def is_wrong(world):
        step = eager(world)
        return lambda batch: step(batch) * 1.01

    file = tmp_path / "new" / "result.json"
    makers = {
        EAGER: eager,
        "unset": cannot_be_set_up,
        "small": fails_above_three_rows,
        "wrong": is_wrong,
        HAND_WRITTEN: lambda world: HandWrittenPath(world, world.stack),
    }
    report = measure(SMALL, seconds=2, file=file, makers=makers)
    assert report.failed == ["unset", "small", "wrong"]
    assert report.paths["unset"].error == "ValueError: no such kernel"
    assert report.paths["unset"].traceback.count("cannot_be_set_up") == 1
    assert list(report.paths["small"].fixed) == ["1", "3"]
    assert "of its norm from eager's" in report.paths["wrong"].error
    for name in (EAGER, HAND_WRITTEN):
        assert list(report.paths[name].fixed) == ["1", "3"]
        assert report.paths[name].changing is not None
    assert json.loads(file.read_text())["paths"]["wrong"]["status"] == "failed"
    lines = table(report).splitlines()
    (row,) = [line for line in lines if line.startswith("changing") and "small" in line]
    assert row.split(None, 2)[2] == "FAILED: RuntimeError: four rows"


def test_what_is_compiled_or_recorded_anew_is_counted(tmp_path):
    def records_each_step(world):
        step = eager(world)

        def run(batch):
            HostEngine().capture(lambda x: [x * 2], static_inputs=[torch.ones(1)])
            return step(batch)

        return run

    makers = {
        EAGER: eager,
        "records": records_each_step,
        COMPILE: lambda world: PlainPath(
            world, torch.compile(world.stack, backend="eager", dynamic=False)
        ),
    }
    report = measure(SMALL, seconds=2, file=tmp_path / "result.json", makers=makers)
    assert report.failed == []
    assert report.paths["records"].setup_recordings == 3 * len(SMALL.batch_sizes)
    assert set(report.paths["records"].changes.recordings) == {SMALL.num_changes}
    assert report.paths[COMPILE].setup_compilations == len(SMALL.batch_sizes)
    new_sizes = {*changing_sizes(SMALL.num_changes, max(SMALL.buckets))} - {*SMALL.batch_sizes}
    assert report.paths[COMPILE].changes.compilations[:2] == [len(new_sizes), 0]
    assert set(report.paths[EAGER].changes.compilations) == {0}


def test_a_benchmark_that_is_stopped_keeps_what_it_has(tmp_path):
    def is_stopped(world):
        raise StoppedError("stopped by SIGTERM")

    file = tmp_path / "result.json"
    report = measure(SMALL, seconds=2, file=file, makers={EAGER: eager, "last": is_stopped})
    assert report.stopped == "stopped by SIGTERM"
    written = json.loads(file.read_text())
    assert written["stopped"] == report.stopped
    assert written["paths"][EAGER]["setup_seconds"] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_the_benchmark_says_what_to_do(capsys):
    with pytest.raises(SystemExit):
        main([])
    assert "--dry-run" in capsys.readouterr().err


def test_changing_sizes_differ_from_step_to_step_and_reach_both_ends():
    sizes = changing_sizes(200, 128)
    assert len(sizes) == 200
    assert {1, 128} <= set(sizes) <= set(range(1, 129))
    assert all(a != b for a, b in itertools.pairwise(sizes))
    assert sizes == changing_sizes(200, 128)


# --- imports --------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("name", MODULES)
def test_every_module_imports_without_a_device(name):
    if name.endswith(".triton_fill"):
        pytest.importorskip("triton")
    assert importlib.import_module(name).__name__ == name
    assert not torch.cuda.is_initialized()
