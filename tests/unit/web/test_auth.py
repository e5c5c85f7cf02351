"""Who may ask, and how much: tokens, sessions, hosts, origins, sizes, rates."""

from __future__ import annotations

from functools import partial

import pytest

from cairn.driver.serving import Serve
from cairn.errors import PlanError
from cairn.testing import ManualClock
from cairn.web import limits
from cairn.web.auth import is_token
from cairn.web.limits import BODY_BYTES_MAX, URL_BYTES_MAX, Rate
from cairn.web.sessions import SESSION_S, SESSIONS_MAX, Sessions
from tests.unit.snapshots.checkpoints import Checkpoint
from tests.unit.web.sites import CONTROL, TOKEN, FakeRun, client, site_of

EVERYTHING = ["/api/state", "/api/openapi.json", "/api/events", "/api/sql", "/", "/nothing"]


@pytest.mark.parametrize("path", EVERYTHING)
@pytest.mark.parametrize(
    "given",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Bearer wrong-token-wrong",
        f"Basic {TOKEN}",
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
        f"Bearer {TOKEN} {TOKEN}",
        f"Bearer {TOKEN.upper()}",
        "Bearer \xff\xfe",
    ],
)
def test_without_the_token_there_is_nothing_to_see(
    checkpoint: Checkpoint, path: str, given: str | None
) -> None:
    asking = client(site_of(checkpoint, token=TOKEN, control_token=CONTROL))
    headers = {} if given is None else {"Authorization": given.encode("latin-1")}
    answer = asking.get(path, headers=headers)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "no-token"
    assert answer.headers["www-authenticate"] == "Bearer"
    assert TOKEN not in answer.text and CONTROL not in answer.text


def test_with_the_token_it_is_answered(checkpoint: Checkpoint) -> None:
    site = site_of(checkpoint, token=TOKEN, control_token=CONTROL)
    assert client(site, TOKEN).get("/api/state").status_code == 200
    assert client(site, CONTROL).get("/api/state").status_code == 200, "control implies reading"
    answer = client(site).get("/api/state", headers={"Authorization": f"bearer  {TOKEN}"})
    assert answer.status_code == 200, "a scheme is written in any case"


def test_tokens_that_are_no_ascii_are_compared_too() -> None:
    assert not is_token("\udcff\u20ac", TOKEN)
    assert is_token(TOKEN, TOKEN)


def test_browser_without_a_session_is_sent_to_the_login(checkpoint: Checkpoint) -> None:
    asking = client(site_of(checkpoint, token=TOKEN), accept="text/html,*/*")
    answer = asking.get("/")
    assert (answer.status_code, answer.headers["location"]) == (303, "/login?next=/")
    assert asking.get("/api/state").status_code == 401, "a program's address is not redirected"


def test_login_gives_a_cookie_that_reads_and_holds_no_token(checkpoint: Checkpoint) -> None:
    site = site_of(checkpoint, FakeRun(checkpoint), token=TOKEN, control_token=CONTROL)
    asking = client(site)
    wrong = asking.post("/login", data={"token": "wrong-token-wrong"})
    assert wrong.status_code == 401 and "set-cookie" not in wrong.headers
    answer = asking.post("/login", data={"token": TOKEN, "next": "/epochs"})
    assert (answer.status_code, answer.headers["location"]) == (303, "/epochs")
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=strict" in cookie and "Path=/" in cookie
    assert TOKEN not in cookie
    assert asking.get("/api/state").status_code == 200
    # A cookie is sent by the browser whoever wrote the page: it changes nothing.
    assert asking.post("/api/control/stop", json={}).status_code == 401


def test_logout_ends_the_session_on_the_server_and_in_the_browser(checkpoint: Checkpoint) -> None:
    asking = client(site_of(checkpoint, token=TOKEN))
    asking.post("/login", data={"token": TOKEN})
    assert asking.get("/api/job").json()["session"] is True
    copied = dict(asking.cookies)
    answer = asking.post("/logout")
    assert (answer.status_code, answer.headers["location"]) == (303, "/login")
    assert "Max-Age=0" in answer.headers["set-cookie"] and not asking.cookies
    asking.cookies.update(copied)
    assert asking.get("/api/job").status_code == 401, "a copy of the cookie is worth nothing"
    assert asking.post("/logout").status_code == 401, "there is nothing left to end"


