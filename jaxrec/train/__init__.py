"""Training: compiled steps, the training loop and checkpoints, and the parts of `jaxrec train`."""

from jaxrec._public import moved_names as _moved_names
from jaxrec._public import public_names as _public_names
from jaxrec.train.callbacks import SaveCheckpoints as SaveCheckpoints
from jaxrec.train.callbacks import SynchronizeReplicas as SynchronizeReplicas
from jaxrec.train.callbacks import WriteMetrics as WriteMetrics
from jaxrec.train.checkpoint import CheckpointError as CheckpointError
from jaxrec.train.checkpoint import CheckpointManager as CheckpointManager
from jaxrec.train.checkpoint import CheckpointMetadata as CheckpointMetadata
from jaxrec.train.checkpoint import Difference as Difference
from jaxrec.train.checkpoint import PreservationPolicy as PreservationPolicy
from jaxrec.train.checkpoint import restore as restore
from jaxrec.train.checkpoint import restore_state as restore_state
from jaxrec.train.early_stopping import EarlyStopping as EarlyStopping
from jaxrec.train.event_windows import EventWindows as EventWindows
from jaxrec.train.interrupt import Interrupt as Interrupt
from jaxrec.train.interrupt import interruptible as interruptible
from jaxrec.train.model import load_model as load_model
from jaxrec.train.placed_batches import put_batch as put_batch
from jaxrec.train.routing import RoutedSteps as RoutedSteps
from jaxrec.train.step import compile_step as compile_step
from jaxrec.train.torchrec import load_torchrec as load_torchrec
from jaxrec.train.torchrec import save_torchrec as save_torchrec
from jaxrec.train.torchrec import torchrec_layers as torchrec_layers
from jaxrec.train.trainer import Callback as Callback
from jaxrec.train.trainer import NotFiniteError as NotFiniteError
from jaxrec.train.trainer import StepResult as StepResult
from jaxrec.train.trainer import Trainer as Trainer

__all__ = _public_names(globals())

__getattr__ = _moved_names(
    __name__,
    {"export_table": "jaxrec.tier.export_rows", "import_table": "jaxrec.tier.import_rows"},
)


def __dir__() -> list[str]:
    return __all__
