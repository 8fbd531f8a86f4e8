"""Tune LoRA adapters of a tiny causal model with TRL and PEFT: made from a configuration, nothing is downloaded.

    python examples/lora.py [--trials 6] [--slots 2]

The batch stays as it is while the trial's size changes, because adapters learn worse from large batches; what goes
from replica to replica is the adapters alone.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from typing import Any

import optuna
import peft
import tokenizers
import torch
import transformers
import trl
from datasets import Dataset

from dist_core.huggingface import elastic
from tuner_bridge import optimize

WORDS = 60
library: Any = transformers
training: Any = trl


def tokenizer() -> Any:
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, **{f"w{index}": 4 + index for index in range(WORDS)}}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return library.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )


def sentences(count: int, seed: int) -> Dataset:
    """Return sentences in which each word is followed by the next one, up to a slip here and there."""
    chance, rows = random.Random(seed), []
    for _ in range(count):
        first, length = chance.randrange(WORDS), chance.randrange(6, 14)
        steps = [first + place + (chance.random() < 0.1) for place in range(length)]
        rows.append({"text": " ".join(f"w{step % WORDS}" for step in steps)})
    return Dataset.from_list(rows)


def base_model() -> Any:
    """Every replica makes the same one: it is in no hand-over."""
    torch.manual_seed(0)
    return library.LlamaForCausalLM(
        library.LlamaConfig(
            vocab_size=WORDS + 4,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=32,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        )
    )


def objective(trial: Any) -> float:
    rank = trial.suggest_categorical("rank", [4, 8, 16])
    trainer = elastic(training.SFTTrainer)(
        model=base_model(),
        args=training.SFTConfig(
            tempfile.mkdtemp(prefix="lora-"),
            learning_rate=trial.suggest_float("learning_rate", 1e-3, 1e-1, log=True),
            num_train_epochs=3,
            per_device_train_batch_size=16,
            eval_strategy="epoch",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
        ),
        train_dataset=sentences(512, seed=0),
        eval_dataset=sentences(64, seed=1),
        processing_class=tokenizer(),
        peft_config=peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"),
        batch="fixed",
        frozen="rebuild",
    )
    trainer.train()
    return float(trainer.evaluate()["eval_loss"])


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--trials", type=int, default=6)
    parser.add_argument("--slots", type=int, default=2)
    given = parser.parse_args()
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0), pruner=optuna.pruners.MedianPruner())
    optimize(study, objective, given.trials, n_jobs=2, slots=given.slots, live=True)
    print(f"best: loss {study.best_value:.3f} with {study.best_params}")


if __name__ == "__main__":
    main()
