"""cerebro.torch.from_transformers: the losses and weights of the Trainer, collators and PEFT."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import cerebro._core as _core
from cerebro.errors import InputError
from cerebro.machine import generators
from cerebro.model import check_model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from small_bert import (  # noqa: E402
    ROWS,
    SMALL,
    TRAIN,
    VALID,
    assert_same_nets,
    build,
    build_seeded,
    given_to_hugging_face,
    make_bert,
    rates_of_updates,
    tokenizer,
)  # fmt: skip

from cerebro.torch import from_transformers  # noqa: E402


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def test_steps_are_not_recorded():
    model = build()
    for _ in range(4):
        model.begin_recorded_unit(training=True)
        for batch in TRAIN * 4:
            model.train_batch(batch)
        assert model.end_recorded_unit(training=True) is None
    assert model.held_bytes == 0


def test_small_integers_are_widened_without_a_collator():
    """The datasets library stores token types as int8, which no embedding takes."""
    batch = {name: torch.as_tensor(np.asarray(value)) for name, value in TRAIN[0].items()}
    batch = {name: value for name, value in batch.items() if not name.endswith("_length")}
    types = torch.zeros_like(batch["input_ids"])
    losses = []
    for kind in (torch.int64, torch.int8):
        generators.seed_all(4, True)
        bert = make_bert()
        optimizer = torch.optim.SGD(bert.parameters(), lr=0.1)
        model = from_transformers(model=bert, optimizer=optimizer)
        losses.append(model.train_batch({**batch, "token_type_ids": types.to(kind)})["loss"])
    assert losses[0] == losses[1]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_losses_and_weights_are_those_of_the_trainer(tmp_path, accumulate):
    pytest.importorskip("accelerate")

    class Ordered(transformers.Trainer):
        def get_train_dataloader(self):
            return [given_to_hugging_face(batch) for batch in TRAIN]

    model = build_seeded(accumulate=accumulate)
    generators.seed_all(4, True)
    rates = rates_of_updates(model)
    losses = [float(model.train_batch(batch)["loss"]) for _ in range(2) for batch in TRAIN]
    ours = np.reshape(losses, (-1, accumulate)).mean(1)  # it logs an update's

    theirs = build_seeded()
    optimizer, scheduler = theirs._optimizers[0], theirs._schedulers[0]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        num_train_epochs=2,
        gradient_accumulation_steps=accumulate,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Ordered(theirs.net, arguments, optimizers=(optimizer, scheduler), train_dataset=TRAIN)
    trainer.model_accepts_loss_kwargs = False  # else it sums a window's losses for a BERT
    generators.seed_all(3, True)
    state = generators.capture(True)
    keep = transformers.TrainerCallback()

    def restore(*arguments, **keywords):  # the Trainer seeds the generators by itself
        generators.seed_all(4, True)

    keep.on_train_begin = restore
    trainer.add_callback(keep)
    trainer.train()
    generators.restore(state)
    updates = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["learning_rate"] for entry in updates] == pytest.approx(rates)
    logged = [entry["loss"] for entry in updates]
    assert logged == pytest.approx(ours, abs=1e-4)  # rounded by the Trainer
    for name, value in theirs.net.state_dict().items():
        assert torch.equal(model.net.state_dict()[name], value), name


@pytest.mark.parametrize(
    ("accumulate", "per_unit", "updates"), [(1, 4, 12), (2, 4, 6), (4, 12, 3), (3, 4, 6), (5, 4, 3)]
)
def test_the_schedule_is_as_long_as_the_updates(accumulate, per_unit, updates):
    """A linear schedule reaches zero after the last update, and no earlier."""

    def make():
        generators.seed_all(3, True)
        model = make_bert()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = transformers.get_linear_schedule_with_warmup(optimizer, 0, updates)
        model = from_transformers(
            model, optimizer=optimizer, scheduler=scheduler, accumulate=accumulate
        )
        return model, rates_of_updates(model)

    found = []
    for hops in (False, True):
        model, rates = make()
        generators.seed_all(4, True)
        seen = []
        for number, batch in enumerate(TRAIN * 3):
            model.train_batch(batch)
            if (number + 1) % per_unit == 0:
                model.end_unit()
                model.end_unit()  # does nothing
                if hops:
                    saved = generators.capture(True)
                    carried = _core.unpack_state(_core.pack_state(model.state_dict()), "torch")
                    seen += rates
                    model, rates = make()
                    model.load_state_dict(carried)
                    generators.restore(saved)
        found.append(model)
        assert seen + rates == pytest.approx([0.1 * (1 - n / updates) for n in range(updates)])
        assert model._optimizers[0].param_groups[0]["lr"] == 0
    assert_same_nets(*found)


def test_a_state_in_an_open_window_steps_the_schedule():
    """Taking the state makes the window's update, and its step of the schedule: no later one."""
    one, two = build_seeded(accumulate=4), build_seeded(accumulate=4)
    for model in (one, two):
        generators.seed_all(4, True)
        model.train_batch(TRAIN[0])
    saved = generators.capture(True)
    carried = _core.unpack_state(_core.pack_state(one.state_dict()), "torch")
    assert carried["scheduler"]["last_epoch"] == 1
    one = build_seeded(accumulate=4)
    one.load_state_dict(carried)
    two.end_unit()
    for model in (one, two):
        generators.restore(saved)
        for batch in TRAIN:
            model.train_batch(batch)
        assert model._schedulers[0].last_epoch == 2
    assert_same_nets(one, two)


