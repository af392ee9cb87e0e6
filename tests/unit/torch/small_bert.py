"""A small BERT, batches and a tokenizer for the tests of `cerebro.torch.from_transformers`."""

from __future__ import annotations

import torch
import transformers

from cerebro.machine import generators
from cerebro.torch import from_transformers

ROWS, LONGEST = 6, 9


def make_batches(seed, count=4):
    """Batches of a ragged column, padded with zeros, as Cerebro's loader makes them."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for number in range(count):
        lengths = torch.randint(3, LONGEST - number, (ROWS,), generator=generator)
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        ids = torch.randint(5, 20, mask.shape, generator=generator) * mask
        labels = torch.randint(0, 3, (ROWS,), generator=generator)
        batches.append({"input_ids": ids, "input_ids_mask": mask, "label": labels})
    return batches


TRAIN, VALID = make_batches(1), make_batches(2)
SMALL = {
    "vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 8, "max_position_embeddings": 16,
}  # fmt: skip


def make_bert(kind="BertForSequenceClassification"):
    config = transformers.BertConfig(num_labels=3, **SMALL)
    return getattr(transformers, kind)(config)


def build(model=None, **options):
    model = make_bert() if model is None else model
    parameters = [item for item in model.parameters() if item.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return from_transformers(model, optimizer=optimizer, scheduler=scheduler, **options)


def given_to_hugging_face(batch):
    return {
        "input_ids": batch["input_ids"],
        "attention_mask": batch["input_ids_mask"].long(),
        "labels": batch["label"],
    }


def build_seeded(*arguments, **options):
    generators.seed_all(3, True)
    return build(*arguments, **options)


def rates_of_updates(model):
    """Return a list that receives the learning rate of each update of the model."""
    rates = []
    optimizer = model._optimizers[0]
    optimizer.register_step_pre_hook(lambda *_: rates.append(optimizer.param_groups[0]["lr"]))
    return rates


def tokenizer():
    from tokenizers import Tokenizer, models

    words = ["[PAD]", "[MASK]", "[CLS]", "[SEP]", "[UNK]", *map(str, range(15))]
    model = models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(model),
        pad_token="[PAD]",
        mask_token="[MASK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        unk_token="[UNK]",
    )


def assert_same_nets(one, two):
    for name, value in one.net.state_dict().items():
        assert torch.equal(two.net.state_dict()[name], value), name
