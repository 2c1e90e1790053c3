"""Systems that a run of ``jaxrec train --log`` sends its values to, one file a system."""

from jaxrec.train.loggers.base import LoggedRun as LoggedRun
from jaxrec.train.loggers.base import RunLogger as RunLogger
from jaxrec.train.loggers.mlflow import MLflowLogger
from jaxrec.train.loggers.tensorboard import TensorBoardLogger
from jaxrec.train.loggers.wandb import WandbLogger

LOGGERS: dict[str, type[RunLogger]] = {
    each.name: each for each in (TensorBoardLogger, WandbLogger, MLflowLogger)
}
"""The systems by their names for ``--log``."""
