"""The formulas that PyTorch computes otherwise while a dispatch mode is active.

Each function here runs forward and backward, once as it is and once recorded; its operators are
compared as `Witness` sees them. Those that differ are kept for each version of PyTorch in
`watched_formulas/`. After looking at a new difference, write the list for the installed version:

    python tests/unit/torch/watched_formulas.py
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from cerebro.torch.cpu_recorder import Recording, Witness, find_difference, leaves_of

FOLDER = Path(__file__).parent / "watched_formulas"

Case = Callable[[Any, Any, Any], Any]
"""A function of a matrix of 6 x 8 that needs gradients, another one, and labels below 8."""

W = torch.linspace(0.5, 2, 8)


def cases() -> dict[str, Case]:
    """Return the functions by name."""
    found: dict[str, Case] = {}
    unary = """
        abs acos acosh asin asinh atan atanh ceil cos cosh deg2rad digamma erf erfc erfinv exp exp2
        expm1 floor frac lgamma log log10 log1p log2 logit neg reciprocal relu round rsqrt selu
        sigmoid sign sin sinc sinh sqrt square tan tanh trunc nan_to_num positive
        """
    for name in unary.split():
        found[name] = lambda x, y, t, name=name: getattr(torch, name)(x)
    for name in ("add", "sub", "mul", "div", "pow", "atan2", "fmod", "remainder", "maximum",
                 "minimum", "fmax", "fmin", "hypot", "logaddexp", "lerp", "xlogy",
                 "where"):  # fmt: skip
        if name == "lerp":
            found[name] = lambda x, y, t: torch.lerp(x, y, 0.3)
        elif name == "where":
            found[name] = lambda x, y, t: torch.where(x > 0, x, y)
        else:
            found[name] = lambda x, y, t, name=name: getattr(torch, name)(x, y)
    for name in ("sum", "mean", "prod", "max", "min", "median", "std", "var", "norm", "logsumexp",
                 "amax", "amin", "nansum", "nanmean", "cumsum", "cumprod", "logcumsumexp",
                 "cummax", "sort", "topk", "kthvalue", "mode", "softmax", "argmax"):  # fmt: skip
        found[f"{name} of rows"] = lambda x, y, t, name=name: _of_rows(name, x)
    for name in ("sum", "mean", "prod", "max", "min", "median", "std", "var", "norm", "amax",
                 "aminmax", "nanmedian"):  # fmt: skip
        found[f"{name} of all"] = lambda x, y, t, name=name: _first(getattr(torch, name)(x))
    activations = """
        celu elu gelu glu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish
        relu6 rrelu silu softplus softshrink softsign tanhshrink threshold
        """
    for name in activations.split():
        if name == "threshold":
            found[name] = lambda x, y, t: F.threshold(x, 0.1, 0.2)
        elif name == "rrelu":
            found[name] = lambda x, y, t: F.rrelu(x, training=True)
        else:
            found[name] = lambda x, y, t, name=name: getattr(F, name)(x)
    for smoothing in (0.0, 0.1):
        for weight in (None, W):
            for reduction in ("mean", "sum", "none"):
                name = f"cross_entropy {reduction}{' weighted' * (weight is not None)}"
                name += " smoothed" * (smoothing > 0)
                found[name] = lambda x, y, t, s=smoothing, w=weight, r=reduction: F.cross_entropy(
                    x, t, weight=w, label_smoothing=s, reduction=r
                )
    found |= {
        "masked_fill by a number": lambda x, y, t: x.masked_fill(y > 1, 0.5),
        "masked_fill by a tensor": lambda x, y, t: x.masked_fill(y > 1, x[0, 0]),
        "masked_fill of a constant": lambda x, y, t: y.masked_fill(y > 1, x[0, 0]),
        "masked_scatter": lambda x, y, t: y.masked_scatter(y > 1, x),
        "index_put": lambda x, y, t: y.index_put((t[:3] % 6,), x[:3]),
        "index_add": lambda x, y, t: y.index_add(0, t[:3] % 6, x[:3]),
        "scatter_add": lambda x, y, t: y.scatter_add(0, t[None, :] % 6, x[:1, :6]),
        "gather": lambda x, y, t: x.gather(1, t[:, None]),
        "index_select": lambda x, y, t: x.index_select(1, t),
        "take_along_dim": lambda x, y, t: x.take_along_dim(t[:, None], 1),
        "roll": lambda x, y, t: x.roll(2, 1),
        "flip": lambda x, y, t: x.flip(0),
        "pad": lambda x, y, t: F.pad(x, (1, 2)),
        "matmul": lambda x, y, t: x @ y.t(),
        "einsum": lambda x, y, t: torch.einsum("ij,kj->ik", x, y),
        "cdist": lambda x, y, t: torch.cdist(x, y),
        "pairwise_distance": lambda x, y, t: F.pairwise_distance(x, y),
        "cosine_similarity": lambda x, y, t: F.cosine_similarity(x, y),
        "normalize": lambda x, y, t: F.normalize(x),
        "layer_norm": lambda x, y, t: F.layer_norm(x, (8,)),
        "group_norm": lambda x, y, t: F.group_norm(x, 2),
        "batch_norm": lambda x, y, t: F.batch_norm(x, None, None, training=True),
        "dropout": lambda x, y, t: F.dropout(x, 0.3),
        "embedding": lambda x, y, t: F.embedding(t, x.t(), padding_idx=0),
        "embedding_bag": lambda x, y, t: F.embedding_bag(t.view(2, 3), x.t()),
        "conv1d": lambda x, y, t: F.conv1d(x[:, None], y[:2, None, :3]),
        "conv2d": lambda x, y, t: F.conv2d(x.view(6, 1, 2, 4), y.view(-1)[:4].view(1, 1, 2, 2)),
        "conv_transpose1d": lambda x, y, t: F.conv_transpose1d(x[:, None], y[:1, None, :3]),
        "max_pool1d": lambda x, y, t: F.max_pool1d(x[:, None], 2),
        "max_pool1d without gradients": lambda x, y, t: F.max_pool1d(y[:, None], 2),
        "max_pool2d": lambda x, y, t: F.max_pool2d(x.view(6, 1, 2, 4), 2),
        "avg_pool2d": lambda x, y, t: F.avg_pool2d(x.view(6, 1, 2, 4), 2),
        "adaptive_max_pool1d": lambda x, y, t: F.adaptive_max_pool1d(x[:, None], 3),
        "adaptive_avg_pool2d": lambda x, y, t: F.adaptive_avg_pool2d(x.view(6, 1, 2, 4), 1),
        "interpolate": lambda x, y, t: F.interpolate(x[:, None], scale_factor=2.0, mode="linear"),
        "attention": lambda x, y, t: F.scaled_dot_product_attention(
            x.view(1, 6, 8), y.view(1, 6, 8), x.view(1, 6, 8)
        ),
        "linalg.inv": lambda x, y, t: torch.linalg.inv(x[:6, :6]),
        "linalg.solve": lambda x, y, t: torch.linalg.solve(x[:6, :6], y),
        "linalg.det": lambda x, y, t: torch.linalg.det(x[:6, :6]),
        "linalg.slogdet": lambda x, y, t: torch.linalg.slogdet(x[:6, :6]).logabsdet,
        "linalg.svdvals": lambda x, y, t: torch.linalg.svdvals(x),
        "linalg.norm": lambda x, y, t: torch.linalg.norm(x),
        "mse_loss": lambda x, y, t: F.mse_loss(x, y),
        "l1_loss": lambda x, y, t: F.l1_loss(x, y),
        "smooth_l1_loss": lambda x, y, t: F.smooth_l1_loss(x, y),
        "huber_loss": lambda x, y, t: F.huber_loss(x, y),
        "bce_with_logits": lambda x, y, t: F.binary_cross_entropy_with_logits(
            x, (y > 0).float(), pos_weight=W
        ),
        "bce": lambda x, y, t: F.binary_cross_entropy(x.sigmoid(), (y > 0).float()),
        "nll_loss": lambda x, y, t: F.nll_loss(x.log_softmax(1), t, weight=W),
        "kl_div": lambda x, y, t: F.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean"),
        "poisson_nll_loss": lambda x, y, t: F.poisson_nll_loss(x, y.abs()),
        "gaussian_nll_loss": lambda x, y, t: F.gaussian_nll_loss(x, y, torch.ones_like(y)),
        "soft_margin_loss": lambda x, y, t: F.soft_margin_loss(x, y.sign()),
        "multi_margin_loss": lambda x, y, t: F.multi_margin_loss(x, t),
        "multilabel_margin_loss": lambda x, y, t: F.multilabel_soft_margin_loss(x, (y > 0).float()),
        "margin_ranking_loss": lambda x, y, t: F.margin_ranking_loss(x, y, y.sign()),
        "hinge_embedding_loss": lambda x, y, t: F.hinge_embedding_loss(x, y.sign()),
        "triplet_margin_loss": lambda x, y, t: F.triplet_margin_loss(x, y, x.flip(0)),
        "cosine_embedding_loss": lambda x, y, t: F.cosine_embedding_loss(x, y, torch.ones(6)),
        "log_softmax": lambda x, y, t: F.log_softmax(x, 1),
        "clamp": lambda x, y, t: x.clamp(-0.5, 0.5),
        "clamp by tensors": lambda x, y, t: x.clamp(y - 1, y + 1),
        "cat": lambda x, y, t: torch.cat([x, y]),
        "stack": lambda x, y, t: torch.stack([x, y]),
        "split": lambda x, y, t: torch.cat(x.split(3, 1)[::-1], 1),
        "unfold": lambda x, y, t: x.unfold(1, 3, 2),
        "diff": lambda x, y, t: x.diff(),
        "trapezoid": lambda x, y, t: torch.trapezoid(x),
        "fft": lambda x, y, t: torch.fft.rfft(x).abs(),
        "tril": lambda x, y, t: x.tril(),
        "repeat_interleave": lambda x, y, t: x.repeat_interleave(2, 1),
        "clip_grad_norm": lambda x, y, t: torch._foreach_norm([x])[0],
    }  # fmt: skip
    return found


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, tuple) else value


def _of_rows(name: str, x: Any) -> Any:
    if name in ("topk", "kthvalue"):
        return getattr(torch, name)(x, 3, 1)[0]
    return _first(getattr(torch, name)(x, 1))


def inputs() -> tuple[Any, Any, Any]:
    """Return harmless data: no zeros, no equal numbers, no missing labels."""
    torch.manual_seed(0)
    x = (torch.rand(6, 8) * 0.8 + 0.1).requires_grad_()
    return x, torch.rand(6, 8) * 3 - 1, torch.tensor([1, 3, 2, 7, 5, 4])


def differing(function: Case) -> str | None:
    """Return how the operators of a function differ while they are recorded; None: they do not."""

    def run() -> None:
        x, y, labels = inputs()
        value = function(x, y, labels)
        if value.requires_grad:
            value.float().sum().backward()

    run()  # what is made once
    with Witness() as witness:
        run()
    witness.unknown = None  # whether it was reviewed is another question
    recording = Recording([])
    with recording:
        run()
    return find_difference(leaves_of(recording), witness)


def found() -> list[str]:
    """Return the names of the functions whose operators differ, with the first difference."""
    lines = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, function in sorted(cases().items()):
            how = differing(function)
            if how is not None:
                lines.append(f"{name}: {how}")
    return lines


def golden() -> Path:
    """Return the file for the installed version of PyTorch, by its first two numbers."""
    return FOLDER / f"torch-{'.'.join(torch.__version__.split('.')[:2])}.txt"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    golden().write_text("\n".join(found()) + "\n")
    print(f"{golden().name} is written")
