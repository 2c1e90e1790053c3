"""Checkpoints: models and optimizers in files that restore to any sharding."""

from jaxrec.train.checkpoint.files import CheckpointError as CheckpointError
from jaxrec.train.checkpoint.files import CheckpointMetadata as CheckpointMetadata
from jaxrec.train.checkpoint.files import Difference as Difference
from jaxrec.train.checkpoint.files import PreservationPolicy as PreservationPolicy
from jaxrec.train.checkpoint.files import all_steps as all_steps
from jaxrec.train.checkpoint.files import best_step as best_step
from jaxrec.train.checkpoint.files import open_checkpoint as open_checkpoint
from jaxrec.train.checkpoint.loading import StateError as StateError
from jaxrec.train.checkpoint.loading import load as load
from jaxrec.train.checkpoint.loading import load_state as load_state
from jaxrec.train.checkpoint.loading import restore as restore
from jaxrec.train.checkpoint.loading import restore_state as restore_state
from jaxrec.train.checkpoint.manager import CheckpointManager as CheckpointManager
from jaxrec.train.checkpoint.manager import require_space as require_space
from jaxrec.train.checkpoint.manager import save as save
