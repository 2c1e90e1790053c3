"""Row optimizers: how the rows of a table change, given their gradients.

Each row that occurs in a batch gets one update. Rows that do not occur keep their weights and their
state. All optimizers take ``learning_rate`` (a number or a schedule of the step) and, by keyword,
the bounds that `RowOptimizer` describes. In their formulas ``w`` is a row, ``g`` its gradient
summed over its occurrences in the batch, and ``lr`` the learning rate.
"""

from jaxrec._public import public_names as _public_names
from jaxrec.optim.adagrad_and_rmsprop import adagrad as adagrad
from jaxrec.optim.adagrad_and_rmsprop import rmsprop as rmsprop
from jaxrec.optim.adagrad_and_rmsprop import rowwise_adagrad as rowwise_adagrad
from jaxrec.optim.adagrad_and_rmsprop import rowwise_rmsprop as rowwise_rmsprop
from jaxrec.optim.adam_and_lamb import adam as adam
from jaxrec.optim.adam_and_lamb import lamb as lamb
from jaxrec.optim.adam_and_lamb import partial_rowwise_adam as partial_rowwise_adam
from jaxrec.optim.adam_and_lamb import partial_rowwise_lamb as partial_rowwise_lamb
from jaxrec.optim.base import RowOptimizer as RowOptimizer
from jaxrec.optim.base import RowState as RowState
from jaxrec.optim.base import Schedule as Schedule
from jaxrec.optim.base import frozen as frozen
from jaxrec.optim.counter import rowwise_adagrad_cowclip as rowwise_adagrad_cowclip
from jaxrec.optim.counter import rowwise_adagrad_with_counter as rowwise_adagrad_with_counter
from jaxrec.optim.ftrl_proximal import ftrl as ftrl
from jaxrec.optim.hyperparameters import hyperparameter as hyperparameter
from jaxrec.optim.norm import mean_squares as mean_squares
from jaxrec.optim.norm import row_norms as row_norms
from jaxrec.optim.outer_steps import diloco as diloco
from jaxrec.optim.schedules import WarmupStage as WarmupStage
from jaxrec.optim.schedules import warmup as warmup
from jaxrec.optim.sgd_and_lars import lars_sgd as lars_sgd
from jaxrec.optim.sgd_and_lars import momentum_sgd as momentum_sgd
from jaxrec.optim.sgd_and_lars import sgd as sgd
from jaxrec.optim.wrappers import OptimizerWrapper as OptimizerWrapper
from jaxrec.optim.wrappers import ema as ema
from jaxrec.optim.wrappers import ema_in_place as ema_in_place

__all__ = _public_names(globals())


def __dir__() -> list[str]:
    return __all__
