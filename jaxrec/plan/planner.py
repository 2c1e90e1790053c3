"""The planner: it makes a plan from a model and devices.

`Planner._search` is where to begin: proposals, a bound, local search, and the whole program.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxrec.embed.stash import Stash, check_stash_name
from jaxrec.mesh.precision import ExchangePrecision
from jaxrec.plan.caches import only_cache
from jaxrec.plan.constraints import STORAGES, ParameterConstraints, check_store
from jaxrec.plan.estimate import make_estimate
from jaxrec.plan.feature_statistics import Statistics
from jaxrec.plan.joined_tables import check_stores, chosen_caches, join_caches, join_constraints
from jaxrec.plan.model_tables import Model, ModelTables, is_function, read_model
from jaxrec.plan.options import (
    Considered,
    ShardingOption,
    consider_options,
    enumerate_options,
    placed_options,
    to_placement,
)
from jaxrec.plan.partitioners import Partitioner, balance_memory, improve, place_fastest
from jaxrec.plan.plan import Context, ShardingPlan, plan_once, with_least_memory
from jaxrec.plan.problem import Problem, Solution, Totals
from jaxrec.plan.proposers import PROPOSERS, Proposer, propose_smallest
from jaxrec.plan.shortage import PlanError, Shortage, explain
from jaxrec.plan.solver import is_small, solve, solve_averaged
from jaxrec.plan.topology import Topology
from jaxrec.plan.workload import TableWorkload, measure_workloads

_DEVICE = ("device",)
_CACHED = ("device", "host")
# Bytes of dense parameters, gradients, optimizer state and temporaries, over those of parameters.
_DENSE_FACTOR = 6
# Fractions of the time limit for the proposers, for the averaged program (with the whole program to
# follow, or alone) and for local search.
_PROPOSING, _AVERAGED, _AVERAGED_ALONE, _IMPROVING = 0.15, 0.4, 0.6, 0.25


@dataclasses.dataclass(frozen=True)
class Planner:
    """A search for the fastest plan of a model's tables on given devices.

    Attributes:
        topology: The devices.
        constraints: Constraints by table.
        statistics: Result of `jaxrec.plan.sample_statistics` for some batches. Without them, a
            sample has one id per feature, and all rows are equally hot.
        storages: Where rows may be kept: "device"; "host", in host memory; "store", in the row
            store that ``store`` names. Tables that are not kept on the devices have a cache there,
            and `jaxrec.shard` needs a function that makes the model. None: "device"; and where
            `plan` gets a function and the tables do not fit, "host", too.
        store: URL of the row store of "store", with ``{table}`` for the table's name, such as
            ``"file:///data/{table}"`` (`jaxrec.tier.stores.open_store`).
        precision: Formats in which rows and gradients travel, as given to `jaxrec.shard`.
        stashes: Values that the plan may choose for the ``stash`` of all collections. Among the
            values with which a plan fits, the planner prefers None, then the fastest: ``(None,
            "recompute", "host")`` stashes only if it must.
        reserve: Fraction of each device's memory to leave free.
        batches: Batches on a device at once: the step's, and those put there ahead of it.
        dense_bytes: Bytes of parameters other than tables; None: the model's.
        time_limit: Seconds that the search may take, beyond one proposal of each proposer.
        gap: The search ends with a plan whose time is within this fraction of the bound.
        proposers: Functions that propose options for tables; see `jaxrec.plan.proposers`.
        partitioners: Functions that place proposals; see `jaxrec.plan.partitioners`.
        is_exact: Whether to solve mixed-integer programs too, which give bounds.

    Raises:
        ValueError: If a number is outside its range.

    Example:
        >>> import jaxrec
        >>> from jaxrec.plan import ParameterConstraints, Topology
        >>> tables = [
        ...     jaxrec.EmbeddingBagConfig("product", num_embeddings=40_000_000, embedding_dim=64),
        ...     jaxrec.EmbeddingBagConfig("country", num_embeddings=5, embedding_dim=64),
        ... ]
        >>> constraints = {"product": ParameterConstraints(pooling_factors=20)}
        >>> planner = Planner(Topology.named("h100", devices=8), constraints)
        >>> plan = planner.plan(tables, batch_size=65536)
        >>> {name: placement.kind for name, placement in plan.to_dict().items()}
        {'product': 'row_wise', 'country': 'table_wise'}
    """

    topology: Topology
    constraints: Mapping[str, ParameterConstraints] = dataclasses.field(default_factory=dict)
    _: dataclasses.KW_ONLY
    statistics: Statistics | None = None
    storages: Sequence[str] | None = None
    store: str | None = None
    precision: ExchangePrecision = ExchangePrecision()  # noqa: RUF009 (frozen)
    stashes: Sequence[Stash | None] = (None,)
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
            raise ValueError(
                f"reserve is a fraction of memory, from 0 to below 1, got {self.reserve}"
            )
        storages = self.storages
        is_text = isinstance(storages, str)
        if storages is not None and (is_text or not storages or set(storages) - set(STORAGES)):
            raise ValueError(f"storages are some of {', '.join(STORAGES)}, got {storages!r}")
        if self.store is not None:
            check_store(self.store)
        if isinstance(self.stashes, str) or not self.stashes:
            raise ValueError(f"stashes is a sequence such as (None, 'host'), got {self.stashes!r}")
        for stash in self.stashes:
            check_stash_name(stash)  # The planned devices may not be here.
        for field in ("time_limit", "gap"):
            if not getattr(self, field) > 0:
                raise ValueError(f"{field} is above 0, got {getattr(self, field)}")
        if self.batches < 1:
            raise ValueError(f"batches is 1 or more, got {self.batches}")
        if not self.proposers or not self.partitioners:
            raise ValueError("there is at least one proposer and one partitioner")

    def plan(self, model: Model, *, batch_size: int) -> ShardingPlan:
        """Return the fastest plan found within the time limit.

        Its ``estimate`` has a lower bound on the time of every plan.

        With several processes, every process calls this. Process 0 searches, with its own
        statistics and topology and the least memory of any process; all processes return its plan.

        Args:
            model: The model, real or abstract (`nnx.eval_shape`); a function that makes the model,
                which is called under `nnx.eval_shape`; or configurations of tables. A model stays
                as it is: `jaxrec.shard` places its tables.
            batch_size: Samples of all devices in a step.

        Raises:
            PlanError: If no plan fits; the message says what to change.
            ValueError: If constraints do not fit the tables or the devices, or processes plan
                different tables.
        """
        tables = read_model(model)
        planner = dataclasses.replace(self, topology=with_least_memory(self.topology))

        def search() -> ShardingPlan:
            return planner._search_all(tables, is_function(model), batch_size)

        return plan_once(search, tables, batch_size)

    def _search_all(self, tables: ModelTables, is_function: bool, batch_size: int) -> ShardingPlan:
        """Return the plan with its context; rows may go to host memory if they do not fit."""
        # The context is of the planner as the user made it, so that `Planner.context` gives the
        # same one when the plan is loaded.
        context = self._context(self._workloads(tables, batch_size), batch_size)
        planners = [dataclasses.replace(self, stashes=(stash,)) for stash in self.stashes]
        may_cache = self.storages is None and is_function
        if may_cache or len(planners) > 1:
            fitting = [each for each in planners if each._fits(tables, batch_size, ())]
            if not fitting and may_cache:
                planners = [dataclasses.replace(each, storages=_CACHED) for each in planners[:1]]
            planners = fitting or planners[:1]
        without = [each for each in planners if each.stashes == (None,)]
        plans = [each._plan(tables, batch_size) for each in without or planners]
        best = min(plans, key=lambda plan: 0.0 if plan.estimate is None else plan.estimate.seconds)
        return dataclasses.replace(best, context=context)

    def _plan(self, tables: ModelTables, batch_size: int) -> ShardingPlan:
        start = time.monotonic()
        workloads = self._workloads(tables, batch_size)
        fixed = self._fixed_bytes(tables, workloads)
        problem = self._problem(workloads, fixed)
        solution, bound, search = self._search(problem, start)
        if not solution.fits:
            raise PlanError(self._explain(tables, workloads, problem, solution, bound, batch_size))
        caches = chosen_caches(problem, solution)
        # Tables that share features must have equal caches, which the program cannot say. So search
        # freely, then again with the caches of those tables fixed; the second search finds them
        # equal.
        if (alike := join_caches(workloads, caches, self.constraints)) is not None:
            return dataclasses.replace(self, constraints=alike)._plan(tables, batch_size)
        estimate = make_estimate(
            problem,
            workloads,
            solution,
            bound=bound,
            search=search,
            search_seconds=time.monotonic() - start,
            fixed_bytes=fixed,
        )
        decided = {
            name: constraint.placement
            for name, constraint in self.constraints.items()
            if constraint.placement is not None
        }
        chosen = {
            option.table: to_placement(option, sites, self.topology)
            for option, sites in problem.chosen(solution.choices)
        }
        placements = decided | chosen
        ordered = tuple((workload.name, placements[workload.name]) for workload in workloads)
        return ShardingPlan(
            ordered, estimate, caches=tuple(caches.items()), stash=self._settings["stash"]
        )

    def evaluate(self, model: Model, plan: ShardingPlan, *, batch_size: int) -> ShardingPlan:
        """Return a plan, made by hand or elsewhere, with an estimate.

        Args:
            model: As for `plan`.
            plan: A placement for every table, and caches.
            batch_size: Samples of all devices in a step.

        Raises:
            ValueError: If a table has no placement or one that does not fit it or the devices.
        """
        tables = read_model(model)
        workloads = self._workloads(tables, batch_size)
        placements = plan.to_dict()
        for workload in workloads:
            if workload.name not in placements:
                raise ValueError(f"the plan has no placement for table {workload.name!r}")
        fixed = self._fixed_bytes(tables, workloads)
        caches = dict(plan.caches)
        decided = (
            placed_options(
                w,
                self.topology,
                placements[w.name],
                caches.get(w.name),
                self.precision,
                plan.stash,
            )
            for w in workloads
        )
        problem = dataclasses.replace(
            self._problem((), fixed), decided=tuple(itertools.chain(*decided))
        )
        solution = Solution.of(problem, ())
        estimate = make_estimate(
            problem,
            workloads,
            solution,
            bound=0.0,
            search="evaluated as given",
            search_seconds=0.0,
            fixed_bytes=fixed,
        )
        context = self._context(workloads, batch_size)
        return dataclasses.replace(plan, estimate=estimate, context=context)

    def options(self, model: Model, *, batch_size: int) -> dict[str, Considered]:
        """Return the ways to place each table that `plan` considers, by table.

        Args:
            model: As for `plan`.
            batch_size: Samples of all devices in a step.

        Raises:
            ValueError: If constraints do not fit the tables or the devices.

        Example:
            >>> import jaxrec
            >>> table = jaxrec.EmbeddingBagConfig("user", num_embeddings=1000, embedding_dim=64)
            >>> constraints = {"user": ParameterConstraints(sharding_types=["row_wise", "grid"])}
            >>> planner = Planner(Topology.named("h100", devices=8), constraints)
            >>> print(planner.options([table], batch_size=64)["user"])
            considered: row_wise by rows, row_wise by pooled, grid by rows, grid by pooled
        """
        workloads = self._workloads(read_model(model), batch_size)
        storages = self.storages or _DEVICE
        constraints = join_constraints(workloads, self.constraints, storages)
        considered = {}
        for workload in workloads:
            constraint = constraints[workload.name]
            if constraint.placement is not None:
                way = f"{constraint.placement.kind}, as its constraints place it"
                considered[workload.name] = Considered((way,), ())
                continue
            options, reasons = consider_options(
                workload, self.topology, constraint, storages=storages, **self._settings
            )
            considered[workload.name] = Considered.of(options, reasons)
        return considered

    def context(self, model: Model, *, batch_size: int) -> Context:
        """Return the context of this planner's plans, for `ShardingPlan.from_json` to check."""
        return self._context(self._workloads(read_model(model), batch_size), batch_size)

    @property
    def _settings(self) -> dict[str, Any]:
        """Settings of the planner that options depend on."""
        stash = self.stashes[0]
        return {"store": self.store, "precision": self.precision, "stash": stash}

    def _context(self, workloads: Sequence[TableWorkload], batch_size: int) -> Context:
        settings: dict[str, Any] = {
            "storages": list(self.storages or _DEVICE),
            "reserve": self.reserve,
            "batches": self.batches,
        }
        if self.store is not None:
            settings["store"] = self.store
        if self.precision != ExchangePrecision():
            settings["precision"] = dataclasses.asdict(self.precision)
        if tuple(self.stashes) != (None,):
            settings["stashes"] = list(self.stashes)
        return Context.of(workloads, self.topology, batch_size, self.constraints, settings)

    def _workloads(self, tables: ModelTables, batch_size: int) -> tuple[TableWorkload, ...]:
        devices = self.topology.num_devices
        if isinstance(batch_size, bool) or batch_size < 1 or batch_size % devices:
            raise ValueError(
                f"the batch is divided among {devices} devices, got batch_size={batch_size}; give "
                "a multiple"
            )
        return measure_workloads(
            tables,
            batch_size=batch_size,
            num_devices=devices,
            constraints=self.constraints,
            statistics=self.statistics,
        )

    def _fixed_bytes(
        self, tables: ModelTables, workloads: Sequence[TableWorkload]
    ) -> dict[str, float]:
        """Return the bytes of each device that do not depend on the plan, by kind."""
        # By feature, not by table: tables that share a feature share its ids.
        features = {
            feature.name: feature.capacity * (8 if workload.is_weighted else 4) + 4 * feature.bags
            for workload in workloads
            for feature in workload.features
        }
        dense = tables.dense_bytes if self.dense_bytes is None else self.dense_bytes
        return {
            "batches": float(self.batches * sum(features.values())),
            "dense": float(_DENSE_FACTOR * dense),
            "reserve": self.reserve * self.topology.memory,
        }

    def _problem(self, workloads: Sequence[TableWorkload], fixed: Mapping[str, float]) -> Problem:
        names: list[str] = []
        options: list[tuple[ShardingOption, ...]] = []
        decided: list[ShardingOption] = []
        constraints = join_constraints(workloads, self.constraints, self.storages or _DEVICE)
        check_stores(workloads, constraints, self.store)
        for workload in workloads:
            constraint = constraints[workload.name]
            if constraint.placement is not None:
                devices = self.topology.num_devices
                cache = only_cache(workload, constraint, self.store, devices)
                decided += placed_options(
                    workload,
                    self.topology,
                    constraint.placement,
                    cache,
                    self.precision,
                    self.stashes[0],
                )
                continue
            names.append(workload.name)
            # `join_constraints` gave every table its storages, so the others are never used.
            options.append(
                enumerate_options(
                    workload, self.topology, constraint, storages=_DEVICE, **self._settings
                )
            )
        return Problem(
            self.topology,
            tuple(names),
            tuple(options),
            tuple(decided),
            capacity=self.topology.memory - sum(fixed.values()),
            host_capacity=self.topology.host_memory * (1 - self.reserve),
            store_capacity=self.topology.disk * (1 - self.reserve),
        )

    def _search(self, problem: Problem, start: float) -> tuple[Solution, float, str]:
        """Return the best solution found, the bound on all solutions, and the steps in words."""
        if not problem.tables:
            solution = Solution.of(problem, ())
            return solution, solution.seconds, "every placement was decided"
        best, proposals = None, 0
        for solution in self._proposed(problem, start + _PROPOSING * self.time_limit):
            proposals += 1
            if solution.better_than(best):
                best = solution
        if best is None:
            raise ValueError("none of the proposers made a proposal for these tables")
        steps = [f"{proposals} proposals"]
        # From cheap to expensive. The last two steps run only if the best plan is not yet within
        # the gap of the bound: local search tries every option of every table, and the whole
        # program has a variable for each part on each device.
        bound = 0.0
        if self.is_exact:
            share = _AVERAGED if is_small(problem) else _AVERAGED_ALONE
            limit = share * self.time_limit
            # A bound that is itself a gap below its optimum would leave none for the plan.
            answer = solve_averaged(problem, best, time_limit=limit, gap=self.gap / 4)
            bound = answer.bound
            steps.append("averaged program" + ("" if answer.is_finished else " (cut short)"))
            if answer.proposal is not None:
                for partition in self.partitioners:
                    solution = partition(problem, answer.proposal)
                    best = solution if solution.better_than(best) else best
        if not self._is_close(best, bound):
            deadline = time.monotonic() + _IMPROVING * self.time_limit
            best = improve(problem, best, deadline=deadline)
            steps.append("improved one by one")
        left = start + self.time_limit - time.monotonic()
        if self.is_exact and not self._is_close(best, bound) and is_small(problem) and left > 0:
            answer = solve(problem, best, time_limit=left, gap=self.gap)
            best = answer.solution or best
            bound = max(bound, answer.bound)
            steps.append("whole program" + ("" if answer.is_finished else " (cut short)"))
        # By the solver's tolerance a bound may exceed the optimum that it proves.
        bound = min(bound, best.seconds) if best.fits else bound
        return best, bound, ", ".join(steps)

    def _explain(
        self,
        tables: ModelTables,
        workloads: Sequence[TableWorkload],
        problem: Problem,
        best: Solution,
        bound: float,
        batch_size: int,
    ) -> str:
        """Return why no plan fits, and changes that would help."""
        shortages = Totals.of(problem, best.choices).shortages
        shortage = Shortage(
            missing=best.excess,
            where=max(shortages, key=lambda storage: shortages[storage]),
            is_proven=bound == float("inf"),
            capacity=problem.capacity,
            fixed=self._fixed_bytes(tables, workloads),
            workloads=workloads,
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
        """Return whether a plan that fits is quickly found, with the named tables in bfloat16."""
        devices = self.topology.num_devices
        workloads = [
            dataclasses.replace(w, table=dataclasses.replace(w.table, dtype="bfloat16"))
            if w.name in bfloat16
            else w
            # `explain` tries numbers of devices that the batch size may not be a multiple of.
            for w in self._workloads(tables, -(-batch_size // devices) * devices)
        ]
        try:
            problem = self._problem(workloads, self._fixed_bytes(tables, workloads))
        except ValueError:
            return False  # a fixed placement does not fit other devices
        if problem.capacity <= 0:
            return False
        if not problem.tables:
            return Solution.of(problem, ()).fits
        if balance_memory(problem, next(propose_smallest(problem))).fits:
            return True
        # The program proves sooner that no plan fits than trials would.
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
        """Place each new proposal of all proposers by all partitioners, until the deadline."""
        seen: set[tuple[int, ...]] = set()
        # In turns: the first proposer alone may take all of the time that large models have. A
        # first round is complete, whatever the deadline: one proposer's first proposal may be a
        # hundred times as slow as another's.
        turns, is_first = [propose(problem) for propose in self.proposers], True
        while turns:
            for proposals in tuple(turns):
                proposal = next(proposals, None)
                if proposal is None:
                    turns.remove(proposals)
                if proposal is None or proposal in seen:
                    continue
                seen.add(proposal)
                for partition in self.partitioners:
                    yield partition(problem, proposal)
                if not is_first and time.monotonic() >= deadline:
                    return
            is_first = False

    def _is_close(self, solution: Solution, bound: float) -> bool:
        return solution.fits and solution.seconds <= bound * (1 + self.gap)
