"""The networks of `benchmarks.gpu_lanes`, and the functions that build Cerebro's models of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import cerebro

CLASSES = 10
RANK = 8  # of an adapter
Make = Callable[[], nn.Module]


# --- small networks -------------------------------------------------------------------


def make_mlp(width: int) -> nn.Module:
    return nn.Sequential(
        *(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()),
        nn.Linear(width, CLASSES),
    )


def make_cnn(width: int, copies: int = 1) -> nn.Module:
    """Three blocks and a classifier; of several `copies` in grouped layers, only the blocks."""
    layers: list[nn.Module] = []
    channels = 3
    for wider in (width, 2 * width, 4 * width):
        layers += [
            nn.Conv2d(copies * channels, copies * wider, 3, padding=1, bias=False, groups=copies),
            *(nn.BatchNorm2d(copies * wider), nn.ReLU(), nn.MaxPool2d(2)),
        ]
        channels = wider
    if copies == 1:
        layers += [nn.Flatten(), nn.Linear(channels * 16, CLASSES)]
    return nn.Sequential(*layers)


class GroupedCnns(nn.Module):
    """Several of these networks as one, with grouped convolutions and batched products."""

    def __init__(self, width: int, copies: int) -> None:
        super().__init__()
        self._copies = copies
        self.blocks = make_cnn(width, copies)
        self.weight = nn.Parameter(torch.randn(copies, 4 * width * 16, CLASSES) / 64)
        self.bias = nn.Parameter(torch.zeros(copies, 1, CLASSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return outputs of shape (copies, rows, classes)."""
        features = self.blocks(x.repeat(1, self._copies, 1, 1))
        by_copy = features.reshape(len(x), self._copies, -1).transpose(0, 1)
        return self.bias + by_copy @ self.weight


def _model(net: nn.Module, config: dict[str, Any], **options: Any) -> cerebro.torch.Model:
    optimizer = torch.optim.Adam(net.parameters(), lr=config["lr"])
    loss = functional.cross_entropy
    return cerebro.torch.Model(
        net, optimizer=optimizer, loss=loss, graph=config["graph"], **options
    )


def build_mlp(config: dict[str, Any]) -> cerebro.torch.Model:
    return _model(make_mlp(config["width"]), config)


def build_cnn(config: dict[str, Any]) -> cerebro.torch.Model:
    return _model(make_cnn(config["width"]), config)


# --- ResNet-18 --------------------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.two = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm_one, self.norm_two = nn.BatchNorm2d(after), nn.BatchNorm2d(after)
        self.skip: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            pointwise = nn.Conv2d(before, after, 1, stride, bias=False)
            self.skip = nn.Sequential(pointwise, nn.BatchNorm2d(after))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.relu(self.norm_one(self.one(x)))
        return functional.relu(self.norm_two(self.two(y)) + self.skip(x))


def make_resnet(width: int) -> nn.Module:
    """ResNet-18 for images of 32 x 32, whose first stage has `width` channels (64 in the paper)."""
    layers = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    channels = width
    for stage in range(4):
        after = width << stage
        layers += [Residual(channels, after, 1 if stage == 0 else 2), Residual(after, after, 1)]
        channels = after
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES)]
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)


def make_sgd(net: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9, weight_decay=5e-4)


def build_resnet(config: dict[str, Any]) -> cerebro.torch.Model:
    net = make_resnet(config["width"])
    loss = functional.cross_entropy
    optimizer = make_sgd(net, config["lr"])
    return cerebro.torch.Model(
        net, optimizer=optimizer, loss=loss, amp="bf16", graph=config["graph"]
    )


# --- adapters of a transformer ------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.norm_one, self.norm_two = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm_one(x)
        parts = [part(normed) for part in (self.query, self.key, self.value)]
        split = [part.unflatten(-1, (self._heads, -1)).transpose(1, 2) for part in parts]
        attended = functional.scaled_dot_product_attention(*split)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.narrow(functional.gelu(self.wide(self.norm_two(x))))


class Transformer(nn.Module):
    """Classifies sequences of tokens by the mean of their last features."""

    def __init__(self, width: int, layers: int, tokens: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.blocks = nn.Sequential(*(Block(width, width // 64 or 1) for _ in range(layers)))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(tokens)).mean(1))  # type: ignore[no-any-return]


class Adapted(nn.Module):
    """A linear layer with a trained product of low rank beside its frozen weight."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        weight = linear.weight
        self.down = nn.Parameter(torch.randn(RANK, linear.in_features, device=weight.device) / 16)
        self.up = nn.Parameter(torch.zeros(linear.out_features, RANK, device=weight.device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = functional.linear(functional.linear(x, self.down), self.up)
        return self.linear(x) + low  # type: ignore[no-any-return]


def adapt(base: nn.Module) -> nn.Module:
    """Freeze a transformer, in place, and give its queries and values adapters, and it a head."""
    base.requires_grad_(False)
    for block in base.blocks:  # type: ignore[union-attr]
        block.query, block.value = Adapted(block.query), Adapted(block.value)
    base.head = nn.Linear(base.head.in_features, CLASSES)  # type: ignore[union-attr, arg-type]
    return base


def trained(net: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in net.parameters() if parameter.requires_grad]


def build_adapter(config: dict[str, Any], info: cerebro.BuildInfo) -> cerebro.torch.Model:
    make = partial(Transformer, *(config[name] for name in ("width", "layers", "tokens")))
    shared = getattr(info, "shared", None)
    net = adapt(make() if shared is None else shared("base", make))
    optimizer = torch.optim.AdamW(trained(net), lr=config["lr"])
    return cerebro.torch.Model(
        net, optimizer=optimizer, loss=functional.cross_entropy, state="trainable",
        graph=config["graph"],
    )  # fmt: skip
