"""A third-party package that brings one of each kind, as a file and as an installed distribution."""

from __future__ import annotations

from pathlib import Path

CODE = '''
"""A method, a norm, a data set, a backbone and an augmentation."""

from dataclasses import dataclass, field

import torch
from torch import nn

import tbbn
from tbbn.bench.methods import Method


@tbbn.register_method("tempered", "cross-entropy at a temperature")
@dataclass(frozen=True)
class Tempered(Method):
    temperature: float = field(default=2.0, metadata={"help": "softens the logits"})

    def loss(self, batch, output, previous):
        return {"ce": nn.functional.cross_entropy(output.logits / self.temperature, batch.labels)}


@tbbn.register_norm("rms", "divide by the root mean square")
class RootMeanSquare(nn.Module):
    def __init__(self, num_features, eps=1e-5, affine=True, device=None, dtype=None, *, power: float = 0.5):
        super().__init__()
        self.num_features, self.eps, self.power = num_features, eps, power
        self.weight = nn.Parameter(torch.ones(num_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(num_features, device=device, dtype=dtype))

    def forward(self, x):
        scale = (x.square().mean((1, 2, 3), keepdim=True) + self.eps) ** -self.power
        return x * scale * self.weight.view(-1, 1, 1) + self.bias.view(-1, 1, 1)


@tbbn.register_dataset("stripes", "4 classes of striped images")
def stripes(argument="8"):
    """Class c has stripes of period c + 1."""
    side = int(argument)

    def part(n, seed):
        noise = torch.randint(0, 64, (4 * n, 3, side, side), generator=torch.Generator().manual_seed(seed))
        labels = torch.arange(4).repeat_interleave(n)
        waves = (torch.arange(side) % (labels[:, None] + 1) == 0) * 128
        return (noise + waves[:, None, None, :]).to(torch.uint8), labels

    return part(12, 0), part(5, 1)


@tbbn.register_backbone("tiny", "one convolution")
def tiny(in_channels):
    return nn.Sequential(
        nn.Conv2d(in_channels, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )


@tbbn.register_augmentation("dim", "darker by up to a half")
class Dim:
    n_parameters = 1

    def draw(self, n, generator, size):
        return 0.5 + 0.5 * torch.rand(n, 1, generator=generator)

    def apply(self, images, parameters):
        return images.float().div(255) * parameters.view(-1, 1, 1, 1)
'''

# Every name that the plugin brings, in a short run.
WORDS = (
    *("--data", "stripes", "--method", "tempered", "--norm", "rms(power=0.4)", "--backbone", "tiny"),
    *("--batch.augment", "dim", "--data.tasks", "2", "--train.epochs", "1", "--memory.budget", "8", "--device", "cpu"),
)


def install(site: Path, name: str = "striped", version: str = "1.2", code: str = CODE) -> None:
    """The package as pip would leave it under `site`."""
    (site / name).mkdir(parents=True)
    (site / name / "__init__.py").write_text(code)
    info = site / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[tbbn.plugins]\n{name} = {name}\n")
    (info / "RECORD").write_text(f"{name}/__init__.py,,\n{info.name}/METADATA,,\n{info.name}/entry_points.txt,,\n")