def test_logout_of_one_browser_leaves_the_others_in(checkpoint: Checkpoint) -> None:
    site = site_of(checkpoint, token=TOKEN)
    one, other = client(site), client(site)
    for each in (one, other):
        each.post("/login", data={"token": TOKEN})
    one.post("/logout")
    assert one.get("/api/job").status_code == 401
    assert other.get("/api/job").status_code == 200


def test_logout_is_for_a_page_of_ours_to_ask_for(checkpoint: Checkpoint) -> None:
    asking = client(site_of(checkpoint, token=TOKEN))
    asking.post("/login", data={"token": TOKEN})
    assert asking.get("/logout").status_code == 405, "a link or an image logs nobody out"
    elsewhere = {"Origin": "https://evil.example"}
    assert asking.post("/logout", headers=elsewhere).status_code == 403
    assert asking.get("/api/job").status_code == 200


def test_only_a_browser_that_has_logged_in_is_told_of_a_session(checkpoint: Checkpoint) -> None:
    assert client(site_of(checkpoint)).get("/api/job").json()["session"] is False
    with_token = client(site_of(checkpoint, token=TOKEN), TOKEN)
    assert with_token.get("/api/job").json()["session"] is False
    assert with_token.post("/logout").status_code == 303, "nothing to end is no error"
    assert with_token.get("/api/job").status_code == 200


@pytest.mark.parametrize("next", ["//evil.example", "/\\evil", "https://evil", "/a\nb", "", "x"])
def test_login_leads_to_no_other_server(checkpoint: Checkpoint, next: str) -> None:
    asking = client(site_of(checkpoint, token=TOKEN))
    answer = asking.post("/login", data={"token": TOKEN, "next": next})
    assert answer.headers["location"] == "/"
    assert 'value="/"' in asking.get("/login", params={"next": next}).text


def test_login_page_writes_what_it_is_given_as_text(checkpoint: Checkpoint) -> None:
    page = client(site_of(checkpoint)).get("/login", params={"next": '/"><script>x</script>'})
    assert "<script>" not in page.text


def test_sessions_end_and_are_bounded() -> None:
    now = [0.0]
    sessions = Sessions(lambda: now[0])
    first = sessions.open()
    assert sessions.is_open(first) and not sessions.is_open(None) and not sessions.is_open("x")
    sessions.close(first)
    sessions.close("x")
    assert not sessions.is_open(first)
    second = sessions.open()
    now[0] = SESSION_S + 1
    assert not sessions.is_open(second)
    opened = [sessions.open() for _ in range(SESSIONS_MAX + 1)]
    assert not sessions.is_open(opened[0]) and sessions.is_open(opened[1])


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "[::1", "", "10.0.0.1"])
def test_names_of_other_hosts_are_refused_on_loopback(checkpoint: Checkpoint, host: str) -> None:
    answer = client(site_of(checkpoint)).get("/api/state", headers={"Host": host})
    assert answer.status_code == 421


