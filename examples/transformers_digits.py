"""Hugging Face Transformers on Horovod's engines: a small vision transformer, and the Trainer of the library.

    horovodrun -np 2 python examples/transformers_digits.py
    horovodrun -np 2 --torch-backend horovod python examples/transformers_digits.py --backend gloo

On CPUs, the Trainer accepts only Gloo, but it uses an existing process group, so the script makes one first. With the second
command, the Trainer makes the group, and ``--torch-backend`` replaces Gloo by Horovod. The script trains on scikit-learn's
handwritten digits, and prints the accuracy on test digits.

Needs the extras ``torch``, ``examples`` and ``integrations``. Takes less than a minute on two cores.
"""

import argparse
import tempfile

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from transformers import EvalPrediction, Trainer, TrainingArguments, ViTConfig, ViTForImageClassification, set_seed

TRAINING = 1437
"""The number of digits for training, from the start; the other 360 are for testing."""


def accuracy(found: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((found.predictions.argmax(1) == found.label_ids).mean())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="horovod")
    parser.add_argument("--epochs", type=int, default=6)
    options = parser.parse_args()

    if options.backend != "gloo":
        dist.init_process_group(options.backend)
    set_seed(1)
    images, labels = load()
    model = ViTForImageClassification(
        ViTConfig(
            image_size=8, patch_size=2, num_channels=1, num_labels=10, hidden_size=48, intermediate_size=96,
            num_hidden_layers=2, num_attention_heads=4,
        )
    )  # fmt: skip
    pictures = [
        {"pixel_values": image.view(1, 8, 8), "labels": label} for image, label in zip(images, labels, strict=True)
    ]
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model,
            TrainingArguments(
                output_dir=folder,
                use_cpu=True,
                num_train_epochs=options.epochs,
                per_device_train_batch_size=16,
                per_device_eval_batch_size=60,
                learning_rate=3e-3,
                save_strategy="no",
                logging_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=pictures[:TRAINING],
            eval_dataset=pictures[TRAINING:],
            compute_metrics=accuracy,
        )
        trainer.train()
        found = trainer.evaluate()
    if trainer.is_world_process_zero():
        ranks, backend = trainer.args.world_size, dist.get_backend()
        print(f"accuracy {found['eval_accuracy']:.3f} on {ranks} ranks by {backend}")
    dist.destroy_process_group()


def load() -> tuple[torch.Tensor, torch.Tensor]:
    """1,797 handwritten digits: images, float32 (1797, 64), from -1 (paper) to 1 (ink), and labels, int64 (1797,)."""
    images, labels = load_digits(return_X_y=True)
    return torch.from_numpy(images).float() / 8 - 1, torch.from_numpy(labels)


if __name__ == "__main__":
    main()
