"""From a model and devices to a plan."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from flax import nnx

from jaxrec.embed.config import TableConfig
from jaxrec.plan.constraints import STORAGES, ParameterConstraints
from jaxrec.plan.context import Context
from jaxrec.plan.estimate import estimate
from jaxrec.plan.exact import is_small, solve, solve_averaged
from jaxrec.plan.failure import PlanError, Shortage, explain
from jaxrec.plan.improve import improve
from jaxrec.plan.options import Option, enumerate_options, placed_options, to_placement
from jaxrec.plan.partitioners import Partitioner, balance_memory, place_fastest
from jaxrec.plan.plan import ShardingPlan
from jaxrec.plan.problem import Loads, Problem, Solution
from jaxrec.plan.proposers import PROPOSERS, Proposer, propose_smallest
from jaxrec.plan.statistics import Statistics
from jaxrec.plan.topology import Topology
from jaxrec.plan.workload import ModelTables, TableWork, measure_work, read_model

Model: TypeAlias = nnx.Module | Sequence[TableConfig]

# Bytes of dense parameters, their gradients, their optimizer's state and what is in between, over
# the bytes of the parameters.
_DENSE_COPIES = 6
# Parts of the time limit that the proposers, the averaged program (and where the whole one is too
# large to follow) and improving may use.
_PROPOSING, _AVERAGED, _AVERAGED_ALONE, _IMPROVING = 0.15, 0.4, 0.6, 0.25


@dataclasses.dataclass(frozen=True)
class Planner:
    """Finds the fastest placement of a model's tables on given devices.

    Attributes:
        topology: The devices.
        constraints: What is said of tables, by name.
        statistics: What was seen of features in a sample of batches (`jaxrec.plan.statistics`);
            without it every sample is taken to have one id, and every row to be as hot as another.
        storages: Where rows may be kept: "device", and for planning ahead "host" and "disk".
        reserve: Part of each device's memory that is left alone.
        batches: Batches on a device at once: that of the step and those put there ahead of it.
        dense_bytes: Bytes of parameters that are no tables; those of the model if None.
        time_limit: Seconds that the search may take.
        gap: The search ends when the plan is known to be no more than this part slower than the
            best.
        proposers: Functions that propose options for tables; see `jaxrec.plan.proposers`.
        partitioners: Functions that place proposals; see `jaxrec.plan.partitioners`.
        is_exact: Whether to solve mixed-integer programs, which give bounds, as well.

    Raises:
        ValueError: If a number is outside its range.

    Example:
        >>> import jaxrec
        >>> from jaxrec.plan import ParameterConstraints, Topology
        >>> tables = [
        ...     jaxrec.EmbeddingBagConfig("product", num_embeddings=40_000_000, embedding_dim=64),
        ...     jaxrec.EmbeddingBagConfig("country", num_embeddings=5, embedding_dim=64),
        ... ]
        >>> said = {"product": ParameterConstraints(pooling_factors=20)}
        >>> plan = Planner(Topology.named("h100", devices=8), said).plan(tables, batch_size=65536)
        >>> {name: placement.kind for name, placement in plan.to_dict().items()}
        {'product': 'row_wise', 'country': 'table_wise'}
    """

    topology: Topology
    constraints: Mapping[str, ParameterConstraints] = dataclasses.field(default_factory=dict)
    _: dataclasses.KW_ONLY
    statistics: Statistics | None = None
    storages: Sequence[str] = ("device",)
    reserve: float = 0.15
    batches: int = 3
    dense_bytes: int | None = None
    time_limit: float = 30.0
    gap: float = 0.005
    proposers: Sequence[Proposer] = PROPOSERS
    partitioners: Sequence[Partitioner] = (place_fastest, balance_memory)
    is_exact: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.reserve < 1:
            raise ValueError(f"reserve is a part of memory, from 0 to below 1, got {self.reserve}")
        if not self.storages or set(self.storages) - set(STORAGES):
            raise ValueError(f"storages are some of {', '.join(STORAGES)}, got {self.storages!r}")
        for field in ("time_limit", "gap"):
            if not getattr(self, field) > 0:
                raise ValueError(f"{field} is above 0, got {getattr(self, field)}")
        if self.batches < 1:
            raise ValueError(f"batches is 1 or more, got {self.batches}")
        if not self.proposers or not self.partitioners:
            raise ValueError("there is at least one proposer and one partitioner")

    def plan(self, model: Model, *, batch_size: int) -> ShardingPlan:
        """The fastest plan that is found within the time limit, with a bound on any plan.

        Args:
            model: The model, real or abstract (`nnx.eval_shape`), or configurations of tables. It
                is not changed: `jaxrec.shard` does that.
            batch_size: Samples in a step, of all devices together.

        Raises:
            PlanError: If no plan fits, with what to change.
            ValueError: If constraints do not fit the tables or the devices.
        """
        start = time.monotonic()
        tables = read_model(model)
        works = self._works(tables, batch_size)
        fixed = self._fixed_bytes(tables, works)
        problem = self._problem(works, fixed)
        solution, bound, search = self._search(problem, start)
        if not solution.fits:
            raise PlanError(self._explain(tables, works, problem, solution, bound, batch_size))
        found = estimate(
            problem,
            {work.name: work for work in works},
            solution,
            bound=bound,
            search=search,
            search_seconds=time.monotonic() - start,
            fixed_bytes=fixed,
        )
        decided = {
            name: said.placement
            for name, said in self.constraints.items()
            if said.placement is not None
        }
        chosen = {
            options[choice.option].table: to_placement(
                options[choice.option], choice.sites, self.topology
            )
            for options, choice in zip(problem.options, solution.choices, strict=True)
        }
        placements = tuple((work.name, (decided | chosen)[work.name]) for work in works)
        return ShardingPlan(placements, found, self._context(works, batch_size))

    def evaluate(self, model: Model, plan: ShardingPlan, *, batch_size: int) -> ShardingPlan:
        """A plan made by hand or elsewhere, with what it is expected to take.

        Args:
            model: As for `plan`.
            plan: A placement for every table.
            batch_size: Samples in a step, of all devices together.

        Raises:
            ValueError: If a table has no placement or one that does not fit it or the devices.
        """
        tables = read_model(model)
        works = self._works(tables, batch_size)
        placements = plan.to_dict()
        for work in works:
            if work.name not in placements:
                raise ValueError(f"the plan has no placement for table {work.name!r}")
        fixed = self._fixed_bytes(tables, works)
        decided = (placed_options(work, self.topology, placements[work.name]) for work in works)
        problem = dataclasses.replace(
            self._problem((), fixed), decided=tuple(itertools.chain(*decided))
        )
        solution = Solution.of(problem, ())
        found = estimate(
            problem,
            {work.name: work for work in works},
            solution,
            bound=0.0,
            search="evaluated as given",
            search_seconds=0.0,
            fixed_bytes=fixed,
        )
        return ShardingPlan(plan.placements, found, self._context(works, batch_size))

    def context(self, model: Model, *, batch_size: int) -> Context:
        """What a plan of this planner is made for, to load one with `ShardingPlan.from_json`."""
        return self._context(self._works(read_model(model), batch_size), batch_size)

    def _context(self, works: Sequence[TableWork], batch_size: int) -> Context:
        settings: dict[str, Any] = {
            "storages": list(self.storages),
            "reserve": self.reserve,
            "batches": self.batches,
        }
        return Context.of(works, self.topology, batch_size, self.constraints, settings)

    def _works(self, tables: ModelTables, batch_size: int) -> tuple[TableWork, ...]:
        devices = self.topology.num_devices
        if isinstance(batch_size, bool) or batch_size < 1 or batch_size % devices:
            raise ValueError(
                f"the batch is divided among {devices} devices, got batch_size={batch_size}; give "
                "a multiple"
            )
        return measure_work(
            tables,
            batch_size=batch_size,
            num_devices=devices,
            constraints=self.constraints,
            statistics=self.statistics,
        )

    def _fixed_bytes(self, tables: ModelTables, works: Sequence[TableWork]) -> dict[str, float]:
        """Bytes of each device that do not depend on where tables go."""
        features = {
            feature.name: feature.capacity * (8 if work.is_weighted else 4) + 4 * feature.bags
            for work in works
            for feature in work.features
        }
        dense = tables.dense_bytes if self.dense_bytes is None else self.dense_bytes
        return {
            "batches": float(self.batches * sum(features.values())),
            "dense": float(_DENSE_COPIES * dense),
            "reserve": self.reserve * self.topology.memory,
        }

    def _problem(self, works: Sequence[TableWork], fixed: Mapping[str, float]) -> Problem:
        names: list[str] = []
        options: list[tuple[Option, ...]] = []
        decided: list[Option] = []
        for work in works:
            said = self.constraints.get(work.name, ParameterConstraints())
            if said.placement is not None:
                decided += placed_options(work, self.topology, said.placement)
                continue
            names.append(work.name)
            options.append(enumerate_options(work, self.topology, said, storages=self.storages))
        return Problem(
            self.topology,
            tuple(names),
            tuple(options),
            tuple(decided),
            capacity=self.topology.memory - sum(fixed.values()),
            host_capacity=self.topology.host_memory * (1 - self.reserve),
            disk_capacity=self.topology.disk * (1 - self.reserve),
        )

    def _search(self, problem: Problem, start: float) -> tuple[Solution, float, str]:
        """The best solution found, the bound on all, and what was done."""
        if not problem.tables:
            solution = Solution.of(problem, ())
            return solution, solution.seconds, "every placement was decided"
        best, tried = None, 0
        for solution in self._proposed(problem, start + _PROPOSING * self.time_limit):
            tried += 1
            if solution.better_than(best):
                best = solution
        if best is None:
            raise ValueError("none of the proposers made a proposal for these tables")
        done = [f"{tried} proposals"]
        bound = 0.0
        if self.is_exact:
            share = _AVERAGED if is_small(problem) else _AVERAGED_ALONE
            answer = solve_averaged(problem, time_limit=share * self.time_limit, gap=self.gap / 4)
            bound = answer.bound
            done.append("averaged program" + ("" if answer.is_finished else " (cut short)"))
            if answer.proposal is not None:
                for partition in self.partitioners:
                    solution = partition(problem, answer.proposal)
                    best = solution if solution.better_than(best) else best
        if not self._is_close(best, bound):
            deadline = time.monotonic() + _IMPROVING * self.time_limit
            best = improve(problem, best, deadline=deadline)
            done.append("improved one by one")
        left = start + self.time_limit - time.monotonic()
        if self.is_exact and not self._is_close(best, bound) and is_small(problem) and left > 0:
            answer = solve(problem, best, time_limit=left, gap=self.gap)
            best = answer.solution or best
            bound = max(bound, answer.bound)
            done.append("whole program" + ("" if answer.is_finished else " (cut short)"))
        bound = min(bound, best.seconds) if best.fits else bound
        return best, bound, ", ".join(done)

    def _explain(
        self,
        tables: ModelTables,
        works: Sequence[TableWork],
        problem: Problem,
        best: Solution,
        bound: float,
        batch_size: int,
    ) -> str:
        """Why no plan fits, and what would help."""
        loads = Loads.of(problem, dict(enumerate(best.choices)))
        where = max(loads.shortages, key=lambda storage: loads.shortages[storage])
        shortage = Shortage(
            missing=best.excess,
            where=where,
            is_proven=bound == float("inf"),
            room=problem.capacity,
            fixed=self._fixed_bytes(tables, works),
            works=works,
            topology=self.topology,
            constraints=self.constraints,
        )

        def fits(
            *,
            topology: Topology | None = None,
            constraints: Mapping[str, ParameterConstraints] | None = None,
            bfloat16: Sequence[str] = (),
        ) -> bool:
            planner = dataclasses.replace(
                self,
                topology=topology or self.topology,
                constraints=self.constraints if constraints is None else constraints,
            )
            return planner._fits(tables, batch_size, bfloat16)

        return explain(shortage, fits, deadline=time.monotonic() + self.time_limit)

    def _fits(self, tables: ModelTables, batch_size: int, bfloat16: Sequence[str]) -> bool:
        """Whether a plan is quickly found that fits, some tables being of another type."""
        devices = self.topology.num_devices
        works = [
            dataclasses.replace(work, table=dataclasses.replace(work.table, dtype="bfloat16"))
            if work.name in bfloat16
            else work
            for work in self._works(tables, -(-batch_size // devices) * devices)
        ]
        try:
            problem = self._problem(works, self._fixed_bytes(tables, works))
        except ValueError:
            return False  # a placement that is decided does not fit other devices
        if problem.capacity <= 0:
            return False
        if not problem.tables:
            return Solution.of(problem, ()).fits
        if balance_memory(problem, next(propose_smallest(problem))).fits:
            return True
        # That nothing fits is sooner proven than tried.
        answer = solve_averaged(problem, time_limit=2.0, gap=0.5)
        if answer.proposal is None:
            return False
        best = balance_memory(problem, answer.proposal)
        for solution in self._proposed(problem, time.monotonic() + 1.0):
            if best.fits:
                return True
            best = solution if solution.better_than(best) else best
        return best.fits or improve(problem, best, deadline=time.monotonic() + 1.0).fits

    def _proposed(self, problem: Problem, deadline: float) -> Iterator[Solution]:
        """What proposers and partitioners make of the problem, no proposal twice."""
        seen: set[tuple[int, ...]] = set()
        for propose in self.proposers:
            for proposal in propose(problem):
                if proposal in seen:
                    continue
                seen.add(proposal)
                for partition in self.partitioners:
                    yield partition(problem, proposal)
                if time.monotonic() >= deadline:
                    return

    def _is_close(self, solution: Solution, bound: float) -> bool:
        return solution.fits and solution.seconds <= bound * (1 + self.gap)
