"""Leased budgets: what is out in the cluster never exceeds the limit, whatever is lost on the way."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_engine.leases import PermitLease, TokenLease


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


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 12),
    st.lists(
        st.tuples(
            st.sampled_from(["want", "send", "arrive", "start", "end", "reply", "lose"]),
            st.integers(0, 2),
            st.integers(0, 15),
        ),
        max_size=150,
    ),
)
def test_calls_in_flight_never_exceed_the_limit(limit: int, events: list[tuple[str, int, int]]) -> None:
    """Hosts are modelled with what they last heard and what they use; messages are lost by not being delivered."""
    lease, now = PermitLease(limit), 0.0
    hosts = ["a", "b", "c"]
    on_the_way: dict[str, int | None] = dict.fromkeys(hosts)
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
        elif name == "lose" and len(hosts) > 1:
            hosts.remove(host)
            lease.lost(host, now + 5.0)
            ghosts.append((now + 5.0, max(heard[host], in_use[host], on_the_way[host] or 0)))
        running = sum(in_use[name] for name in hosts) + sum(calls for _, calls in ghosts)
        assert running <= limit
        assert lease.lent <= limit


def test_a_request_rate_is_kept_over_any_minute() -> None:
    lease = TokenLease(per_minute=120.0)
    times: list[float] = []
    for tick in range(3000):
        now = tick * 0.1
        times += [now] * int(lease.lend(50.0, now))
    for start in range(0, 240, 7):
        assert sum(start <= at < start + 60 for at in times) <= 120 + lease.burst
    assert len(times) >= 120 * 5 - 5


def test_tokens_are_not_handed_out_beyond_what_waits() -> None:
    lease = TokenLease(per_minute=6000.0)
    lease.lend(0.0, 0.0)
    assert lease.lend(3.0, 10.0) == 3.0
    assert lease.lend(0.0, 20.0) == 0.0
