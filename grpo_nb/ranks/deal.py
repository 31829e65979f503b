"""Assignment of groups to ranks: always complete groups, always the same for the same numbers."""

from collections.abc import Sequence


def deal(loads: Sequence[int], ranks: int) -> list[list[int]]:
    """The places of the loads by rank, ascending: each load, the largest first, goes to the rank with the least so far.

    Equal loads are dealt in turn. Some ranks have one more than others where the count does not divide, and none where
    there are more ranks than loads.

    >>> deal([1, 1, 1, 1, 1], 2)
    [[0, 2, 4], [1, 3]]
    >>> deal([9, 2, 3, 4], 2)
    [[0], [1, 2, 3]]
    """
    taken: list[list[int]] = [[] for _ in range(ranks)]
    sums = [0] * ranks
    for place in sorted(range(len(loads)), key=lambda place: (-loads[place], place)):
        rank = min(range(ranks), key=lambda rank: (sums[rank], len(taken[rank]), rank))
        taken[rank].append(place)
        sums[rank] += loads[place]
    return [sorted(places) for places in taken]
