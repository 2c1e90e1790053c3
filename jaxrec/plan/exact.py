"""The best plan as a mixed-integer program, and how good a plan can be at all.

With a variable ``y`` in {0, 1} for each option of each table (and ``x`` for each of its sites), and
for each group ``g`` of tables and each thing ``q`` done to its rows a variable ``E`` for the time
of the slowest device, the problem is linear:

    minimize    sum home y + sum launch z + sum E
    subject to  sum_o y_to = 1                        each table has one option,
                sum_s x_tos = parts y_to              whose parts are on as many sites,
                E_gq >= sum load x                    on each device,
                E_g0 >= sum at_least y,  z_g >= y,
                memory <= capacity                    likewise, with its own maxima.

It is solved by HiGHS (Huangfu and Hall 2018, "Parallelizing the dual revised simplex method").

`solve_averaged` leaves out where parts go: a device's load is the average of all, which is no more
than the slowest's. Its optimum is a bound on every plan, is quickly found for thousands of tables,
and names options that `jaxrec.plan.partitioners` then places. `solve` is the whole program, for
models that are small enough.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from jaxrec.plan.options import EXCHANGED, HELD, PLACED, POOLED, Option
from jaxrec.plan.problem import Choice, Loads, Problem, Solution

# Larger programs than this are not begun: their relaxations alone take too long.
MAX_VARIABLES, MAX_NONZEROS = 40_000, 400_000
# Parts of a group that each are put into a constraint of their own.
_MOST_PARTS = 64
# HiGHS holds constraints to within 1e-6; what it may use of memory is less by that.
_MARGIN = 2e-6


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a search found.

    Attributes:
        proposal: For each table the index of an option; None if nothing was found.
        solution: The same with sites, of a whole program.
        bound: No plan takes less than these seconds; infinite if no plan fits.
        is_finished: Whether the search ran to its end.
    """

    proposal: tuple[int, ...] | None
    solution: Solution | None
    bound: float
    is_finished: bool


def solve_averaged(problem: Problem, *, time_limit: float, gap: float) -> Answer:
    """The best options if loads were the average of all devices', and the bound that follows.

    Args:
        problem: The tables.
        time_limit: Seconds to take at most.
        gap: Part of the time of a step that the result may be above the bound.
    """
    program = _Program(problem, with_sites=False)
    values, bound, is_finished = program.solve(time_limit, gap, cutoff=None)
    return Answer(program.proposal(values), None, bound, is_finished)


def solve(problem: Problem, incumbent: Solution | None, *, time_limit: float, gap: float) -> Answer:
    """The best plan.

    Args:
        problem: The tables.
        incumbent: A plan that fits, to be improved; nothing slower is looked at.
        time_limit: Seconds to take at most.
        gap: Part of the time of a step that the result may be above the bound.
    """
    program = _Program(problem, with_sites=True)
    fits = incumbent is not None and incumbent.fits
    cutoff = incumbent.seconds * (1 - gap / 2) if incumbent is not None and fits else None
    values, bound, is_finished = program.solve(time_limit, gap, cutoff)
    if cutoff is not None:
        # What the cutoff left out is not known to be worse than the cutoff.
        bound = min(bound, cutoff)
    solution = program.solution(values)
    if incumbent is not None and (solution is None or not solution.better_than(incumbent)):
        solution = incumbent
    return Answer(program.proposal(values), solution, bound, is_finished)


def is_small(problem: Problem) -> bool:
    """Whether `solve` can be begun."""
    variables = nonzeros = 0
    for options in problem.options:
        for option in options:
            sites = len(option.sites)
            variables += 1 + (sites if sites > 1 else 0)
            nonzeros += int(np.count_nonzero(option.load)) * sites
    return variables <= MAX_VARIABLES and nonzeros <= MAX_NONZEROS


