"""The trainer of a run of ``jaxrec train``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, Literal

import jax
from rich.console import Console

from jaxrec.data import DataError, TableEncoder
from jaxrec.tier.vocabulary.assignment import TableFullError
from jaxrec.train import checkpoint
from jaxrec.train.devices import Devices, plan_devices
from jaxrec.train.model import make_kind, table_configs
from jaxrec.train.models.kind import ModelKind
from jaxrec.train.trainer import Trainer


def make_trainer(
    kind: ModelKind,
    encoder: TableEncoder | None,
    num_steps: int,
    console: Console,
    uneven: Literal["stop", "empty"],
) -> tuple[Trainer, Devices]:
    """Make the model on its devices, and load the checkpoint of a resumed run."""
    config = kind.config
    if (count := config.devices * jax.process_count()) > 1:
        console.print(f"planning where the tables go on {count} devices")
    devices = plan_devices(config.devices, table_configs(kind), config.data.batch_size)
    devices = dataclasses.replace(devices, encoder=encoder, dense=config.dense_layers)
    model, optimizer = make_kind(kind, num_steps, devices)
    trainer = Trainer(
        model=model,
        optimizer=optimizer,
        loss=kind.loss,
        place=devices.put_batch,
        uneven=uneven,
    )
    # A run that was killed before its first checkpoint starts anew.
    if config.resume is not None and (checkpoint.all_steps(config.resume) or config.eval_only):
        saved = trainer.restore(config.resume, config.step).plan
        for change in () if saved is None else devices.changes_since(saved):
            console.print(f"the plan differs from the checkpoint's: {change}")
    return trainer, devices


def train_on(trainer: Trainer, batches: Iterable[Any]) -> None:
    """Train on batches; an error about a full table names the options that help."""
    try:
        trainer.train(batches)
    except TableFullError as error:
        raise DataError(
            f"{error}: --data.table-rows, --data.batch-size, --vocabulary.admit-after"
        ) from None
