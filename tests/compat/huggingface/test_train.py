"""Training our models with transformers: losses, gradient checkpointing, the Trainer."""

import pytest
import torch
from tiny_transformers import COUNT, hf, llama, ours, tokens, transformers
from torch.nn import functional as F
from torch.testing import assert_close

import polyhead as ph


def make(**changes):
    return ours(outputs=ph.Logits(COUNT, tied=True), **changes).train()


def test_the_loss_is_that_of_the_next_tokens():
    model, ids = make(), tokens(2, 6)
    labels = ids.clone()
    labels[0, :3] = -100  # not scored
    out = model(ids, labels=labels)
    targets = labels[:, 1:].flatten()
    losses = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), targets, reduction="none", ignore_index=-100)
    assert_close(out.loss, losses.sum() / (targets != -100).sum())
    assert_close(model(ids, labels=labels, num_items_in_batch=40).loss, losses.sum() / 40)
    assert_close(model(ids, labels=labels, return_dict=False)[0], out.loss)
    model.loss_function = lambda logits, labels, vocab_size, **_: logits.sum() * 0 + vocab_size
    assert model(ids, labels=labels).loss == COUNT


@pytest.mark.parametrize("options", [{}, {"num_items_in_batch": 0}, {"num_items_in_batch": 8}, {"ignore_index": 0}])
def test_a_batch_without_labels_adds_nothing(options):
    """A mean over no label is 0 / 0, and one such micro-batch made the loss of a whole step NaN."""
    model, ids = make(), tokens(2, 6)
    labels = torch.full_like(ids, options.get("ignore_index", -100))
    labels[:, 0] = ids[:, 0]  # of no next token
    loss = model(ids, labels=labels, **options).loss
    loss.backward()
    assert loss == 0
    assert all((p.grad == 0).all() for p in model.parameters() if p.grad is not None)


def test_nan_is_not_hidden():
    model, ids = make(), tokens(2, 6)
    with torch.no_grad():
        next(model.parameters()).fill_(torch.nan)
    assert model(ids, labels=ids).loss.isnan()


def test_the_balance_of_experts_is_part_of_the_loss_in_training_only():
    """In accumulated batches it counts once."""
    model, ids = make(feedforward=ph.Experts(2, 1, 8, balance=3.0)), tokens(3, 6)
    loss, added = model(ids, labels=ids).loss, model.model.auxiliary_loss()
    assert added > 1
    assert_close(loss, model.eval()(ids, labels=ids).loss + added)
    model.train()
    labels, added, loss = ids.clone(), 0, 0
    labels[0, :3] = -100
    for row, row_labels in zip(ids.split(1), labels.split(1), strict=True):
        loss += model(row, labels=row_labels, num_items_in_batch=13).loss
        added += model.model.auxiliary_loss() * (row_labels[:, 1:] != -100).sum() / 13
    assert_close(loss, added + model.eval()(ids, labels=labels, num_items_in_batch=13).loss)


def trainer_of(model, data, folder, **options):
    fields = {"max_steps": 1, "learning_rate": 0.0, "max_grad_norm": 1e9, "save_strategy": "no", "logging_steps": 1}
    fields |= {"report_to": [], "disable_tqdm": True, "use_cpu": True, "seed": 0}
    arguments = transformers.TrainingArguments(output_dir=folder, **{**fields, **options})
    return transformers.Trainer(model, arguments, train_dataset=data, eval_dataset=data)


def test_the_trainer_accumulates_the_loss(tmp_path):
    """Of rows that have different numbers of labels."""
    pytest.importorskip("accelerate")
    model, ids = make(), tokens(4, 6)
    data = []
    for i, row in enumerate(ids):
        data.append({"input_ids": row, "labels": row.where(torch.arange(6) > i, -100)})
    results = []
    for batch_size, steps in ((4, 1), (1, 4)):
        sizes = {"per_device_train_batch_size": batch_size, "gradient_accumulation_steps": steps}
        trainer = trainer_of(model, data, tmp_path, **sizes)
        trainer.train()
        row = next(row for row in trainer.state.log_history if "loss" in row)
        results.append(torch.tensor([float(row["loss"]), float(row["grad_norm"])]))
    assert_close(*results, rtol=1e-4, atol=1e-4)


def test_the_trainer_smooths_the_labels_of_next_tokens(tmp_path):
    """Also of a model whose heads were swapped.  It keeps the columns that the model reads."""
    pytest.importorskip("accelerate")
    ids = tokens(2, 6)
    for model in (make(), hf.swap_heads(llama(torch.float32), [0], ph.Hyla(4))):
        trainer = trainer_of(model.eval(), None, tmp_path, label_smoothing_factor=0.1)
        loss, logits = trainer.compute_loss(model, {"input_ids": ids, "labels": ids}), model(ids).logits
        expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), label_smoothing=0.1)
        assert_close(loss, expected)
        trainer._set_signature_columns_if_needed()
        assert {"position_ids", "attention_mask", "labels"} <= set(trainer._signature_columns)


def test_gradient_checkpointing():
    """That it computes again and changes no gradient is in tests/models."""
    model = make()
    with pytest.warns(FutureWarning, match="activation_checkpointing_enable"):
        model.gradient_checkpointing_enable()
    assert model.is_activation_checkpointing
    assert model.model.config.checkpoint
    model.activation_checkpointing_disable()
    assert not model.model.config.checkpoint
    assert make(checkpoint=True).is_activation_checkpointing