def test_a_schedule_by_the_epoch_does_not_follow_updates():
    model = build_seeded(accumulate=2, scheduler_step="epoch")
    for batch in TRAIN[:3]:
        model.train_batch(batch)
    model.end_unit()
    assert model._schedulers[0].last_epoch == 0
    model.end_epoch(0, {})
    assert model._schedulers[0].last_epoch == 1


def test_compute_metrics_gets_all_logits_and_labels():
    seen = []

    def compute_metrics(evaluated):
        seen.append(evaluated)
        return {
            "eval_accuracy": (evaluated.predictions.argmax(-1) == evaluated.label_ids).mean(),
            "count": len(evaluated.label_ids),
        }

    model = build(compute_metrics=compute_metrics)
    found = model.evaluate(VALID)
    logits = torch.cat([model.predict_batch(batch).logits for batch in VALID])
    labels = torch.cat([batch["label"] for batch in VALID])
    assert isinstance(seen[0], transformers.EvalPrediction)
    assert np.array_equal(seen[0].predictions, logits.numpy())
    assert np.array_equal(seen[0].label_ids, labels.numpy())
    assert found["accuracy"] == float((logits.argmax(1) == labels).double().mean())
    assert found["count"] == len(labels)
    with pytest.raises(InputError, match="compute_metrics must return a dict, not 3"):
        build(compute_metrics=lambda evaluated: 3).evaluate(VALID)


def padded(parts):
    """Tensors joined along their rows, with -100 where others are longer, as in the Trainer."""
    longest = max(part.shape[1] for part in parts)
    fill = torch.nn.functional.pad
    wide = [
        fill(part, (0, 0) * (part.dim() - 2) + (0, longest - part.shape[1]), value=-100)
        for part in parts
    ]
    return torch.cat(wide).numpy()


def test_compute_metrics_gets_several_outputs_of_different_lengths():
    """Answers to questions: two logits and two labels."""
    seen = []

    def compute_metrics(evaluated):
        seen.append(evaluated)
        return {"rows": len(evaluated.predictions[0])}

    ends = {"start_positions": torch.arange(ROWS) % 2, "end_positions": torch.arange(ROWS) % 3}
    batches = [{**batch, **ends} for batch in VALID]
    assert len({batch["input_ids"].shape[1] for batch in batches}) > 1
    bert = transformers.BertForQuestionAnswering(transformers.BertConfig(num_labels=2, **SMALL))
    model = build(bert, compute_metrics=compute_metrics)
    assert model.evaluate(batches)["rows"] == ROWS * len(batches)
    outputs = [model.predict_batch(batch) for batch in batches]
    for name, found in zip(("start_logits", "end_logits"), seen[0].predictions, strict=True):
        assert np.array_equal(found, padded([output[name] for output in outputs]))
    for labels, found in zip(ends.values(), seen[0].label_ids, strict=True):
        assert np.array_equal(found, labels.repeat(len(batches)))


def test_compute_metrics_gets_no_cache_of_a_language_model():
    seen = []
    settings = {key: value for key, value in SMALL.items() if key != "max_position_embeddings"}
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(pad_token_id=0, **settings))
    pads = transformers.DataCollatorForLanguageModeling(tokenizer(), mlm=False)
    model = build(llama, data_collator=pads, compute_metrics=lambda found: seen.append(found) or {})
    batches = [{name: batch[name] for name in ("input_ids", "input_ids_mask")} for batch in VALID]
    model.evaluate(batches)
    expected = padded([model.predict_batch(batch)["logits"] for batch in batches])
    assert np.array_equal(seen[0].predictions, expected)
    assert seen[0].label_ids.shape == expected.shape[:2]


def test_a_padding_collator_makes_the_same_batches_as_the_mask():
    pads = transformers.DataCollatorWithPadding(tokenizer())
    plain, collated = build_seeded(), build_seeded(data_collator=pads)
    for model in (plain, collated):
        generators.seed_all(4, True)
        for batch in TRAIN:
            model.train_batch(batch)
    assert_same_nets(plain, collated)


