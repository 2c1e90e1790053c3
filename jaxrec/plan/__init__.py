"""Which sharding for which table."""

from jaxrec.plan.constraints import ParameterConstraints as ParameterConstraints
from jaxrec.plan.context import PlanMismatchError as PlanMismatchError
from jaxrec.plan.failure import PlanError as PlanError
from jaxrec.plan.plan import ShardingPlan as ShardingPlan
from jaxrec.plan.planner import Planner as Planner
from jaxrec.plan.statistics import Statistics as Statistics
from jaxrec.plan.statistics import statistics as statistics
from jaxrec.plan.topology import Topology as Topology
