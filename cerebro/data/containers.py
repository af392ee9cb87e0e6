"""Data sets inside of what programs hold: a DataModule, a dict of splits, a DataLoader.

A search makes its own batches in its own order, so only the data sets are taken. What else would
change the rows that a model sees, such as a sampler with weights, is refused by name.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from cerebro.data.manifest import FILE_NAME
from cerebro.data.sources.image_folders import holds_class_folders
from cerebro.data.sources.loaders import dataset_of, is_loader
from cerebro.errors import InputError
from cerebro.machine.files import expand_path
from cerebro.model import has_base

LIGHTNING = ("lightning", "pytorch_lightning")
VALIDATION_SPLITS = ("validation", "valid", "val", "dev")
TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
"""Methods of a DataModule that change batches on their way to the model."""

Unpacked = tuple[Any, Any, str]
"""Training data, validation data, and a sentence about what is not used."""


def is_container(value: Any) -> bool:
    """Return whether a value is one of the containers of this module, or a folder of images."""
    return is_loader(value) or _is_module(value) or _is_splits(value) or is_image_folder(value)


def is_image_folder(value: Any) -> bool:
    """Return whether a value is the path of a folder with class folders of images."""
    if not isinstance(value, (str, os.PathLike)):
        return False
    folder = Path(expand_path(os.fspath(value)))
    return folder.is_dir() and not (folder / FILE_NAME).exists() and holds_class_folders(folder)


def unpack(data: Any, validation: Any) -> Unpacked:
    """Return the data sets in the arguments of a search; other arguments as they are.

    A DataModule and a dict of splits also have validation data, unless `validation` is given. Raise
    InputError if there is nothing to train on, or something that a search cannot honour.
    """
    remarks = []
    if _is_module(data):
        data, validation, remark = _unpack_module(data, validation)
        remarks.append(remark)
    elif _is_splits(data):
        data, validation, remark = _unpack_splits(data, validation)
        remarks.append(remark)
    if is_loader(data):
        size = getattr(data.batch_sampler, "batch_size", None)
        remarks.append(
            f"the DataLoader's dataset is read; its batch_size={size} and its order are "
            "not used: search() takes batch_size=, and shuffles all rows in each epoch"
        )
        data = dataset_of(data)
    if is_loader(validation):
        validation = dataset_of(validation)
    return data, validation, "; ".join(remarks)


def unpack_one(source: Any) -> tuple[Any, str]:
    """Return the data set to write of a source, and a sentence about what is not written."""
    if isinstance(source, (str, os.PathLike)):
        return source, ""
    data, other, remark = unpack(source, None)
    if other is not None:
        remark += "; its validation data is not written: search() reads both"
    return data, remark


def _is_module(value: Any) -> bool:
    return has_base(value, "LightningDataModule", *LIGHTNING)


def _unpack_module(module: Any, validation: Any) -> Unpacked:
    name = type(module).__name__
    for hook in TRANSFER_HOOKS:
        if _defines(module, hook):
            raise InputError(
                f"{name} defines {hook}, which would not be called: do in the dataset what is done "
                "for each row, and in the LightningModule what needs a batch; then remove it"
            )
    try:
        return _read_module(name, module, validation)
    except AttributeError as error:
        if not str(error).startswith("'NoneType' object") or getattr(module, "trainer", None):
            raise
        raise InputError(
            f"{name} reads {error.name!r} of None, and a search has no Trainer: if it is "
            "self.trainer, give the DataModule the value as an argument"
        ) from error


def _read_module(name: str, module: Any, validation: Any) -> Unpacked:
    module.prepare_data()
    module.setup("fit")
    used = "training data"
    data = _one_loader(f"{name}.train_dataloader()", module.train_dataloader())
    if validation is None and _defines(module, "val_dataloader"):
        loaders = module.val_dataloader()
        if loaders is not None and not (isinstance(loaders, (list, tuple)) and not loaders):
            validation = _one_loader(f"{name}.val_dataloader()", loaders)
            used = "training and validation data"
    return data, validation, f"{name}: its {used} is used"


def _defines(module: Any, name: str) -> bool:
    # Lightning's own methods raise an error; `from_datasets` sets those of the instance.
    if name in vars(module):
        return True
    defined = next(kind for kind in type(module).__mro__ if name in vars(kind))
    return defined.__module__.partition(".")[0] not in LIGHTNING


def _one_loader(what: str, loader: Any) -> Any:
    if isinstance(loader, (list, tuple)) and len(loader) == 1:
        loader = loader[0]
    if not is_loader(loader):
        raise InputError(
            f"{what} returned a {type(loader).__name__}, not one DataLoader: give search() the "
            "data sets, data and validation="
        )
    return loader


def _is_splits(value: Any) -> bool:
    return isinstance(value, dict) and type(value).__module__.partition(".")[0] == "datasets"


def _unpack_splits(splits: Any, validation: Any) -> Unpacked:
    if "train" not in splits:
        raise InputError(
            f"the dataset has the splits {', '.join(splits)}, none of which is 'train': give one "
            f"of them, such as dataset[{next(iter(splits))!r}]"
        )
    used = {"train": "trains"}
    if isinstance(validation, str) and validation in splits:
        used[validation], validation = "validates", splits[validation]
    elif validation is None:
        for name in VALIDATION_SPLITS:
            if name in splits:
                used[name], validation = "validates", splits[name]
                break
    unused = [f"{name!r} is not used" for name in splits if name not in used]
    told = [f"{name!r} {verb}" for name, verb in used.items()] + unused
    return splits["train"], validation, f"{type(splits).__name__}: {', '.join(told)}"
