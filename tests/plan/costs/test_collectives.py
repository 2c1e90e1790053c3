"""Times of collectives beside counts of the bytes on each link."""

from __future__ import annotations

import pytest

from jaxrec.plan.costs.collectives import all_gather, all_to_all, latency, reduce_scatter
from tests.plan.costs.cases import linked, topology


@pytest.mark.parametrize(("hosts", "each"), [(1, 1), (1, 8), (2, 4), (4, 1)])
def test_an_all_to_all_takes_the_slower_of_its_links(hosts, each):
    """Beside a count of the parts that leave a device, one by one."""
    devices = hosts * each
    part = 1.0 / devices
    within = sum(part for other in range(1, devices) if other // each == 0)
    between = sum(part for other in range(1, devices) if other // each != 0)
    for speeds in ((1.0, 0.0), (0.0, 1.0), (1.0, 3.0)):
        links = topology(hosts=hosts, each=each, **linked(*speeds))
        expected = max(within * speeds[0], between * speeds[1])
        assert all_to_all(1.0, links) == pytest.approx(expected)


@pytest.mark.parametrize("collective", [reduce_scatter, all_gather])
@pytest.mark.parametrize(("hosts", "each"), [(1, 1), (1, 8), (2, 4), (4, 1)])
def test_sums_go_by_host_and_then_between_hosts(collective, hosts, each):
    """Beside a ring within each host, and one of the parts between hosts."""
    links = topology(hosts=hosts, each=each, **linked(1.0, 10.0))
    ring = sum(1.0 / each for _ in range(each - 1))
    between = sum(1.0 / each / hosts for _ in range(hosts - 1))
    assert collective(1.0, links) == pytest.approx(ring + 10.0 * between)


@pytest.mark.parametrize(("hosts", "each", "expected"), [(1, 1, 0.0), (1, 4, 2.0), (2, 2, 2.0)])
def test_one_device_starts_no_collective(hosts, each, expected):
    assert latency(topology(hosts=hosts, each=each, **linked(call=2.0))) == expected
