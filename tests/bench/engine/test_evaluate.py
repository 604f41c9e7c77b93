"""What evaluation does with a network, apart from counting."""

from __future__ import annotations

import torch

from tbbn.bench.engine.forward import evaluation_forward
from tbbn.bench.models import LinearHead, Network, backbone


def test_logits_are_float32_whatever_the_backbone_computes_in() -> None:
    """In bf16 equal logits are common, and argmax gives each tie to the older class."""
    body = backbone("small", in_channels=3, generator=torch.Generator().manual_seed(0))
    network = Network(body, LinearHead(body.n_features))
    network.grow(200, torch.Generator().manual_seed(1))
    network.eval()
    images = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(2))
    output = evaluation_forward(network, images, "bf16")
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        pooled = network.backbone(images).pooled
        rounded = network(images).logits
    assert rounded.dtype == torch.bfloat16  # what it would be otherwise
    assert output.logits.dtype == torch.float32
    torch.testing.assert_close(output.logits, network.head(pooled.float()), rtol=0, atol=0)
