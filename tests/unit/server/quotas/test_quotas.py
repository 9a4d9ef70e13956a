from __future__ import annotations

import os
import pwd

import pytest
from hypothesis import given
from hypothesis import strategies as st

from djinn_client.errors import QuotaExceeded
from djinn_client.protocol.fields.scheduling import ResourceUse
from djinnd.config import Quota
from djinnd.config.principals import number_of
from djinnd.messages import TenantLimits, TenantUse
from djinnd.server.principals.names import groups_of
from djinnd.server.quotas.quotas import QuotaTable

GROUPS = {1: [10], 2: [10, 20], 3: []}


def quotas(groups=GROUPS.get, **rules):
    return QuotaTable(rules, lambda user: groups(user, []))


def tenant(user=1, **quota):
    return quotas(rule=Quota(**quota)).tenant(user, 0.0)


def refused(check, *arguments):
    with pytest.raises(QuotaExceeded) as caught:
        check(*arguments)
    return caught.value


# --- which rule -----------------------------------------------------------------------------------------------------


def test_the_first_matching_rule_applies():
    table = quotas(
        two=Quota(users=(2,)), ten=Quota(groups=(10, 11)), either=Quota(users=(3,), groups=(20,)), rest=Quota()
    )
    assert [table.tenant(user, 0.0).rule.name for user in (1, 2, 3, 4)] == ["ten", "two", "either", "rest"]


def test_rules_for_names_of_tokens():
    table = quotas(robots=Quota(users=("ci", 2)), ten=Quota(groups=(10,)), rest=Quota())
    names = [table.tenant(user, 0.0).rule.name for user in (number_of("ci"), 2, number_of("other"), 1)]
    assert names == ["robots", "robots", "rest", "ten"]


def test_a_user_without_a_rule_has_no_limit():
    nobody = quotas(ten=Quota(groups=(10,), sessions=0)).tenant(3, 0.0)
    nobody.expect_session(10**6, "interactive")
    nobody.charge(10**12, 0.0)
    nobody.expect_tokens(0.0)
    assert nobody.rule.name == "" and nobody.limits == TenantLimits(3)


def test_groups_are_looked_up_only_if_a_rule_needs_them():
    def never(user, default):
        pytest.fail("it may be far away")

    assert quotas(never, own=Quota(users=(1,)), all=Quota(groups=(10,))).tenant(1, 0.0).rule.name == "own"
    asked = []
    table = quotas(lambda user, _: asked.append(user) or [20], a=Quota(groups=(10,)), b=Quota(groups=(20,)))
    assert [table.tenant(5, 0.0).rule.name for _ in range(3)] == ["b"] * 3 and asked == [5]


def test_groups_of_this_machine_s_users():
    entry = pwd.getpwuid(os.getuid())
    assert entry.pw_gid in groups_of(os.getuid())
    assert groups_of(4_000_000_000) == ()


def test_changed_rules_apply_to_existing_tenants():
    table = quotas(rest=Quota(tokens_per_s=10))
    mine, other = table.tenant(1, 0.0), table.tenant(2, 0.0)
    mine.charge(150, 0.0)
    table.reload({"one": Quota(users=(1,), weight=2, device_kv=5, sessions=0), "rest": Quota(tokens_per_s=1)}, 0.0)
    assert table.tenant(1, 0.0) is mine and [each.rule.name for each in table] == ["one", "rest"]
    assert mine.limits == TenantLimits(1, 2.0, 5, None, None)
    mine.expect_tokens(0.0)
    assert refused(mine.expect_session, 0, "batch").data["rule"] == "one"
    other.charge(10, 0.0)
    other.expect_tokens(0.0)
    other.charge(1, 0.0)
    assert refused(other.expect_tokens, 0.0).data["retry_s"] == 1.0, "the level stays, up to the new size"


def test_engines_get_the_tenant_s_limits():
    limited = tenant(7, weight=0.5, device_kv=1, host_kv=2, disk_kv=0, sessions=3)
    assert limited.limits == TenantLimits(7, 0.5, 1, 2, 0)


# --- sessions and classes -------------------------------------------------------------------------------------------


