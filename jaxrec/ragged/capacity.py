"""Static capacities: a short ladder of sizes, and a memory that keeps a run to a few of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrec.ragged.bounds import INT32_BOUND
from jaxrec.ragged.columns import by_name, whole_number

SMALLEST = 8


def capacity_for(count: int) -> int:
    """Return the smallest capacity of the ladder 8, 12, 16, 24, 32, ... that holds ``count``."""
    # The ladder has 2**k and 3 * 2**(k - 1). Padding takes less than a third of a capacity (above
    # the smallest one), and all counts up to a million need 35 capacities. Powers of two alone
    # would need 18, with up to half of each as padding.
    if count < 0:
        raise ValueError(f"a capacity holds a count of 0 or more, not {count}")
    power = max(SMALLEST, 1 << max(count - 1, 0).bit_length())
    three_quarters = power // 4 * 3
    return three_quarters if three_quarters >= SMALLEST and count <= three_quarters else power


class LengthMoments(NamedTuple):
    """Distribution of a feature's number of ids per sample.

    Attributes:
        mean: Mean length.
        variance: Variance of the lengths.
        skew: Third central moment over the variance; large where a few samples have most ids.
    """

    mean: float
    variance: float
    skew: float

    @classmethod
    def of(cls, lengths: np.ndarray, counts: np.ndarray | None = None) -> LengthMoments:
        """Return the moments of ``[samples]`` lengths; ``counts`` says how often each occurs."""
        if not np.size(lengths) or (counts is not None and not np.sum(counts)):
            return cls(0.0, 0.0, 0.0)
        mean = float(np.average(lengths, weights=counts))
        deviations = np.asarray(lengths, np.float64) - mean
        variance = float(np.average(deviations**2, weights=counts))
        third = float(np.average(deviations**3, weights=counts))
        return cls(mean, variance, third / variance if variance else 0.0)

    def likely_ids(self, samples: int, deviations: float) -> float:
        """Return a number of ids that few batches of ``samples`` samples exceed.

        A normal quantile, ``deviations`` standard deviations above the mean, with the first
        correction for skew of Cornish and Fisher, "Moments and cumulants in the specification of
        distributions", 1938.
        """
        # The sum of n lengths has n times the variance and n times the third moment of one. Their
        # quotient, which `skew` is, does not grow with n.
        spread = deviations * (samples * self.variance) ** 0.5
        return samples * self.mean + spread + max(0.0, (deviations**2 - 1) / 6 * self.skew)


# Standard deviations above the mean in a first size. In 500 batches of 100 features, one or two
# exceed it. Each further size adds two deviations, so a steady stream of batches ends with three
# sizes.
_FIRST_DEVIATIONS, _MORE_DEVIATIONS = 4.0, 2.0

# For features whose lengths vary, the second size is at least 1/8 larger than the first, the third
# 1/2 larger than the second, and each further one twice the one before. This bounds the number of
# sizes where the normal quantile fails: heavy tails, or lengths that grow during the run.
_FIRST_HEADROOM = 1 / 8

# A size is at most two times the ids of the batch that asks for it, plus 64. One very long sample
# says little about later batches, and would otherwise make all of them large.
_MOST_TIMES, _AND_IDS = 2, 64

# Capacities are multiples of 8. The exception is a feature with the same number of ids in every
# sample (of 8 or more samples): it has no padding.
_MULTIPLE = 8

# Takes this process's numbers and returns the maximum of each over all processes.
Agree = Callable[[Sequence[int]], Sequence[int]]

# Names of keys, number of samples of a device and number of devices.
_Kind = tuple[tuple[str, ...], int, int]


class CapacityMemory:
    """Capacities of earlier batches, for later batches to reuse.

    Each kind of batch (keys, samples, devices) has a list of sizes; a size is a capacity for every
    key. `lengths` are moments known before the first batch, `capacities` lower bounds, by feature.
    """

    # A batch takes the first size that holds it. If none does, a new size gets headroom in all keys
    # at once. Otherwise each of a hundred keys would soon ask for a size of its own, and each size
    # compiles a program.

    def __init__(self, lengths: Mapping[str, LengthMoments], capacities: Mapping[str, int]) -> None:
        self.lengths, self.capacities = dict(lengths), dict(capacities)
        self._sizes: dict[_Kind, list[tuple[int, ...]]] = {}
        self._lock = threading.Lock()  # readers pack in several threads

    def sizes(
        self, keys: tuple[str, ...], samples: int, devices: int = 1
    ) -> tuple[tuple[int, ...], ...]:
        """Return the sizes of a kind of batch so far, in ascending order."""
        return tuple(self._sizes.get((keys, samples, devices), ()))

    def fit(
        self,
        keys: tuple[str, ...],
        samples: int,
        demand: Sequence[int],
        lengths: Sequence[np.ndarray],
        *,
        devices: int = 1,
        first: Sequence[int] | None = None,
        agree: Agree = tuple,
    ) -> tuple[int, ...]:
        """Return capacities that hold a batch; add a new size if no earlier one does.

        Args:
            keys: Names of the keys.
            samples: Number of samples per device.
            demand: Ids of each key on the fullest device, the same on all processes.
            lengths: Bag lengths of each key on this process's devices, without padding samples.
            devices: Number of devices.
            first: Capacities if no earlier batch had these keys, samples and devices. None:
                computed from ``lengths``.
            agree: Function that returns each number's maximum over all processes.
        """
        with self._lock:
            sizes = self._sizes.setdefault((keys, samples, devices), [])
            for size in sizes:
                if all(need <= most for need, most in zip(demand, size, strict=True)):
                    return size
            if first is None or sizes:
                last = sizes[-1] if sizes else (0,) * len(keys)
                first = agree(self._larger(keys, samples, demand, lengths, last, len(sizes)))
            sizes.append(tuple(first))
            return sizes[-1]

    def of_batch(
        self,
        keys: tuple[str, ...],
        lengths: Sequence[np.ndarray],
        inverse: np.ndarray | None,
        *,
        samples: int | None = None,
        first: Sequence[int] | None = None,
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the capacities and the sample capacities (or ``()``) of a batch on the host.

        ``inverse`` is ``[keys, batch]``, the bag of each sample, or None.
        """
        demand = [int(each.sum(dtype=np.int64)) for each in lengths]
        if inverse is None:
            samples = max(map(len, lengths), default=0) if samples is None else samples
            return self.fit(keys, samples, demand, lengths, first=first), ()
        shared = [own[bags] for own, bags in zip(lengths, inverse, strict=True)]
        demand += [int(each.sum(dtype=np.int64)) for each in shared]
        return self.fit_shared(keys, inverse.shape[1], demand, lengths, shared, first=first)

    def fit_shared(
        self,
        keys: tuple[str, ...],
        samples: int,
        demand: Sequence[int],
        of_bags: Sequence[np.ndarray],
        of_samples: Sequence[np.ndarray],
        *,
        devices: int = 1,
        first: Sequence[int] | None = None,
        agree: Agree = tuple,
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Compute `fit` for a batch whose samples share bags: capacities and sample capacities.

        ``demand`` and ``first`` have a number per key for its bags, then one per key for its
        samples. ``of_samples`` are the bag lengths of each key's samples.
        """
        # Sample capacities are fitted as if they belonged to more keys, so that both kinds of
        # capacity change together and make one new program, not two.
        names = (*keys, *(f"samples of {key}" for key in keys))
        lengths = (*of_bags, *of_samples)
        size = self.fit(names, samples, demand, lengths, devices=devices, first=first, agree=agree)
        return size[: len(keys)], size[len(keys) :]

    def _larger(
        self,
        keys: tuple[str, ...],
        samples: int,
        demand: Sequence[int],
        lengths: Sequence[np.ndarray],
        last: Sequence[int],
        count: int,
    ) -> list[int]:
        """Return the next size of a kind of batch, after ``count`` sizes that are too small.

        ``last`` is the largest of them; the other arguments are those of `fit`.
        """
        deviations = _FIRST_DEVIATIONS + _MORE_DEVIATIONS * count
        headroom = min(1.0, _FIRST_HEADROOM * 4 ** (count - 1)) if count else 0.0
        size = []
        for key, needed, bags, before in zip(keys, demand, lengths, last, strict=True):
            # A first size from known moments was too small if there are others, so the moments did
            # not describe this run. This batch's lengths do.
            is_known = key in self.lengths and not count
            moments = self.lengths[key] if is_known else LengthMoments.of(bags)
            is_fixed = not moments.variance and (is_known or bags.size >= _MULTIPLE)
            likely = moments.likely_ids(samples, deviations)
            if not is_known:
                likely = min(likely, _MOST_TIMES * needed + _AND_IDS)
            is_larger = not is_fixed or needed > before > 0
            if is_larger:
                likely = max(likely, (1 + headroom) * max(needed, before))
            capacity = max(needed, before, int(likely), self.capacities.get(key, 0))
            if is_larger or not capacity:
                capacity = max(1, -(-capacity // _MULTIPLE)) * _MULTIPLE
            size.append(min(capacity, INT32_BOUND - 1))
        return size

    def to_dict(self) -> dict[str, Any]:
        """Return the memory as data for JSON."""
        with self._lock:
            return {
                "lengths": {key: list(moments) for key, moments in self.lengths.items()},
                "capacities": dict(self.capacities),
                "sizes": [
                    {
                        "keys": list(keys),
                        "samples": samples,
                        "devices": devices,
                        "capacities": [list(size) for size in sizes],
                    }
                    for (keys, samples, devices), sizes in self._sizes.items()
                ],
            }

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> CapacityMemory:
        """Return the memory that `to_dict` saved."""
        # The file may be anyone's, so each number is converted and checked.
        try:
            lengths = {
                str(key): LengthMoments(*map(float, moments))
                for key, moments in saved["lengths"].items()
            }
            memory = cls(lengths, checked_capacities(saved["capacities"]))
            for each in saved["sizes"]:
                keys = tuple(map(str, each["keys"]))
                sizes = [tuple(map(_count, size)) for size in each["capacities"]]
                if any(len(size) != len(keys) for size in sizes):
                    raise ValueError(f"a size of keys {list(keys)} has other numbers of capacities")
                memory._sizes[keys, _count(each["samples"]), _count(each["devices"])] = sizes
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(
                f"Packer.from_dict takes what Packer.to_dict returned, got {saved!r:.80} "
                f"({type(error).__name__}: {error})"
            ) from None
        return memory

    # A lock cannot be pickled, and batches carry their memory from data workers.
    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())


def checked_capacities(capacities: Any) -> dict[str, int]:
    """Return capacities by name; raise an error if one is not an integer of 0 or more."""
    checked = {
        key: whole_number(f"the capacity of feature {key!r}", capacity)
        for key, capacity in by_name("capacities", capacities).items()
    }
    if negative := {key: capacity for key, capacity in checked.items() if capacity < 0}:
        raise ValueError(f"capacities must be 0 or more, got {negative}")
    return checked


def _count(number: Any) -> int:
    number = whole_number("a size", number)
    if number < 0:
        raise ValueError(f"a size must be 0 or more, got {number}")
    return number