def test_random_masks_use_the_trials_generators():
    """Of language modeling: the trial's generators draw them, also after a hop."""
    masks = transformers.DataCollatorForLanguageModeling(tokenizer())

    def make():
        generators.seed_all(3, True)
        return build(make_bert("BertForMaskedLM"), data_collator=masks, compute_metrics=count)

    def count(evaluated):
        assert evaluated.predictions.shape[:2] == evaluated.label_ids.shape
        return {"masked": int((evaluated.label_ids != -100).sum())}

    batches = [{name: batch[name] for name in ("input_ids", "input_ids_mask")} for batch in TRAIN]
    found = []
    for hops in (False, True):
        model = make()
        generators.seed_all(4, True)
        losses = []
        for batch in batches:
            losses.append(float(model.train_batch(batch)["loss"]))
            if hops:
                saved = generators.capture(True)
                carried = _core.unpack_state(_core.pack_state(model.state_dict()), "torch")
                model = make()
                model.load_state_dict(carried)
                generators.restore(saved)
        found.append(losses)
        assert 0 < model.evaluate(batches)["masked"] < 100
    assert found[0] == found[1] and len(set(found[0])) == len(batches)
    seeded = transformers.DataCollatorForLanguageModeling(tokenizer(), seed=1)
    with pytest.raises(InputError, match="DataCollatorForLanguageModeling has a seed"):
        build(data_collator=seeded)


def test_padded_labels_do_not_count():
    batches = [
        {
            "input_ids": batch["input_ids"],
            "input_ids_mask": batch["input_ids_mask"],
            "labels": batch["input_ids"] % 3,
            "labels_mask": batch["input_ids_mask"],
        }
        for batch in TRAIN
    ]
    model = build(make_bert("BertForTokenClassification"))
    with torch.no_grad():
        labels = (batches[0]["labels"]).masked_fill(~batches[0]["labels_mask"], -100)
        expected = model.net.eval()(
            input_ids=batches[0]["input_ids"],
            attention_mask=batches[0]["input_ids_mask"].long(),
            labels=labels,
        ).loss
    assert float(model.eval_batch(batches[0])["loss"]) == float(expected)


def test_peft_models_move_without_their_base():
    peft = pytest.importorskip("peft")

    def make():
        generators.seed_all(3, True)
        adapters = peft.LoraConfig(task_type="SEQ_CLS", r=2, lora_dropout=0.1)
        return build(peft.get_peft_model(make_bert(), adapters), state="trainable")

    found = []
    for hops in (False, True):
        model = make()
        generators.seed_all(4, True)
        for batch in TRAIN:
            model.train_batch(batch)
            if hops:
                saved = generators.capture(True)
                state = model.state_dict()
                assert state["net"] and not any(
                    "base_layer.weight" in name for name in state["net"]
                )
                carried = _core.unpack_state(_core.pack_state(state), "torch")
                model = make()
                model.load_state_dict(carried)
                generators.restore(saved)
        found.append(model)
    assert_same_nets(*found)
    assert found[0].evaluate(VALID) == found[1].evaluate(VALID)


def test_error_for_an_unconverted_model_names_from_transformers():
    with pytest.raises(InputError, match=r"has no train_batch.*cerebro\.torch\.from_transformers"):
        check_model(make_bert())


def test_inputs_may_map_columns_with_other_names():
    renamed = [
        {"text": b["input_ids"], "text_mask": b["input_ids_mask"], "kind": b["label"]}
        for b in TRAIN
    ]
    plain = build_seeded()
    other = build_seeded(inputs={"input_ids": "text", "labels": "kind"})
    assert plain.evaluate(TRAIN) == other.evaluate(renamed)
    with pytest.raises(InputError, match="none of the columns text, kind is an argument"):
        plain.evaluate(renamed)
    with pytest.raises(TypeError, match="takes data_collator=, not collator="):
        build(collator=1)
    with pytest.raises(InputError, match="model must be a model of transformers, not 3"):
        from_transformers(3, optimizer=None)


def make_mixtral():
    torch.manual_seed(2)
    small = {key: value for key, value in SMALL.items() if key != "max_position_embeddings"}
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            num_key_value_heads=1, num_local_experts=2, output_router_logits=True, pad_token_id=0,
            **small,
        )
    )  # fmt: skip


def of_a_language(batch):
    """A batch of VALID whose labels are the tokens."""
    return {**batch, "labels": batch["input_ids"], "labels_mask": batch["input_ids_mask"]}


def seen_by_metrics(evaluate):
    """Return the logits and labels that `compute_metrics` gets."""
    seen = []

    def compute_metrics(prediction):
        seen.append((prediction.predictions, prediction.label_ids))
        return {"rows": len(prediction.label_ids)}

    assert evaluate(compute_metrics)["rows"] > 0
    return seen[-1]


