"""cerebro.torch.from_transformers takes the arguments of a Trainer, and trains what it trains."""

from __future__ import annotations

import pytest

import cerebro._core as _core
from cerebro.errors import InputError
from cerebro.machine import generators

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from small_bert import (  # noqa: E402
    ROWS,
    TRAIN,
    assert_same_nets,
    build_seeded,
    given_to_hugging_face,
    make_bert,
    rates_of_updates,
    tokenizer,
)  # fmt: skip

from cerebro.torch import from_transformers  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


def make_arguments(**options):
    return transformers.TrainingArguments(
        report_to="none", use_cpu=True, disable_tqdm=True, save_strategy="no", **options
    )


class Scheduled:
    """What `bind_info` reads of a trial: two epochs of the batches."""

    epochs, steps, steps_per_epoch, data = 2, None, len(TRAIN), None
    seed, trial, device = 0, 0, "cpu"


def weighted_loss(outputs, labels, num_items_in_batch=None):
    entropy = torch.nn.functional.cross_entropy
    return entropy(outputs["logits"], labels, reduction="sum") / num_items_in_batch


OPTIONS = {
    "defaults": {},
    "adamw": {
        "learning_rate": 0.02, "weight_decay": 0.1, "adam_beta1": 0.8, "adam_epsilon": 1e-6,
        "optim": "adamw_torch", "lr_scheduler_type": "cosine", "warmup_steps": 3,
        "max_grad_norm": 0.1,
    },
    "adafactor": {"optim": "adafactor", "learning_rate": 0.01, "lr_scheduler_type": "constant"},
    "smoothing": {"label_smoothing_factor": 0.2, "learning_rate": 0.01},
    "checkpointing": {"gradient_checkpointing": True, "learning_rate": 0.01},
    "bf16": {"bf16": True, "learning_rate": 0.01, "max_grad_norm": 0.0},
    "own loss": {"learning_rate": 0.01},
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_arguments_train_what_the_trainer_trains(tmp_path, name):
    pytest.importorskip("accelerate")
    options = dict(OPTIONS[name], output_dir=str(tmp_path), num_train_epochs=2)
    own = {"compute_loss_func": weighted_loss} if name == "own loss" else {}

    class Ordered(transformers.Trainer):
        def get_train_dataloader(self):
            return [given_to_hugging_face(batch) for batch in TRAIN]

    generators.seed_all(3, True)
    model = from_transformers(make_bert(), make_arguments(**options), **own)
    model.bind_info(Scheduled)
    generators.seed_all(4, True)
    rates = rates_of_updates(model)
    for _ in range(2):
        for batch in TRAIN:
            model.train_batch(batch)

    generators.seed_all(3, True)
    net = make_bert()
    arguments = make_arguments(logging_steps=1, **options)
    trainer = Ordered(net, arguments, train_dataset=TRAIN, **own)
    keep = transformers.TrainerCallback()
    keep.on_train_begin = lambda *given, **named: generators.seed_all(4, True)
    trainer.add_callback(keep)
    trainer.train()
    theirs = [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]
    assert rates == pytest.approx(theirs)
    for key, value in net.state_dict().items():
        assert torch.equal(model.net.state_dict()[key], value), key


def test_the_schedule_of_arguments_survives_a_hop():
    """It is made by `bind_info`, as long as the trial's updates; it is a part of states."""
    found = []
    for hops in (False, True):
        model = build_from_arguments(gradient_accumulation_steps=2, lr_scheduler_type="polynomial")
        rates = rates_of_updates(model)
        generators.seed_all(4, True)
        for _ in range(2):
            for batch in TRAIN:
                model.train_batch(batch)
            model.end_unit()
            if hops:
                saved = generators.capture(True)
                carried = _core.unpack_state(_core.pack_state(model.state_dict()), "torch")
                model = build_from_arguments(
                    gradient_accumulation_steps=2, lr_scheduler_type="polynomial"
                )
                model.load_state_dict(carried)
                generators.restore(saved)
        assert model._schedulers[0].last_epoch == 4
        assert model._optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-7)  # its end
        assert hops or len(rates) == 4
        found.append(model)
    assert_same_nets(*found)


def build_from_arguments(**options):
    generators.seed_all(3, True)
    model = from_transformers(make_bert(), make_arguments(output_dir="x", **options))
    model.bind_info(Scheduled)
    return model


def test_adapters_train_with_arguments():
    peft = pytest.importorskip("peft")
    adapters = peft.LoraConfig(task_type="SEQ_CLS", r=2)
    adapted = peft.get_peft_model(make_bert(), adapters)
    before = {name: value.clone() for name, value in adapted.state_dict().items()}
    model = from_transformers(adapted, make_arguments(output_dir="x"), state="trainable")
    model.bind_info(Scheduled)
    model.train_batch(TRAIN[0])
    after = adapted.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and all("lora" in name or "classifier" in name for name in changed)


