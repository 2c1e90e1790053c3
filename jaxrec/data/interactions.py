"""The sequence of each user's items in time, for models that predict the next item."""

from __future__ import annotations

import dataclasses
import functools
import os

import numpy as np
from jaxtyping import Float, Int32

from jaxrec.data.files import DataError

# One item to predict from, one for validation and one for testing.
_SHORTEST = 3


@dataclasses.dataclass(frozen=True, eq=False)
class Interactions:
    """Sequences of items, one for each user, with leave-one-out evaluation.

    The last item of a sequence is for testing, and the item before it for validation. Such an item
    is ranked among `candidates`: itself and items that its user has never met (Kang and McAuley
    2018, arXiv:1808.09781, section IV-A; Sun et al. 2019, arXiv:1904.06690, section 4.2).

    Attributes:
        sequences: For each user ``[length]`` int32 items from 1 to ``num_items``, oldest first.
        num_items: Largest item number.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp(), "interactions.txt")
        >>> _ = path.write_text("1 5\\n2 7\\n1 6\\n1 7\\n2 5\\n2 9\\n3 1\\n")
        >>> found = Interactions.read(path)
        >>> [items.tolist() for items in found.sequences], found.num_items
        ([[5, 6, 7], [7, 5, 9]], 9)
        >>> [items.tolist() for items in found.before(-1)]
        [[5, 6], [7, 5]]
    """

    sequences: list[Int32[np.ndarray, " length"]]
    num_items: int

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Interactions:
        """Read a file with a line ``user item`` for each interaction, in the order of time.

        Users and items are integers from 1. Users with fewer than three interactions are left out.

        Raises:
            OSError: The file cannot be read.
            DataError: A line is not a pair of integers, or no user has three interactions.
        """
        try:
            pairs = np.loadtxt(path, dtype=np.int64, ndmin=2)
        except ValueError as error:
            raise DataError(
                f"{path}: expected two integers a line, user and item; {error}"
            ) from None
        least, most = pairs.min(initial=1), pairs.max(initial=1)
        if pairs.shape[1] != 2 or least < 1 or most >= 2**31:
            raise DataError(
                f"{path}: expected two integers from 1 to {2**31 - 1} a line, user and item, got "
                f"{pairs.shape[1]} columns with numbers from {least} to {most}"
            )
        # A stable sort keeps each user's items in the order of time.
        pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
        starts = np.flatnonzero(np.diff(pairs[:, 0], prepend=-1))
        rows = np.split(pairs[:, 1].astype(np.int32), starts[1:])
        rows = [row for row in rows if len(row) >= _SHORTEST]
        if not rows:
            raise DataError(f"{path}: no user has {_SHORTEST} interactions")
        return cls(rows, int(pairs[:, 1].max()))

    @classmethod
    def generate(cls, num_users: int, num_items: int, seed: int) -> Interactions:
        """Generate sequences of 5 to 50 random items, with power-law lengths.

        After the first item, an item follows from the item before by a fixed permutation with
        probability 2/3, and is random otherwise.
        """
        rng = np.random.default_rng(seed)
        follows = 1 + rng.permutation(num_items)
        rows = []
        for length in np.minimum(4 + rng.zipf(1.8, num_users), 50):
            row = [int(rng.integers(1, num_items + 1))]
            for _ in range(length - 1):
                known = rng.random() < 2 / 3
                row.append(int(follows[row[-1] - 1] if known else rng.integers(1, num_items + 1)))
            rows.append(np.array(row, np.int32))
        return cls(rows, num_items)

    @functools.cached_property
    def popularity(self) -> Float[np.ndarray, " num_items_and_one"]:
        """Each item's share of the interactions, ``[num_items + 1]``; item 0 does not exist."""
        counts = np.bincount(np.concatenate(self.sequences), minlength=self.num_items + 1)
        return counts / counts.sum()

    def before(self, position: int) -> list[Int32[np.ndarray, " length"]]:
        """Return the items of each sequence before a position; -1 is the last item's position."""
        return [row[:position] for row in self.sequences]

    def candidates(
        self, position: int, *, others: int = 100, seed: int
    ) -> Int32[np.ndarray, "users candidates"]:
        """Return each user's item at ``position`` and random items that the user never met.

        Args:
            position: Position from the end; -1 is the last item.
            others: Number of different random items, drawn by their popularity.
            seed: Seed of the random items.

        Returns:
            ``[users, 1 + others]`` int32, the user's item first.

        Raises:
            ValueError: Fewer than ``others`` items remain for the user who has met the most.
        """
        longest = max(len({*row.tolist()}) for row in self.sequences)
        if (count := np.count_nonzero(self.popularity)) < longest + others:
            raise ValueError(
                f"a user has {longest} of the {count} items, which leaves too few items to draw "
                f"{others} others"
            )
        rng, cumulative = np.random.default_rng(seed), np.cumsum(self.popularity)
        found = np.zeros((len(self.sequences), 1 + others), np.int32)
        for user, row in enumerate(self.sequences):
            taken, chosen = {*row.tolist()}, [row[position]]
            # Drawn anew until there are enough: users have met few of the items.
            while len(chosen) <= others:
                drawn = rng.random(2 * others) * cumulative[-1]
                for item in np.searchsorted(cumulative, drawn, "right").tolist():
                    if item not in taken and len(chosen) <= others:
                        taken.add(item)
                        chosen.append(item)
            found[user] = chosen
        return found
