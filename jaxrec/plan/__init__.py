"""Which sharding for which table."""

from jaxrec.plan.plan import ShardingPlan as ShardingPlan
