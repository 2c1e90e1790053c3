"""The search for a plan as a mixed-integer linear program: variables and constraints.

Variables: ``y`` in {0, 1} for each option of each table, ``x`` in {0, 1} for each site of an
option, ``z`` in [0, 1] for whether a group is used, and ``E_gq`` for the time that count ``q`` of
the `Load` takes on the slowest device of group ``g``:

    minimize    sum home y + sum launch z + sum E + sum F
    subject to  sum_o y_to = 1                        each table has one option,
                sum_s x_tos = parts y_to              with each part on a site of its own,
                E_gq >= sum load x                    on each device,
                z_g >= sum_o y_to                     for each table t, over its options in g,
                memory <= capacity                    as the sum of its own maxima.

``F_g`` is the time of the exchange's positions that stay empty on the slowest device. Let ``A`` be
the sum of ``round_capacity y``, the positions of one round, and ``v_k`` in {0, 1} say whether rows
overflow ``k`` times or more. In units of one position's time, with ``E_g0`` for rows exchanged,

    E_g0 <= A + sum_k a_k A v_k,    F_g >= A + sum_k b_k A v_k - E_g0,

with ``a_k`` and ``b_k`` from `ExchangeCosts.overflow_steps` and `empty_positions`: an overflow of
the exchange by rows adds a round, and the first overflow of the pooled exchange makes it large
enough for any demand. The product ``A v_k`` is a variable between ``A - max A (1 - v_k)`` and the
smaller of ``A`` and ``max A v_k`` (McCormick 1976, "Computability of global solutions to
factorable nonconvex programs").

Two more constraints hold for every plan, and tighten the relaxation, in which ``y`` and ``x`` may
be fractions. First, if ``n`` parts have a load of ``l`` or more, some device has ``n / D`` of them,
rounded up: ``E_gq >= l ceil(n / D)``. Second, the slowest device has no less than the largest part:
with the loads of parts ``l_1 < l_2 < ...`` and ``w_i`` in [0, 1] for whether any is as large as
``l_i``,

    E_gq >= sum_i (l_i - l_(i-1)) w_i,    w_i >= sum of y_to with load >= l_i for each table t.

So a fraction of a large part adds to what smaller parts take, and the bound before any branching is
close to the optimum.

HiGHS solves the program (Huangfu and Hall 2018, "Parallelizing the dual revised simplex method").
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from jaxrec.plan.options import ShardingOption
from jaxrec.plan.problem import Choice, Problem, Solution, Totals
from jaxrec.plan.quantities import LOADS

if TYPE_CHECKING:
    import highspy

# Each load gets a variable and a constraint in the program, so only the largest loads are used; the
# bound stays valid with fewer. Loads in `_add_largest`:
_MAX_LARGEST = 64
# Loads in `_add_counts`, fewer since each has an integer variable, on which the solver branches:
_MAX_COUNTED = 8
# Variables of an averaged program up to which its first relaxation is solved by the simplex method.
# That of a thousand tables on 128 devices takes it minutes, and five seconds by an interior point.
_MAX_SIMPLEX = 5000
# HiGHS holds constraints to within 1e-6. The program leaves more of the memory than that unused.
_MARGIN = 2e-6

# An option, its variable, and the variables of its sites.
Member: TypeAlias = tuple[ShardingOption, int, list[int]]


class Program:
    """The mixed-integer program of a problem; times are in units of `scale`, bytes of the capacity.

    Without ``with_sites`` the program does not assign parts to sites: a device's load is then the
    average over all devices, or the load of the largest part if that is more.
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
        self.decided = Totals.of(problem)
        # HiGHS's tolerances are absolute (1e-6), so that times of microseconds and memory of 1e11
        # bytes must be brought close to 1.
        self.scale = self._scale()
        self.capacity = problem.capacity if problem.capacity > 0 else 1.0
        self._add_choices()
        self._add_groups()
        self._add_memory()

    def _scale(self) -> float:
        """Return the seconds that are 1 in the program: about the time of a step."""
        position = self.problem.position_seconds.sum(axis=0)
        fastest = [
            min(
                o.home.total + position[self.problem.groups[o.group]] * o.round_capacity
                for o in options
            )
            for options in self.problem.options
        ]
        return float(sum(fastest) + self.decided.seconds) or 1.0

    def variable(
        self, cost: float = 0.0, *, upper: float = math.inf, is_integer: bool = False
    ) -> int:
        """Add a variable of 0 or more; return its index."""
        self.costs.append(cost)
        self.upper.append(upper)
        self.is_integer.append(int(is_integer))
        return len(self.costs) - 1

    def constraint(
        self, terms: Sequence[tuple[int, float]], low: float = -math.inf, high: float = math.inf
    ) -> None:
        """Add ``low <= sum of factor * variable <= high``."""
        row = len(self.low)
        self.entries += [(row, variable, factor) for variable, factor in terms if factor]
        self.low.append(low)
        self.high.append(high)

    def _add_choices(self) -> None:
        """Add a variable for each option, and one for each of its sites if it has several."""
        self.y: list[list[int]] = []
        self.x: list[list[list[int]]] = []
        for options in self.problem.options:
            self.y.append(
                [
                    self.variable(float(o.home.total) / self.scale, upper=1, is_integer=True)
                    for o in options
                ]
            )
            self.constraint([(y, 1.0) for y in self.y[-1]], low=1, high=1)
            self.x.append([])
            for option, y in zip(options, self.y[-1], strict=True):
                # With one site there is nothing to choose: ``y`` stands for ``x``.
                sites: list[int] = []
                if self.with_sites and len(option.sites) > 1:
                    sites = [self.variable(upper=1, is_integer=True) for _ in option.sites]
                    self.constraint(
                        [(x, 1.0) for x in sites] + [(y, -float(option.parts))], low=0, high=0
                    )
                self.x[-1].append(sites)

    def _members(self) -> dict[int, list[list[Member]]]:
        """Return the members of each group by its index, in one list per table."""
        members: dict[int, list[list[Member]]] = {}
        for options, ys, xs in zip(self.problem.options, self.y, self.x, strict=True):
            of_table: dict[int, list[Member]] = {}
            for option, y, sites in zip(options, ys, xs, strict=True):
                of_table.setdefault(self.problem.groups[option.group], []).append(
                    (option, y, sites)
                )
            for group, table in of_table.items():
                members.setdefault(group, []).append(table)
        return members

    def _add_groups(self) -> None:
        """Add the time of each group's slowest device, for each count of its load."""
        problem = self.problem
        # Variables that stand for memory, with the fraction of the capacity that one takes.
        self.loaded: list[tuple[int, float]] = []
        for group, tables in self._members().items():
            launch = problem.launch_seconds[group] / self.scale
            # A group with a decided table is launched in any case; see `_constant`.
            if launch and not self.decided.members[group]:
                # Not an integer variable: at whole ``y`` the solver gives it 0 or 1 anyway, since a
                # launch costs time.
                used = self.variable(launch, upper=1)
                for table in tables:
                    self.constraint([(used, 1.0), *((y, -1.0) for _, y, _ in table)], low=0)
            for count, name in enumerate(LOADS):
                seconds = problem.unit_seconds[count, group] / self.scale
                bytes = problem.unit_bytes[count, group] / self.capacity
                # `most` is in seconds where the count takes time, else in bytes. One variable
                # serves for both, since the device that has most of a count needs most time and
                # most memory for it.
                if not (unit := seconds or bytes):
                    continue
                most = self.variable(1.0 if seconds else 0.0)
                if bytes:
                    self.loaded.append((most, bytes / unit))
                self._add_slowest(
                    most, tables, count, unit, unit * self.decided.stacked[count, group]
                )
                if name == "exchanged":
                    self._add_positions(group, most, tables, unit)
                if seconds:
                    self._add_counts(most, tables, count, unit)

    def _add_positions(
        self, group: int, most: int, tables: Sequence[Sequence[Member]], unit: float
    ) -> None:
        """Add the empty positions of one round of the exchange, and of rounds that overflow it."""
        position = float(self.problem.position_seconds[:, group].sum()) / self.scale
        if not position:
            return
        # `most` counts all of the time of rows exchanged; times ``position / unit``, only that of
        # their positions in messages.
        # All in seconds of positions: those of one round, and the empty ones of all rounds.
        decided = position * float(self.decided.round_capacity[group])
        round_, empty = self.variable(), self.variable(1.0)
        chosen = [(y, -position * o.round_capacity) for table in tables for o, y, _ in table]
        self.constraint([(round_, 1.0), *chosen], low=decided, high=decided)
        positions = [(empty, 1.0), (round_, -1.0), (most, position / unit)]
        fitting = [(round_, 1.0), (most, -position / unit)]
        largest = decided + position * sum(
            max(o.round_capacity for o, _, _ in table) for table in tables
        )
        before: list[tuple[int, float]] = []
        for fit, moved in self._overflows(group, tables):
            overflows, more = self.variable(upper=1, is_integer=True), self.variable()
            self.constraint([(more, 1.0), (round_, -1.0)], high=0)
            self.constraint([(more, 1.0), (overflows, -largest)], high=0)
            self.constraint([(more, 1.0), (round_, -1.0), (overflows, -largest)], low=-largest)
            # An exchange that overflows k times also overflows k - 1 times.
            if before:
                self.constraint([*before, (overflows, -1.0)], low=0)
            before = [(overflows, 1.0)]
            positions.append((more, -moved))
            fitting.append((more, fit))
        self.constraint(positions, low=0)
        if before:
            self.constraint(fitting, low=0)

    def _overflows(
        self, group: int, tables: Sequence[Sequence[Member]]
    ) -> list[tuple[float, float]]:
        """Return ``(a_k, b_k)`` of each overflow of a group's exchange, in multiples of a round.

        With overflow ``k`` the exchange holds ``a_k`` more rows and moves ``b_k`` more positions
        than before it. The positions of the forward and the backward pass are weighted by their
        cost.
        """
        problem, decided, exchanged = self.problem, self.decided, LOADS.index("exchanged")
        demands = [
            float(o.load.stacked[exchanged].max()) / o.round_capacity
            for table in tables
            for o, _, _ in table
            if o.round_capacity
        ]
        if decided.round_capacity[group]:
            demand = decided.stacked[exchanged, group].max()
            demands.append(float(demand / decided.round_capacity[group]))
        costs, seconds = problem.costs[group], problem.position_seconds[:, group]
        overflows, fit, moved = [], 1.0, 1.0
        # No sum over tables takes more rounds than the largest demand of any one of them.
        for step in costs.overflow_steps(max(demands, default=0.0)):
            positions = step + np.array(costs.empty_positions(step, 1.0))
            weighed = float(positions @ seconds / seconds.sum())
            overflows.append((step - fit, weighed - moved))
            fit, moved = step, weighed
        return overflows

    def _add_slowest(
        self,
        most: int,
        tables: Sequence[Sequence[Member]],
        count: int,
        unit: float,
        decided: np.ndarray,
    ) -> None:
        """Constrain ``most`` to be at least every device's load, and at least the average.

        ``most`` is the variable of the slowest device's time for count number ``count`` of `Load`,
        and ``unit`` the time of one unit of it. ``decided``, ``[devices]``, is the time of tables
        with a given placement.
        """
        weights, width = self.problem.weights[count], self.problem.widths[count]
        members = [member for table in tables for member in table]
        # This holds for every plan. It is the only bound on a sum of small parts when there are no
        # sites; with them, it spares the solver finding the average from one constraint per device.
        average = [
            (y, -unit * o.parts * float(o.load.stacked[count].sum()) / width) for o, y, _ in members
        ]
        # Loads of decided tables carry the weights of their devices; the average is of plain counts
        # over devices counted as slowest ones.
        self.constraint([(most, 1.0), *average], low=float((decided / weights).sum() / width))
        self._add_largest(most, tables, count, unit)
        if not self.with_sites:
            if decided.max() > 0:
                self.constraint([(most, 1.0)], low=float(decided.max()))
            return
        by_device: list[list[tuple[int, float]]] = [[] for _ in weights]
        for option, y, sites in members:
            for site, x in enumerate(sites or [y]):
                for device, load in zip(
                    option.sites[site], option.load.stacked[count], strict=True
                ):
                    if load:
                        by_device[device].append((x, -unit * float(load * weights[device])))
        for device, terms in enumerate(by_device):
            if terms or decided[device]:
                self.constraint([(most, 1.0), *terms], low=float(decided[device]))

    def _add_largest(
        self, most: int, tables: Sequence[Sequence[Member]], count: int, unit: float
    ) -> None:
        """Constrain ``most`` to be at least the largest part's load, on the fastest device."""
        # The part may go to the fastest device, so only that device's time is certain.
        unit *= float(self.problem.weights[count].min())
        loads = [
            [unit * float(o.load.stacked[count].max()) for o, _, _ in table] for table in tables
        ]
        levels = sorted({load for table in loads for load in table if load})[-_MAX_LARGEST:]
        if not levels:
            return
        reached = {level: self.variable(upper=1) for level in levels}
        for lower, higher in itertools.pairwise(reached.values()):
            self.constraint([(lower, 1.0), (higher, -1.0)], low=0)
        steps = np.diff(levels, prepend=0.0)
        self.constraint([(most, 1.0), *zip(reached.values(), -steps, strict=True)], low=0)
        for table, parts in zip(tables, loads, strict=True):
            # Levels between a table's own loads need no constraint: a larger level that is reached
            # raises all smaller ones.
            for level in reached.keys() & set(parts):
                as_large = [
                    (y, -1.0) for (_, y, _), part in zip(table, parts, strict=True) if part >= level
                ]
                self.constraint([(reached[level], 1.0), *as_large], low=0)

    def _add_counts(
        self, most: int, tables: Sequence[Sequence[Member]], count: int, unit: float
    ) -> None:
        """Constrain ``most`` to the load of the device with the most parts.

        If ``n`` parts go to ``D`` devices, one device has at least ``ceil(n / D)`` of them.
        """
        num_devices = self.problem.topology.num_devices
        unit *= float(self.problem.weights[count].min())
        members = [(option, y) for table in tables for option, y, _ in table]
        loads = {
            float(load) for option, _ in members for load in option.load.stacked[count] if load
        }
        for load in sorted(loads)[-_MAX_COUNTED:]:
            parts = [
                (y, -o.parts * np.count_nonzero(o.load.stacked[count] >= load) / num_devices)
                for o, y in members
            ]
            # An integer of n / D or more is the ceiling, which no linear constraint could say.
            number = self.variable(is_integer=True)
            self.constraint([(number, 1.0), *parts], low=0)
            self.constraint([(most, 1.0), (number, -unit * load)], low=0)

    def _add_memory(self) -> None:
        """Bound a device's memory: kept bytes, the largest group's exchange, and loads."""
        problem, decided, capacity = self.problem, self.decided, self.capacity
        temporary, members = self.variable(), self._members()
        # Groups are exchanged one after the other, so their buffers are never there together: the
        # largest counts, and all that is kept adds up.
        self.constraint([(temporary, 1.0)], low=float(decided.temporary.max(initial=0)) / capacity)
        kept: list[tuple[int, float]] = []
        for group, tables in members.items():
            options = [(option, y) for table in tables for option, y, _ in table]
            terms = [(y, -o.temporary / capacity) for o, y in options]
            low = float(decided.temporary[group]) / capacity
            self.constraint([(temporary, 1.0), *terms], low=low)
            kept += [(y, o.kept / capacity) for o, y in options]
        # Bytes of groups that decided tables have to themselves.
        bytes = (problem.unit_bytes * decided.stacked.max(axis=2)).sum(axis=0)
        alone = sum(bytes[group] for group in range(len(bytes)) if group not in members)
        free = float(problem.capacity - decided.kept - alone) / capacity
        # The margin is for HiGHS's tolerance. A plan that exceeds the capacity by rounding would be
        # refused by `Totals`, which counts exactly.
        self.constraint([(temporary, 1.0), *kept, *self.loaded], high=free - _MARGIN)
        self._add_stored()

    def _add_stored(self) -> None:
        """Bound the bytes of row stores in host memory and on disk."""
        capacities = {"host": self.problem.host_capacity, "store": self.problem.store_capacity}
        for storage, capacity in capacities.items():
            members = [
                (y, option.stored_bytes)
                for options, ys in zip(self.problem.options, self.y, strict=True)
                for option, y in zip(options, ys, strict=True)
                if option.cache is not None and option.storage == storage
            ]
            free = capacity - self.decided.stored[storage]
            if members and free > 0:
                terms = [(y, bytes / free) for y, bytes in members]
                self.constraint(terms, high=1 - _MARGIN)
            # Decided tables fill the storage already, and the division above has no meaning.
            for y, _ in members if free <= 0 else ():
                self.constraint([(y, 1.0)], high=0)

    def solve(
        self, time_limit: float, gap: float, start: Solution | None = None
    ) -> tuple[np.ndarray | None, float, bool]:
        """Solve the program by HiGHS, to within ``gap`` of the bound as a fraction.

        Returns:
            Values of the variables, or None without a solution; the bound in seconds; and whether
            the search ran to its end.
        """
        # Imported here, so that everything else runs without HiGHS.
        import highspy

        class Silent(highspy.Highs):
            """HiGHS without the banner that it prints when callbacks are enabled."""

            def enableCallbacks(self) -> None:
                self.silent()
                super().enableCallbacks()

        solver = Silent()
        solver.silent()
        solver.setOptionValue("time_limit", max(time_limit, 0.1))
        solver.setOptionValue("mip_rel_gap", gap)
        if not self.with_sites and len(self.costs) > _MAX_SIMPLEX:
            # Only where there is no basis to start from; HiGHS goes on by the simplex method.
            solver.setOptionValue("mip_lp_solver", "ipm")
        solver.passModel(self._model())
        # HiGHS can only start from a solution that fits.
        if start is not None and start.fits:
            variables, starts = self._values(start)
            solver.setSolution(len(variables), variables, starts)
        solver.run()
        status, info = solver.getModelStatus(), solver.getInfo()
        # No variable is below 0, so no program is unbounded.
        if status in (
            highspy.HighsModelStatus.kInfeasible,
            highspy.HighsModelStatus.kUnboundedOrInfeasible,
        ):
            return None, math.inf, True
        # A search that is cut short before its first relaxation has no bound but 0.
        bound = info.mip_dual_bound if math.isfinite(info.mip_dual_bound) else 0.0
        values = None
        if info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible:
            values = np.array(solver.getSolution().col_value)
        is_finished = status == highspy.HighsModelStatus.kOptimal
        return values, max(0.0, bound * self.scale), is_finished

    def _model(self) -> highspy.HighsLp:
        import highspy

        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = len(self.costs), len(self.low)
        model.col_cost_ = np.array(self.costs)
        model.col_lower_, model.col_upper_ = np.zeros(len(self.costs)), np.array(self.upper)
        # No bound below 0 anywhere: the variables are counts, times and bytes.
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
        """Return the variables of options and sites, and their values in a solution.

        HiGHS finds values of the other variables for them.
        """
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
        """Return the seconds of every plan that no variable of the program counts."""
        decided, members = self.decided, self._members()
        seconds = decided.home
        group_seconds = decided.group_seconds
        for group, launch in enumerate(self.problem.launch_seconds):
            if group not in members:
                seconds += float(group_seconds[group])
            elif decided.members[group]:
                seconds += float(launch)
        return seconds

    def proposal(self, values: np.ndarray | None) -> tuple[int, ...] | None:
        """Return the index of each table's option by the variables' values; None without values."""
        if values is None:
            return None
        # HiGHS's integers are within 1e-6 of whole numbers, so take the largest, not those equal to
        # 1.
        return tuple(int(np.argmax(values[ys])) for ys in self.y)

    def solution(self, values: np.ndarray | None) -> Solution | None:
        """Return the solution, options and sites, by the variables' values; None without values."""
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
