"""The graphs as readable code: our own dump, and depyf's."""

import pytest
import torch

from compile_backend import GraphbufError, dump, explain
from tests import custom_ops as ops
from tests.backend.conftest import compiled

OPTIONS = {
    "compiler": "aot_eager",
    "cudagraph_capture_sizes": [4, 8],
    "splitting_ops": ["graphbuf_test::opaque"],
    "rowwise_ops": ["graphbuf_test::opaque"],
}


def fn(x):
    return ops.opaque(x.relu() + 1).sum(-1) * 2


def test_the_dump_shows_every_stage_and_piece(tmp_path):
    run = compiled(fn, {**OPTIONS, "debug_dump_path": str(tmp_path / "live")})
    with torch.inference_mode():
        run(torch.randn(5, 4))
    (folder,) = (tmp_path / "live").iterdir()
    texts = {path.name: path.read_text() for path in folder.iterdir()}
    assert sorted(texts) == [
        "00_before_split.py",
        "01_after_split.py",
        "02_after_lift_inputs.py",
        "cuts.txt",
        "piece_0.py",
        "piece_1.py",
    ]
    assert "self.piece_0(" in texts["01_after_split.py"]
    assert "torch.ops.graphbuf_test.opaque.default(" in texts["01_after_split.py"]
    assert "self.slots.l_x_(" in texts["02_after_lift_inputs.py"]
    assert "L_x_" not in texts["02_after_lift_inputs.py"]
    assert "relu()" in texts["piece_0.py"]
    assert "graphbuf_test" not in texts["piece_0.py"] + texts["piece_1.py"]
    assert "named in splitting_ops" in texts["cuts.txt"]

    files = dump(run, str(tmp_path / "later"))
    assert {path.name for path in files} == {*texts, "explain.txt"}
    assert "graphbuf_test::opaque" in (tmp_path / "later" / "explain.txt").read_text()


# depyf 0.20 leaves a file open when it is imported, and warns whenever it is used
@pytest.mark.filterwarnings("ignore:unclosed file.*VERSION.txt:ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:.*You are trying to debug:UserWarning")
def test_depyf_dumps_the_split_graph_and_the_slot_reads(tmp_path):
    import depyf

    run = compiled(fn, OPTIONS)
    with depyf.prepare_debug(str(tmp_path)), torch.inference_mode():
        run(torch.randn(5, 4))
    texts = {path.name: path.read_text() for path in tmp_path.rglob("*.py")}
    split = [text for name, text in texts.items() if "after_split" in name.replace(" ", "_")]
    assert split, sorted(texts)
    assert "piece_0" in split[0]
    lifted = [text for name, text in texts.items() if "lift_inputs" in name]
    assert lifted, sorted(texts)
    assert "slots.l_x_" in lifted[0]
    assert any("before_split" in name.replace(" ", "_") for name in texts)


def test_explain_of_a_model_that_was_compiled_in_place():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())

    class Wrapped(torch.nn.Module):
        def forward(self, x):
            return model(x) * 2

    wrapped = Wrapped()
    wrapped.compile(backend="graphbuf", options={"compiler": "eager"})
    with torch.inference_mode():
        for _ in range(3):
            wrapped(torch.randn(5, 4))
    assert explain(wrapped).hits == 2


@pytest.mark.parametrize(
    "other", [torch.relu, torch.compile(torch.relu, backend="eager"), torch.nn.Linear(2, 2)]
)
def test_what_this_backend_does_not_serve_has_no_explanation(other, tmp_path):
    with pytest.raises(GraphbufError, match="not compiled by this backend"):
        explain(other)
    with pytest.raises(GraphbufError):
        dump(other, str(tmp_path / "made"))
    assert not (tmp_path / "made").exists()


def test_an_explanation_before_the_first_call_is_empty():
    assert explain(torch.compile(torch.relu, backend="graphbuf")).num_graphs == 0


def test_the_recompile_limit_is_announced(caplog):
    run = compiled(lambda x, how: x * len(how), {"compiler": "eager"})
    with torch.inference_mode(), torch._dynamo.config.patch(recompile_limit=3):
        for word in ("a", "bb", "ccc"):
            assert "recompile_limit" not in str(explain(run))
            run(torch.ones(3), word)
        assert "recompile_limit" in str(explain(run))
    assert [r for r in caplog.records if "run eagerly and are not counted" in r.message]
