"""Training of the adapters benchmark's replicas: LoRA adapters of a Llama by PEFT, in Hugging Face's Trainer."""

from __future__ import annotations

import os
from typing import Any

import peft
import torch
import transformers
from torch.utils.data import Dataset

from benchmarks.rescale_training import noting, run
from dist_core.huggingface import ElasticTrainer

library: Any = transformers
VOCABULARY, WIDTH, LAYERS = 512, 512, 11
"""A layer has 10 MB: attention's four matrices, and three of twice the width."""


class Tokens(Dataset[Any]):
    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> Any:
        words = (torch.arange(8) * (index + 1)) % VOCABULARY
        return {"input_ids": words, "labels": words}


class Notes(library.TrainerCallback):  # type: ignore[misc]  # its library is not typed here
    def __init__(self, note: Any) -> None:
        self._note = note

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._note()


def base() -> Any:
    """Return a base model of about 120 MB; for ``ADAPTED`` = 0, as many layers of next to nothing."""
    torch.manual_seed(0)
    width = WIDTH if int(os.environ["ADAPTED"]) else 32
    return library.LlamaForCausalLM(
        library.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=32,
        )
    )


def train() -> None:
    frozen: Any = os.environ.get("FROZEN")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    with noting() as note:
        ElasticTrainer(
            args=library.TrainingArguments(
                os.path.join(os.environ["TRACE_DIR"], "trainer"),
                max_steps=100_000,
                per_device_train_batch_size=4,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                use_cpu=True,
                logging_strategy="no",
            ),
            model=peft.get_peft_model(base(), lora),
            train_dataset=Tokens(),
            callbacks=[Notes(note)],
            batch="fixed",
            frozen=frozen,
        ).train()


def main() -> int:
    return run(train)
