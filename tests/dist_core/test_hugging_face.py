"""Hugging Face's own Trainer, and the elastic one in its place: the same script, the same numbers."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset

import dist_core
from tests.support.habits import GROWN, PAIR, RESCALED, Kit, as_trial, in_plain_pytorch, weights_of, with_a_loss
from tests.support.hugging_face import Tokens, accuracy, arguments, classifier, told

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]
"""Importing these libraries takes longer than most tests, and they warn of each other."""


class Sentences(Dataset[Any]):
    """Of different lengths, the rest of each is not counted."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.words = torch.randint(0, 20, (count, 9), generator=generator)
        self.lengths = torch.randint(3, 9, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> Any:
        labels = self.words[index].clone()
        labels[self.lengths[index] :] = -100
        return {"input_ids": self.words[index], "labels": labels}


def trainer_class(kit: Kit) -> Any:
    import transformers

    from dist_core.huggingface import ElasticTrainer

    return ElasticTrainer if kit.elastic else transformers.Trainer


def language_model() -> Any:
    import transformers

    library: Any = transformers
    torch.manual_seed(0)
    return library.GPT2LMHeadModel(
        library.GPT2Config(
            vocab_size=20, n_embd=16, n_layer=1, n_head=2, n_positions=16, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        )
    )


def classification(kit: Kit) -> list[float]:
    """A model of labels, evaluated each epoch by as many samples as no number of replicas divides; the best is kept."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_class(kit)(
            classifier(),
            arguments(
                folder, eval_strategy="epoch", save_strategy="epoch", save_total_limit=2, metric_for_best_model="loss"
            ),
            train_dataset=Tokens(96),
            eval_dataset=Tokens(41, seed=1),
            compute_metrics=accuracy,
        )
        trainer.train()
        weights = weights_of(trainer.model)
        result = trainer.predict(Tokens(41, seed=2))
        assert result.predictions.shape == (41, 2)
        return [*weights, *told(trainer), *result.predictions.flatten().tolist(), result.metrics["test_accuracy"]]


def generation(kit: Kit) -> list[float]:
    """A language model whose loss is the mean over all tokens of a step, in two micro-batches, stopped by max_steps."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_class(kit)(
            language_model(),
            arguments(
                folder,
                batch_size=12,
                gradient_accumulation_steps=2,
                max_steps=11,
                lr_scheduler_type="cosine",
                warmup_steps=2,
                eval_strategy="steps",
                eval_steps=4,
            ),
            train_dataset=Sentences(100),
            eval_dataset=Sentences(30),
        )
        trainer.train()
        return [*weights_of(trainer.model), *told(trainer), float(trainer.lr_scheduler.last_epoch)]


HABITS = pytest.mark.parametrize("habit", [classification, generation])


@HABITS
@pytest.mark.parametrize("replicas", [1, 2, PAIR, RESCALED])
def test_the_elastic_trainer_ends_as_the_trainer(habit: Any, replicas: int) -> None:
    """Two trainings of a language model, once for each kind."""
    expected = in_plain_pytorch(habit)
    results = [each for each in as_trial(habit, replicas) if each is not None]
    assert len(results) == (1 if replicas == 1 else 2)
    for found in results:
        assert found == pytest.approx(expected, abs=2e-4)


@HABITS
def test_a_replica_lost_in_an_evaluation_changes_no_number(habit: Any) -> None:
    """Two trainings of a language model."""
    expected = in_plain_pytorch(habit)
    survivors = with_a_loss(habit, "in an evaluation")
    for found in (survivors[0], survivors[2]):
        assert found == pytest.approx(expected, abs=2e-4)


HALF = {"max_steps": 11, "save_strategy": "steps", "save_steps": 6, "logging_steps": 1}


