"""A small BERT with LoRA adapters: which of two words does a sequence contain more often?

    python examples/transformers_lora.py

The model is made from a configuration, so nothing is downloaded; its base stays frozen, and only
the adapters and the classifier are trained and moved. All trials share the base. Sequences have
different lengths, and a data collator pads them. Afterwards the best trial is trained once more,
and its states are compared.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    get_linear_schedule_with_warmup,
)

import cerebro

WORDS, LONGEST = 50, 24


def make_data(folder: str) -> cerebro.Dataset:
    """Write 600 sequences of 8 to 24 numbers; the label compares the counts of 10 and 11."""
    random = np.random.default_rng(0)
    texts, labels = [], []
    while len(texts) < 600:
        text = random.integers(1, WORDS, random.integers(8, LONGEST + 1))
        text = np.where(text > 30, random.integers(10, 12, len(text)), text)
        ten, eleven = (text == 10).sum(), (text == 11).sum()
        if ten != eleven:
            texts.append(text.astype("int64"))
            labels.append(int(ten > eleven))
    columns = {"input_ids": texts, "label": np.array(labels)}
    return cerebro.shard(columns, folder, shards=4, exist_ok=True, progress=False)


def pad(rows):
    """Pad a batch of rows: as `DataCollatorWithPadding`, but without a tokenizer."""
    longest = max(len(row["input_ids"]) for row in rows)
    ids = [row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows]
    return {
        "input_ids": torch.tensor(ids),
        "attention_mask": (torch.tensor(ids) != 0).long(),
        "labels": torch.tensor([row["label"] for row in rows]),
    }


def compute_metrics(evaluated):
    logits, labels = evaluated
    return {"accuracy": (logits.argmax(-1) == labels).mean()}


def make_base():
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=WORDS,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=LONGEST,
        )
    )


def build(config, info):
    base = info.shared("bert", make_base)
    adapters = LoraConfig(task_type="SEQ_CLS", r=config["rank"], lora_alpha=16, lora_dropout=0.1)
    model = get_peft_model(base, adapters)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    return cerebro.torch.from_transformers(
        model,
        optimizers=(
            optimizer,
            get_linear_schedule_with_warmup(optimizer, 10, info.total_steps),
        ),
        data_collator=pad,
        compute_metrics=compute_metrics,
        state="trainable",
    )


SPACE = {"rank": [4, 16], "lr": cerebro.loguniform(1e-3, 1e-1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="data/sequences")
    parser.add_argument("--run", help="the run's folder (runs/<time>)")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--trials", type=int, default=4)
    parser.add_argument("--workers", type=int)
    options = parser.parse_args()

    train, valid = make_data(options.data).split(0.8, 0.2)
    result = cerebro.search(
        build,
        SPACE,
        train,
        epochs=options.epochs,
        validation=valid,
        n_trials=options.trials,
        metric="accuracy",
        batch_size=32,
        workers=options.workers,
        run=options.run,
    )
    print(result.summary())
    print(cerebro.replay(result, result.best))


if __name__ == "__main__":
    main()