def test_a_given_pair_goes_before_the_arguments():
    net = make_bert()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    arguments = make_arguments(output_dir="x", learning_rate=0.1)
    model = from_transformers(net, arguments, optimizers=(optimizer, None))
    model.bind_info(Scheduled)
    assert model._optimizers == (optimizer,) and model._schedulers[0].base_lrs == [0.5]
    assert from_transformers(net, optimizers=(optimizer, scheduler))._schedulers == (scheduler,)
    of_class = from_transformers(
        net, arguments, optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 0.2, "momentum": 0.5})
    )
    assert of_class._optimizers[0].param_groups[0]["momentum"] == 0.5


def test_a_tokenizer_pads_and_columns_that_no_model_takes_do_not_reach_it():
    more = [{**batch, "unread": batch["input_ids"] + 7} for batch in TRAIN]
    seen = []

    def collate(rows):
        seen.extend(rows)
        return transformers.DataCollatorWithPadding(tokenizer())(rows)

    plain = build_seeded()
    with_tokenizer = build_seeded(processing_class=tokenizer())
    generators.seed_all(3, True)
    removing = from_transformers(make_bert(), make_arguments(output_dir="x"), collate)
    expected = plain.evaluate(TRAIN)
    assert with_tokenizer.evaluate(TRAIN) == expected == removing.evaluate(more)
    assert seen and all(set(row) == {"input_ids", "label"} for row in seen)
    keeping = make_arguments(output_dir="x", remove_unused_columns=False)
    seen.clear()
    pads = lambda rows: seen.extend(rows) or {"input_ids": torch.zeros(ROWS, 2).long()}  # noqa: E731
    from_transformers(make_bert(), keeping, pads).predict_batch(more[0])
    assert "unread" in seen[0]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_steps": 5}, "max_steps=5: search.. takes epochs="),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0: change the model in build"),
        ({"dataloader_drop_last": True}, "dataloader_drop_last=True: search.. takes drop_last="),
        ({"batch_eval_metrics": True}, "batch_eval_metrics=True: compute_metrics gets"),
        (
            {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch"},
            "give optimizers=.*scheduler_step='metric'",
        ),
        ({"optim": "lomo"}, "optim='lomo' needs a special training loop"),
    ],
)
def test_arguments_that_would_train_otherwise_are_refused(options, text):
    with pytest.raises(InputError, match=text):
        from_transformers(make_bert(), make_arguments(output_dir="x", **options))


def test_arguments_of_the_search_are_named_once():
    options = {"num_train_epochs": 5, "per_device_train_batch_size": 4, "logging_steps": 7}
    text = (
        r"not used are per_device_train_batch_size, num_train_epochs, logging_steps.*: "
        r"search\(\) takes batch_size=, epochs="
    )
    with pytest.warns(UserWarning, match=text):
        from_transformers(make_bert(), make_arguments(output_dir="x", **options))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, r"give args=TrainingArguments\(...\) or optimizers="),
        ({"args": 3}, "args must be transformers.TrainingArguments, not 3"),
        ({"optimizers": 3}, r"optimizers must be \(optimizer, scheduler\), not 3"),
        ({"optimizers": (1, None), "optimizer": 1}, "optimizers has the optimizer: leave out"),
        ({"compute_loss_func": 3}, "compute_loss_func must be callable"),
        ({"optimizer_cls_and_kwargs": (1, {})}, "optimizer_cls_and_kwargs needs args="),
        ({"tokenizer": 1}, "takes processing_class=, not tokenizer="),
        ({"train_dataset": 1}, "train_dataset=: search.. takes the data"),
        ({"eval_dataset": 1}, "eval_dataset=: search.. takes the data"),
        ({"callbacks": []}, "callbacks=: search.. takes callbacks="),
        ({"model_init": 1}, "model_init=: build makes the model"),
    ],
)
def test_wrong_arguments_are_named(options, text):
    with pytest.raises((InputError, TypeError), match=text):
        from_transformers(make_bert(), **options)


def test_settings_are_given_once():
    arguments = make_arguments(output_dir="x")
    with pytest.raises(InputError, match="leave out clip_norm, accumulate and amp"):
        from_transformers(make_bert(), arguments, accumulate=2)
    with pytest.raises(InputError, match="leave out scheduler_step"):
        from_transformers(make_bert(), arguments, scheduler_step="epoch")
    with pytest.raises(InputError, match=r"the schedule of args.*bind_info"):
        from_transformers(make_bert(), arguments).train_batch(TRAIN[0])