class Streamed(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        samples = Tokens(41, seed=1)
        return (samples[index] for index in range(len(samples)))


def own_evaluations(kit: Kit) -> list[float]:
    """A trainer whose evaluations see some of the samples; and one over a stream, whose last batch is a small one."""

    class Chosen(transformers_trainer()):  # type: ignore[misc]  # known at run time
        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            if eval_dataset is not None:
                return super().get_eval_dataloader(eval_dataset)
            return DataLoader(Tokens(41, seed=1), 4, sampler=range(3, 35, 2))

    with tempfile.TemporaryDirectory() as folder:
        kind = elastic_kind(Chosen) if kit.elastic else Chosen
        trainer = kind(classifier(), arguments(folder), train_dataset=Tokens(96), compute_metrics=accuracy)
        trainer.train()
        some, all_of_it = trainer.evaluate(), trainer.evaluate(Streamed())
        return [*(each[name] for each in (some, all_of_it) for name in ("eval_loss", "eval_accuracy"))]


def transformers_trainer() -> Any:
    import transformers

    return transformers.Trainer


def elastic_kind(kind: Any) -> Any:
    from dist_core.huggingface import elastic

    return elastic(kind)


@pytest.mark.parametrize("replicas", [1, PAIR])
def test_evaluations_see_the_samples_that_the_trainer_says_each_as_much_as_another(replicas: int) -> None:
    expected = in_plain_pytorch(own_evaluations)
    for found in as_trial(own_evaluations, replicas):
        assert found == pytest.approx(expected, abs=1e-5)


class ByLength(BatchSampler):
    def __iter__(self) -> Iterator[list[int]]:
        yield from reversed(list(super().__iter__()))


@pytest.mark.parametrize(
    ("loader", "sentence"),
    [
        (list(range(3)), r"get_train_dataloader\(\) returned a list; .*ConcatDataset"),
        (DataLoader(Tokens(32), 8), "returned batches of 8 samples, but per_device_train_batch_size is 24"),
        (DataLoader(Tokens(32), batch_sampler=[list(range(24))]), "whose list chooses the samples of each batch"),
        (DataLoader(Tokens(32), batch_sampler=ByLength(range(32), 24, False)), "whose ByLength chooses the samples"),
    ],
)
@pytest.mark.parametrize("derived", [True, False])
def test_training_data_that_replicas_could_not_share_is_refused(loader: Any, sentence: str, derived: bool) -> None:
    from dist_core.errors import InvalidTraining
    from dist_core.huggingface import ElasticTrainer

    class Own(ElasticTrainer if derived else transformers_trainer()):  # type: ignore[misc]  # known at run time
        def get_train_dataloader(self) -> Any:
            return loader

    with tempfile.TemporaryDirectory() as folder:
        trainer = (Own if derived else elastic_kind(Own))(classifier(), arguments(folder), train_dataset=Tokens(32))
        with pytest.raises(InvalidTraining, match=sentence):
            trainer.train()


def class_weights(kit: Kit) -> list[float]:
    weights = torch.tensor([0.2, 6.0])

    class Weighted(transformers_trainer()):  # type: ignore[misc]  # known at run time
        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            loader = dist_core.current_dataloader() if kit.elastic else None
            if loader is not None:
                loader.weigh(float(weights[labels].sum()))
            return torch.nn.functional.cross_entropy(outputs.logits, labels, weights)

    with tempfile.TemporaryDirectory() as folder:
        kind = elastic_kind(Weighted) if kit.elastic else Weighted
        trainer = kind(classifier(), arguments(folder), train_dataset=Tokens(96))
        trainer.train()
        return weights_of(trainer.model)


@pytest.mark.parametrize(("replicas", "passes"), [(1, 3), (2, 1), (GROWN, 1)])
def test_a_weighed_loss_of_the_users_counts_as_on_one_process(replicas: int, passes: int) -> None:
    expected = in_plain_pytorch(class_weights)
    results = [each for each in as_trial(class_weights, replicas, passes) if each is not None]
    for found in results:
        assert found == pytest.approx(expected, abs=1e-5)
    assert results


def own_batches(kit: Kit) -> list[float]:
    class Own(trainer_class(kit)):  # type: ignore[misc]  # known at run time
        def get_train_dataloader(self) -> Any:
            return DataLoader(Tokens(32), 8, sampler=range(16))

    with tempfile.TemporaryDirectory() as folder:
        trainer = Own(classifier(), arguments(folder, batch_size=8), train_dataset=Tokens(32))
        trainer.train()
        return [*weights_of(trainer.model), trainer.state.global_step]


@pytest.mark.parametrize("replicas", [1, PAIR])
def test_a_class_derived_from_ours_may_make_its_own_training_loader(replicas: int) -> None:
    expected = in_plain_pytorch(own_batches)
    for found in as_trial(own_batches, replicas):
        assert found == pytest.approx(expected, abs=2e-4)


def own_schedule(kit: Kit) -> list[float]:
    class Cosine(trainer_class(kit)):  # type: ignore[misc]  # of either class
        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            self.lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, num_training_steps)
            return self.lr_scheduler

    with tempfile.TemporaryDirectory() as folder:
        trainer = Cosine(classifier(), arguments(folder), train_dataset=Tokens(96))
        trainer.train()
        return [*weights_of(trainer.model), trainer.state.global_step, *trainer.lr_scheduler.get_last_lr()]


def test_a_class_derived_from_ours_may_make_its_own_schedule() -> None:
    """A training by the trainer, and a trial that grows."""
    expected = in_plain_pytorch(own_schedule)
    for found in as_trial(own_schedule, GROWN):
        assert found == pytest.approx(expected, abs=1e-5)


def half_trained(folder: str) -> None:
    """By the trainer itself, which has saved what it knows."""
    import transformers

    library: Any = transformers

    class StopsEarly(library.TrainerCallback):  # type: ignore[misc]  # as above
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop |= state.global_step == 6

    trainer = library.Trainer(
        classifier(), arguments(folder, **HALF), train_dataset=Tokens(96), callbacks=[StopsEarly()]
    )
    trainer.train()