@pytest.mark.parametrize("preprocessed", [False, True])
def test_outputs_of_one_number_are_those_of_the_trainer(tmp_path, preprocessed):
    pytest.importorskip("accelerate")

    def preprocess(logits, labels):
        assert labels.shape == logits[1].shape[:2]
        return logits[0], logits[1].argmax(-1)

    options = {"preprocess_logits_for_metrics": preprocess} if preprocessed else {}
    batches = [of_a_language({k: v for k, v in b.items() if k != "label"}) for b in VALID]

    def ours(compute_metrics):
        model = build(make_mixtral(), compute_metrics=compute_metrics, **options)
        return model.evaluate(batches)

    class Ordered(transformers.Trainer):
        def get_eval_dataloader(self, *_):
            masks = [batch["input_ids_mask"] for batch in batches]
            return [
                {
                    "input_ids": batch["input_ids"],
                    "attention_mask": mask.long(),
                    "labels": batch["labels"].masked_fill(~mask, -100),
                }
                for batch, mask in zip(batches, masks, strict=True)
            ]

    def theirs(compute_metrics):
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), report_to="none", use_cpu=True, disable_tqdm=True
        )
        trainer = Ordered(make_mixtral(), arguments, compute_metrics=compute_metrics, **options)
        found = trainer.evaluate(eval_dataset=batches)
        return {key.removeprefix("eval_"): value for key, value in found.items()}

    (logits, labels), (expected, expected_labels) = map(seen_by_metrics, (ours, theirs))
    assert np.array_equal(labels, expected_labels)
    assert len(logits) == len(expected) and logits[0].shape == (len(VALID),)
    for mine, other in zip(logits[:2], expected[:2], strict=True):
        assert mine.shape == other.shape and np.allclose(mine, other, atol=1e-6)


def test_logits_are_kept_as_they_were_preprocessed():
    def share(prediction):
        return {"right": float((prediction.predictions == prediction.label_ids).mean())}

    seen = []

    def keep(logits, labels):
        seen.append((logits.shape, labels.shape, logits.requires_grad))
        return logits.argmax(-1)

    model = build_seeded(compute_metrics=share, preprocess_logits_for_metrics=keep)
    found = model.evaluate(VALID)
    assert seen == [((ROWS, 3), (ROWS,), False)] * len(VALID)
    right = [model.predict_batch(b).logits.argmax(-1) == b["label"] for b in VALID]
    assert found["right"] == pytest.approx(float(torch.cat(right).float().mean()))
    with pytest.raises(InputError, match="give compute_metrics="):
        build(preprocess_logits_for_metrics=keep)
    with pytest.raises(InputError, match="preprocess_logits_for_metrics must be callable"):
        build(compute_metrics=share, preprocess_logits_for_metrics=3)


class Wanting(torch.nn.Module):
    """A network that needs values which are no tensors, and tensors inside of others."""

    def __init__(self):
        super().__init__()
        self.base = torch.nn.Linear(1, 1)

    def forward(self, input_ids, return_loss=None, names=None, targets=None, none=1):
        assert return_loss is True and names == ["a", 3] and none is None
        assert isinstance(targets, list) and isinstance(targets[0], dict)
        boxes, (more, text) = targets[0]["boxes"], targets[0]["pair"]
        assert boxes.device == more.device == self.base.weight.device and text == "x"
        loss = self.base(input_ids[:, :1].float()).square().mean() + 0 * boxes.sum().to("cpu")
        return {"loss": loss}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_values_of_a_collator_are_moved_as_by_the_trainer(device):
    from cerebro.integrations.transformers import _move_to_device

    value = torch.zeros(2)
    targets = [{"boxes": value, "pair": (value, "x"), 3: None}]
    batch = {"input_ids": value, "return_loss": True, "names": ["a", 3], "targets": targets}
    moved = _move_to_device(batch, torch.device(device))
    inner = moved["targets"][0]
    tensors = (moved["input_ids"], inner["boxes"], inner["pair"][0])
    assert {each.device.type for each in tensors} == {device}
    assert (moved["return_loss"], moved["names"]) == (True, ["a", 3])
    assert type(inner["pair"]) is tuple and inner["pair"][1] == "x" and inner[3] is None


def test_a_collator_may_return_values_that_are_no_tensors():
    def collate(rows):
        value = torch.ones(2)
        return {
            "return_loss": True,
            "names": ["a", 3],
            "none": None,
            "input_ids": torch.tensor([row["input_ids"][:3] for row in rows]),
            "targets": [{"boxes": value, "pair": (value, "x")}],
        }

    network = Wanting()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    model = from_transformers(network, optimizer=optimizer, data_collator=collate)
    assert model.train_batch(TRAIN[0])["loss"] > 0
    assert model.evaluate(VALID).keys() == {"loss"}
