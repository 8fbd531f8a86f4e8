"""TRL's trainers over adapters of PEFT's, and the elastic ones in their place."""

from __future__ import annotations

import random
import tempfile
from typing import Any

import pytest
import torch

from dist_core.errors import InvalidTraining
from dist_core.trial.current import get_core
from tests.support.habits import RESCALED, Kit, as_trial, in_plain_pytorch
from tests.support.hugging_face import told

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]


def words(chance: random.Random, count: int) -> str:
    return " ".join(f"w{chance.randrange(60)}" for _ in range(count))


def tokenizer() -> Any:
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    library: Any = transformers
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, **{f"w{index}": 4 + index for index in range(60)}}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return library.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )


def base_model() -> Any:
    import transformers

    library: Any = transformers
    torch.manual_seed(0)
    return library.LlamaForCausalLM(
        library.LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=64,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        )
    )


def adapters() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def options(folder: str) -> dict[str, Any]:
    return {
        "output_dir": folder,
        "num_train_epochs": 3,
        "per_device_train_batch_size": 12,
        "logging_steps": 2,
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "eval_strategy": "epoch",
        "save_strategy": "no",
        "train_sampling_strategy": "sequential",
        "learning_rate": 1e-2,
    }


def trained_and_told(trainer: Any) -> list[float]:
    """The adapters, and what the trainer has logged."""
    trained = [each for each in trainer.model.parameters() if each.requires_grad]
    return [*(float(value) for each in trained for value in each.detach().flatten()), *told(trainer)]


def supervised(kit: Kit) -> list[float]:
    """Adapters of a causal model, whose frozen weights no hand-over carries."""
    import trl as theirs
    from datasets import Dataset

    trl: Any = theirs

    from dist_core.huggingface import elastic

    chance = random.Random(0)
    data = Dataset.from_list([{"text": words(chance, chance.randrange(4, 12))} for _ in range(48)])
    trainer_class = elastic(trl.SFTTrainer) if kit.elastic else trl.SFTTrainer
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_class(
            model=base_model(),
            args=trl.SFTConfig(**options(folder)),
            train_dataset=data,
            eval_dataset=data.select(range(17)),
            processing_class=tokenizer(),
            peft_config=adapters(),
            **({"frozen": "rebuild"} if kit.elastic else {}),
        )
        trainer.train()
        if kit.elastic:
            state = get_core().registry.capture()["model-0"]
            assert set(state["module"]) < {name for name, _ in trainer.model.named_parameters()}
            assert all("lora" in name for name in state["module"])
        return trained_and_told(trainer)


def preferences(kit: Kit) -> list[float]:
    import trl as theirs
    from datasets import Dataset

    trl: Any = theirs

    from dist_core.huggingface import elastic

    chance = random.Random(0)
    rows = [
        {"prompt": words(chance, 4), "chosen": " " + words(chance, 5), "rejected": " " + words(chance, 5)}
        for _ in range(48)
    ]
    data = Dataset.from_list(rows)
    trainer_class = elastic(trl.DPOTrainer) if kit.elastic else trl.DPOTrainer
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_class(
            model=base_model(),
            args=trl.DPOConfig(**options(folder)),
            train_dataset=data,
            eval_dataset=data.select(range(17)),
            processing_class=tokenizer(),
            peft_config=adapters(),
        )
        trainer.train()
        return trained_and_told(trainer)


@pytest.mark.parametrize("replicas", [1, RESCALED])
@pytest.mark.parametrize("habit", [supervised, preferences])
def test_an_elastic_trainer_of_trl_ends_as_its_own(habit: Any, replicas: int) -> None:
    """Two trainings of a language model."""
    expected = in_plain_pytorch(habit)
    results = [each for each in as_trial(habit, replicas) if each is not None]
    assert results
    for found in results:
        assert found == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize("name", ["GRPOTrainer", "RLOOTrainer"])
def test_a_trainer_that_generates_what_it_trains_on_is_refused_by_name(name: str) -> None:
    """On several replicas its groups of completions would be torn apart."""
    import trl

    from dist_core.huggingface import elastic

    with pytest.raises(InvalidTraining, match=rf"^{name} generates its samples in groups.*Use TRL's {name} as it is"):
        elastic(getattr(trl, name))