def test_sessions_are_limited_by_the_rule():
    limited = tenant(sessions=4)
    limited.expect_session(3, "agent")
    error = refused(limited.expect_session, 4, "agent")
    assert error.message == "you have 4 sessions, and quotas.rule.sessions is 4: close some"
    assert error.data == {"quota": "sessions", "rule": "rule", "limit": 4, "used": 4}
    assert error.code == "quota_exceeded"


@pytest.mark.parametrize(
    ("highest", "allowed"),
    [("interactive", ["interactive", "agent", "batch"]), ("agent", ["agent", "batch"]), ("batch", ["batch"])],
)
def test_classes_above_the_highest_are_refused(highest, allowed):
    limited = tenant(highest_class=highest)
    for name in ("interactive", "agent", "batch"):
        if name in allowed:
            limited.expect_class(name)
        else:
            error = refused(limited.expect_session, 0, name)
            assert error.message.endswith(f"ask for {' or '.join(allowed)}")
            assert error.data == {"quota": "highest_class", "rule": "rule", "limit": highest, "used": name}


# --- tokens ---------------------------------------------------------------------------------------------------------


def test_tokens_per_second_are_limited():
    limited = tenant(tokens_per_s=100)
    limited.expect_tokens(0.0)
    limited.charge(1000, 0.0)  # ten seconds' worth
    limited.expect_tokens(0.0)
    limited.charge(250, 0.0)
    error = refused(limited.expect_tokens, 1.0)
    assert error.message == (
        "you have used 150 tokens too many: quotas.rule.tokens_per_s is 100, and 1,000 at once: try again in 1.5 s"
    )
    assert error.data == {
        "quota": "tokens_per_s",
        "rule": "rule",
        "limit": 100.0,
        "used": pytest.approx(1131, rel=1e-3),
        "retry_s": 1.5,
    }
    limited.expect_tokens(2.5)


@given(st.floats(0.001, 1e6), st.integers(1, 10**9))
def test_a_tenant_that_comes_at_retry_s_is_admitted(rate, tokens):
    limited = tenant(tokens_per_s=rate)
    limited.charge(tokens, 0.0)
    try:
        limited.expect_tokens(0.0)
    except QuotaExceeded as error:
        limited.expect_tokens(error.data["retry_s"] * (1 + 1e-9) + 1e-6)


# --- use ------------------------------------------------------------------------------------------------------------


def test_use_reports_all_quotas():
    limited = tenant(sessions=9, tokens_per_s=5, host_kv=100)
    limited.charge(20, 0.0)
    use = limited.use(2, 1024, TenantUse(1, 10, 20, 30), [ResourceUse("other", 1, 2)], 2.0)
    assert (use.user, use.rule, use.weight, use.highest_class) == (1, "rule", 1.0, "interactive")
    assert (use.sessions, use.sessions_limit) == (2, 9)
    assert (use.device_kv, use.device_kv_limit, use.host_kv, use.host_kv_limit) == (10, None, 20, 100)
    assert (use.disk_kv, use.disk_kv_limit) == (30, None)
    assert use.resources[-1] == ResourceUse("other", 1, 2)
    assert use.tokens_per_s == pytest.approx(10 * 0.9, rel=0.05) and use.tokens_per_s_limit == 5
    assert limited.use(0, 4, None, [], 0.0).sessions_limit == 4, "the limit of all users applies"
    assert tenant().use(0, 4, None, [], 0.0).sessions_limit == 4


@pytest.mark.parametrize("name", ["host_kv", "disk_kv"])
def test_a_tenant_cannot_request_larger_tiers_than_its_quota(name):
    def asked(nbytes):
        return (nbytes, None) if name == "host_kv" else (None, nbytes)

    mine = tenant(**{name: 1000})
    for within in (None, 0, 1000):
        mine.expect_tiers(*asked(within))
    told = refused(mine.expect_tiers, *asked(1001))
    assert f"quotas.rule.{name}" in told.message and (told.data["limit"], told.data["needed"]) == (1000, 1001)
    tenant().expect_tiers(1 << 60, 1 << 60)
