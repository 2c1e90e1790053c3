"""Row optimizers: how the rows of a table change, given their gradients."""

from jaxrec.optim.base import RowOptimizer as RowOptimizer
from jaxrec.optim.base import Schedule as Schedule