@pytest.mark.parametrize("host", ["localhost:8080", "127.0.0.1", "[::1]:99", "127.8.8.8:1"])
def test_own_names_are_answered_on_loopback(checkpoint: Checkpoint, host: str) -> None:
    answer = client(site_of(checkpoint)).get("/api/state", headers={"Host": host})
    assert answer.status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:81"},
        {"Origin": "http://[bad"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
def test_pages_of_other_sites_post_nothing(checkpoint: Checkpoint, headers: dict[str, str]) -> None:
    asking = client(site_of(checkpoint))
    path = "/api/state/count/n/lookup"
    assert asking.post(path, json={"keys": [5]}, headers=headers).status_code == 403
    own = {"Origin": "http://127.0.0.1", "Sec-Fetch-Site": "same-origin"}
    assert asking.post(path, json={"keys": [5]}, headers=own).status_code == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_a_body_that_is_not_said_to_be_json_is_refused(checkpoint: Checkpoint, kind: str) -> None:
    answer = client(site_of(checkpoint)).post(
        "/api/state/count/n/lookup", content=b'{"keys": [5]}', headers={"Content-Type": kind}
    )
    assert answer.status_code == 415


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'{"keys": 5}', b'{"keys": [5], "x": 1}', b"\xff\xfe", b"[" * 9000],
)
def test_malformed_bodies_are_400(checkpoint: Checkpoint, body: bytes) -> None:
    answer = client(site_of(checkpoint)).post(
        "/api/state/count/n/lookup", content=body, headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["code"] == "bad-request"


@pytest.mark.parametrize("chunked", [True, False])
def test_bodies_too_large_are_refused(checkpoint: Checkpoint, chunked: bool) -> None:
    body = b"x" * (BODY_BYTES_MAX + 1)
    answer = client(site_of(checkpoint)).post(
        "/api/sql", content=iter([body[:10], body[10:]]) if chunked else body
    )
    assert answer.status_code == 413


@pytest.mark.parametrize("length", ["9" * 5000, "-1", "1e3", "x", "\u00b2"])
def test_lengths_that_are_none_are_refused(checkpoint: Checkpoint, length: str) -> None:
    answer = client(site_of(checkpoint)).post(
        "/api/sql", content=b"{}", headers={"Content-Length": length.encode("latin-1")}
    )
    assert answer.status_code == 413


def test_addresses_too_long_are_refused(checkpoint: Checkpoint) -> None:
    asking = client(site_of(checkpoint))
    assert asking.get("/api/state?x=" + "y" * URL_BYTES_MAX).status_code == 414
    assert asking.get("/api/state/" + "y" * URL_BYTES_MAX).status_code == 414


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    """The clock of all rates: it stands still until a test moves it."""
    clock = ManualClock()
    monkeypatch.setattr(limits, "Rate", partial(Rate, clock=lambda: clock() / 1000))
    return clock


def test_more_than_the_rate_is_429_and_later_requests_are_answered(
    checkpoint: Checkpoint, clock: ManualClock
) -> None:
    asking = client(site_of(checkpoint, requests_per_s=2.0))
    assert [asking.get("/login").status_code for _ in range(4)] == [200, 200, 429, 429]
    clock.advance_ms(500)
    assert [asking.get("/login").status_code for _ in range(2)] == [200, 429]


@pytest.mark.parametrize("token", [None, "wrong-token-wrong-token"])
def test_clients_without_a_token_push_out_nobody_who_has_one(
    checkpoint: Checkpoint, token: str | None, clock: ManualClock
) -> None:
    site = site_of(checkpoint, token=TOKEN, requests_per_s=100.0)
    asking = client(site, token)
    strangers = [asking.get("/api/job").status_code for _ in range(30)]
    assert strangers == [401] * 20 + [429] * 10, "they have a rate of their own"
    asking.headers["Authorization"] = f"Bearer {TOKEN}"
    readers = [asking.get("/api/state").status_code for _ in range(101)]
    assert readers == [200] * 100 + [429]


def test_where_no_token_is_needed_all_requests_share_the_whole_rate(
    checkpoint: Checkpoint, clock: ManualClock
) -> None:
    asking = client(site_of(checkpoint, requests_per_s=100.0))
    answers = [asking.get("/login").status_code for _ in range(101)]
    assert answers == [200] * 100 + [429]


PUBLIC = "https://cairn.example"


@pytest.mark.parametrize(
    ("settings", "headers", "is_secure"),
    [
        ({}, {}, False),
        ({}, {"X-Forwarded-Proto": "https"}, False),
        ({"public_url": PUBLIC}, {}, False),
        ({"public_url": PUBLIC}, {"X-Forwarded-Proto": "https"}, True),
        ({"public_url": PUBLIC}, {"X-Forwarded-Proto": "https, http"}, True),
        ({"public_url": PUBLIC}, {"X-Forwarded-Proto": "http"}, False),
        ({"public_url": PUBLIC}, {"Host": "cairn.example"}, True),
        ({"public_url": "http://cairn.example"}, {"Host": "cairn.example"}, False),
    ],
)
def test_cookies_behind_a_tls_proxy_are_secure_only_if_the_proxy_is_configured(
    checkpoint: Checkpoint, settings: dict[str, str], headers: dict[str, str], is_secure: bool
) -> None:
    asking = client(site_of(checkpoint, token=TOKEN, **settings), **headers)
    answer = asking.post("/login", data={"token": TOKEN})
    assert answer.status_code == 303
    assert ("secure" in answer.headers["set-cookie"].lower()) is is_secure


def test_pages_of_the_public_address_are_our_own_and_no_others_are(checkpoint: Checkpoint) -> None:
    form = {"token": TOKEN}
    asking = client(site_of(checkpoint, token=TOKEN, public_url=f"{PUBLIC}:443/"))
    for origin, host, status in (
        (PUBLIC, "127.0.0.1", 303),
        (PUBLIC, "cairn.example", 303),
        ("http://cairn.example", "127.0.0.1", 403),
        ("https://cairn.example.evil", "127.0.0.1", 403),
        (PUBLIC, "other.example", 421),
    ):
        headers = {"Origin": origin, "Host": host}
        assert asking.post("/login", data=form, headers=headers).status_code == status, headers
    plain = client(site_of(checkpoint, token=TOKEN))
    assert plain.post("/login", data=form, headers={"Origin": PUBLIC}).status_code == 403


@pytest.mark.parametrize(
    "url", ["cairn.example", "ftp://x", "https://", "https://x/path", "http://x:y"]
)
def test_a_public_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(PlanError, match="public_url"):
        Serve(public_url=url)


def test_rate_fills_up_again_with_time() -> None:
    now = [0.0]
    rate = Rate(10.0, lambda: now[0])
    assert [rate.take() for _ in range(11)] == [True] * 10 + [False]
    now[0] = 0.25
    assert [rate.take() for _ in range(3)] == [True, True, False]
    now[0] = 1000.0
    assert [rate.take() for _ in range(11)] == [True] * 10 + [False]


def test_every_answer_keeps_a_browser_safe(checkpoint: Checkpoint) -> None:
    asking = client(site_of(checkpoint, token=TOKEN))
    for path in ("/login", "/api/state", "/nothing"):
        headers = asking.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"
        assert "access-control-allow-origin" not in headers
    assert asking.get("/nothing").headers["referrer-policy"] == "no-referrer"


def test_requests_at_once_are_bounded(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = site_of(checkpoint, token=TOKEN)
    monkeypatch.setattr("cairn.web.limits.AT_ONCE_MAX", 1)
    assert client(site, TOKEN).get("/api/state").status_code == 200
    monkeypatch.setattr("cairn.web.limits.AT_ONCE_MAX", 0)
    asking = client(site, TOKEN)
    assert asking.get("/api/state").status_code == 429
    # What needs no token has bounds of its own.
    assert asking.get("/login").status_code == 200
    form = {"token": TOKEN}
    assert asking.post("/login", data=form).status_code == 303
    monkeypatch.setattr("cairn.web.limits.OPEN_BODIES_MAX", 0)
    asking = client(site, TOKEN)
    assert asking.post("/login", data=form).status_code == 429
    assert asking.post("/static/app.js", data=form).status_code == 429
    assert asking.get("/login").status_code == 200


def test_a_form_with_too_many_fields_is_a_wrong_token(checkpoint: Checkpoint) -> None:
    asking = client(site_of(checkpoint, token=TOKEN))
    kind = {"Content-Type": "application/x-www-form-urlencoded"}
    body = "&".join(["a=1"] * 11)
    assert asking.post("/login", content=body, headers=kind).status_code == 401


@pytest.mark.parametrize(
    "path",
    [
        "/api/job?x=1",
        "/api/epochs?limt=5",
        "/api/epochs?limit=5&limt=5",
        "/api/epochs?=true",
        "/api/epochs?limit",
        "/api/epochs/3?limit=1",
        "/api/state?limit=5",
        "/api/state/count/n/5?after=x",
        "/api/events?x=1",
        "/api/openapi.json?x",
    ],
)
def test_parameters_that_nobody_described_are_400(checkpoint: Checkpoint, path: str) -> None:
    asking = client(site_of(checkpoint))
    answer = asking.get(path)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "bad-request"
    assert asking.head(path).status_code == 400


def test_parameters_that_are_described_are_taken_and_a_slip_is_told_what_there_is(
    checkpoint: Checkpoint,
) -> None:
    asking = client(site_of(checkpoint))
    assert asking.get("/api/epochs?limit=1&before=9").status_code == 200
    assert asking.get("/api/epochs?").status_code == 200
    error = asking.get("/api/epochs?limt=5").json()["error"]
    assert "'limt'" in error["message"] and error["next"] == "known parameters: limit, before"
    assert asking.post("/api/sql?limit=5", json={"sql": "select 1"}).status_code == 400
    assert asking.post("/api/epochs?limt=5").status_code == 405


def test_what_nobody_foresaw_is_answered_without_a_word_about_it(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = site_of(checkpoint)
    monkeypatch.setattr(site, "open_state", lambda *a, **k: 1 / 0)
    answer = client(site).get("/api/state")
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal"
    assert "Zero" not in answer.text and "Traceback" not in answer.text
    assert answer.headers["x-content-type-options"] == "nosniff"
