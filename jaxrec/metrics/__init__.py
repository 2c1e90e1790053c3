"""Streaming metrics of predictions."""

from jaxrec.metrics.auc import auc as auc
from jaxrec.metrics.binary import BinarySums as BinarySums
from jaxrec.metrics.binary import binary_sums as binary_sums
from jaxrec.metrics.binary import calibration as calibration
from jaxrec.metrics.binary import log_loss as log_loss
from jaxrec.metrics.binary import normalized_entropy as normalized_entropy
