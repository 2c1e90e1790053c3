"""Which sharding for which table."""

from jaxrec._public import moved_names as _moved_names
from jaxrec._public import public_names as _public_names
from jaxrec.plan.caches import TableCache as TableCache
from jaxrec.plan.constraints import ParameterConstraints as ParameterConstraints
from jaxrec.plan.estimate import DeviceEstimate as DeviceEstimate
from jaxrec.plan.estimate import Estimate as Estimate
from jaxrec.plan.estimate import GroupEstimate as GroupEstimate
from jaxrec.plan.estimate import TableEstimate as TableEstimate
from jaxrec.plan.feature_statistics import FeatureStatistics as FeatureStatistics
from jaxrec.plan.feature_statistics import Statistics as Statistics
from jaxrec.plan.feature_statistics import sample_statistics as sample_statistics
from jaxrec.plan.fingerprint import Fingerprint as Fingerprint
from jaxrec.plan.options import Considered as Considered
from jaxrec.plan.partitioners import Partitioner as Partitioner
from jaxrec.plan.plan import Context as Context
from jaxrec.plan.plan import PlanMismatchError as PlanMismatchError
from jaxrec.plan.plan import ShardingPlan as ShardingPlan
from jaxrec.plan.planner import Planner as Planner
from jaxrec.plan.problem import Problem as Problem
from jaxrec.plan.problem import Solution as Solution
from jaxrec.plan.proposers import Proposer as Proposer
from jaxrec.plan.quantities import Links as Links
from jaxrec.plan.quantities import Rate as Rate
from jaxrec.plan.shortage import PlanError as PlanError
from jaxrec.plan.topology import Topology as Topology
from jaxrec.plan.trials import Trial as Trial
from jaxrec.plan.trials import dry_run as dry_run
from jaxrec.plan.trials import render_trials as render_trials

__all__ = _public_names(globals())

__getattr__ = _moved_names(__name__, {"statistics": "jaxrec.plan.sample_statistics"})


def __dir__() -> list[str]:
    return __all__