class _Program:
    """The program of a problem: variables and constraints, in seconds over a scale and bytes over
    the capacity."""

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

    def _members(self) -> dict[int, list[tuple[Option, int, list[int]]]]:
        members: dict[int, list[tuple[Option, int, list[int]]]] = {}
        for options, ys, xs in zip(self.problem.options, self.y, self.x, strict=True):
            for option, y, sites in zip(options, ys, xs, strict=True):
                members.setdefault(self.problem.groups[option.key], []).append((option, y, sites))
        return members

    def _add_groups(self) -> None:
        """The slowest device of each group, for what is done to its rows and what is held."""
        problem, start = self.problem, self.start
        # Variables that stand for memory, and how much one takes of the capacity.
        self.held: list[tuple[int, float]] = []
        for group, members in self._members().items():
            launch = problem.launch_seconds[group] / self.scale
            if start.members[group]:
                pass  # what is decided launches it already; see the constant in `solve`
            elif launch:
                used = self.variable(launch, upper=1)
                for _, y, _ in members:
                    self.constraint([(used, 1.0), (y, -1.0)], low=0)
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
                if quantity == EXCHANGED:
                    # Empty places: `E_g0` of the docstring less what the slowest device has.
                    place = problem.place_seconds[group].sum() / self.scale
                    empty = self.variable(1.0)
                    terms = [(y, -place * o.at_least) for o, y, _ in members]
                    self.constraint(
                        [(empty, 1.0), (most, place / unit), *terms],
                        low=place * start.at_least[group],
                    )
                fixed = unit * start.rows[group, quantity]
                self._add_slowest(most, members, quantity, unit, fixed)
                if quantity == POOLED:
                    self._add_whole_parts(most, members, unit)

    def _add_slowest(
        self,
        most: int,
        members: Sequence[tuple[Option, int, list[int]]],
        quantity: int,
        unit: float,
        fixed: np.ndarray,
    ) -> None:
        """``most`` is no less than the load of any device, or than the average."""
        devices = self.problem.topology.num_devices
        average = [
            (y, -unit * o.parts * float(o.load[quantity].sum()) / devices) for o, y, _ in members
        ]
        self.constraint([(most, 1.0), *average], low=float(fixed.mean()))
        if not self.with_sites:
            # No less than any one part; the largest are enough to say so.
            loads = [(float(o.load[quantity].max()), y) for o, y, _ in members]
            for load, y in sorted(loads, reverse=True)[:_MOST_PARTS]:
                self.constraint([(most, 1.0), (y, -unit * load)], low=0)
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

    def _add_whole_parts(
        self, most: int, members: Sequence[tuple[Option, int, list[int]]], unit: float
    ) -> None:
        """Of ``n`` parts some device has ``n / D`` or more, rounded up, each with bags."""
        devices = self.problem.topology.num_devices
        least = min(float(option.load[POOLED].min()) for option, _, _ in members)
        if least <= 0:
            return
        count = self.variable(is_integer=True)
        parts = [(y, -float(o.parts * o.load.shape[1]) / devices) for o, y, _ in members]
        self.constraint([(count, 1.0), *parts], low=0)
        self.constraint([(most, 1.0), (count, -unit * least)], low=0)

    def _add_memory(self) -> None:
        problem, start, capacity = self.problem, self.start, self.capacity
        temporary = self.variable()
        self.constraint([(temporary, 1.0)], low=float(start.temporary.max(initial=0)) / capacity)
        kept: list[tuple[int, float]] = []
        for group, members in self._members().items():
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
        self, time_limit: float, gap: float, cutoff: float | None
    ) -> tuple[np.ndarray | None, float, bool]:
        """Values of the variables if any were found, the bound in seconds, and whether it ended."""
        # SciPy is only here, so that all else runs without it; importing it takes a while.
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        constant = self._constant()
        rows, columns, factors = zip(*self.entries, strict=True)
        shape = (len(self.low), len(self.costs))
        matrix = csr_array((factors, (rows, columns)), shape=shape)
        constraints = [LinearConstraint(matrix, self.low, self.high)]
        if cutoff is not None:
            high = (cutoff - constant) / self.scale
            constraints.append(LinearConstraint(np.array([self.costs]), -np.inf, high))
        result = milp(
            self.costs,
            integrality=self.is_integer,
            bounds=Bounds(0, self.upper),
            constraints=constraints,
            options={"time_limit": max(time_limit, 0.1), "mip_rel_gap": gap},
        )
        if result.status == 2:
            return None, math.inf, True
        bound = result.mip_dual_bound
        if bound is None or not math.isfinite(bound):
            bound = 0.0
        return result.x, constant + bound * self.scale, result.status == 0

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
