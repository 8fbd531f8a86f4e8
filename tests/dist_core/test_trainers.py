"""Trainers of others, driven by hand, end as on one process."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dist_core
from tests.support.habits import EARLIER, PAIR, RESCALED, Kit, as_trial, in_plain_pytorch, weights_of, with_a_loss
from tests.support.hugging_face import Tokens, classifier


def rows(count: int) -> TensorDataset:
    x = torch.randn(count, 10, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x @ torch.arange(10.0)[:, None] > 0).float())


def lightning_trainer(kit: Kit) -> list[float]:
    """Lightning calls optimizers with a closure. The wrapped model hides in a list, not to be registered twice."""
    import lightning.pytorch as pl

    class Classifier(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 1))
            self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.01)
            self.called = [kit.wrap(self.net, self.optimizer)]

        def configure_optimizers(self) -> Any:
            return self.optimizer

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return nn.functional.binary_cross_entropy_with_logits(self.called[0](batch[0]), batch[1])

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("loss", nn.functional.binary_cross_entropy_with_logits(self.net(batch[0]), batch[1]))

    module = Classifier()
    loader = kit.loader(rows(96), 24)
    trainer = pl.Trainer(
        max_epochs=0,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    for _ in kit.epochs(3):
        trainer.fit_loop.max_epochs = trainer.current_epoch + 1
        module.train()
        trainer.fit(module, loader, DataLoader(rows(40), 40))
    return weights_of(module.net)


def hugging_face_trainer(kit: Kit) -> list[float]:
    """It counts its own steps, and leaves the loop when it has made them all."""
    import transformers

    # Its annotations are narrower than what it takes.
    library: Any = transformers
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = library.get_cosine_schedule_with_warmup(optimizer, 3, 12)
    loader = kit.loader(Tokens(96), 24)

    class Driven(library.Trainer):  # type: ignore[misc]  # as above
        def get_train_dataloader(self) -> Any:
            return loader

    with tempfile.TemporaryDirectory() as folder:
        arguments = library.TrainingArguments(
            folder,
            num_train_epochs=1,
            per_device_train_batch_size=24,
            report_to="none",
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
            logging_strategy="no",
            label_names=["labels"],
            remove_unused_columns=False,
            seed=0,
            accelerator_config={"dispatch_batches": False},
        )
        trainer = Driven(
            kit.wrap(model, optimizer, schedule),
            arguments,
            train_dataset=Tokens(96),
            eval_dataset=Tokens(40),
            optimizers=(optimizer, schedule),
        )
        for _ in kit.epochs(3):
            trainer.train()
            assert trainer.evaluate()["eval_loss"] < 2.0
    return [*weights_of(model), float(schedule.last_epoch)]


def skorch_net(kit: Kit) -> list[float]:
    """It makes its loader anew each epoch, and calls optimizers with a closure."""
    import skorch

    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 1))
    net = skorch.NeuralNet(
        module,
        nn.BCEWithLogitsLoss,
        optimizer=torch.optim.Adam,
        lr=0.01,
        batch_size=24,
        max_epochs=1,
        train_split=None,
        verbose=0,
        iterator_train=type(kit.loader(rows(1), 1)),
    )
    net.initialize()
    net.module_ = kit.wrap(net.module_, net.optimizer_)
    for _ in kit.epochs(3):
        net.partial_fit(rows(96))
    return weights_of(module)


def ignite_engine(kit: Kit) -> list[float]:
    """It begins data again that ends before its count of batches, so a generator gives it none."""
    from ignite.engine import Engine, Events

    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    model, loader = kit.wrap(module, optimizer, schedule), kit.loader(rows(96), 24)

    def step(engine: Engine, batch: Any) -> float:
        model.train()
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    trainer = Engine(step)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: schedule.step())
    for _ in kit.epochs(3):
        trainer.state.epoch_length = None
        trainer.run((batch for batch in loader), max_epochs=1)
    return [*weights_of(module), float(schedule.get_last_lr()[0])]


def timm_step(kit: Kit) -> list[float]:
    """The step of its training script: its optimizer, clipping, schedule by epoch and moving average of the weights."""
    timm: Any = pytest.importorskip("timm")
    loss, optim, scheduler, utils = (import_module(f"timm.{part}") for part in ("loss", "optim", "scheduler", "utils"))
    torch.manual_seed(0)
    images = torch.randn(96, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    net = timm.create_model("test_vit", num_classes=2, img_size=32)
    optimizer = optim.create_optimizer_v2(net, opt="sgd", lr=0.05, momentum=0.9, weight_decay=1e-4)
    model, loader = kit.wrap(net, optimizer), kit.loader(TensorDataset(images, (images.mean((1, 2, 3)) > 0).long()), 24)
    schedule, _ = scheduler.create_scheduler_v2(optimizer, sched="cosine", num_epochs=3, warmup_epochs=1)
    average = utils.ModelEmaV3(net, decay=0.9)
    optimizer.register_step_post_hook(lambda *_: average.update(net))
    if kit.elastic:
        dist_core.register_state("average", average)
    criterion = loss.LabelSmoothingCrossEntropy(0.1)
    for epoch in kit.epochs(3):
        model.train()
        for x, y in loader:
            criterion(model(x), y).backward()
            utils.dispatch_clip_grad(timm.models.model_parameters(net), value=1.0, mode="norm")
            optimizer.step()
            optimizer.zero_grad()
        schedule.step(epoch + 1)
    return [*weights_of(net, average.module), optimizer.param_groups[0]["lr"]]


TRAINERS = pytest.mark.parametrize(
    "trains", [lightning_trainer, hugging_face_trainer, skorch_net, ignite_engine, timm_step]
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
"""Importing these libraries takes longer than most tests."""


@pytest.fixture(autouse=True)
def their_warnings() -> Iterator[None]:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("replicas", [1, PAIR, RESCALED])
@TRAINERS
def test_a_trainer_driven_by_hand_ends_as_on_one_process(trains: Any, replicas: int) -> None:
    expected = in_plain_pytorch(trains)
    for weights in as_trial(trains, replicas):
        if weights is not None:
            assert weights == pytest.approx(expected, abs=1e-4)
    assert dist_core.current_epoch() is None


@TRAINERS
def test_a_trainer_that_counts_its_steps_makes_all_of_them_after_a_loss(trains: Any) -> None:
    """It counts the step that a replica was lost in, which did not count."""
    expected = in_plain_pytorch(trains)
    survivors = with_a_loss(trains, EARLIER)
    for weights in (survivors[0], survivors[2]):
        assert weights == pytest.approx(expected, abs=1e-4)
