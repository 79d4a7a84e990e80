"""Leased budgets: what is out in the cluster never exceeds the limit, whatever is lost on the way."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_engine.leases import PermitLease, RateLease


def test_permits_go_where_the_calls_are() -> None:
    lease = PermitLease(10)
    for host in ("a", "b"):
        lease.join(host)
    lease.want("a", 20)
    lease.want("b", 2)
    assert lease.lend("a", 0.0) == 8
    assert lease.lend("b", 0.0) == 2


def test_a_share_is_lent_to_another_host_only_when_the_first_has_confirmed_that_it_holds_less() -> None:
    lease = PermitLease(4)
    for host in ("a", "b"):
        lease.join(host)
    lease.want("a", 4)
    assert lease.lend("a", 0.0) == 4
    lease.want("b", 4)
    assert lease.lend("b", 0.0) == 0
    assert lease.lend("a", 0.0) == 2  # sent, not confirmed
    assert lease.lend("b", 0.0) == 0
    lease.confirm("a", 3)  # one call above the new lease still runs out
    assert lease.lend("b", 0.0) == 1
    lease.confirm("a", 2)
    assert lease.lend("b", 0.0) == 2


def test_a_lost_host_s_share_returns_when_its_lease_has_ended() -> None:
    lease = PermitLease(4)
    for host in ("a", "b"):
        lease.join(host)
        lease.want(host, 4)
    assert lease.lend("a", 0.0) == 2
    lease.confirm("a", 2)
    lease.lost("a", returns_at=10.0)
    assert lease.lend("b", 9.0) == 2
    assert lease.lend("b", 10.5) == 4


@settings(max_examples=300)
@given(
    st.integers(1, 12),
    st.lists(
        st.tuples(
            st.sampled_from(["want", "send", "arrive", "start", "end", "reply", "lose", "limit"]),
            st.integers(0, 2),
            st.integers(0, 15),
        ),
        max_size=150,
    ),
)
def test_calls_in_flight_never_exceed_the_limit_once_hosts_have_heard_of_it(
    limit: int, events: list[tuple[str, int, int]]
) -> None:
    """Hosts are modelled with what they last heard and what they use; messages are lost by not being delivered."""
    lease, now = PermitLease(limit), 0.0
    hosts = ["a", "b", "c"]
    on_the_way: dict[str, float | None] = dict.fromkeys(hosts)
    newest: dict[str, bool] = dict.fromkeys(hosts, False)
    heard = dict.fromkeys(hosts, 0)
    in_use = dict.fromkeys(hosts, 0)
    ghosts: list[tuple[float, int]] = []
    for host in hosts:
        lease.join(host)
    for name, which, number in events:
        host = hosts[which % len(hosts)]
        now += 0.1
        ghosts = [(until, calls) for until, calls in ghosts if until > now]
        before = lease.lent
        if name == "want":
            lease.want(host, number)
        elif name == "send":
            on_the_way[host], newest[host] = lease.lend(host, now), False
        elif name == "arrive" and on_the_way[host] is not None:
            heard[host], newest[host] = on_the_way[host] or 0, True
            on_the_way[host] = None
        elif name == "start" and in_use[host] < heard[host]:
            in_use[host] += 1
        elif name == "end" and in_use[host]:
            in_use[host] -= 1
        elif name == "reply" and newest[host]:
            lease.confirm(host, max(heard[host], in_use[host]))
        elif name == "limit":
            lease.limit = number
        elif name == "lose" and len(hosts) > 1:
            hosts.remove(host)
            lease.lost(host, now + 5.0)
            ghosts.append((now + 5.0, max(heard[host], in_use[host], on_the_way[host] or 0)))
        running = sum(in_use[name] for name in hosts) + sum(calls for _, calls in ghosts)
        assert running <= lease.lent
        assert lease.lent <= max(before, lease.limit)  # a limit that was lowered lends nothing more until it holds


def test_a_limit_that_is_lowered_lends_nothing_before_hosts_hold_less() -> None:
    lease = PermitLease(10)
    for host in ("a", "b"):
        lease.join(host)
        lease.want(host, 5)
        assert lease.lend(host, 0.0) == 5
        lease.confirm(host, 5)
    lease.limit = 4
    assert lease.lend("a", 0.0) == 0  # b still holds 5
    assert lease.lend("b", 0.0) == 0
    lease.confirm("b", 1)  # one call still runs
    assert lease.lend("a", 0.0) == 2
    assert lease.lent <= 10
    lease.confirm("a", 2)
    assert lease.lend("b", 0.0) == 2
    lease.confirm("b", 2)
    assert lease.lent == 4


@settings(max_examples=200)
@given(
    st.floats(0.1, 100.0),
    st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.0, 50.0), st.floats(0.5, 2.0)), max_size=60),
)
def test_rates_of_hosts_never_sum_to_more_than_the_limit_was(
    limit: float, events: list[tuple[str, float, float]]
) -> None:
    """Each host goes by what it has heard last; the limit is changed now and then."""
    lease, goes_by = RateLease(limit), dict.fromkeys("abc", 0.0)
    for host in goes_by:
        lease.join(host)
    highest = limit
    for number, (host, wanted, factor) in enumerate(events):
        lease.want(host, wanted)
        goes_by[host] = lease.lend(host, float(number))
        lease.confirm(host, goes_by[host])
        assert sum(goes_by.values()) <= highest * (1 + 1e-9)
        assert goes_by[host] <= wanted
        if number % 7 == 6:
            lease.limit *= factor
            highest = max(sum(goes_by.values()), lease.limit)
        else:
            highest = max(sum(goes_by.values()), lease.limit)


def test_a_rate_goes_where_it_is_used() -> None:
    lease = RateLease(10.0)
    for host, wanted in (("a", 1.0), ("b", 100.0)):
        lease.join(host)
        lease.want(host, wanted)
    assert lease.lend("a", 0.0) == 1.0
    assert lease.lend("b", 0.0) == 9.0
