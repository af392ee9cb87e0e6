"""LightningModules as models: steps, hooks, logged values and optimizers, as in a Trainer."""

from __future__ import annotations

from typing import Any

from cerebro.arguments import check_optional_real, check_whole_number, explain_keywords, list_words
from cerebro.integrations.lightning.model import LightningModel
from cerebro.integrations.lightning.trainer import Options
from cerebro.model import Columns

WORDS = list_words(
    {
        "module": "model net lightning_module",
        "inputs": "batch columns",
        "gradient_clip_val": "clip_norm max_grad_norm clip_value",
        "accumulate_grad_batches": "accumulate gradient_accumulation_steps",
        "precision": "amp mixed_precision",
        "search() takes epochs=": "max_epochs epochs min_epochs max_steps",
        "search() takes callbacks=": "callbacks logger enable_progress_bar",
        "search() takes batch_size= and data": (
            "batch_size train_dataloaders datamodule val_dataloaders"
        ),
        "leave it out: search() decides it": (
            "strategy devices accelerator num_nodes trainer device deterministic "
            "num_sanity_val_steps enable_checkpointing default_root_dir"
        ),
        "the module has them: configure_optimizers": "optimizer scheduler lr",
        "the module has them: training_step and validation_step": "loss metrics step",
    }
)


@explain_keywords(WORDS)
def from_lightning(
    module: Any,
    *,
    inputs: Columns | None = None,
    forward: Columns | None = None,
    gradient_clip_val: float | None = None,
    gradient_clip_algorithm: str | None = None,
    accumulate_grad_batches: int = 1,
    precision: str = "32-true",
    state: str = "all",
) -> LightningModel:
    """Make a model from a LightningModule, without a Trainer.

    Parameters
    ----------
    module
        A ``LightningModule`` of ``lightning`` or ``pytorch_lightning``.
    inputs
        The columns of the batch that the module's steps receive. A list of columns gives a batch
        that steps unpack, ``x, y = batch``; a mapping of keys to columns gives a dict; a name gives
        that column alone. None: a dict of all columns, which steps may also unpack in the data's
        order.
    forward
        The columns passed to ``forward`` in :meth:`~cerebro.model.BaseModel.predict`, in the form
        of `inputs` of :class:`cerebro.torch.Model`. None: the first column if `inputs` is a list;
        if `inputs` is None, those named like its parameters or the only one that is no target;
        otherwise all of `inputs`. Not used if the module defines ``predict_step``.
    gradient_clip_val, gradient_clip_algorithm, accumulate_grad_batches
        As in ``lightning.Trainer``. A window of accumulated batches may cross units: its gradients
        move with the trial.
    precision
        "32-true" or "bf16-mixed".
    state
        "all", or "trainable" as in :class:`cerebro.torch.Model`.

    Returns
    -------
    LightningModel
        A model for `build` to return.

    Raises
    ------
    InputError
        The module overrides a method that a search cannot support; the message names it and a fix.
    """
    options = Options(
        check_whole_number("accumulate_grad_batches", accumulate_grad_batches, 1),
        check_optional_real("gradient_clip_val", gradient_clip_val, above=0),
        gradient_clip_algorithm,
        precision,
    )
    return LightningModel(module, inputs, forward, options, state)