def resumed(folder: str, kit: Kit) -> list[float]:
    with tempfile.TemporaryDirectory() as own:
        trainer = trainer_class(kit)(classifier(), arguments(own, **HALF), train_dataset=Tokens(96))
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-6")
        assert trainer.state.global_step == 11
        return [*weights_of(trainer.model), *told(trainer)]


@pytest.mark.parametrize("replicas", [1, PAIR])
def test_it_goes_on_from_a_checkpoint_of_the_trainers(tmp_path: Path, replicas: int) -> None:
    half_trained(str(tmp_path))
    habit = functools.partial(resumed, str(tmp_path))
    expected = in_plain_pytorch(habit)
    for found in as_trial(habit, replicas):
        assert found == pytest.approx(expected, abs=2e-4)


def best(folder: str, kit: Kit) -> list[float]:
    """The best weights of all epochs are loaded at the end, from what the first replica has saved."""
    trainer = trainer_class(kit)(
        classifier(),
        arguments(
            folder, eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True, save_total_limit=1
        ),
        train_dataset=Tokens(96),
        eval_dataset=Tokens(41, seed=1),
    )
    trainer.train()
    return [*weights_of(trainer.model), trainer.state.best_metric]


@pytest.mark.parametrize("replicas", [1, GROWN])
def test_the_best_weights_are_there_at_the_end(tmp_path: Path, replicas: int) -> None:
    expected = in_plain_pytorch(functools.partial(best, str(tmp_path / "plain")))
    for found in as_trial(functools.partial(best, str(tmp_path / "elastic")), replicas):
        assert found == pytest.approx(expected, abs=2e-4)


def adaptive(kit: Kit) -> list[Any]:
    """Large batches go past steps that something is due at."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_class(kit)(
            classifier(),
            arguments(folder, num_train_epochs=6, batch_size=4, logging_steps=10, eval_strategy="steps", eval_steps=25),
            train_dataset=Tokens(400),
            eval_dataset=Tokens(41, seed=1),
            **({"batch": "adaptive"} if kit.elastic else {}),
        )
        trainer.train()
        history = trainer.state.log_history
        evaluations = [entry["step"] for entry in history if "eval_loss" in entry]
        largest = trainer._elastic._core.adaptation._largest_used if kit.elastic else 4
        steps = trainer._elastic._core.position.steps if kit.elastic else trainer.state.global_step
        return [trainer.state.global_step, evaluations, largest, steps, history[-1]["train_loss"]]


def test_a_batch_that_adapts_makes_fewer_steps_that_count_as_the_same_number() -> None:
    """Two trainings of a language model."""
    plain_steps, plain_evaluations, *_, plain_loss = in_plain_pytorch(adaptive)
    [(global_step, evaluations, largest, steps, loss)] = as_trial(adaptive, 1)
    assert global_step == plain_steps == 600
    assert largest > 4
    assert steps < 600
    assert len(evaluations) == len(plain_evaluations)
    assert all(mine - theirs < 25 for mine, theirs in zip(evaluations, plain_evaluations, strict=True))
    assert loss < 1.5 * plain_loss + 0.2


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True"),
        ({"fsdp": True}, "fsdp"),
    ],
)
def test_other_ways_to_train_on_several_devices_are_refused(wrong: dict[str, Any], sentence: str) -> None:
    from dist_core.errors import InvalidTraining
    from dist_core.huggingface.trainer import refuse_arguments

    class Given:
        deepspeed = fsdp = None
        auto_find_batch_size = False

    given = Given()
    for name, value in wrong.items():
        setattr(given, name, value)
    with pytest.raises(InvalidTraining, match=sentence):
        refuse_arguments(given)


def test_what_is_no_trainer_is_refused() -> None:
    from dist_core.errors import InvalidTraining
    from dist_core.huggingface import elastic

    with pytest.raises(InvalidTraining, match="takes a subclass of transformers"):
        elastic(dict)


def test_an_unknown_batch_is_refused() -> None:
    from dist_core.errors import InvalidTraining
    from dist_core.huggingface import ElasticTrainer

    with tempfile.TemporaryDirectory() as folder, pytest.raises(InvalidTraining, match="choose 'fixed', 'adaptive'"):
        ElasticTrainer(classifier(), arguments(folder), batch="large")


def test_an_extension_by_epochs_is_refused_and_names_the_setting() -> None:
    from dist_core.errors import InvalidTraining
    from dist_core.huggingface import ElasticTrainer
    from dist_core.trial.current import get_core

    get_core().epochs.more_epochs = 2
    with tempfile.TemporaryDirectory() as folder:
        trainer = ElasticTrainer(classifier(), arguments(folder), train_dataset=Tokens(32))
        with pytest.raises(InvalidTraining, match=r"2 epochs more than .* and a larger num_train_epochs instead"):
            trainer.train()
