"""The search for a plan as a mixed-integer program: variables and constraints.

With a variable ``y`` in {0, 1} for each option of each table (and ``x`` for each of its sites), and
for each group ``g`` of tables and each thing ``q`` done to its rows a variable ``E`` for the time
of the slowest device, the problem is linear:

    minimize    sum home y + sum launch z + sum E + sum F
    subject to  sum_o y_to = 1                        each table has one option,
                sum_s x_tos = parts y_to              whose parts are on as many sites,
                E_gq >= sum load x                    on each device,
                z_g >= y,
                memory <= capacity                    with maxima of its own.

``F_g`` are places of the exchange that no row of the slowest device fills. With ``A = sum at_least
y`` places in a round, and ``v_k`` in {0, 1} for whether rows overflow ``k`` times or more,

    E_g0 <= A + sum_k a_k A v_k,    F_g >= A + sum_k b_k A v_k - E_g0,

in rows: by rows each time has room for one round more, by sums there is one time that has room for
all (`jaxrec.plan.cost.overflow_rooms`). ``A v_k`` is a variable between ``A - max A (1 - v_k)`` and
the lesser of ``A`` and ``max A v_k`` (McCormick 1976, "Computability of global solutions to
factorable nonconvex programs").

Implied where ``y`` and ``x`` are whole numbers, and said because the solver first takes them to be
fractions: the slowest device has no less than the average. Of ``n`` parts of a load ``l`` or more
some device has ``n / D`` or more, rounded up, so ``E_gq >= l ceil(n / D)``. And it has no less than
the largest part: with the loads of parts ``l_1 < l_2 < ...`` and ``w_i`` in [0, 1] for whether any
is as large as ``l_i``,

    E_gq >= sum_i (l_i - l_(i-1)) w_i,    w_i >= sum of y_to with load >= l_i for each table t.

So a large part that is only a fraction adds its fraction to what smaller ones take, and the bound
before any branching is close to the optimum.

It is solved by HiGHS (Huangfu and Hall 2018, "Parallelizing the dual revised simplex method").
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from jaxrec.plan.cost import ROWS, SLACK, SUMS, overflow_rooms
from jaxrec.plan.options import EXCHANGED, HELD, PLACED, POOLED, Option
from jaxrec.plan.problem import Choice, Loads, Problem, Solution

if TYPE_CHECKING:
    import highspy

# Sizes of parts in a group that bound what its slowest device has: so many of the largest.
_MOST_PARTS = 64
# The same of parts that are counted.
_MOST_COUNTED = 8
# HiGHS holds constraints to within 1e-6; what it may use of memory is less by that.
_MARGIN = 2e-6

# An option, its variable, and those of its sites.
Member: TypeAlias = tuple[Option, int, list[int]]


class Program:
    """The program of a problem, in seconds over a scale and bytes over the capacity.

    Args:
        problem: The tables.
        with_sites: Whether to say where parts go. If not, a device's load is the average of all,
            or that of the largest part.
    """

    def __init__(self, problem: Problem, *, with_sites: bool):
        self.problem = problem
        self.with_sites = with_sites
        self.costs: list[float] = []
        self.upper: list[float] = []
        self.is_integer: list[int] = []
        # Constraints as entries (constraint, variable, factor), with bounds on their sums.
        self.entries: list[tuple[int, int, float]] = []
        self.low: list[float] = []
        self.high: list[float] = []
        self.start = Loads.of(problem, {})
        self.scale = self._scale()
        self.capacity = problem.capacity if problem.capacity > 0 else 1.0
        self._add_choices()
        self._add_groups()
        self._add_memory()

    def _scale(self) -> float:
        """Seconds that stand for 1: about those of a step."""
        fastest = [
            min(
                o.home.sum()
                + self.problem.place_seconds[self.problem.groups[o.key]].sum() * o.at_least
                for o in options
            )
            for options in self.problem.options
        ]
        return float(sum(fastest) + self.start.seconds) or 1.0

    def variable(
        self, cost: float = 0.0, *, upper: float = math.inf, is_integer: bool = False
    ) -> int:
        self.costs.append(cost)
        self.upper.append(upper)
        self.is_integer.append(int(is_integer))
        return len(self.costs) - 1

    def constraint(
        self, terms: Sequence[tuple[int, float]], low: float = -math.inf, high: float = math.inf
    ) -> None:
        """``low <= sum of factor * variable <= high``."""
        row = len(self.low)
        self.entries += [(row, variable, factor) for variable, factor in terms if factor]
        self.low.append(low)
        self.high.append(high)

    def _add_choices(self) -> None:
        self.y: list[list[int]] = []
        self.x: list[list[list[int]]] = []
        for options in self.problem.options:
            self.y.append(
                [
                    self.variable(float(o.home.sum()) / self.scale, upper=1, is_integer=True)
                    for o in options
                ]
            )
            self.constraint([(y, 1.0) for y in self.y[-1]], low=1, high=1)
            self.x.append([])
            for option, y in zip(options, self.y[-1], strict=True):
                sites: list[int] = []
                if self.with_sites and len(option.sites) > 1:
                    sites = [self.variable(upper=1, is_integer=True) for _ in option.sites]
                    self.constraint(
                        [(x, 1.0) for x in sites] + [(y, -float(option.parts))], low=0, high=0
                    )
                self.x[-1].append(sites)

    def _members(self) -> dict[int, list[list[Member]]]:
        members: dict[int, list[list[Member]]] = {}
        for options, ys, xs in zip(self.problem.options, self.y, self.x, strict=True):
            of_table: dict[int, list[Member]] = {}
            for option, y, sites in zip(options, ys, xs, strict=True):
                of_table.setdefault(self.problem.groups[option.key], []).append((option, y, sites))
            for group, table in of_table.items():
                members.setdefault(group, []).append(table)
        return members

    def _add_groups(self) -> None:
        """The slowest device of each group, for what is done to its rows and what is held."""
        problem, start = self.problem, self.start
        # Variables that stand for memory, and how much one takes of the capacity.
        self.held: list[tuple[int, float]] = []
        for group, tables in self._members().items():
            members = [member for table in tables for member in table]
            launch = problem.launch_seconds[group] / self.scale
            if start.members[group]:
                pass  # what is decided launches it already; see the constant in `solve`
            elif launch:
                used = self.variable(launch, upper=1)
                for table in tables:
                    terms = [(y, -1.0) for _, y, _ in table]
                    self.constraint([(used, 1.0), *terms], low=0)
            for quantity in range(HELD + 1):
                if quantity == HELD:
                    unit = problem.row_bytes[group] / self.capacity
                else:
                    unit = problem.row_seconds[group, quantity] / self.scale
                if not unit:
                    continue
                most = self.variable(0.0 if quantity == HELD else 1.0)
                if quantity == HELD:
                    self.held.append((most, 1.0))
                if quantity in (PLACED, POOLED):
                    bytes = problem.owner_bytes[group, quantity - PLACED] / self.capacity
                    self.held.append((most, bytes / unit))
                fixed = unit * start.rows[group, quantity]
                self._add_slowest(most, tables, quantity, unit, fixed)
                if quantity == EXCHANGED:
                    self._add_places(group, most, tables, unit)
                if quantity != HELD:
                    self._add_counts(most, members, quantity, unit)

    def _add_places(
        self, group: int, most: int, tables: Sequence[Sequence[Member]], unit: float
    ) -> None:
        """Places of the exchange without a row, of one round and of those that overflow it."""
        place = float(self.problem.place_seconds[group].sum()) / self.scale
        if not place:
            return
        # All in seconds of places: those of a round, and those that rows leave empty.
        decided = place * float(self.start.at_least[group])
        room, empty = self.variable(), self.variable(1.0)
        chosen = [(y, -place * o.at_least) for table in tables for o, y, _ in table]
        self.constraint([(room, 1.0), *chosen], low=decided, high=decided)
        filled = [(empty, 1.0), (room, -1.0), (most, place / unit)]
        fitting = [(room, 1.0), (most, -place / unit)]
        largest = decided + sum(place * max(o.at_least for o, _, _ in table) for table in tables)
        before: list[tuple[int, float]] = []
        for fit, taken in self._overflows(group, tables):
            overflows, more = self.variable(upper=1, is_integer=True), self.variable()
            self.constraint([(more, 1.0), (room, -1.0)], high=0)
            self.constraint([(more, 1.0), (overflows, -largest)], high=0)
            self.constraint([(more, 1.0), (room, -1.0), (overflows, -largest)], low=-largest)
            if before:
                self.constraint([*before, (overflows, -1.0)], low=0)
            before = [(overflows, 1.0)]
            filled.append((more, -taken))
            fitting.append((more, fit))
        self.constraint(filled, low=0)
        if before:
            self.constraint(fitting, low=0)

    def _overflows(
        self, group: int, tables: Sequence[Sequence[Member]]
    ) -> list[tuple[float, float]]:
        """For each time that rows can overflow: how many more fit then, and how many more places
        are taken (those of forward and backward weighed by what they cost), both in rounds."""
        problem, start = self.problem, self.start
        rounds = [
            float(o.load[EXCHANGED].max()) / o.at_least
            for table in tables
            for o, _, _ in table
            if o.at_least
        ]
        if start.at_least[group]:
            rounds.append(float(start.rows[group, EXCHANGED].max() / start.at_least[group]))
        # No sum over tables is more rounds than the most of any one of them.
        most, devices = max(rounds, default=0.0), problem.topology.num_devices
        key, seconds = problem.group_keys[group], problem.place_seconds[group]
        reached = {
            ROWS: [float(k) for k in range(2, math.ceil(most - 1e-9) + 1)],
            SUMS: [devices / SLACK] if most > 1 + 1e-9 else [],
        }
        found, fit, taken = [], 1.0, 1.0
        for reach in reached.get(key.way, []):
            places = reach + np.array(overflow_rooms(key, reach, 1.0, devices))
            weighed = float(places @ seconds / seconds.sum())
            found.append((reach - fit, weighed - taken))
            fit, taken = reach, weighed
        return found

    def _add_slowest(
        self,
        most: int,
        tables: Sequence[Sequence[Member]],
        quantity: int,
        unit: float,
        fixed: np.ndarray,
    ) -> None:
        """``most`` is no less than the load of any device, or than the average."""
        devices = self.problem.topology.num_devices
        members = [member for table in tables for member in table]
        average = [
            (y, -unit * o.parts * float(o.load[quantity].sum()) / devices) for o, y, _ in members
        ]
        self.constraint([(most, 1.0), *average], low=float(fixed.mean()))
        self._add_largest(most, tables, quantity, unit)
        if not self.with_sites:
            if fixed.max() > 0:
                self.constraint([(most, 1.0)], low=float(fixed.max()))
            return
        on_device: list[list[tuple[int, float]]] = [[] for _ in range(devices)]
        for option, y, sites in members:
            for site, x in enumerate(sites or [y]):
                for device, load in zip(option.sites[site], option.load[quantity], strict=True):
                    if load:
                        on_device[device].append((x, -unit * float(load)))
        for device, terms in enumerate(on_device):
            if terms or fixed[device]:
                self.constraint([(most, 1.0), *terms], low=float(fixed[device]))

    def _add_largest(
        self, most: int, tables: Sequence[Sequence[Member]], quantity: int, unit: float
    ) -> None:
        """``most`` is no less than the largest part."""
        loads = [[unit * float(o.load[quantity].max()) for o, _, _ in table] for table in tables]
        levels = sorted({load for table in loads for load in table if load})[-_MOST_PARTS:]
        if not levels:
            return
        reached = {level: self.variable(upper=1) for level in levels}
        for lower, higher in itertools.pairwise(reached.values()):
            self.constraint([(lower, 1.0), (higher, -1.0)], low=0)
        steps = np.diff(levels, prepend=0.0)
        self.constraint([(most, 1.0), *zip(reached.values(), -steps, strict=True)], low=0)
        for table, parts in zip(tables, loads, strict=True):
            for level in reached.keys() & set(parts):
                as_large = [
                    (y, -1.0) for (_, y, _), part in zip(table, parts, strict=True) if part >= level
                ]
                self.constraint([(reached[level], 1.0), *as_large], low=0)

    def _add_counts(self, most: int, members: Sequence[Member], quantity: int, unit: float) -> None:
        """Of ``n`` parts of a size or larger some device has ``n / D`` or more, rounded up."""
        devices = self.problem.topology.num_devices
        sizes = {float(size) for option, _, _ in members for size in option.load[quantity] if size}
        for size in sorted(sizes)[-_MOST_COUNTED:]:
            parts = [
                (y, -o.parts * np.count_nonzero(o.load[quantity] >= size) / devices)
                for o, y, _ in members
            ]
            count = self.variable(is_integer=True)
            self.constraint([(count, 1.0), *parts], low=0)
            self.constraint([(most, 1.0), (count, -unit * size)], low=0)

    def _add_memory(self) -> None:
        problem, start, capacity = self.problem, self.start, self.capacity
        temporary = self.variable()
        self.constraint([(temporary, 1.0)], low=float(start.temporary.max(initial=0)) / capacity)
        kept: list[tuple[int, float]] = []
        for group, tables in self._members().items():
            members = [member for table in tables for member in table]
            terms = [(y, -o.temporary / capacity) for o, y, _ in members]
            self.constraint(
                [(temporary, 1.0), *terms], low=float(start.temporary[group]) / capacity
            )
            kept += [(y, o.kept / capacity) for o, y, _ in members]
        free = (problem.capacity - start.kept - self._decided_alone()) / capacity
        self.constraint([(temporary, 1.0), *kept, *self.held], high=free - _MARGIN)
        self._add_stored()

    def _decided_alone(self) -> float:
        """Bytes of groups that decided tables have to themselves."""
        problem, members = self.problem, self._members()
        most = self.start.rows.max(axis=2)
        held = most[:, HELD] * problem.row_bytes
        held += (most[:, [PLACED, POOLED]] * problem.owner_bytes).sum(axis=1)
        return float(sum(held[g] for g in range(len(problem.groups)) if g not in members))

    def _add_stored(self) -> None:
        """Rows in host memory and on disk."""
        topology = self.problem.topology
        for storage, capacity in (
            ("host", self.problem.host_capacity),
            ("disk", self.problem.disk_capacity),
        ):
            on_host: list[list[tuple[int, float]]] = [[] for _ in range(topology.hosts)]
            for options, ys, xs in zip(self.problem.options, self.y, self.x, strict=True):
                for option, y, sites in zip(options, ys, xs, strict=True):
                    if option.storage != storage:
                        continue
                    if capacity <= 0:
                        self.constraint([(y, 1.0)], high=0)
                        continue
                    if not self.with_sites:
                        share = option.parts * float(option.stored_bytes.sum()) / topology.hosts
                        for host in range(topology.hosts):
                            on_host[host].append((y, share / capacity))
                        continue
                    for site, x in enumerate(sites or [y]):
                        for device, bytes in zip(
                            option.sites[site], option.stored_bytes, strict=True
                        ):
                            host = device // topology.devices_per_host
                            on_host[host].append((x, float(bytes) / capacity))
            for terms in on_host:
                if terms:
                    self.constraint(terms, high=1 - _MARGIN)

    def solve(
        self, time_limit: float, gap: float, start: Solution | None = None
    ) -> tuple[np.ndarray | None, float, bool]:
        """Values of the variables if any were found, the bound in seconds, and whether it ended."""
        # HiGHS is only here, so that all else runs without it.
        import highspy

        solver = highspy.Highs()
        solver.silent()
        solver.setOptionValue("time_limit", max(time_limit, 0.1))
        solver.setOptionValue("mip_rel_gap", gap)
        solver.passModel(self._model())
        if start is not None:
            variables, values = self._values(start)
            solver.setSolution(len(variables), variables, values)
        solver.run()
        status, info = solver.getModelStatus(), solver.getInfo()
        # Nothing is below 0, so nothing is unbounded.
        if status in (
            highspy.HighsModelStatus.kInfeasible,
            highspy.HighsModelStatus.kUnboundedOrInfeasible,
        ):
            return None, math.inf, True
        bound = info.mip_dual_bound if math.isfinite(info.mip_dual_bound) else 0.0
        found = None
        if info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible:
            found = np.array(solver.getSolution().col_value)
        is_finished = status == highspy.HighsModelStatus.kOptimal
        return found, max(0.0, bound * self.scale), is_finished

    def _model(self) -> highspy.HighsLp:
        import highspy

        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = len(self.costs), len(self.low)
        model.col_cost_ = np.array(self.costs)
        model.col_lower_, model.col_upper_ = np.zeros(len(self.costs)), np.array(self.upper)
        model.row_lower_, model.row_upper_ = np.array(self.low), np.array(self.high)
        model.offset_ = self._constant() / self.scale
        rows, columns, factors = zip(*self.entries, strict=True)
        ends = np.cumsum(np.bincount(rows, minlength=len(self.low)))
        model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        model.a_matrix_.start_ = np.array([0, *ends], np.int32)
        model.a_matrix_.index_ = np.array(columns, np.int32)
        model.a_matrix_.value_ = np.array(factors)
        kinds = highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger
        model.integrality_ = [kinds[is_integer] for is_integer in self.is_integer]
        return model

    def _values(self, solution: Solution) -> tuple[np.ndarray, np.ndarray]:
        """The variables of options and sites, and their values; those of others follow."""
        values: dict[int, float] = {}
        for choice, ys, xs in zip(solution.choices, self.y, self.x, strict=True):
            for option, (y, sites) in enumerate(zip(ys, xs, strict=True)):
                is_chosen = option == choice.option
                values[y] = float(is_chosen)
                values |= {
                    x: float(is_chosen and site in choice.sites) for site, x in enumerate(sites)
                }
        return np.array([*values], np.int32), np.array([*values.values()])

    def _constant(self) -> float:
        """Seconds that every plan takes and that no variable stands for."""
        problem, start, members = self.problem, self.start, self._members()
        seconds = float(start.home.sum())
        for group in range(len(problem.groups)):
            if group not in members:
                seconds += float(start.group_seconds[group])
            elif start.members[group]:
                seconds += float(problem.launch_seconds[group])
        return seconds

    def proposal(self, values: np.ndarray | None) -> tuple[int, ...] | None:
        if values is None:
            return None
        return tuple(int(np.argmax(values[ys])) for ys in self.y)

    def solution(self, values: np.ndarray | None) -> Solution | None:
        chosen = self.proposal(values)
        if values is None or chosen is None:
            return None
        choices = []
        for table, index in enumerate(chosen):
            option, sites = self.problem.options[table][index], self.x[table][index]
            if not sites:
                choices.append(Choice(index, (0,) * option.parts))
                continue
            most = np.argsort(-values[sites], kind="stable")[: option.parts]
            choices.append(Choice(index, tuple(int(site) for site in sorted(most))))
        return Solution.of(self.problem, choices)
