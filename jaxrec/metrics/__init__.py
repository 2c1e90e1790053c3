"""Streaming metrics of predictions: pure functions on states that live in the compiled step."""

from jaxrec._public import public_names as _public_names
from jaxrec.metrics.areas import AUC as AUC
from jaxrec.metrics.areas import AUPRC as AUPRC
from jaxrec.metrics.areas import RAUC as RAUC
from jaxrec.metrics.areas import auc as auc
from jaxrec.metrics.areas import average_precision as average_precision
from jaxrec.metrics.areas import regression_auc as regression_auc
from jaxrec.metrics.averages import Average as Average
from jaxrec.metrics.averages import Calibration as Calibration
from jaxrec.metrics.averages import ClickThroughRate as ClickThroughRate
from jaxrec.metrics.averages import MeanAbsoluteError as MeanAbsoluteError
from jaxrec.metrics.averages import MeanSquaredError as MeanSquaredError
from jaxrec.metrics.averages import NormalizedMeanSquaredError as NormalizedMeanSquaredError
from jaxrec.metrics.averages import NumMissingLabels as NumMissingLabels
from jaxrec.metrics.averages import NumPositives as NumPositives
from jaxrec.metrics.averages import RecalibratedCalibration as RecalibratedCalibration
from jaxrec.metrics.averages import ServingCalibration as ServingCalibration
from jaxrec.metrics.averages import ServingLoss as ServingLoss
from jaxrec.metrics.averages import SumOfWeights as SumOfWeights
from jaxrec.metrics.averages import TensorWeightedAverage as TensorWeightedAverage
from jaxrec.metrics.averages import WeightedAverage as WeightedAverage
from jaxrec.metrics.averages import WeightedSumOfPredictions as WeightedSumOfPredictions
from jaxrec.metrics.binned import BinnedAUC as BinnedAUC
from jaxrec.metrics.binned import BinnedAUPRC as BinnedAUPRC
from jaxrec.metrics.binned import BinnedRAUC as BinnedRAUC
from jaxrec.metrics.classification import Accuracy as Accuracy
from jaxrec.metrics.classification import HindsightTargetPR as HindsightTargetPR
from jaxrec.metrics.classification import MulticlassRecall as MulticlassRecall
from jaxrec.metrics.classification import MultiLabelPrecision as MultiLabelPrecision
from jaxrec.metrics.classification import Precision as Precision
from jaxrec.metrics.classification import Recall as Recall
from jaxrec.metrics.classification import label_codes as label_codes
from jaxrec.metrics.domain import Domain as Domain
from jaxrec.metrics.entropy import (
    CalibrationFreeNormalizedEntropy as CalibrationFreeNormalizedEntropy,
)
from jaxrec.metrics.entropy import LogLoss as LogLoss
from jaxrec.metrics.entropy import NormalizedEntropy as NormalizedEntropy
from jaxrec.metrics.entropy import PositiveNormalizedEntropy as PositiveNormalizedEntropy
from jaxrec.metrics.entropy import RecalibratedNormalizedEntropy as RecalibratedNormalizedEntropy
from jaxrec.metrics.entropy import SegmentedNormalizedEntropy as SegmentedNormalizedEntropy
from jaxrec.metrics.entropy import ServingNormalizedEntropy as ServingNormalizedEntropy
from jaxrec.metrics.entropy import UnweightedNormalizedEntropy as UnweightedNormalizedEntropy
from jaxrec.metrics.group import GroupState as GroupState
from jaxrec.metrics.group import MetricGroup as MetricGroup
from jaxrec.metrics.group import Task as Task
from jaxrec.metrics.group import merge_all as merge_all
from jaxrec.metrics.group import merge_over_axis as merge_over_axis
from jaxrec.metrics.group import merge_over_processes as merge_over_processes
from jaxrec.metrics.metric import Metric as Metric
from jaxrec.metrics.metric import SumMetric as SumMetric
from jaxrec.metrics.pairs import XAUC as XAUC
from jaxrec.metrics.pairs import SessionPairwiseAUC as SessionPairwiseAUC
from jaxrec.metrics.ranking import NDCG as NDCG
from jaxrec.metrics.ranking import rank_metrics as rank_metrics
from jaxrec.metrics.samples import SampleMetric as SampleMetric
from jaxrec.metrics.samples import SampleWindow as SampleWindow
from jaxrec.metrics.sessions import GroupedAUC as GroupedAUC
from jaxrec.metrics.sessions import SessionPrecision as SessionPrecision
from jaxrec.metrics.sessions import SessionRecall as SessionRecall
from jaxrec.metrics.sessions import UserAUC as UserAUC
from jaxrec.metrics.sessions import sessions_of as sessions_of
from jaxrec.metrics.training import OutputMetric as OutputMetric
from jaxrec.metrics.training import ScalarMetric as ScalarMetric
from jaxrec.metrics.training import Throughput as Throughput
from jaxrec.metrics.training import tower_qps as tower_qps
from jaxrec.metrics.writers import BackgroundWriter as BackgroundWriter
from jaxrec.metrics.writers import ConsoleWriter as ConsoleWriter
from jaxrec.metrics.writers import CSVWriter as CSVWriter
from jaxrec.metrics.writers import JSONLinesWriter as JSONLinesWriter
from jaxrec.metrics.writers import TensorBoardWriter as TensorBoardWriter
from jaxrec.metrics.writers import Writer as Writer
from jaxrec.metrics.writers import Writers as Writers

__all__ = _public_names(globals())


def __dir__() -> list[str]:
    return __all__
