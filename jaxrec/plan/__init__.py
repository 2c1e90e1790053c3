"""Which sharding for which table."""

from jaxrec.plan.considered import Considered as Considered
from jaxrec.plan.constraints import ParameterConstraints as ParameterConstraints
from jaxrec.plan.context import Context as Context
from jaxrec.plan.context import PlanMismatchError as PlanMismatchError
from jaxrec.plan.estimate import DeviceEstimate as DeviceEstimate
from jaxrec.plan.estimate import Estimate as Estimate
from jaxrec.plan.estimate import GroupEstimate as GroupEstimate
from jaxrec.plan.estimate import TableEstimate as TableEstimate
from jaxrec.plan.feature_statistics import FeatureStatistics as FeatureStatistics
from jaxrec.plan.feature_statistics import Statistics as Statistics
from jaxrec.plan.feature_statistics import statistics as statistics
from jaxrec.plan.partitioners import Partitioner as Partitioner
from jaxrec.plan.plan import ShardingPlan as ShardingPlan
from jaxrec.plan.planner import Planner as Planner
from jaxrec.plan.problem import Problem as Problem
from jaxrec.plan.problem import Solution as Solution
from jaxrec.plan.proposers import Proposer as Proposer
from jaxrec.plan.rates import Links as Links
from jaxrec.plan.rates import Rate as Rate
from jaxrec.plan.shortage import PlanError as PlanError
from jaxrec.plan.table_cache import TableCache as TableCache
from jaxrec.plan.topology import Topology as Topology
