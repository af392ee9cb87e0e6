"""Text classification as in the tutorial of transformers, with Cerebro in place of the Trainer.

Two lines differ from it: ``from_transformers`` instead of ``Trainer``, and ``search`` instead of
``trainer.train()``. What the tutorial downloads is made here: reviews, tokenizer and a small BERT.
"""

from __future__ import annotations

import sys

import numpy as np
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    TrainingArguments,
)

import cerebro

GOOD, BAD = ["good", "great", "fine"], ["bad", "poor", "awful"]
WORDS = ["[PAD]", "[UNK]", *GOOD, *BAD, "the", "film", "plot", "was"]


def load_reviews(rows, seed):
    random = np.random.default_rng(seed)
    texts = [" ".join(random.choice(WORDS[2:], random.integers(3, 9))) for _ in range(rows)]
    labels = [int(sum(t.count(w) for w in GOOD) > sum(t.count(w) for w in BAD)) for t in texts]
    return Dataset.from_dict({"text": texts, "label": labels})


words = models.WordLevel({word: code for code, word in enumerate(WORDS)}, unk_token="[UNK]")
tokens = Tokenizer(words)
tokens.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=tokens, pad_token="[PAD]", unk_token="[UNK]", model_max_length=16
)


def preprocess_function(examples):
    return tokenizer(examples["text"], truncation=True)


train = load_reviews(80, 1).map(preprocess_function, batched=True)
test = load_reviews(40, 2).map(preprocess_function, batched=True)
data_collator = DataCollatorWithPadding(tokenizer=tokenizer)


def compute_metrics(eval_pred):
    predictions, labels = eval_pred
    predictions = np.argmax(predictions, axis=1)
    return {"accuracy": np.mean(predictions == labels)}


def build(config, info):
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = BertForSequenceClassification(
        BertConfig(vocab_size=len(WORDS), intermediate_size=16, **small)
    )
    training_args = TrainingArguments(
        output_dir="my_awesome_model",
        learning_rate=config["lr"],
        per_device_train_batch_size=16,
        per_device_eval_batch_size=16,
        num_train_epochs=2,
        weight_decay=0.01,
        warmup_steps=2,
        eval_strategy="epoch",
        save_strategy="epoch",
        report_to="none",
    )
    return cerebro.torch.from_transformers(
        model=model,
        args=training_args,
        processing_class=tokenizer,
        data_collator=data_collator,
        compute_metrics=compute_metrics,
    )


if __name__ == "__main__":
    result = cerebro.search(
        build,
        {"lr": [1e-3, 1e-2]},
        train,
        validation=test,
        epochs=2,
        batch_size=16,
        metric="accuracy",
        searcher="grid",
        keep="last",
        run=sys.argv[1],
    )
    print(result.summary())
