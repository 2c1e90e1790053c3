"""The training runtime: the step, the loop, checkpoints, the command line."""

from jaxrec.train.ahead import RoutedSteps as RoutedSteps
from jaxrec.train.checkpoint import CheckpointError as CheckpointError
from jaxrec.train.checkpoint import Run as Run
from jaxrec.train.checkpoint import Saver as Saver
from jaxrec.train.checkpoint import restore as restore
from jaxrec.train.checkpoint import restore_state as restore_state
from jaxrec.train.keep import Keep as Keep
from jaxrec.train.memory import keep_freed_memory as keep_freed_memory
from jaxrec.train.model import load_model as load_model
from jaxrec.train.pipeline import Pipeline as Pipeline
from jaxrec.train.place import put as put
from jaxrec.train.step import compile_step as compile_step
from jaxrec.train.tables import export_table as export_table
from jaxrec.train.tables import import_table as import_table
from jaxrec.train.tables import load_torchrec as load_torchrec
from jaxrec.train.trainer import NotFiniteError as NotFiniteError
from jaxrec.train.trainer import Trainer as Trainer
