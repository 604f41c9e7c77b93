"""A reverted model is an ordinary one: torch.export and ONNX take it. In eval mode a converted one is too."""

import io

import pytest
import torch
from torch import nn

import tbbn


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    tbbn.convert(model)
    with tbbn.balance(model, current=12, memory=4, past_tasks=3):
        model(torch.randn(16, 3, 6, 6))
    return model.eval()


@pytest.mark.parametrize("revert", [True, False])
def test_torch_export(model, revert):
    x = torch.randn(2, 3, 6, 6)
    wanted = model(x)
    program = torch.export.export(tbbn.revert(model) if revert else model, (x,))
    torch.testing.assert_close(program.module()(x), wanted)


@pytest.mark.filterwarnings("ignore")  # the exporter's own
def test_onnx_export(model):
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    from onnx.reference import ReferenceEvaluator

    x = torch.randn(2, 3, 6, 6)
    wanted = model(x)
    program = torch.onnx.export(tbbn.revert(model), (x,), dynamo=True, verbose=False)
    file = io.BytesIO()
    program.save(file)
    loaded = onnx.load_from_string(file.getvalue())
    onnx.checker.check_model(loaded)
    name = loaded.graph.input[0].name
    (got,) = ReferenceEvaluator(loaded).run(None, {name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(got), wanted, rtol=1e-4, atol=1e-5)
